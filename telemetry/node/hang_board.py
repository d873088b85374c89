"""What the ranks of a node publish while the job hangs, and what has become of their processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.diagnosis.hangs import HangState
from telemetry.node.board import GONE, read_head
from telemetry.util.files import read_small, remove_file, replace_file
from telemetry.util.processes import START_TICKS, STATE, stat_fields

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.node.board import RankHead

_HANG: Final = "hang-"
_MAX_STATE_BYTES: Final = 1 << 16


class RankProcess(msgspec.Struct, frozen=True):
    """A rank's process. ``state``: its letter in proc(5), empty if it is gone. ``ended``: whether by itself."""

    rank: int
    pid: int
    state: str
    ended: bool


class HangReport(msgspec.Struct, frozen=True):
    """A rank's state while the job hangs. ``at_ns``: when it was published, monotonic nanoseconds."""

    pid: int
    at_ns: int
    state: HangState


class HangBoard:
    """What the ranks of a node publish while the job hangs, and which of their processes are gone or stopped.

    Args:
        folder: the folder of the board.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def processes(self) -> list[RankProcess]:
        """Every process that has published here, also those that are gone, by rank."""
        heads = (read_head(self._folder / name) for name in self._names("rank-", GONE))
        return sorted((_process(head) for head in heads if head is not None), key=lambda process: process.rank)

    def put(self, rank: int, at_ns: int, state: HangState) -> None:
        """Publish what this rank does.

        Raises:
            OSError: the file cannot be written.
        """
        content = msgspec.json.encode(HangReport(os.getpid(), at_ns, state))
        replace_file(self._folder / f"{_HANG}{rank}.json", content)

    def reports(self) -> list[HangReport]:
        """The newest report of each rank."""
        found = []
        for name in self._names(_HANG):
            try:
                found.append(msgspec.json.decode(read_small(self._folder / name, _MAX_STATE_BYTES), type=HangReport))
            except (OSError, ValueError, RecursionError):
                continue
        return found

    def take_back(self, rank: int) -> None:
        """Remove this rank's report."""
        remove_file(self._folder / f"{_HANG}{rank}.json")

    def _names(self, *beginnings: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.startswith(beginnings)]  # noqa: PTH208
        except OSError:
            return []


def _process(head: RankHead) -> RankProcess:
    fields = stat_fields(head.pid)
    letter = fields[STATE].decode() if fields else ""
    gone = letter in {"", "Z", "X"} or int(fields[START_TICKS]) != head.ticks
    return RankProcess(head.rank, head.pid, "" if gone else letter, head.ended)
