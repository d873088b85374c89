"""What the agent thread does between two ticks: it sleeps, and takes samples of threads of this process."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from telemetry.agent.gil_turns import GilTurns
from telemetry.core.clock import NS, now_ns
from telemetry.core.own_threads import Wake

if TYPE_CHECKING:
    from telemetry.agent.stall_monitor import StallMonitor
    from telemetry.collect.line_sampler import LineSampler
    from telemetry.collect.thread_sampler import ThreadSampler
    from telemetry.core.errors import ErrorLog


class BetweenTicks:
    """Used by the agent thread. Any thread may end the wait.

    Args:
        interval_seconds: time between two ticks.
        stalls: knows how often the training thread is sampled.
        threads: samples the training thread in a job of several ranks. ``lines``: while a stall is open.
        errors: counts samples that failed.

    Attributes:
        turns: is told how late the agent thread wakes.
    """

    def __init__(
        self,
        interval_seconds: float,
        stalls: StallMonitor,
        threads: ThreadSampler,
        lines: LineSampler,
        errors: ErrorLog,
    ) -> None:
        self._interval_seconds = interval_seconds
        self._stalls = stalls
        self._threads = threads
        self._lines = lines
        self._errors = errors
        self.turns = GilTurns()
        self._random = random.Random()  # noqa: S311 - of our own, so that the training's numbers stay the same
        self._wake = Wake()

    def end(self) -> None:
        """End this wait and all later ones: the agent stops."""
        self._wake.set()

    def wait_until(self, stamp: int, *, alone: bool) -> None:
        """Sleep until ``stamp``, and take samples meanwhile if there are several ranks or a stall is open.

        Args:
            stamp: monotonic nanoseconds.
            alone: whether this is the only rank of the job.
        """
        lines = self._lines
        if lines.sampling:  # a tick may take long where C calls hold the GIL, and the code that does so must be seen
            stamp = max(stamp, now_ns() + int(self._interval_seconds / 2 * NS))
        while not self._wake.is_set() and (left := (stamp - now_ns()) / NS) > 0:
            # At random intervals: steps of the training may have the same length as a fixed interval.
            apart = self._stalls.sample_seconds * (0.5 + self._random.random())
            gap = lines.gap()
            wait = min(left, gap) if alone else min(left, gap, apart)
            due = now_ns() + int(wait * NS)
            self.turns.begin(due)
            self._wake.wait(wait)
            self.turns.check()
            with self._errors.contained("lines"):
                if wait == gap:
                    lines.sample(due)
                else:
                    lines.late(due)
            if not alone:
                with self._errors.contained("diagnose"):
                    self._threads.sample()
        if self._wake.is_set():
            self.turns.end()
