"""The cgroups of this process: pressure, limits, the OOM killer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from telemetry.records import PressureSample
from telemetry.sources.collector import CollectorError
from telemetry.util.clock import now_ns
from telemetry.util.files import read_small

# -- pressure stall information of the kernel, and the limits of this process's cgroup (v2 or v1) ----------------------

_RESOURCES: Final = ("cpu", "io", "memory")
_QUOTA: Final = "cpu.cfs_quota_us"
_NO_LIMIT: Final = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


class PressureSource:
    """PSI and cgroup limits.

    Args:
        proc: where /proc is mounted.
        cgroups: where the cgroup hierarchies are mounted.
    """

    name = "pressure"

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._pressure = f"{proc}/pressure/"
        self._paths: dict[str, str | None] = {}
        self._groups = cgroup_folders(proc, cgroups)
        # A file that is not there costs as much as one that is.
        self._has_quota_file = {folder: (folder / _QUOTA).exists() for folder in self._groups.get("cpu", ())}
        self._before: dict[str, int] = {}
        self._before_ns = 0
        self._throttled_before: tuple[int, int] | None = None
        self._used_before: tuple[int, int] | None = None

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
        limit, limited = self._cpu_limit()
        return PressureSample(
            pressure_ratio=ratios,
            cgroup_cpu_limit=limit,
            cgroup_cpu_used=None if limited is None else self._used(limited, now),
            cgroup_throttled_ratio=self._throttled(limited),
            cgroup_memory_limit_bytes=self._memory("memory.max", "memory.limit_in_bytes"),
            cgroup_memory_used_bytes=self._memory("memory.current", "memory.usage_in_bytes"),
        )

    def close(self) -> None:
        """Nothing is held."""

    def _stalled_us(self, resource: str) -> int | None:
        """Microseconds since boot in which some task waited for the resource."""
        text = _read(self._pressure + resource)
        for line in (text or "").splitlines():
            if line.startswith("some") and "total=" in line:
                return int(line.rpartition("total=")[2])
        return None

    def _cpu_limit(self) -> tuple[float | None, Path | None]:
        """The lowest limit in cores, and the group that sets it: this process's group or one above it."""
        cores = ((_cores(folder, first=first), folder) for folder, first in self._has_quota_file.items())
        return min(((limit, folder) for limit, folder in cores if limit is not None), default=(None, None))

    def _used(self, limited: Path, now: int) -> float | None:
        """Cores used by all processes of the group that sets the limit."""
        stat = _read(f"{limited}/cpu.stat") or ""
        used = next((int(line.split()[1]) * 1000 for line in stat.splitlines() if line.startswith("usage_usec ")), None)
        if used is None:  # version 1, where the controllers are mounted together
            text = _read(f"{limited}/cpuacct.usage")
            used = int(text) if text else None
        before, self._used_before = self._used_before, None if used is None else (used, now)
        if used is None or before is None or now <= before[1]:
            return None
        return (used - before[0]) / (now - before[1])

    def _throttled(self, limited: Path | None) -> float | None:
        text = (self._first("cpu", "cpu.stat") if limited is None else _read(f"{limited}/cpu.stat")) or ""
        pairs = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        if "nr_periods" not in pairs or "nr_throttled" not in pairs:
            return None
        now = (int(pairs["nr_periods"]), int(pairs["nr_throttled"]))
        before, self._throttled_before = self._throttled_before, now
        if before is None:
            return None
        periods = now[0] - before[0]
        return (now[1] - before[1]) / periods if periods > 0 else 0.0

    def _memory(self, v2: str, v1: str) -> int | None:
        text = self._first("memory", v2) or self._first("memory", v1)
        if text is None or text == "max":
            return None
        amount = int(text)
        return amount if amount < _NO_LIMIT else None

    def _first(self, controller: str, file: str) -> str | None:
        """The file in this process's cgroup or in the nearest group above that has it. Searched once."""
        if file not in self._paths:
            folders = self._groups.get(controller, ())
            self._paths[file] = next((str(folder / file) for folder in folders if (folder / file).is_file()), None)
        path = self._paths[file]
        return None if path is None else _read(path)


