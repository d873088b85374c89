"""Reads processes and the machine from /proc directly. That takes 7 µs; a general library takes milliseconds."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.model.records import HostSample, ProcessSample
from telemetry.safety.files import read_small
from telemetry.safety.processes import START_TICKS, STATE, Schedule, read_schedule, stat_fields
from telemetry.sources.cgroup import KIB, PressureSource, read_pairs
from telemetry.sources.collector import CollectorError
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable


# -- one process, or one thread ------------------------------------------------------------------------------------

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Stat:
    """One process: resident bytes, threads, parent's pid, start in ticks since boot, and CPU seconds since its start.

    ``children_cpu_seconds``: CPU time of its children that have ended and been waited for. ``anonymous_bytes``:
    resident memory that belongs to no file and is not shared memory.
    """

    cpu_seconds: float
    children_cpu_seconds: float
    resident_bytes: int
    anonymous_bytes: int
    threads: int
    parent: int
    start_ticks: int


def read_stat(pid: int | str) -> Stat | None:
    """Read `/proc/PID/stat` and `statm` (proc(5)); None if the process has ended."""
    fields = stat_fields(pid)
    pages = (_read(f"{pid}/statm") or b"").split(None, 3)
    if len(fields) < 20 or len(pages) < 3 or fields[STATE] in {b"Z", b"X"}:
        return None
    cpu, children = ((int(fields[at]) + int(fields[at + 1])) / _TICKS for at in (11, 13))
    resident, anonymous = int(pages[1]) * _PAGE, (int(pages[1]) - int(pages[2])) * _PAGE
    parent, threads, started = int(fields[1]), int(fields[17]), int(fields[START_TICKS])
    return Stat(cpu, children, resident, max(0, anonymous), threads, parent, started)


@dataclass(frozen=True, slots=True)
class ThreadLoad:
    """The threads of one process over some time.

    Attributes:
        active: threads that were on a core, or wanted one, for a share of the time that counts. Idle threads do not.
        running: mean number of threads on a core. ``queued``: mean number of threads that wanted a core and had none.
    """

    active: int
    running: float
    queued: float


_ACTIVE: Final = 0.05
"""A thread is active from this share of the time on."""

_MAX_THREADS: Final = 512


class ThreadLoads:
    """Follows the threads of processes from reading to reading. A reading takes 15 µs for each thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], Schedule] = {}
        self._at_ns = 0

    def read(self, pids: Iterable[int], without: Container[int] = ()) -> dict[int, ThreadLoad]:
        """The load since the last reading, by pid. Processes without one are left out, and threads of ``without``."""
        now, before, self._before = now_ns(), self._before, {}
        passed, self._at_ns = now - self._at_ns, now
        found = {}
        for pid in pids:
            active, running, queued, known = 0, 0, 0, False
            for tid in _threads(pid)[:_MAX_THREADS]:
                schedule = None if tid in without else read_schedule(pid, tid)
                if schedule is None:
                    continue
                self._before[pid, tid] = schedule
                earlier = before.get((pid, tid))
                if earlier is not None:
                    ran, waited = schedule.run_ns - earlier.run_ns, schedule.runnable_ns - earlier.runnable_ns
                    active += ran + waited >= _ACTIVE * passed
                    running, queued, known = running + ran, queued + waited, True
            if known:
                found[pid] = ThreadLoad(active, running / passed, queued / passed)
        return found


_CLEARLY: Final = 2.0
"""So many times the cores are clearly too many threads. Fewer may be meant: some of them wait for one another."""


@dataclass(frozen=True, slots=True)
class PlannedThreads:
    """With how many threads torch will compute, and how many cores this process may use, by affinity and quota."""

    threads: int
    cores: float

    @property
    def too_many(self) -> str:
        """What is wrong and what to do, in words; empty if the threads are not clearly too many."""
        if self.threads < _CLEARLY * max(self.cores, 1.0):
            return ""
        wanted = max(1, int(self.cores))
        return f"torch computes with {self.threads} threads on {self.cores:g} cores: set OMP_NUM_THREADS={wanted}"


