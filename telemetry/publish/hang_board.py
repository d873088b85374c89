"""What the ranks of a node say of themselves while the job hangs, and which of their processes are gone or stopped."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.util.files import parse_object, read_small, remove_file, replace_file

if TYPE_CHECKING:
    from pathlib import Path

_MAX_HEAD_BYTES: Final = 4096
_MAX_STATE_BYTES: Final = 1 << 16
_GONE: Final = "gone-"
_HANG: Final = "hang-"


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank. ``state``: its letter of proc(5), empty where it is gone; ``ended``: by itself."""

    rank: int
    pid: int
    state: str
    ended: bool


def mark_gone(path: str, rank: int) -> None:
    """The file of a process that is gone is kept under another name: nothing else tells that it was there."""
    try:
        os.replace(path, os.path.join(os.path.dirname(path), f"{_GONE}{rank}"))  # noqa: PTH105, PTH118, PTH120
    except OSError:
        remove_file(path)


class HangBoard:
    """The part of a board that is used only while the job hangs.

    Args:
        folder: of the board.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def processes(self) -> list[RankProcess]:
        """Every process that has published here, those that are gone included, by rank."""
        found = []
        for name in self._names():
            if name.startswith(("rank-", _GONE)):
                try:
                    found.append(_process(read_small(self._folder / name, _MAX_HEAD_BYTES)))
                except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    continue
        return sorted(found, key=lambda process: process.rank)

    def put(self, rank: int, state: dict[str, Any]) -> None:
        """Say what this rank does.

        Raises:
            OSError: it cannot be written.
        """
        content = json.dumps(state | {"pid": os.getpid()}).encode()
        replace_file(self._folder / f"{_HANG}{rank}.json", content)

    def states(self) -> list[dict[str, Any]]:
        """What the ranks have said, of each its newest word, with the ``pid`` of the process that said it."""
        found = []
        for name in self._names():
            if name.startswith(_HANG):
                try:
                    state = parse_object(read_small(self._folder / name, _MAX_STATE_BYTES))
                except OSError:
                    continue
                if state is not None:
                    found.append(state)
        return found

    def take_back(self, rank: int) -> None:
        """This rank says nothing any more."""
        remove_file(self._folder / f"{_HANG}{rank}.json")

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._folder)  # noqa: PTH208 - names alone
        except OSError:
            return []


def _process(content: bytes) -> RankProcess:
    """Who published a file of the board.

    Raises:
        ValueError, KeyError, TypeError: it is no such file.
    """
    head: Any = json.loads(content.partition(b"\0")[0])
    rank, pid, ended = int(head["rank"]), int(head["pid"]), bool(head.get("ended"))
    try:
        fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        letter = fields[0].decode()
        gone = letter in "ZX" or int(fields[19]) != head["ticks"]
    except OSError:
        letter, gone = "", True
    return RankProcess(rank, pid, "" if gone else letter, ended)
