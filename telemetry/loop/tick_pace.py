"""Which ticks of the agent thread are skipped, because nothing changes.

The ring is still emptied. A tick is not skipped if the ring shows that the training thread lost more time in the last
interval than before, or ended no step. So a new stall is seen as early as with every tick. What only samples show (GPU
clocks, other ranks) is seen at most three intervals later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.model.records import COMPUTE, DATA_WAIT
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from telemetry.config import Config
    from telemetry.loop.ledger import Accounting

_MAX_SKIPPED: Final = 3
_MAX_INTERVAL_SECONDS: Final = 1.0
"""With longer intervals no tick is skipped: a scrape would be older than 5 s."""

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
        # A stall must be seen within its window, so the window has to have several ticks.
        self._most = min(_MAX_SKIPPED, int(config.stall_window_seconds / (2 * config.interval_seconds)))
        self._most *= config.interval_seconds <= _MAX_INTERVAL_SECONDS
        self._max_rise = config.stall_exit_ratio
        self._lost_ratio = 0.0
        self._skipped = 0
        self.intervals = 1
        self._at_last = (0, 0, 0, 0)

    def skips(self, *, busy: bool) -> bool:
        """Whether to skip the tick that is due, after `Accounting.update`. ``busy``: something must be followed."""
        ledger = self._accounting.ledger
        now = (ledger.at_ns, ledger.ns[COMPUTE], ledger.ns[DATA_WAIT], self._accounting.steps_total)
        passed, compute, wait, steps = (new - old for new, old in zip(now, self._at_last, strict=True))
        before, self._at_last = self._lost_ratio, now
        trains = 0 < passed < _MAX_GAP_SECONDS * NS and steps > 0
        self._lost_ratio = max(wait, passed - compute) / passed if trains else 0.0
        calm = trains and not busy and self._lost_ratio <= before + self._max_rise
        if calm and self._skipped < self._most:
            self._skipped += 1
            return True
        self.intervals, self._skipped = self._skipped + 1, 0
        return False
