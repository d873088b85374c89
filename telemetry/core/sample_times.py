"""When a thread is sampled, and how much time a sample stands for.

The gaps between samples are random, exponentially distributed. So every moment is sampled equally often, also in code
that repeats in a fixed rhythm, and it does not matter where the sampling pauses. A sample stands for the mean gap, and
also for the time from the moment that was due to the moment of the sample: the sampling thread waited for the GIL then,
which one C call may have held all that time.

While a thread runs Python, another one gets the GIL after the switch interval, 5 ms by default, or earlier, when the
thread makes a call that releases the GIL. So Python code of less than 5 ms would hardly be seen: its time would count
for the call after it. Therefore the interval is shortened while a process is sampled.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Final

from telemetry.core.clock import NS

SWITCH_SECONDS: Final = 0.0005
"""The switch interval while a process is sampled."""

_MAX_OWN_SHARE: Final = 0.008
"""The gaps grow until the sampling thread takes at most this share of a core."""

_MAX_DELAY_NS: Final = 20 * NS
"""A longer delay is no C call: the process was stopped."""


class SampleTimes:
    """The times of the samples that one thread takes. Used on that thread.

    Args:
        gap_seconds: mean gap between samples.
    """

    def __init__(self, gap_seconds: float) -> None:
        self._least = self._mean = gap_seconds
        self._random = random.Random()  # noqa: S311 - of our own, so that the training's numbers stay the same
        self._samples = 0
        self._cpu_ns = 0
        self._began_ns = time.thread_time_ns()

    def gap(self) -> float:
        """Seconds to wait for the next sample."""
        return self._random.expovariate(1 / self._mean)

    def weight_ns(self, due_ns: int, taken_ns: int) -> int:
        """The time that a sample stands for, which was due at one stamp and was taken at another."""
        return int(self._mean * NS) + self.delay_ns(due_ns, taken_ns)

    @staticmethod
    def delay_ns(due_ns: int, taken_ns: int) -> int:
        """The time by which a thread was late."""
        return min(max(0, taken_ns - due_ns), _MAX_DELAY_NS)

    def taken(self, samples: int = 1) -> None:
        """Count a sample that was taken now. If samples cost too much CPU time, the mean gap grows.

        ``samples`` is 0 if it was not due after a gap: then only its cost counts.
        """
        self._samples += samples
        self._cpu_ns = time.thread_time_ns() - self._began_ns
        self._mean = max(self._least, self._cpu_ns / max(1, self._samples) / NS / _MAX_OWN_SHARE)

    def starts(self) -> None:
        """Count the cost of samples from now on: what this thread did before was something else."""
        self._began_ns = time.thread_time_ns() - self._cpu_ns


_before: float | None = None
_registered = False


def shorten_switch_interval() -> None:
    """Shorten the switch interval of this process, if it is longer."""
    global _before, _registered  # noqa: PLW0603
    now = sys.getswitchinterval()
    if now <= SWITCH_SECONDS:
        return
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=restore_switch_interval)
    _before = now
    sys.setswitchinterval(SWITCH_SECONDS)


def restore_switch_interval() -> None:
    """Undo `shorten_switch_interval`, unless other code has set another interval meanwhile."""
    global _before
    before, _before = _before, None
    if before is not None and abs(sys.getswitchinterval() - SWITCH_SECONDS) < SWITCH_SECONDS / 100:
        sys.setswitchinterval(before)
