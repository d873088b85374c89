"""How much memory a trial may take: the limits of the cgroups above this process, and what the machine has left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from telemetry.sources.cgroup import MemoryLimits

_NO_LIMIT: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Room:
    """Memory at one moment, in bytes.

    Attributes:
        limit: of the tightest limit. ``left``: until it is reached.
    """

    limit: int
    left: int


class MemoryRoom:
    """Reads how much memory is left.

    Args:
        most: a limit that the user gives for a trial; None without one.
    """

    def __init__(self, most: int | None = None) -> None:
        self._limits = MemoryLimits(Path("/proc"), Path("/sys/fs/cgroup"))
        self._most = most

    def now(self, used: int = 0) -> Room:
        """The tightest limit now. ``used``: what the trial itself takes, for the limit that the user gives."""
        found = self._limits.tightest()
        rooms = [] if found is None else [Room(found.limit, found.available)]
        if self._most is not None:
            rooms.append(Room(self._most, self._most - used))
        return min(rooms, key=lambda room: room.left, default=Room(_NO_LIMIT, _NO_LIMIT))


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
