"""Which ranks the rest of the job has to know of: the few that others may wait for.

A job has up to thousands of ranks, and each rank looks for the one that it waits for at every tick. Only the extremes
can be that one, so a node passes on a few ranks of each kind. The extremes of the extremes are those of the whole, so
the choice can be made again at each level of a tree.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.core.tick import RankPace

EACH: Final = 8
"""Ranks that are passed on of each kind."""


def candidates(paces: Iterable[RankPace], each: int = EACH) -> tuple[RankPace, ...]:
    """The ranks that others may wait for, and the fastest ones to compare them with.

    Args:
        paces: of any number of ranks.
        each: how many of each kind: shortest compute, least time in collectives, longest without a step, in a phase.

    Returns:
        At most four times ``each`` ranks, by rank; none of them twice.
    """
    known = list(paces)
    stepping = [pace for pace in known if pace.steps]
    chosen: dict[int, RankPace] = {}

    def take(among: list[RankPace], key: Callable[[RankPace], float]) -> None:
        for pace in heapq.nsmallest(each, among, key):
            chosen[pace.rank] = pace

    take(stepping, lambda pace: pace.compute_seconds / pace.steps)
    take([pace for pace in stepping if pace.samples], lambda pace: pace.in_sync_samples / pace.samples)
    take(
        [pace for pace in known if pace.seconds_without_step > 0 and not pace.waits_for_ranks],
        lambda pace: -pace.seconds_without_step,
    )
    take([pace for pace in known if pace.phase is not None], lambda pace: pace.rank)
    return tuple(chosen[rank] for rank in sorted(chosen))
