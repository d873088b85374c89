"""When the stack of a thread is sampled, how much time a sample stands for, and what the thread was doing.

The gaps between samples are random, exponentially distributed. So every moment is sampled equally often, also in code
that repeats in a fixed rhythm, and it does not matter where the sampling pauses. A sample stands for the mean gap, plus
its delay: the time for which the sampling thread waited for a core and for the GIL. A C call that holds the GIL for L
is due for a sample once, at any moment of it, and in the mean gap and delay add up to L.

While a thread runs Python, another one gets the GIL after the switch interval, 5 ms by default, or earlier, when the
thread makes a call that releases the GIL. So Python code of less than 5 ms would hardly be seen: its time would count
for the call after it. Therefore the sampling thread wakes 6 ms before each sample, shortens the interval, and restores
it after the sample.

Whether the thread computes is seen from its CPU clock while the sampling thread holds the GIL: its state in /proc does
not tell, because reading that gives the GIL up, which wakes a thread that waits for it. If the sampling thread had to
wait for the GIL, the thread held it if meanwhile it was on a core.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.safety.gil import switch_interval, thread_waits
from telemetry.safety.processes import is_running
from telemetry.util.clock import NS, clock_gettime_ns, now_ns, thread_clock, thread_time_ns
from telemetry.util.profiles import StackTime
from telemetry.util.stacks import Stack, stack_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LEAD_NS: Final = 6_000_000
"""Longer than Python's own switch interval. In a simulation of C calls of 20 ms beside a second thread, 60 of 100
samples in them came late without it, and 20 with it; shares were off by 2 points instead of 8."""

_MAX_DELAY_NS: Final = 20 * NS
"""After a longer delay, the process was stopped: no C call takes so long."""

_RUNS_NS: Final = 1_000
_LOOK_NS: Final = 5_000
"""A thread whose CPU clock advances so much while this one holds the GIL, for so long, runs without the GIL."""

_SMOOTHING: Final = 0.1


class Sample(NamedTuple):
    """One look at a thread.

    Attributes:
        stack: its stack; empty if it runs no Python.
        blocked: whether it had nothing to run: it was on no core, and wanted none.
        waited: whether this thread had to wait for the GIL. ``held``: whether the sampled one held it meanwhile.
        wall_ns: the time that the sample stands for.
        due_ns: when it was due, monotonic. ``taken_ns``: when it was taken.
    """

    stack: Stack
    blocked: bool
    waited: bool
    held: bool
    wall_ns: int
    due_ns: int
    taken_ns: int

    @property
    def cpu_ns(self) -> int:
        """The part of its time in which the thread was on a core or wanted one."""
        return 0 if self.blocked else self.wall_ns

    @property
    def time(self) -> StackTime:
        """Its time for a profile."""
        return StackTime(self.wall_ns, self.cpu_ns, self.wall_ns if self.held else 0)


class SampleClock:
    """Decides when the next sample is due, and takes it. Used by one thread, for threads of its process.

    Args:
        sleep: sleeps for some seconds.
    """

    def __init__(self, sleep: Callable[[float], object]) -> None:
        self._sleep = sleep
        self._random = random.Random()  # noqa: S311 - our own, so that the training's numbers stay the same
        self._mean_ns = 0
        self._due_ns = 0
        self._waited = False
        self._ran_ns = 0  # CPU time of the sampled thread before the last sleep
        self._spent_ns = 0  # CPU time of this thread when the newest sample began to cost
        self._cost_ns = 200_000.0  # of a sample: an estimate until it is measured

    def draw(self, mean_seconds: float, max_share: float) -> None:
        """Draw the time of the next sample.

        Args:
            mean_seconds: mean time between two samples.
            max_share: the largest share of a core that samples may take. If they cost more, the gaps are longer.
        """
        self._mean_ns = int(max(mean_seconds * NS, self._cost_ns / max_share))
        self._due_ns = now_ns() + int(self._random.expovariate(1 / self._mean_ns))

    @property
    def left_seconds(self) -> float:
        """Time until the next sample is near."""
        return (self._due_ns - _LEAD_NS - now_ns()) / NS

    def wait(self, native: int, seconds: float) -> bool:
        """Sleep until the next sample of a thread is near, at most for some seconds. Returns whether it is.

        Then call `wait_until_due`, and right after it `take`. ``native``: the thread, by `threading.get_native_id`.
        """
        self._due_ns = max(self._due_ns, now_ns())  # it may have passed during other work
        left = min(seconds, (self._due_ns - _LEAD_NS - now_ns()) / NS)
        self._waited = left > 0  # if the sample is due when this thread wakes, it has waited for longer than the lead
        if left > 0:
            self._ran_ns = cpu_ns(native)
            self._sleep(left)
        return now_ns() >= self._due_ns - _LEAD_NS

    def wait_until_due(self, native: int) -> None:
        """Shorten the switch interval, and sleep until the sample is due. After it this thread has the GIL."""
        self._spent_ns = thread_time_ns()
        switch_interval.shorten()
        left = (self._due_ns - now_ns()) / NS
        if left > 0:
            waits, self._ran_ns = thread_waits(), cpu_ns(native)
            self._sleep(left)
            self._waited = thread_waits() - waits > 1  # one was the sleep

    def take(self, ident: int, native: int, until: dict[str, Any] | None = None) -> Sample:
        """Take the sample that is due now.

        Args:
            ident: the thread, by `threading.get_ident`.
            native: the same by `threading.get_native_id`.
            until: the globals of a module. Its frames, and their callers, are left out.
        """
        try:
            waited, now = self._waited, now_ns()
            delay = min(max(0, now - self._due_ns), _MAX_DELAY_NS)
            ran = cpu_ns(native)
            stack = stack_of(ident, until)
            computes = cpu_ns(native) - ran >= _RUNS_NS
            held = waited and ran - self._ran_ns >= delay / 2  # others may have held the GIL
            blocked = not (held or computes or is_running(native))
        finally:
            switch_interval.restore()
        self._cost_ns += _SMOOTHING * (thread_time_ns() - self._spent_ns - self._cost_ns)
        return Sample(stack, blocked, waited, held, self._mean_ns + delay, self._due_ns, now)


def runs_beside(native: int) -> bool:
    """Whether a thread of this process is on a core while this one, which has just got the GIL, holds it."""
    ran, until = cpu_ns(native), now_ns() + _LOOK_NS
    while now_ns() < until:
        pass
    return cpu_ns(native) - ran >= _RUNS_NS


def cpu_ns(native: int) -> int:
    """CPU time of a thread of this process, by its native id; 0 if it has ended."""
    try:
        return clock_gettime_ns(thread_clock(native))
    except OSError:
        return 0
