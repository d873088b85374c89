"""Measures the longest of many short steps, alternately with and without the agent in one process.

A step of 40 us is shorter than any turn of the agent's thread. A step during such a turn waits for the GIL. Segments
with and without the agent alternate, in a new order for each pair. With the agent there is one scrape a second. There
are eight idle DataLoader workers in both.

On a machine with other work, the kernel takes the core from both. So after each long step, the time that the training
thread waited without being runnable is read, too: the wall clock minus its CPU time and its run-queue delay. The thread
does no I/O and does not sleep, so this is the wait for the GIL. It includes time in which the thread with the GIL has
lost its core.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from array import array
from time import perf_counter_ns
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from benchmarks import agent_cpu, child, loops
from benchmarks.spread import percentile

STEP_US: Final = 40.0
LONG_NS: Final = 1_000_000
"""Steps longer than this are summed."""

_READ_FROM_NS: Final = 150_000
"""After a step of this length, the thread's waits are read."""

_SETTLE_SECONDS: Final = 3.0
_WORKERS: Final = 8


class _Short:
    """Steps of about `STEP_US`: a batch from an iterator that the hooks see, and some small operators."""

    def __init__(self) -> None:
        self.loader = loops.EndlessLoader(torch.randn(32, 32))
        self.weights = torch.randn(32, 32)
        self.operators = 1
        while min(self._one() for _ in range(3)) < STEP_US * 1e3:
            self.operators += 1

    def _one(self) -> float:
        iterator = iter(self.loader)
        took = []
        for _ in range(500):
            start = perf_counter_ns()
            self._step(iterator)
            took.append(perf_counter_ns() - start)
        return percentile(took, 0.2)

    def _step(self, iterator: Any) -> None:
        data = next(iterator)
        for _ in range(self.operators):
            data = torch.mm(data, self.weights)

    def run(self, seconds: float) -> tuple[array[int], list[int]]:
        """Durations of the steps, and the waits for the GIL in long ones; nanoseconds."""
        iterator, clock = iter(self.loader), _GilWait()
        took, waited = array("q"), []
        end = perf_counter_ns() + int(seconds * 1e9)
        start = perf_counter_ns()
        clock.take()
        while start < end:
            self._step(iterator)
            now = perf_counter_ns()
            took.append(now - start)
            if now - start > _READ_FROM_NS:
                waited.append(clock.take())
            start = perf_counter_ns()
        return took, waited


class _GilWait:
    """The time since the last call in which the calling thread neither ran nor was runnable."""

    def __init__(self) -> None:
        self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._before = 0

    def take(self) -> int:
        """Nanoseconds; 0 if the clocks disagree slightly."""
        delay = int(os.pread(self._file, 100, 0).split()[1])
        now = perf_counter_ns() - time.thread_time_ns() - delay
        before, self._before = self._before, now
        return max(0, now - before)

    def __del__(self) -> None:
        os.close(self._file)


def measure(*, pairs: int, segment_seconds: float) -> dict[str, Any]:
    """The figures of each segment, in nanoseconds."""
    torch.set_num_threads(1)
    workers = iter(DataLoader(agent_cpu.Samples(), batch_size=4, num_workers=_WORKERS))
    next(workers)
    short = _Short()
    segments: dict[str, list[dict[str, float]]] = {"bare": [], "agent": []}
    for _ in range(pairs):
        for kind in random.sample(("bare", "agent"), 2):
            segments[kind].append(_segment(short, segment_seconds, agent=kind == "agent"))
    del workers
    return segments


def _segment(short: _Short, seconds: float, *, agent: bool) -> dict[str, float]:
    if not agent:
        return summary(*short.run(seconds), seconds)
    import telemetry

    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir:
        running: Any = telemetry.start(run_dir, port=0, start_line=False)
        try:
            with agent_cpu.scraping(running.metrics_url, 1.0):
                short.run(_SETTLE_SECONDS)
                return summary(*short.run(seconds), seconds)
        finally:
            telemetry.stop()


def summary(took: array[int], waited: list[int], seconds: float) -> dict[str, float]:
    """The figures of one segment."""
    return {
        "steps": len(took),
        "p50": percentile(took, 0.5),
        "p99.9": percentile(took, 0.999),
        "p99.99": percentile(took, 0.9999),
        "max": max(took),
        "long": sum(step for step in took if step > LONG_NS) / seconds,
        "gil_max": max(waited, default=0),
        "gil": sum(waited) / seconds,
    }


if __name__ == "__main__":
    child.answer(measure)
