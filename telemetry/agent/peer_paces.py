"""The newest paces of other ranks, and the last ones of ranks of this node that have ended.

When a job ends, its ranks leave the board one after the other. The last line of rank 0 still has to tell of all. Of
other nodes only some ranks are known at any time, so nothing follows from one that is not among them any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.records import RankPace


class PeerPaces:
    """Reads the paces of the other ranks once a tick, and keeps the last pace of each rank of this node.

    Args:
        newest: returns the paces of the ranks that run now.
    """

    def __init__(self, newest: Callable[[], tuple[RankPace, ...]]) -> None:
        self._newest = newest
        self._far: tuple[RankPace, ...] = ()
        self._near: dict[int, RankPace] = {}

    def read(self) -> tuple[RankPace, ...]:
        """The paces of the ranks that run now."""
        paces = self._newest()
        self._near |= {pace.rank: pace for pace in paces if pace.node is None}
        self._far = tuple(pace for pace in paces if pace.node is not None)
        return paces

    @property
    def of_run(self) -> tuple[RankPace, ...]:
        """As of the newest `read`, with those of ranks that ended before it."""
        return (*self._near.values(), *self._far)
