"""Pressure stall information of the kernel, and the limits of this process's cgroup (v2 or v1)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from telemetry.collect.collector import CollectorError
from telemetry.core.clock import now_ns
from telemetry.core.filesystem import read_small
from telemetry.core.samples import PressureSample

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
