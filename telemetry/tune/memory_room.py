"""How much memory a trial may take: the limits of the cgroups above this process, and what the machine has left."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NO_LIMIT: Final = 1 << 60
_MOUNTS: Final = Path("/sys/fs/cgroup")
_FILES: Final = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Limit, use, and how the lines of the whole group in memory.stat begin: of cgroup v2 and v1."""

_CACHE: Final = ("active_file", "inactive_file")
"""Page cache, which the kernel gives back. Loading torch fills it within a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory at one moment, in bytes.

    Attributes:
        limit: of the tightest limit. ``left``: until it is reached.
        source: ``cgroup``, ``machine`` or ``option``.
    """

    limit: int
    left: int
    source: str


class MemoryRoom:
    """Reads how much memory is left.

    Args:
        most: a limit that the user gives for a trial; None without one.
    """

    def __init__(self, most: int | None = None) -> None:
        self._groups = _limited_groups()
        self._most = most

    def now(self, used: int = 0) -> Room:
        """The tightest limit now. ``used``: what the trial itself takes, for the limit that the user gives."""
        rooms = [room for group in self._groups if (room := _of_group(*group)) is not None]
        machine = _of_machine()
        if machine is not None:
            rooms.append(machine)
        if self._most is not None:
            rooms.append(Room(self._most, self._most - used, "option"))
        return min(rooms, key=lambda room: room.left, default=Room(_NO_LIMIT, _NO_LIMIT, "machine"))


def shared_memory_left(folder: str = "/dev/shm") -> int | None:  # noqa: S108
    """Bytes left where workers put their batches; None if there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def proportional_bytes(pid: int) -> int | None:
    """Memory of a process, with what it shares divided by the number of processes; None if it cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _limited_groups() -> list[tuple[Path, tuple[str, str, str]]]:
    """The memory cgroups of this process and those above it, each with its files."""
    found: list[tuple[Path, tuple[str, str, str]]] = []
    try:
        lines = Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return found
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            mount, files = _MOUNTS / "memory", _FILES[1]
        elif number == "0":
            mount, files = _MOUNTS, _FILES[0]
        else:
            continue
        folder = mount / path.lstrip("/")
        folders = [folder, *(above for above in folder.parents if mount in (above, *above.parents))]
        found += [(each, files) for each in folders if (each / files[0]).exists()]
    return found


def _of_group(folder: Path, files: tuple[str, str, str]) -> Room | None:
    try:
        limit = int((folder / files[0]).read_text())
        used = int((folder / files[1]).read_text())
        lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        cached = {files[2] + name for name in _CACHE}
        cache = sum(int(value) for name, value in lines if name in cached)
    except (OSError, ValueError):  # "max", for example
        return None
    return Room(limit, limit - used + cache, "cgroup") if limit < _NO_LIMIT else None


def _of_machine() -> Room | None:
    figures: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text("ascii", "replace").splitlines()[:5]:
            name, _, rest = line.partition(":")
            figures[name] = int(rest.split()[0]) * 1024
    if "MemAvailable" not in figures:
        return None
    return Room(figures["MemTotal"], figures["MemAvailable"], "machine")
