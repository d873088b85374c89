"""Skips ticks while nothing changes.

While no stall is open and the loop goes on as before, every second tick is skipped; after a while, four of five, or
fewer if `stall_window_seconds` is short. The ring is emptied nevertheless. If it shows that the training thread lost
more time in the last second than before, or ended no step, the tick is not skipped. So a new stall is seen as early as
with every tick. What only samples show (GPU clocks, other ranks) is seen at most four intervals later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.core.clock import NS
from telemetry.core.labels import COMPUTE, DATA_WAIT

if TYPE_CHECKING:
    from telemetry.agent.accounting import Accounting
    from telemetry.config import Config

_MIN_INTERVAL_SECONDS: Final = 0.5
_MAX_INTERVAL_SECONDS: Final = 1.0
"""With other intervals no tick is skipped. With longer ones a scrape would be older than 5 s. A user who sets shorter
ones wants the samples."""

_MAX_SKIPPED: Final = 4
_LONG_CALM: Final = 20
"""So many ticks in a row are skipped after so many calm ones; before, one. Prometheus scrapes every 15 s or less often.
The log has a line every 10 s: with four it comes with every second tick. `make bench` measures the CPU time with it:
"CPU at 1 Hz" in `benchmarks/results/overhead-*.md`."""

_MAX_GAP_SECONDS: Final = 2.0
"""After a longer gap the machine was suspended, or the agent did not run. Such a tick must not be skipped."""


class TickPace:
    """Decides which ticks are skipped.

    Args:
        config: interval and ratios.
        accounting: up to date at every call, even if the tick before was skipped.

    Attributes:
        intervals: how many intervals the newest tick that was not skipped comes after the one before.
    """

    def __init__(self, config: Config, accounting: Accounting) -> None:
        self._accounting = accounting
        self._possible = _MIN_INTERVAL_SECONDS < config.interval_seconds <= _MAX_INTERVAL_SECONDS
        # A stall must be seen within its window, which has to have several ticks.
        self._max_skipped = min(_MAX_SKIPPED, int(config.stall_window_seconds / (2 * config.interval_seconds)))
        self._max_rise = config.stall_exit_ratio
        self._lost_ratio = self._lost_before = 0.0
        self._trains = False
        self._risen: tuple[int, float] | None = None  # since the ratio rose: calm ticks until then, and the ratio then
        self._skipped = self._calm = 0  # in a row
        self.intervals = 1
        self._at_last = (0, 0, 0, 0)

    def skips(self, *, busy: bool, wanted: bool = False) -> bool:
        """Whether to skip the tick that is due. Must be called for each tick, after `Accounting.update`.

        Args:
            busy: whether something must be followed, such as an open stall.
            wanted: whether there is a line for the log. Then no second tick in a row is skipped.
        """
        before, now = self._at_last, self._newest()
        self._at_last = now
        self._count(calm=self._is_calm(before, now), busy=busy)
        max_skipped = self._max_skipped if self._calm > _LONG_CALM and not wanted else min(1, self._max_skipped)
        skips = self._possible and self._calm > 0 and self._skipped < max_skipped
        if not skips:
            self.intervals = self._skipped + 1
        self._skipped = self._skipped + 1 if skips else 0
        return skips

    def _count(self, *, calm: bool, busy: bool) -> None:
        """Count calm ticks in a row. A rise that is over again, as on a busy machine, does not end a long calm."""
        if busy or not self._trains:
            self._calm, self._risen = 0, None
        elif not calm:
            self._risen = self._risen or (self._calm, self._lost_before)
            self._calm = 0
        else:
            self._calm += 1
            if self._risen is not None and self._lost_ratio <= self._risen[1] + self._max_rise:
                self._calm, self._risen = self._calm + self._risen[0], None

    def _newest(self) -> tuple[int, int, int, int]:
        """Nanoseconds, nanoseconds of compute, nanoseconds of waiting, and steps, over the run so far."""
        ledger = self._accounting.ledger
        return (ledger.at_ns, ledger.ns[COMPUTE], ledger.ns[DATA_WAIT], self._accounting.steps_total)

    def _is_calm(self, before: tuple[int, int, int, int], now: tuple[int, int, int, int]) -> bool:
        passed, compute, wait, steps = (new - old for new, old in zip(now, before, strict=True))
        other = max(0, passed - compute - wait)
        self._trains = 0 < passed < _MAX_GAP_SECONDS * NS and steps > 0
        self._lost_before = self._lost_ratio
        self._lost_ratio = (wait + other) / passed if self._trains else 0.0
        return self._trains and self._lost_ratio <= self._lost_before + self._max_rise
