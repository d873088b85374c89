"""What the kernel tells, and what it lets us have."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from telemetry.doctor.finding import ABSENT, OK, Finding, Place, as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_workers(place: Place) -> Iterable[Finding]:
    """How workers are started, and on how many cores."""
    del place
    import multiprocessing

    method = multiprocessing.get_start_method()
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        OK, "workers", f"DataLoader workers are started by {method}; {cores} of {os.cpu_count()} cores are ours"
    )


def check_schedstat(place: Place) -> Iterable[Finding]:
    """Whether the kernel tells running from waiting for a core."""
    del place
    from telemetry.collect.proc import read_schedule

    schedule = read_schedule(os.getpid(), threading.get_native_id())
    if schedule is None or schedule.run_ns == 0:
        text = "the kernel keeps none (CONFIG_SCHED_INFO): why workers are slow is not told apart"
        yield Finding(ABSENT, "schedstat", text)
    else:
        yield Finding(OK, "schedstat", "tells running, runnable and blocked workers apart")


def check_pressure(place: Place) -> Iterable[Finding]:
    """Whether the kernel tells of pressure."""
    del place
    folder = Path("/proc/pressure")
    there = [name for name in ("cpu", "io", "memory") if _readable(folder / name)]
    if there:
        yield Finding(OK, "pressure", f"{folder} tells of {', '.join(there)}")
    else:
        yield Finding(ABSENT, "pressure", f"no {folder}: the kernel lacks PSI, was booted with psi=0, or hides it")


def check_cgroup(place: Place) -> Iterable[Finding]:
    """The limits of our cgroup."""
    del place
    from telemetry.collect.pressure import PressureSource
    from telemetry.collect.source import SourceError

    try:
        sample = PressureSource().read()
    except SourceError as error:
        yield Finding(ABSENT, "cgroup", f"{error}: no limits are known")
        return
    cpu, memory, used = sample.cgroup_cpu_limit, sample.cgroup_memory_limit_bytes, sample.cgroup_memory_used_bytes
    cores = "no CPU limit" if cpu is None else f"CPU limit {cpu:g} cores"
    of_it = f", {as_bytes(used)} used" if used is not None else ""
    room = "no memory limit" if memory is None else f"memory limit {as_bytes(memory)}"
    yield Finding(OK, "cgroup", f"{cores}, {room}{of_it}")


def _readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False
