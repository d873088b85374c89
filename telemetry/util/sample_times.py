"""When a sample of a thread's stack is due, and how much time it stands for."""

from __future__ import annotations

import random
from typing import Final

from telemetry.util.clock import NS, thread_time_ns

MAX_SHARE: Final = 0.008
"""The gaps grow until the sampling thread takes at most this share of a core."""

FIRST_SAMPLES: Final = 400
FIRST_MAX_SHARE: Final = 0.02
"""The first samples of a stall may take more. They name its line, and their number decides how exact the shares are.
While C calls of 0.03 to 0.15 s hold the GIL, a sample takes 2 to 3 ms: its thread wakes at each switch interval."""

_MAX_DELAY_NS: Final = 20 * NS
"""After a longer delay, the process was stopped: no C call takes so long."""


class SampleTimes:
    """The times of one thread's samples, and how much time each stands for. Used on that thread.

    The gaps between samples are random, exponentially distributed. So every moment is sampled equally often, also in
    code that repeats in a fixed rhythm, and it does not matter where the sampling pauses. A sample stands for the mean
    gap, plus its delay: the sampling thread waited for the GIL then, which one C call may have held all that time.

    While a thread runs Python, another one gets the GIL after the switch interval, 5 ms by default, or earlier, when
    the thread makes a call that releases the GIL. So Python code of less than 5 ms would hardly be seen: its time would
    count for the call after it. Therefore the interval is shortened while a process is sampled.

    Args:
        gap_seconds: mean gap between samples.

    Attributes:
        max_share: the largest share of a core that samples take.
        samples: how many were taken.
        part: samples are taken in this part of the time, in bursts. The weights make up for the rest.
    """

    def __init__(self, gap_seconds: float, max_share: float = MAX_SHARE) -> None:
        self._least = self._mean = gap_seconds
        self.max_share = max_share
        self.part = 1.0
        self._random = random.Random()  # noqa: S311 - our own, so that the training's numbers stay the same
        self.samples = 0
        self._cpu_ns = 0
        self._began_ns = thread_time_ns()

    def gap(self) -> float:
        """Seconds to wait for the next sample."""
        return self._random.expovariate(1 / self._mean)

    def weight_ns(self, due_ns: int, taken_ns: int) -> int:
        """The time that a sample stands for. It was due at one stamp and taken at the other."""
        return int((self._mean * NS + self.delay_ns(due_ns, taken_ns)) / self.part)

    @staticmethod
    def delay_ns(due_ns: int, taken_ns: int) -> int:
        """The time by which a thread was late."""
        return min(max(0, taken_ns - due_ns), _MAX_DELAY_NS)

    def taken(self) -> None:
        """Count a sample that was taken now. If samples cost too much CPU time, the mean gap grows."""
        self.samples += 1
        self._cpu_ns = thread_time_ns() - self._began_ns
        self._mean = max(self._least, self.part * self._cpu_ns / self.samples / NS / self.max_share)

    def starts(self) -> None:
        """Count the cost of samples from now on, without this thread's earlier work."""
        self._began_ns = thread_time_ns() - self._cpu_ns
