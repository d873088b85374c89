"""The files through which ranks agree on a snapshot: their names, by the id of the request, and their contents."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.snapshot import protocol as p
from telemetry.util.files import caches_folders, dump_object, parse_object

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from telemetry.snapshot.private_folder import Folder

RENDEZVOUS_FOLDER: Final = ".meeting"
"""The command and the ranks of a run may be of different versions, so the name stays."""

_STAMP_SECONDS: Final = 3.0
"""Files that are added within this time may leave the folder's modification time unchanged. File systems store it
with a resolution of 2 s or better."""

_NAME: Final = re.compile(r"([0-9a-z-]+)\.(request|plan|(answer|result)-(\d+))\.json")


@dataclass
class RequestFiles:
    """The files of one request. ``answers`` and ``results`` have the ranks that have written one."""

    request: bool = False
    plan: bool = False
    answers: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)


def new_id(now: float) -> str:
    """An id for a request that is made now (Unix time)."""
    return f"{int(now * 1000):013d}-{secrets.token_hex(4)}"


def id_seconds(text: str) -> float:
    """Unix time at which the request with an id was made."""
    return int(text[:13]) / 1000


class RequestFolderWatch:
    """Tells whether the folder of requests is known to be empty. To list it at each tick costs 30 times as much.

    Args:
        folder: the folder, which may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cached: bool | None = None  # whether the modification time may be an old one, as on NFS
        self._newest: tuple[int, int] | None = None
        self._empty: tuple[tuple[int, int], float] | None = None  # stamp of the folder while empty, and since when
        self._stays_empty: tuple[int, int] | None = None  # the same stamp, once no file can have come unseen

    def stays_empty(self) -> bool:
        """Whether no file can have come since the folder was listed."""
        self._newest = self._stamp()
        return self._newest is not None and self._newest == self._stays_empty

    def listed(self, found: Container[str], now: float) -> None:
        """The folder was listed after the last call of `stays_empty`. ``now``: Unix time."""
        if found or self._newest is None:
            self._empty = None
        elif self._empty is None or self._empty[0] != self._newest:
            self._empty = self._newest, now
        settled = self._empty is not None and now - self._empty[1] > _STAMP_SECONDS
        self._stays_empty = self._newest if settled else None

    def expect(self) -> None:
        """This process has written a file."""
        self._empty = self._stays_empty = None

    def _stamp(self) -> tuple[int, int] | None:
        """Inode and modification time of the folder. One of them changes when a file is added. None without one."""
        try:
            status = self._folder.stat(follow_symlinks=False)
        except OSError:
            return None
        if self._cached is None:
            self._cached = caches_folders(self._folder)
        return None if self._cached else (status.st_ino, status.st_mtime_ns)


def clear(folder: Folder, id_: str, files: RequestFiles) -> None:
    """Remove the files of a request."""
    names = ["request"] * files.request + ["plan"] * files.plan
    names += [f"answer-{rank}" for rank in files.answers] + [f"result-{rank}" for rank in files.results]
    for name in names:
        folder.remove(f"{id_}.{name}.json")


def scan(folder: Folder) -> dict[str, RequestFiles]:
    """The files in the folder, by the id of the request. Files with other names are ignored."""
    found: dict[str, RequestFiles] = {}
    for name in folder.names():
        match = _NAME.fullmatch(name)
        if match is None or not p.valid_id(match[1]):
            continue
        files = found.setdefault(match[1], RequestFiles())
        if match[2] == "request":
            files.request = True
        elif match[2] == "plan":
            files.plan = True
        else:
            (files.answers if match[3] == "answer" else files.results).add(int(match[4]))
    return found


def load(folder: Folder, name: str) -> dict[str, Any]:
    """Read a message; `protocol` checks its fields.

    Raises:
        InvalidError: it is not a JSON object.
        OSError: it cannot be read.
    """
    value = parse_object(folder.read(name))
    if value is None:
        raise p.InvalidError(f"{name}: not a JSON object")
    return value


def dump(message: p.Request | p.Answer | p.Plan | p.Result) -> bytes:
    """A message as it is written to a file."""
    return dump_object(p.as_json(message))
