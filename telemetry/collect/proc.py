"""Raw reads of /proc/PID: 7 µs where a richer library takes milliseconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from telemetry.files import read_small

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Stat:
    """One process: resident bytes, threads, parent's pid, start in ticks since boot, and CPU seconds since it began.

    ``children_cpu_seconds`` is that of its children that have ended and been waited for.
    """

    cpu_seconds: float
    children_cpu_seconds: float
    resident_bytes: int
    threads: int
    parent: int
    start_ticks: int


def read_stat(pid: int | str) -> Stat | None:
    """From `/proc/PID/stat` and `statm` (proc(5)); None if the process is gone."""
    try:
        fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        resident = int(read_small(f"/proc/{pid}/statm").split()[1]) * _PAGE
    except (OSError, IndexError):
        return None
    if fields[0] in {b"Z", b"X"}:
        return None
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    children = (int(fields[13]) + int(fields[14])) / _TICKS
    return Stat(cpu, children, resident, int(fields[17]), int(fields[1]), int(fields[19]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """One thread: nanoseconds it has run, and nanoseconds it was runnable but had no core."""

    run_ns: int
    runnable_ns: int


def read_schedule(pid: int | str, tid: int) -> Schedule | None:
    """From `/proc/PID/task/TID/schedstat`; None if the thread is gone or the kernel keeps no such figures."""
    try:
        run, runnable = read_small(f"/proc/{pid}/task/{tid}/schedstat").split()[:2]
    except (OSError, ValueError):
        return None
    return Schedule(int(run), int(runnable)) if run != b"0" else None  # schedstat is there, and switched off


@dataclass(frozen=True, slots=True)
class Signals:
    """A thread's state (`R`, `S`, `D`, `T` ... of proc(5)) and its signals, a bit each."""

    state: str
    pending: int
    blocked: int
    caught: int


def read_signals(pid: int) -> Signals | None:
    """Of the process's main thread, from `/proc/PID/status`; None if the process is gone."""
    values = {b"SigPnd:": 0, b"ShdPnd:": 0, b"SigBlk:": 0, b"SigCgt:": 0}
    state = ""
    try:
        for line in read_small(f"/proc/{pid}/status").splitlines():
            name, _, rest = line.partition(b"\t")
            if name == b"State:":
                state = rest[:1].decode()
            elif name in values:
                values[name] = int(rest, 16)
    except (OSError, ValueError):
        return None
    return Signals(state, values[b"SigPnd:"] | values[b"ShdPnd:"], values[b"SigBlk:"], values[b"SigCgt:"])


_STATES: Final = {"R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped", "t": "traced"}


def thread_state(pid: int | str, tid: int) -> str:
    """What a thread does, in words, and where in the kernel it sleeps; empty where that is not told."""
    task = f"/proc/{pid}/task/{tid}"
    state = _task_state(task)
    if not state:
        return ""
    words = _STATES.get(state, f"in state {state}")
    try:
        where = read_small(f"{task}/wchan").decode("ascii", "replace").partition(".")[0]  # what the compiler added
    except OSError:
        where = ""
    return f"{words} in {where}" if where not in {"", "0"} and state in "SD" else words


def is_running(tid: int) -> bool:
    """Whether a thread of this process is on a core, or only waits for one."""
    return _task_state(f"/proc/self/task/{tid}") == "R"


def _task_state(task: str) -> str:
    """The letter of proc(5); empty where that is not told."""
    try:
        return read_small(f"{task}/stat").rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def is_worker_of_ours(parent: int) -> bool:
    """Whether a process with this parent is our child, or that of our fork server, which is our child."""
    here = os.getpid()
    if parent == here:
        return True
    stat = read_stat(parent)
    return stat is not None and stat.parent == here


@dataclass(frozen=True, slots=True)
class Io:
    """Bytes a process has had read from storage; and those it has written, into files, pipes or anything else."""

    read_bytes: int
    written_bytes: int


def read_io(pid: int) -> Io | None:
    """From `/proc/PID/io` (`read_bytes` and `wchar` of proc(5)); None where that is not told."""
    try:
        fields = read_small(f"/proc/{pid}/io").split()
    except OSError:
        return None
    # A line for each figure, in an order that has not changed since they are told.
    told = len(fields) > 9 and fields[2] == b"wchar:" and fields[8] == b"read_bytes:"
    return Io(int(fields[9]), int(fields[3])) if told else None
