"""The machine, this process and its DataLoader workers.

psutil for the machine; for processes the raw `/proc/PID/stat` and `statm`, which take 7 µs where psutil's richer
calls take milliseconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.clock import NS, now_ns
from telemetry.collect.source import SourceError
from telemetry.records import HostSample, ProcessSample, WorkersSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class HostSource:
    """CPU and memory of the machine."""

    name = "host"

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._cores = psutil.cpu_count() or 1
        self._before: tuple[float, float] | None = None

    def read(self) -> HostSample:
        """CPU use since the previous reading; None at the first."""
        busy, total = _cpu_times(self._psutil.cpu_times())
        ratio = None
        if self._before is not None and total > self._before[1]:
            ratio = min(1.0, max(0.0, (busy - self._before[0]) / (total - self._before[1])))
        self._before = (busy, total)
        memory = self._psutil.virtual_memory()
        return HostSample(ratio, self._cores, memory.total - memory.available, memory.total)

    def close(self) -> None:
        """Nothing is held."""


def _cpu_times(times: Any) -> tuple[float, float]:
    """Busy and total seconds of all cores. Guest time is in user time already."""
    total = times.user + times.nice + times.system + times.idle
    total += sum(getattr(times, name, 0.0) for name in ("iowait", "irq", "softirq", "steal"))
    idle = times.idle + getattr(times, "iowait", 0.0)
    return total - idle, total


@dataclass(frozen=True, slots=True)
class _Stat:
    cpu_seconds: float
    resident_bytes: int
    threads: int
    parent: int
    start_ticks: int


def _stat(pid: int | str) -> _Stat | None:
    """From `/proc/PID/stat` and `statm` (proc(5)); None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - every tick
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123
            resident = int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return None
    if fields[0] in {b"Z", b"X"}:
        return None
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    return _Stat(cpu, resident, int(fields[17]), int(fields[1]), int(fields[19]))


class ProcessSource:
    """This process."""

    name = "process"

    def read(self) -> ProcessSample:
        """CPU time, resident memory and threads.

        Raises:
            SourceError: there is no /proc.
        """
        stat = _stat("self")
        if stat is None:
            raise SourceError("/proc/self/stat cannot be read")
        return ProcessSample(stat.cpu_seconds, stat.resident_bytes, stat.threads)

    def close(self) -> None:
        """Nothing is held."""


class WorkersSource:
    """The DataLoader workers of this process.

    Args:
        workers: the pids of the workers known, alive or not.
        ready: how many batches lie ready, None where that cannot be told.
    """

    name = "workers"

    def __init__(self, workers: Callable[[], Iterable[int]], ready: Callable[[], int | None]) -> None:
        self._workers = workers
        self._ready = ready
        self._before: dict[tuple[int, int], float] = {}
        self._before_ns = 0

    def read(self) -> WorkersSample:
        """Workers that are alive and still ours; zero of them is a reading too."""
        here, now = os.getpid(), now_ns()
        cpu: dict[tuple[int, int], float] = {}
        resident = 0
        for pid in self._workers():
            stat = _stat(pid)
            if stat is None or (stat.parent != here and not _forkserver_child(stat.parent, here)):
                continue  # gone; or the pid is another process's by now
            cpu[pid, stat.start_ticks] = stat.cpu_seconds
            resident += stat.resident_bytes
        spent = [seconds - self._before[worker] for worker, seconds in cpu.items() if worker in self._before]
        wall = (now - self._before_ns) / NS
        ratio = sum(spent) / len(spent) / wall if spent and wall > 0 else None
        self._before, self._before_ns = cpu, now
        return WorkersSample(len(cpu), ratio, resident, self._ready() if cpu else None)

    def close(self) -> None:
        """Nothing is held."""


def _forkserver_child(parent: int, here: int) -> bool:
    """Whether a worker's parent is our fork server, which is our child."""
    stat = _stat(parent)
    return stat is not None and stat.parent == here