def planned_threads() -> PlannedThreads:
    """The threads as torch tells if it is imported. Otherwise as the environment sets them, or one for each core."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota = PressureSource().read().cgroup_cpu_limit
    except CollectorError:
        quota = None
    torch, wanted = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    threads = torch.get_num_threads() if torch is not None else int(wanted) if wanted.isdecimal() else allowed
    return PlannedThreads(threads, float(allowed) if quota is None else min(float(allowed), quota))


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Io:
    """Bytes that a process has read from storage, and bytes that it has written to files, pipes or anything else."""

    read_bytes: int
    written_bytes: int


def read_io(pid: int) -> Io | None:
    """Read `/proc/PID/io` (`read_bytes` and `wchar` of proc(5)); None if the file cannot be read."""
    fields = (_read(f"{pid}/io") or b"").split()
    # One line for each figure. The order has never changed in the kernel.
    told = len(fields) > 9 and fields[2] == b"wchar:" and fields[8] == b"read_bytes:"
    return Io(int(fields[9]), int(fields[3])) if told else None


_STATES: Final = {b"R": "running", b"S": "sleeping", b"D": "in uninterruptible sleep", b"T": "stopped", b"t": "traced"}


def thread_state(pid: int | str, tid: int) -> str:
    """A thread's state in words and the kernel function it sleeps in; empty if the kernel does not report them."""
    fields = stat_fields(f"{pid}/task/{tid}")
    if not fields:
        return ""
    state = fields[STATE]
    words = _STATES.get(state, f"in state {state.decode()}")
    where = (_read(f"{pid}/task/{tid}/wchan") or b"").decode("ascii", "replace").partition(".")[0]  # no suffix
    return f"{words} in {where}" if where not in {"", "0"} and state in {b"S", b"D"} else words


def is_worker_of_ours(parent: int) -> bool:
    """Whether a process with this parent is a child of this process or of its fork server."""
    here = os.getpid()
    return parent == here or ((stat := read_stat(parent)) is not None and stat.parent == here)


def _read(path: str) -> bytes | None:
    try:
        return read_small(f"/proc/{path}")
    except OSError:
        return None


# -- counts child processes that the script has started with multiprocessing and that may train ------------------------


def started() -> int:
    """The number of child processes that may train.

    DataLoader workers and pool workers do not count, because they are daemons. Managers do not count, because they only
    serve objects. This reads a table of multiprocessing, because polling the children would reap them.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    children = tuple(getattr(process, "_children", ()))
    return sum(1 for child in children if not child.daemon and "Manager" not in child.name)


# -- the machine and this process --------------------------------------------------------------------------------------
# Raw files: `/proc/PID/stat` and `statm` take 7 µs where psutil's richer calls take milliseconds.


class HostSource:
    """CPU and memory of the machine."""

    name = "host"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before: tuple[int, int] | None = None

    def read(self) -> HostSample:
        """CPU use since the previous reading; None at the first."""
        # user, nice, system, idle, iowait, irq, softirq, steal; then guests, whose time is in user and nice, too
        ticks = [int(each) for each in read_small(self._proc / "stat").split(b"\n", 1)[0].split()[1:9]]
        total, ratio = sum(ticks), None
        busy = total - ticks[3] - ticks[4]
        if self._before is not None and total > self._before[1]:
            ratio = min(1.0, max(0.0, (busy - self._before[0]) / (total - self._before[1])))
        self._before = (busy, total)
        memory = read_pairs(self._proc / "meminfo")
        available, size = memory["MemAvailable:"] * KIB, memory["MemTotal:"] * KIB
        return HostSample(ratio, os.cpu_count() or 1, size - available, size)


class ProcessSource:
    """This process.

    Args:
        training_thread: returns its native thread id.
    """

    name = "process"

    def __init__(self, training_thread: Callable[[], int]) -> None:
        self._training_thread = training_thread

    def read(self) -> ProcessSample:
        """CPU time, resident memory and threads, and the training thread's time on a core and run-queue delay.

        Raises:
            CollectorError: there is no /proc.
        """
        stat = read_stat("self")
        if stat is None:
            raise CollectorError("/proc/self/stat cannot be read")
        schedule = read_schedule("self", self._training_thread())
        runnable, running = (None, None) if schedule is None else (schedule.runnable_ns / NS, schedule.run_ns / NS)
        return ProcessSample(
            stat.cpu_seconds, stat.resident_bytes, stat.threads, runnable, running, stat.children_cpu_seconds
        )
