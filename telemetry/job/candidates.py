"""Selects the ranks that the rest of the job must know: the few that others may wait for.

A job may have thousands of ranks, and at every tick each rank looks for the one that it waits for. Only a rank with an
extreme value can be that one. So a node passes on a few ranks with extreme values of each kind. The selection can be
repeated at each level of a tree, because the extremes of a set are among the extremes of its parts.

With a slow rank go the fastest ranks of its node. They show whether the rank is slow or the whole node, however many
ranks the node has.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.records import RankPace

EACH: Final = 8
"""Number of ranks of each kind that are passed on."""


def candidates(paces: Iterable[RankPace], each: int = EACH) -> tuple[RankPace, ...]:
    """The ranks that others may wait for, and the fastest ones to compare them with.

    Args:
        paces: the paces of any number of ranks.
        each: how many of each kind: shortest compute, least time in collectives, longest without a step, in a phase.

    Returns:
        At most four times ``each`` ranks and the fastest ranks of the nodes of the slow ones, sorted by rank, without
        duplicates.
    """
    known = list(paces)
    stepping = [pace for pace in known if pace.steps]
    chosen: dict[int, RankPace] = {}

    def take(among: list[RankPace], key: Callable[[RankPace], float]) -> None:
        for pace in heapq.nsmallest(each, among, key):
            chosen[pace.rank] = pace

    take(stepping, _compute)
    take([pace for pace in stepping if pace.samples], lambda pace: pace.in_sync_samples / pace.samples)
    nodes = {pace.node for pace in chosen.values()}
    chosen |= {pace.rank: pace for pace in stepping if pace.node_fastest and pace.node in nodes}
    take(
        [pace for pace in known if pace.seconds_without_step > 0 and not pace.waits_for_ranks],
        lambda pace: -pace.seconds_without_step,
    )
    take([pace for pace in known if pace.phase is not None], lambda pace: pace.rank)
    return tuple(chosen[rank] for rank in sorted(chosen))


def of_node(node: str, paces: Iterable[RankPace]) -> tuple[RankPace, ...]:
    """The paces of all ranks of a node, as the other nodes get them: with the node's name and its fastest ranks marked.

    The fastest are those that the others wait for least, by each sign of a slow rank: the rank with the longest
    compute, the one that spends most of it in synchronisation, and the one whose GPU is busiest.
    """
    known = tuple(paces)
    fastest = {
        max(some, key=key).rank
        for some, key in (
            ([pace for pace in known if pace.steps], _compute),
            ([pace for pace in known if pace.steps and pace.samples], _in_sync),
            ([pace for pace in known if pace.steps and pace.gpu_busy_ratio is not None], _gpu_busy),
        )
        if some
    }
    return tuple(replace(p, node=node, node_ranks=len(known), node_fastest=p.rank in fastest) for p in known)


def _compute(pace: RankPace) -> float:
    return pace.compute_seconds / pace.steps


def _in_sync(pace: RankPace) -> float:
    return _compute(pace) * pace.in_sync_samples / pace.samples


def _gpu_busy(pace: RankPace) -> float:
    return pace.gpu_busy_ratio or 0.0
