"""The cgroups of this process: pressure, limits, the OOM killer."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from telemetry.model.records import PressureSample
from telemetry.safety.files import read_small
from telemetry.sources.collector import CollectorError
from telemetry.util.clock import now_ns

_NO_LIMIT: Final = 1 << 60
"""Version 1 writes a number near 2**63 for "no limit"."""


def _read(path: str | Path) -> str | None:
    try:
        return read_small(path).decode("ascii", "replace").strip()
    except OSError:
        return None


def _number(path: str | Path) -> int | None:
    """The number in a file; None without a file, or without a number in it (``max``, -1: no limit)."""
    text = _read(path) or ""
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def read_pairs(path: str | Path) -> dict[str, int]:
    """The lines of a name and a number; empty if the file cannot be read."""
    words = [line.split(None, 2) for line in (_read(path) or "").splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdigit()}


def cgroup_folders(proc: Path, mount: Path) -> dict[str, tuple[Path, ...]]:
    """For each controller the folders of this process's cgroup and of the groups above, innermost first."""
    found: dict[str, tuple[Path, ...]] = {}
    for line in (_read(f"{proc}/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in ("cpu", "memory"):
            if controllers == "":
                root = mount
            elif controller in controllers.split(","):
                root = mount / controllers if (mount / controllers).is_dir() else mount / controller
            else:
                continue
            inner = root / path.lstrip("/")
            # Inside a container the path is the host's, but the mount is already this process's group.
            folders = tuple(f for f in (inner, *inner.parents) if f == root or root in f.parents)
            if any(f.is_dir() for f in folders) and (controllers or controller not in found):
                found[controller] = tuple(f for f in folders if f.is_dir())
    return found


# -- pressure stall information of the kernel, and the limits of this process's cgroup (v2 or v1) ----------------------

_RESOURCES: Final = ("cpu", "io", "memory")
_QUOTA: Final = "cpu.cfs_quota_us"


class PressureSource:
    """PSI and cgroup limits.

    Args:
        proc: where /proc is mounted.
        cgroups: where the cgroup hierarchies are mounted.
    """

    name = "pressure"

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._pressure = f"{proc}/pressure/"
        self._groups = cgroup_folders(proc, cgroups)
        # Looking for a missing file costs as much as reading a file.
        self._has_quota_file = {folder: (folder / _QUOTA).exists() for folder in self._groups.get("cpu", ())}
        self._cpu_stat = self._first("cpu", "cpu.stat")
        self._memory_max = self._first("memory", "memory.max", "memory.limit_in_bytes")
        self._memory_used = self._first("memory", "memory.current", "memory.usage_in_bytes")
        self._before: dict[str, int] = {}
        self._before_ns = 0
        self._throttled_before: tuple[int, int] | None = None
        self._used_before: tuple[int, int] | None = None

    def _first(self, controller: str, *files: str) -> Path | None:
        """The file in this process's cgroup, or in the nearest group above that has it."""
        paths = (folder / file for file in files for folder in self._groups.get(controller, ()))
        return next((path for path in paths if path.is_file()), None)

    def read(self) -> PressureSample:
        """Pressure and throttling since the previous reading (absent at the first), and the limits now.

        Raises:
            CollectorError: the kernel offers neither pressure files nor cgroup limits.
        """
        totals = {name: total for name in _RESOURCES if (total := self._stalled_us(name)) is not None}
        now = now_ns()
        passed_us = (now - self._before_ns) / 1e3
        ratios = {
            name: min(1.0, max(0.0, (total - self._before[name]) / passed_us))
            for name, total in totals.items()
            if name in self._before and passed_us > 0
        }
        self._before, self._before_ns = totals, now
        if not totals and not self._groups:
            raise CollectorError("neither /proc/pressure nor a cgroup of ours can be read")
        # The lowest limit in cores, and the group that sets it: this process's group or one above it.
        cores = ((_cores(folder, first=first), folder) for folder, first in self._has_quota_file.items())
        limit, limited = min(((cores, folder) for cores, folder in cores if cores is not None), default=(None, None))
        return PressureSample(
            pressure_ratio=ratios,
            cgroup_cpu_limit=limit,
            cgroup_cpu_used=None if limited is None else self._used(limited, now),
            cgroup_throttled_ratio=self._throttled(self._cpu_stat if limited is None else limited / "cpu.stat"),
            cgroup_memory_limit_bytes=None if self._memory_max is None else _number(self._memory_max),
            cgroup_memory_used_bytes=None if self._memory_used is None else _number(self._memory_used),
        )

    def _stalled_us(self, resource: str) -> int | None:
        text = _read(self._pressure + resource)
        for line in (text or "").splitlines():
            if line.startswith("some") and "total=" in line:
                return int(line.rpartition("total=")[2])
        return None

    def _used(self, limited: Path, now: int) -> float | None:
        """Cores used by all processes of the group that sets the limit."""
        used_us = read_pairs(limited / "cpu.stat").get("usage_usec")
        # In version 1 the controllers are mounted together.
        used = _number(limited / "cpuacct.usage") if used_us is None else used_us * 1000
        before, self._used_before = self._used_before, None if used is None else (used, now)
        if used is None or before is None or now <= before[1]:
            return None
        return (used - before[0]) / (now - before[1])

    def _throttled(self, stat: Path | None) -> float | None:
        pairs = {} if stat is None else read_pairs(stat)
        if "nr_periods" not in pairs or "nr_throttled" not in pairs:
            return None
        now = (pairs["nr_periods"], pairs["nr_throttled"])
        before, self._throttled_before = self._throttled_before, now
        if before is None:
            return None
        periods = now[0] - before[0]
        return (now[1] - before[1]) / periods if periods > 0 else 0.0


def _cores(folder: Path, *, first: bool) -> float | None:
    """The number of cores that a group's quota allows; None without a quota. ``first``: version 1 of cgroups."""
    if first:
        quota, period = _number(folder / _QUOTA), _number(folder / "cpu.cfs_period_us")
    else:
        words = (_read(folder / "cpu.max") or "").split()
        quota, period = (int(word) if word.isdigit() else None for word in words) if len(words) == 2 else (None, None)
    return quota / period if quota and period else None


# -- the memory cgroup, and how many of its processes the kernel's OOM killer has killed -------------------------------
# A killed process cannot report it. But the kernel counts, and the other ranks, the next attempt and the report can
# read the counter of the same group after the kill.

EVENTS: Final = ("memory.events", "memory.oom_control")
"""The file with the counter, in cgroup version 2 and in version 1."""

_BOOT_CHARACTERS: Final = 8


def group_id(folder: Path, proc: Path) -> str:
    """Make an id that no other cgroup has, also not a later one of the same name, or one on another machine.

    Raises:
        OSError: the folder does not exist.
    """
    boot = read_small(proc / "sys/kernel/random/boot_id").decode("ascii", "replace")
    return f"{boot[:_BOOT_CHARACTERS]}-{folder.stat().st_ino:x}"


def oom_kills(path: str | Path) -> int | None:
    """How many processes of the group the OOM killer has killed so far; None if the kernel does not report it.

    Args:
        path: the group's file of `EVENTS`.
    """
    return read_pairs(path).get("oom_kill")


class OomCounter:
    """The counter of one group, which is chosen at the start.

    In version 2 a group counts for those below it, too. So the group is the nearest one with a limit, which all tasks
    of a job share. In version 1 each group counts for itself alone, and the group is the process's own.

    Args:
        proc: where /proc is mounted.
        cgroups: where the cgroup hierarchies are mounted.

    Attributes:
        group: id of the group; None without a counter.
        path: its file.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self.group: str | None = None
        self.path: str | None = None
        folders = cgroup_folders(proc, cgroups).get("memory", ())
        version_2, version_1 = ([f / name for f in folders if oom_kills(f / name) is not None] for name in EVENTS)
        limited = [path for path in version_2 if _number(path.parent / "memory.max") is not None]
        path = next(iter([*limited, *version_2, *version_1]), None)
        if path is None:
            return
        try:
            self.group, self.path = group_id(path.parent, proc), str(path)
        except OSError:
            pass  # the group has been removed

    def count(self) -> int | None:
        """How many processes were killed so far; None if the kernel does not report it."""
        return None if self.path is None else oom_kills(self.path)


# -- how much memory can still be allocated before the kernel kills a process: on the machine, and in each memory cgroup
# A cgroup's limit holds for all processes in it and below it. So the groups above this process's own count, too. Page
# cache is given back when memory is short, so it counts as available.

KIB: Final = 1024

_RECLAIMABLE: Final = ("active_file", "inactive_file", "slab_reclaimable")
_RECLAIMABLE_BELOW: Final = ("total_active_file", "total_inactive_file")
"""Lines of ``memory.stat``. Version 1 has each figure twice: ``total_`` includes the groups below."""


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
        self._meminfo = proc / "meminfo"
        self._groups = [  # looking for a missing file costs as much as reading a file
            (folder, (folder / "memory.limit_in_bytes").exists())
            for folder in cgroup_folders(proc, cgroups).get("memory", ())
        ]

    def tightest(self) -> MemoryLimit | None:
        """The limit that leaves least; None if nothing can be read. Limits may change while the process runs."""
        limits = [_limit_of(folder, first=first) for folder, first in self._groups]
        machine = read_pairs(self._meminfo)
        if "MemTotal:" in machine and "MemAvailable:" in machine:
            limits.append(MemoryLimit(machine["MemAvailable:"] * KIB, machine["MemTotal:"] * KIB))
        return min((limit for limit in limits if limit is not None), default=None)

    def shared_memory(self) -> int | None:
        """Bytes of shared memory of this process's own group and the groups below; None without a group."""
        stats = (read_pairs(folder / "memory.stat") for folder, _ in self._groups)
        return next((stat.get("total_shmem", stat["shmem"]) for stat in stats if "shmem" in stat), None)


def _limit_of(folder: Path, *, first: bool) -> MemoryLimit | None:
    """The limit of a cgroup, if it has one. ``first``: version 1."""
    limit = _number(folder / ("memory.limit_in_bytes" if first else "memory.max"))
    used = None if limit is None else _number(folder / ("memory.usage_in_bytes" if first else "memory.current"))
    if limit is None or used is None:
        return None
    stat = read_pairs(folder / "memory.stat")
    below = any(name.startswith("total_") for name in stat)
    cache = sum(stat.get(name, 0) for name in (_RECLAIMABLE_BELOW if below else _RECLAIMABLE))
    return MemoryLimit(max(0, limit - max(0, used - cache)), limit)