def _cores(folder: Path, *, first: bool) -> float | None:
    """The number of cores that a group's quota allows; None without a quota. ``first``: version 1 of cgroups."""
    if not first:
        quota, _, period = (_read(f"{folder}/cpu.max") or "max").partition(" ")
    elif not (quota := _read(f"{folder}/{_QUOTA}") or "max").isdigit():  # -1: none
        return None
    else:
        period = _read(f"{folder}/cpu.cfs_period_us") or "0"
    return int(quota) / int(period) if quota.isdigit() and int(quota) > 0 and int(period) > 0 else None


def cgroup_folders(proc: Path, mount: Path) -> dict[str, tuple[Path, ...]]:
    """For each controller the folders of this process's cgroup and those above it, innermost first."""
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
            # Inside a container the path is that of the host, but the mount is already this process's group.
            folders = tuple(f for f in (inner, *inner.parents) if f == root or root in f.parents)
            if any(f.is_dir() for f in folders) and (controllers or controller not in found):
                found[controller] = tuple(f for f in folders if f.is_dir())
    return found


def _read(path: str) -> str | None:
    try:
        return read_small(path).decode("ascii", "replace").strip()
    except OSError:
        return None


# -- A memory cgroup: which one it is, and how many of its processes the kernel's OOM killer has killed ----------------

EVENTS: Final = ("memory.events", "memory.oom_control")
"""The file that counts, in cgroup version 2 and in version 1."""

_BOOT_CHARACTERS: Final = 8


def group_id(folder: Path, proc: Path) -> str:
    """Tells a cgroup from all others, also from one of the same name after it was removed, and on other machines.

    Raises:
        OSError: the folder does not exist.
    """
    boot = read_small(proc / "sys/kernel/random/boot_id").decode("ascii", "replace")
    return f"{boot[:_BOOT_CHARACTERS]}-{folder.stat().st_ino:x}"


def oom_kills(path: str | Path) -> int | None:
    """How many processes of the group the OOM killer has killed so far; None where the kernel does not tell.

    Args:
        path: of the file of `EVENTS`.
    """
    try:
        text = read_small(path).decode("ascii", "replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.isdigit():
            return int(number)
    return None


# -- how many processes the OOM killer has killed in the cgroup of this process ----------------------------------------
# A killed process cannot tell. But the kernel counts, and the other ranks, the next attempt and the report can read the
# counter of the same group after the kill.


class OomCounter:
    """The counter of one group, found at the start.

    In version 2 a group counts for those below it, too. So the group is the nearest one with a limit, which all tasks
    of a job share. In version 1 each group counts for itself alone, and the group is that of the process.

    Args:
        proc: where /proc is mounted.
        cgroups: where the cgroup hierarchies are mounted.

    Attributes:
        group: which group it is; None if there is no counter.
        path: of the file.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self.group: str | None = None
        self.path: str | None = None
        folder, name = _counting(cgroup_folders(proc, cgroups).get("memory", ()))
        if folder is None:
            return
        try:
            self.group, self.path = group_id(folder, proc), str(folder / name)
        except OSError:
            pass  # the group has been removed

    def count(self) -> int | None:
        """How many so far; None where the kernel does not tell."""
        return None if self.path is None else oom_kills(self.path)

    def head_fields(self) -> dict[str, Any]:
        """For the first line of a log: where the counter is, for those who read it later."""
        return {} if self.path is None else {"memory_group": self.group, "memory_events": self.path}


def _counting(folders: tuple[Path, ...]) -> tuple[Path | None, str]:
    """The folder whose counter is to be read, and the name of its file. ``folders``: innermost first."""
    version_2, version_1 = EVENTS
    own = next((folder for folder in folders if oom_kills(folder / version_2) is not None), None)
    if own is not None:
        limited = (folder for folder in folders if _is_limited(folder) and (folder / version_2).is_file())
        return next(limited, own), version_2
    return next((folder for folder in folders if oom_kills(folder / version_1) is not None), None), version_1


def _is_limited(folder: Path) -> bool:
    try:
        return (folder / "memory.max").read_text(encoding="ascii").strip().isdigit()
    except (OSError, UnicodeDecodeError):
        return False


# -- memory limit ------------------------------------------------------------------------------------------------------
# How much memory can still be allocated before the kernel kills a process: on the machine, and in each memory cgroup.
#
# A cgroup's limit holds for all processes in it and below it. So the groups above this process's own count, too. Page
# cache is given back when memory is short, so it counts as available.

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
