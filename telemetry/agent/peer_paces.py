"""The newest paces of other ranks, and the last ones of ranks that have ended.

When a job ends, its ranks leave the board one after the other. The last line of rank 0 still has to tell of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.core.tick import RankPace


class PeerPaces:
    """Reads the paces of the other ranks once a tick, and keeps the last pace of each that is gone.

    Args:
        newest: returns the paces of the ranks that run now.
    """

    def __init__(self, newest: Callable[[], tuple[RankPace, ...]]) -> None:
        self._newest = newest
        self._last: tuple[RankPace, ...] = ()
        self._ended: dict[int, RankPace] = {}

    def read(self) -> tuple[RankPace, ...]:
        """The paces of the ranks that run now."""
        paces = self._newest()
        if len(paces) < len(self._last):  # seldom: a job of 10,000 ranks pays for it only then
            running = {pace.rank for pace in paces}
            self._ended.update({pace.rank: pace for pace in self._last if pace.rank not in running})
        self._last = paces
        return paces

    @property
    def of_run(self) -> tuple[RankPace, ...]:
        """As of the newest `read`, with those of ranks that ended before it."""
        running = {pace.rank for pace in self._last}
        return (*self._last, *(pace for rank, pace in self._ended.items() if rank not in running))
