"""When the agent thread works: which ticks are skipped, and what it samples between two ticks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.util.clock import NS, now_ns
from telemetry.util.gil import thread_waits
from telemetry.util.threads import Wake

if TYPE_CHECKING:
    from telemetry.agent.accounting import Accounting
    from telemetry.agent.stalls import StallMonitor
    from telemetry.config import Config
    from telemetry.sources.lines import LineSampler, StepSampler, ThreadSampler
    from telemetry.util.errors import ErrorLog
    from telemetry.util.gil import GilTurns


# -- skips ticks while nothing changes ---------------------------------------------------------------------------------
# While no stall is open and the loop goes on as before, every second tick is skipped; after a while four of five, or
# fewer if `stall_window_seconds` is short. The ring is still emptied. A tick is not skipped if the ring shows that the
# training thread lost more time in the last second than before, or ended no step. So a new stall is seen as early as
# with every tick. What only samples show (GPU clocks, other ranks) is seen at most four intervals later.

_MIN_INTERVAL_SECONDS: Final = 0.5
_MAX_INTERVAL_SECONDS: Final = 1.0
"""With longer intervals no tick is skipped, because a scrape would be older than 5 s. Shorter intervals below the
minimum skip none either: a user who sets them wants the samples."""

_MAX_SKIPPED: Final = 4
_LONG_CALM: Final = 20
"""After this many calm ticks, this many in a row are skipped; before, one. Prometheus scrapes every 15 s or less often.
The log has a line every 10 s: with four it comes with every second tick. `make bench` measures the CPU time with it:
"The agent's own threads" in `benchmarks/results/overhead-*.md`."""

_MAX_GAP_SECONDS: Final = 2.0
"""After a longer gap the machine was suspended, or the agent did not run. Such a tick must not be skipped."""


class TickPace:
    """Decides which ticks are skipped.

    Args:
        config: interval and ratios.
        accounting: must be up to date at every call, also after a skipped tick.

    Attributes:
        intervals: how many intervals lie between the last two ticks that were not skipped.
    """

    def __init__(self, config: Config, accounting: Accounting) -> None:
        self._accounting = accounting
        self._possible = _MIN_INTERVAL_SECONDS < config.interval_seconds <= _MAX_INTERVAL_SECONDS
        # A stall must be seen within its window, so the window has to have several ticks.
        self._max_skipped = min(_MAX_SKIPPED, int(config.stall_window_seconds / (2 * config.interval_seconds)))
        self._max_rise = config.stall_exit_ratio
        self._lost_ratio = self._lost_before = 0.0
        self._trains = False
        self._risen: tuple[int, float] | None = None  # calm ticks before the ratio rose, and the ratio then
        self._skipped = self._calm = 0  # ticks in a row
        self.intervals = 1
        self._at_last = (0, 0, 0, 0)

    def skips(self, *, busy: bool, wanted: bool = False) -> bool:
        """Whether to skip the tick that is due. Call it for each tick, after `Accounting.update`.

        Args:
            busy: something must be followed, such as an open stall.
            wanted: there is a line for the log. Then a second tick in a row is not skipped.
        """
        self._look()
        self._count(busy=busy)
        max_skipped = self._max_skipped if self._calm > _LONG_CALM and not wanted else min(1, self._max_skipped)
        skips = self._possible and self._calm > 0 and self._skipped < max_skipped
        if not skips:
            self.intervals = self._skipped + 1
        self._skipped = self._skipped + 1 if skips else 0
        return skips

    def _look(self) -> None:
        """Compare the ledger with that at the last call: does the loop go on, and which share of its time is lost?"""
        ledger = self._accounting.ledger
        now = (ledger.at_ns, ledger.ns[COMPUTE], ledger.ns[DATA_WAIT], self._accounting.steps_total)
        passed, compute, wait, steps = (new - old for new, old in zip(now, self._at_last, strict=True))
        self._at_last = now
        self._trains = 0 < passed < _MAX_GAP_SECONDS * NS and steps > 0
        self._lost_before = self._lost_ratio
        self._lost_ratio = max(wait, passed - compute) / passed if self._trains else 0.0

    def _count(self, *, busy: bool) -> None:
        """Count calm ticks in a row. A rise that has passed, as on a busy machine, does not end a long calm."""
        if busy or not self._trains:
            self._calm, self._risen = 0, None
        elif self._lost_ratio > self._lost_before + self._max_rise:
            self._risen = self._risen or (self._calm, self._lost_before)
            self._calm = 0
        else:
            self._calm += 1
            if self._risen is not None and self._lost_ratio <= self._risen[1] + self._max_rise:
                self._calm, self._risen = self._calm + self._risen[0], None


# -- between ticks: the agent thread sleeps, and samples threads of this process ---------------------------------------


class BetweenTicks:
    """Waits between two ticks on the agent thread. Any thread may end the wait.

    Args:
        interval_seconds: time between two ticks.
        stalls: decides how often the training thread is sampled.
        threads: samples the training thread in a job of several ranks.
        lines: samples it while a stall is open.
        steps: samples it now and then in any run.
        errors: counts samples that failed.
        turns: counts how late the agent thread wakes.
    """

    def __init__(
        self,
        interval_seconds: float,
        stalls: StallMonitor,
        threads: ThreadSampler,
        lines: LineSampler,
        *,
        steps: StepSampler,
        errors: ErrorLog,
        turns: GilTurns,
    ) -> None:
        self._interval_seconds = interval_seconds
        self._stalls = stalls
        self._threads = threads
        self._lines = lines
        self._steps = steps
        self._errors = errors
        self.turns = turns
        self._random = random.Random()  # noqa: S311 - our own, so that the training's numbers stay the same
        self._wake = Wake()

    def end(self) -> None:
        """End this wait and all later ones, because the agent stops."""
        self._wake.set()

    def wait_until(self, stamp: int, *, alone: bool) -> None:
        """Sleep until ``stamp``, and take samples meanwhile: more if there are several ranks or a stall is open.

        Args:
            stamp: monotonic nanoseconds.
            alone: this is the only rank of the job.
        """
        lines, steps = self._lines, self._steps
        if lines.sampling:  # C calls that hold the GIL make ticks long, and their code must still be sampled
            stamp = max(stamp, now_ns() + int(self._interval_seconds / 2 * NS))
        while not self._wake.is_set() and (left := (stamp - now_ns()) / NS) > 0:
            # At random intervals, because the training's steps may have the same length as a fixed interval.
            apart = self._stalls.sample_seconds * (0.5 + self._random.random())
            gap, step_gap = lines.gap(), steps.gap()
            wait = min(left, gap, step_gap) if alone else min(left, gap, step_gap, apart)
            due, waits = now_ns() + int(wait * NS), thread_waits()
            self.turns.begin(due)
            self._wake.wait(wait)
            waits = thread_waits() - waits - (wait > 0)  # for the GIL; one was the sleep
            self.turns.check()
            with self._errors.contained("lines"):
                if wait == gap:
                    lines.sample(due)
                else:
                    lines.late(due)
                if wait == step_gap:
                    steps.sample(due, waits)
            if not alone:
                with self._errors.contained("diagnose"):
                    self._threads.sample()
        if self._wake.is_set():
            self.turns.end()
