"""Selects the ranks that the rest of the job must know: the few that others may wait for.

A job may have thousands of ranks, and at every tick each rank looks for the one that it waits for. Only a rank with an
extreme value can be that one. So a node passes on a few ranks with extreme values of each kind. The selection can be
repeated at each level of a tree, because the extremes of a set are among the extremes of its parts.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.core.tick import RankPace

EACH: Final = 8
"""Number of ranks of each kind that are passed on."""


def candidates(paces: Iterable[RankPace], each: int = EACH) -> tuple[RankPace, ...]:
    """The ranks that others may wait for, and the fastest ones to compare them with.

    Args:
        paces: the paces of any number of ranks.
        each: how many of each kind: shortest compute, least time in collectives, longest without a step, in a phase.

    Returns:
        At most four times ``each`` ranks, sorted by rank, without duplicates.
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
