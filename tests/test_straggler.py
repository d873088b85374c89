"""Which rank the others wait for, and whether its whole node is slow."""

from __future__ import annotations

import pytest

from telemetry.core.tick import RankPace
from telemetry.diagnose.straggler import straggler


def pace(rank: int, in_sync: int, node: str | None = None, ranks: int = 0) -> RankPace:
    """30 steps of a second; ``in_sync`` of 100 samples waited for other ranks."""
    return RankPace(rank, 30.0, 30, 30.0, 0.0, 0.0, samples=100, in_sync_samples=in_sync, node=node, node_ranks=ranks)


def test_all_ranks_of_a_node_are_slow():
    slow = straggler(pace(0, 40), [pace(1, 41), *(pace(rank, rank - 4, "n2", 4) for rank in range(4, 8))])
    assert slow.name == "rank 4 on n2"
    assert slow.lost == pytest.approx(0.4)
    assert slow.why == "takes longer to compute a step; all 4 ranks of that node are waited for, so the node is slow"


@pytest.mark.parametrize(
    "others",
    [
        [pace(4, 1, "n2", 4), pace(5, 39, "n2", 4), pace(6, 1, "n2", 4), pace(7, 1, "n2", 4)],
        [pace(4, 1, "n2", 4), pace(5, 1, "n2", 4)],
        [pace(4, 1, "n2", 1)],
        [pace(4, 1)],
    ],
    ids=["one rank is fast", "not all are known", "a node of one rank", "a rank of this node"],
)
def test_a_slow_rank_makes_no_slow_node(others):
    slow = straggler(pace(0, 40), [pace(1, 41), *others])
    assert slow.rank == 4
    assert slow.why == "takes longer to compute a step"
