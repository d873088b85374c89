"""The machine and this process.

psutil for the machine; for processes the raw `/proc/PID/stat` and `statm`, which take 7 µs where psutil's richer
calls take milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telemetry.collect.collector import CollectorError
from telemetry.collect.procfs import read_schedule, read_stat
from telemetry.core.clock import NS
from telemetry.core.samples import HostSample, ProcessSample

if TYPE_CHECKING:
    from collections.abc import Callable


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


class ProcessSource:
    """This process.

    Args:
        training_thread: its native thread id.
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

    def close(self) -> None:
        """Nothing is held."""
