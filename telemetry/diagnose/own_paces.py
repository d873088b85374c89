"""The paces of this rank in the last minute: those of other nodes are some seconds old, and are compared with these."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.core.tick import RankPace

_KEPT: Final = 90
"""Paces that are kept, at most one a second. Another node's may be a cycle of 10 s old, and 30 s more on NFS."""

_APART_SECONDS: Final = 0.9

_SAME_TIME: Final = 0.05
"""Two windows are of the same time if one ends at most this share of its steps after the other."""


class OwnPaces:
    """The newest paces of one rank, the oldest first."""

    def __init__(self) -> None:
        self._paces: deque[RankPace] = deque(maxlen=_KEPT)
        self._newest_seconds = 0.0

    def add(self, pace: RankPace, wall_seconds: float) -> None:
        """Add the pace of a tick. ``wall_seconds``: of the run so far."""
        if self._paces and pace.last_step < self._paces[-1].last_step:
            self._paces.clear()
        if not self._paces or wall_seconds - self._newest_seconds >= _APART_SECONDS:
            self._paces.append(pace)
            self._newest_seconds = wall_seconds

    def at_the_time_of(self, peers: Iterable[RankPace]) -> tuple[RankPace, ...]:
        """Those of the earlier paces of this rank whose windows end where windows of its peers end."""
        if not self._paces:
            return ()
        newest = self._paces[-1]
        late = newest.last_step - _SAME_TIME * newest.steps
        ends = [pace.last_step for pace in self._paces]
        steps = {peer.last_step for peer in peers if ends[0] <= peer.last_step < late}
        return tuple(self._paces[place] for place in sorted({_nearest(ends, step) for step in steps}))


def _nearest(ends: list[int], step: int) -> int:
    """The place of the number that is nearest to ``step``; at most the last number."""
    place = bisect_left(ends, step)
    return place - 1 if place and step - ends[place - 1] < ends[place] - step else place
