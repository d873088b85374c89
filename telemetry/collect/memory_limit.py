"""How much memory can still be allocated before the kernel kills a process: on the machine, and in each memory cgroup.

A cgroup's limit holds for all processes in it and below it. So the groups above this process's own count, too. Page
cache is given back when memory is short, so it counts as available.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.collect.pressure import cgroup_folders
from telemetry.core.filesystem import read_small

if TYPE_CHECKING:
    from pathlib import Path

_NO_LIMIT: Final = 1 << 60
"""Version 1 writes a number near 2**63 for "no limit"."""

_KIB: Final = 1024

_RECLAIMABLE: Final = frozenset(
    {"active_file", "inactive_file", "slab_reclaimable", "total_active_file", "total_inactive_file"}
)
"""Lines of ``memory.stat``. Version 1 has each figure twice: ``total_`` is with the groups below."""


class MemoryLimit(NamedTuple):
    """A limit, and what is left of it, in bytes."""

    available: int
    limit: int


class MemoryLimits:
    """The limits that apply to this process.

    Args:
        proc: where /proc is mounted.
        cgroups: where the cgroup hierarchies are mounted.
    """

    def __init__(self, proc: Path, cgroups: Path) -> None:
        self._meminfo = f"{proc}/meminfo"
        self._groups = [_MemoryGroup(folder) for folder in cgroup_folders(proc, cgroups).get("memory", ())]

    def tightest(self) -> MemoryLimit | None:
        """The limit that leaves least; None if nothing can be read. Limits may change while the process runs."""
        limits = [self._of_machine(), *(group.limit() for group in self._groups)]
        return min((limit for limit in limits if limit is not None), default=None)

    def shared_memory(self) -> int | None:
        """Bytes of shared memory of this process's own group and those below it; None without one."""
        for group in self._groups:
            own, total = _figures(group.stat, "shmem", "total_shmem")
            if own is not None:
                return own if total is None else total
        return None

    def _of_machine(self) -> MemoryLimit | None:
        total, available = _figures(self._meminfo, "MemTotal:", "MemAvailable:")
        return None if total is None or available is None else MemoryLimit(available * _KIB, total * _KIB)


class _MemoryGroup:
    """One cgroup. Which version it has is found out once: a file that is not there costs as much as one that is."""

    __slots__ = ("_limit", "_used", "stat")

    def __init__(self, folder: Path) -> None:
        second = not (folder / "memory.limit_in_bytes").exists()
        self._limit = f"{folder}/memory.{'max' if second else 'limit_in_bytes'}"
        self._used = f"{folder}/memory.{'current' if second else 'usage_in_bytes'}"
        self.stat = f"{folder}/memory.stat"

    def limit(self) -> MemoryLimit | None:
        """Its limit (version 2 or 1); None if it has none."""
        limit = _number(self._limit)
        if limit is None or limit >= _NO_LIMIT:
            return None
        used = _number(self._used)
        if used is None:
            return None
        stat = _pairs(self.stat)
        hierarchical = any(name.startswith("total_") for name in stat)
        cache = sum(
            value for name, value in stat.items() if name in _RECLAIMABLE and name.startswith("total_") == hierarchical
        )
        return MemoryLimit(max(0, limit - max(0, used - cache)), limit)


def _number(path: str) -> int | None:
    """The number in a file; None if there is no file, or no number in it (``max``: no limit)."""
    try:
        text = read_small(path).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _figures(path: str, *names: str) -> list[int | None]:
    """The numbers behind some names in a file of such lines; None for one that is not there. Parses no other line."""
    try:
        content = b"\n" + read_small(path)
    except OSError:
        return [None] * len(names)
    found: list[int | None] = []
    for name in names:
        words = content.partition(b"\n%b " % name.encode())[2].split(None, 1)
        found.append(int(words[0]) if words and words[0].isdigit() else None)
    return found


def _pairs(path: str) -> dict[str, int]:
    """Lines of a name and a number; empty if the file cannot be read."""
    try:
        lines = read_small(path).decode("ascii", "replace").splitlines()
    except OSError:
        return {}
    words = [line.split(None, 2) for line in lines]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdigit()}
