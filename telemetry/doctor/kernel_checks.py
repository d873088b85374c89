"""Checks of what the kernel reports, and of the limits it sets."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from telemetry.doctor.finding import ABSENT, OK, CheckContext, Finding
from telemetry.util.text import binary_size

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_workers(place: CheckContext) -> Iterable[Finding]:
    """How DataLoader workers are started, and on how many cores they may run."""
    del place
    import multiprocessing

    method = multiprocessing.get_start_method()
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        OK,
        "workers",
        f"DataLoader workers are started by {method}; this process may use {cores} of {os.cpu_count()} cores",
    )


def check_schedstat(place: CheckContext) -> Iterable[Finding]:
    """Whether the kernel reports run-queue delay."""
    del place
    from telemetry.sources.proc import read_schedule

    schedule = read_schedule(os.getpid(), threading.get_native_id())
    if schedule is None or schedule.run_ns == 0:
        text = "the kernel reports no run-queue delay (CONFIG_SCHED_INFO is off): causes of slow workers are less exact"
        yield Finding(ABSENT, "schedstat", text)
    else:
        yield Finding(OK, "schedstat", "the kernel tells running, runnable and blocked workers apart")


def check_pressure(place: CheckContext) -> Iterable[Finding]:
    """Whether the kernel reports pressure (PSI)."""
    del place
    folder = Path("/proc/pressure")
    there = [name for name in ("cpu", "io", "memory") if _readable(folder / name)]
    if there:
        yield Finding(OK, "pressure", f"{folder} reports {', '.join(there)}")
    else:
        yield Finding(
            ABSENT, "pressure", f"there is no {folder}: the kernel has no PSI, or it is turned off (boot with psi=1)"
        )


def check_cgroup(place: CheckContext) -> Iterable[Finding]:
    """The CPU and memory limits of this process's cgroup."""
    del place
    from telemetry.sources.cgroup import PressureSource
    from telemetry.sources.collector import CollectorError

    try:
        sample = PressureSource().read()
    except CollectorError as error:
        yield Finding(ABSENT, "cgroup", f"{error}: limits are unknown")
        return
    cpu, memory, used = sample.cgroup_cpu_limit, sample.cgroup_memory_limit_bytes, sample.cgroup_memory_used_bytes
    cores = "no CPU limit" if cpu is None else f"CPU limit {cpu:g} cores"
    of_it = f", {binary_size(used)} used" if used is not None else ""
    room = "no memory limit" if memory is None else f"memory limit {binary_size(memory)}"
    yield Finding(OK, "cgroup", f"{cores}, {room}{of_it}")


def check_memory(place: CheckContext) -> Iterable[Finding]:
    """How much memory is left, and whether the kernel tells which pages workers share."""
    del place
    from telemetry.sources.memory import MemorySource

    available, limit = (sample := MemorySource(tuple).read()).memory_available_bytes, sample.memory_limit_bytes
    left = "unknown" if available is None or limit is None else f"{binary_size(available)} of {binary_size(limit)}"
    if _readable(Path("/proc/self/smaps_rollup")):
        yield Finding(OK, "memory", f"left for this process: {left}")
    else:
        text = "no /proc/PID/smaps_rollup: memory that workers copy on write is seen as growth of no part of the run"
        yield Finding(ABSENT, "memory", f"left for this process: {left}; {text}")


def _readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False
