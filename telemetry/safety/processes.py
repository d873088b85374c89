"""What the kernel says of a process or a thread, and what kind of process this is."""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from time import CLOCK_BOOTTIME
from typing import TYPE_CHECKING, Final

from telemetry.safety.files import read_small
from telemetry.util.clock import clock_gettime, unix_time

if TYPE_CHECKING:
    from collections.abc import Mapping


DISABLED_VARIABLE: Final = "TELEMETRY_DISABLED"
FALSE_WORDS: Final = frozenset({"0", "false", "no", "off", ""})

STATE, START_TICKS = 0, 19
"""Places in `stat_fields`."""


def stat_fields(process: int | str) -> list[bytes]:
    """`/proc/PROCESS/stat` from the state letter on, see proc(5); empty if the process has ended.

    Args:
        process: its pid, ``self``, or ``PID/task/TID`` for a thread.
    """
    try:
        return read_small(f"/proc/{process}/stat").rpartition(b")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot. With the pid it identifies the process. None if it ended."""
    fields = stat_fields(pid)
    return int(fields[START_TICKS]) if fields and fields[STATE] not in {b"Z", b"X"} else None


def process_state(pid: int, ticks: int | None) -> str:
    """The letter of a process's state in proc(5); empty if it has ended. ``ticks``: its start, see `start_ticks`."""
    fields = stat_fields(pid)
    gone = not fields or fields[STATE] in {b"Z", b"X"} or int(fields[START_TICKS]) != ticks
    return "" if gone else fields[STATE].decode()


def is_running(tid: int) -> bool:
    """Whether a thread of this process is running or runnable."""
    return stat_fields(f"self/task/{tid}")[:1] == [b"R"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One thread: nanoseconds it has run, and its run-queue delay in nanoseconds."""

    run_ns: int
    runnable_ns: int


def read_schedule(pid: int | str, tid: int) -> Schedule | None:
    """Read `/proc/PID/task/TID/schedstat`; None if the thread has ended or the kernel keeps no such figures."""
    try:
        fields = read_small(f"/proc/{pid}/task/{tid}/schedstat").split()
    except OSError:
        return None
    if len(fields) < 2 or fields[0] == b"0":  # the file exists, but schedstats are switched off
        return None
    return Schedule(int(fields[0]), int(fields[1]))


def process_started(pid: int) -> float | None:
    """The Unix time at which a process started, if the kernel reports it."""
    ticks = start_ticks(pid)
    try:
        booted = unix_time() - clock_gettime(CLOCK_BOOTTIME)
        return None if ticks is None else booted + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def pid_namespace() -> int:
    """Id of this process's pid namespace; 0 if unknown. It differs between containers that share a disk."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def process_name(pid: int) -> str:
    """A name that no other process of this machine has ever had, whatever its clock shows."""
    try:
        boot = read_small("/proc/sys/kernel/random/boot_id")[:8].decode("ascii", "replace")
    except OSError:
        boot = ""
    return f"{pid}/{boot}-{start_ticks(pid) or 0}"


def runs_without_gil() -> bool:
    """Whether threads of this process run Python at the same time. The ring relies on the GIL."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()  # from Python 3.13 on


def disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether TELEMETRY_DISABLED turns everything off. Anything but an explicit "no" counts as yes."""
    return environ.get(DISABLED_VARIABLE, "").strip().lower() not in FALSE_WORDS


def is_loader_worker() -> bool:
    """Whether this process is a DataLoader worker, or a spawned child that is importing its main module.

    A spawned child runs the script's top level again, which may contain an unguarded ``telemetry.start()``. For workers
    ``get_worker_info`` is not enough: if workers are threads, it reports the training process as a worker, too.
    """
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        return True
    worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    if worker_info is None or worker_info() is None:
        return False
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_worker_loop":  # torch's or torchdata's
            return True
        frame = frame.f_back
    return False
