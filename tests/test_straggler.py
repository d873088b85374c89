"""Which rank the others wait for, and whether its whole node is slow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from telemetry.diagnosis.stragglers import OwnPaces, short_of_cores, straggler
from telemetry.node.peers import candidates, of_node
from telemetry.records import RankPace


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


def test_chance_in_the_samples_is_no_slow_compute():
    """It waits for data 0.1 s of each step. By the samples it may cost 0.22 s; with 30 of them, that may be chance."""
    own = replace(pace(0, 12), samples=30)
    waiting = replace(pace(1, 5), samples=30, compute_seconds=27.0, exposed_wait_seconds=3.0)
    assert straggler(own, [waiting]).why == "waits for data"
    certain = replace(waiting, samples=3000, in_sync_samples=500)
    slow = straggler(replace(own, samples=3000, in_sync_samples=1200), [certain])
    assert slow.why == "takes longer to compute a step"


def test_windows_of_other_moments_make_an_evaluation_no_slow_compute():
    """Rank 3 evaluates. The newest pace of its node is 21 steps old: the window of rank 1 has more of the evaluations.

    The figures are those of a real job, of which rank 1 named slow compute, and ranks 0 and 2 the evaluation.
    """
    own = RankPace(1, 10.0018, 126, 9.9838, 0.0180, 0.0, samples=108, in_sync_samples=42, last_step=2392)
    away = dict(away_seconds=1.6445, away_in="evaluation", node="n2", node_ranks=2, last_step=2371)
    slow = RankPace(3, 12.0001, 172, 10.3298, 0.0257, samples=354, in_sync_samples=43, **away)
    assert straggler(own, [slow]).why == "is in an evaluation"


def test_a_rank_that_waits_is_not_slow_because_its_window_began_earlier():
    """Rank 2 writes checkpoints. Rank 3 waits for it, too, but half of its window of 15 s was before them."""
    own = RankPace(1, 10.003, 110, 9.984, 0.019, 0.0, samples=181, in_sync_samples=65, last_step=4157)
    of_n2 = dict(node="n2", node_ranks=2, last_step=4157)
    away = dict(away_seconds=2.854, away_in="checkpoint")
    slow = RankPace(2, 10.0, 110, 7.127, 0.019, samples=116, in_sync_samples=22, **away, **of_n2)
    peer = RankPace(3, 15.0, 192, 14.962, 0.038, 0.0, samples=517, in_sync_samples=99, node_fastest=True, **of_n2)
    assert straggler(own, [slow, peer]).why == "is in a checkpoint"


@pytest.mark.parametrize(("samples", "is_slow"), [(100, False), (3000, True)])
def test_a_node_is_not_slow_by_chance_in_the_samples(samples, is_slow):
    """Rank 3 seems to cost 0.13 s of each step, more than half of the 0.2 s that rank 2 costs."""
    own = replace(pace(0, round(0.4 * samples)), samples=samples)
    peer = replace(pace(3, round(0.27 * samples), "n2", 2), samples=samples)
    waits = replace(pace(2, 0, "n2", 2), samples=0, compute_seconds=24.0, exposed_wait_seconds=6.0)
    assert straggler(own, [waits, peer]).why.endswith("so the node is slow") == is_slow


def test_the_error_of_the_samples_is_known():
    alike = replace(pace(1, 10), samples=1000, in_sync_samples=100)
    assert straggler(pace(0, 40), [pace(1, 10)]).error == pytest.approx(0.057, abs=0.001)
    assert straggler(pace(0, 40), [alike]).error == pytest.approx(0.050, abs=0.001)
    waiting = replace(pace(1, 1), compute_seconds=18.0, exposed_wait_seconds=12.0, samples=0, in_sync_samples=0)
    assert straggler(pace(0, 40), [waiting]).error == 0.0, "clocks measured this"


# -- nodes of many ranks ------------------------------------------------------------------------------------------


def passed_on(*slow_ranks: int, ranks: int = 16) -> list[RankPace]:
    """What another node gets of a node of 16 ranks, through two levels of the tree, and of one that is healthy."""
    slow = {rank: replace(pace(rank, 1 + rank % 16 // 4), compute_seconds=29.0 + rank / 64) for rank in slow_ranks}
    n2 = of_node("n2", [slow.get(rank, pace(rank, 40)) for rank in range(16, 16 + ranks)])
    n3 = of_node("n3", [pace(rank, 40) for rank in range(32, 32 + ranks)])
    return list(candidates([*candidates(n2), *candidates(n3)]))


@pytest.mark.parametrize("ranks", [2, 9, 16])
def test_a_slow_node_of_any_number_of_ranks_is_slow(ranks):
    slow = straggler(pace(0, 40), [pace(1, 41), *passed_on(*range(16, 16 + ranks), ranks=ranks)])
    assert slow.node == "n2"
    assert slow.why.endswith(f"; all {ranks} ranks of that node are waited for, so the node is slow")


@pytest.mark.parametrize("fast", [16, 25, 31])
def test_one_fast_rank_of_sixteen_shows_that_the_node_is_not_slow(fast):
    slow = straggler(pace(0, 40), [pace(1, 41), *passed_on(*(r for r in range(16, 32) if r != fast))])
    assert slow.node == "n2"
    assert slow.why == "takes longer to compute a step"


def test_a_node_whose_fastest_rank_has_another_pace_is_not_slow():
    ranks = of_node("n2", [pace(rank, 1) for rank in range(16, 32)])
    changed = [replace(p, steps=3 * p.steps) if p.node_fastest else p for p in ranks]
    assert straggler(pace(0, 40), changed).why == "takes longer to compute a step"


def test_a_node_of_which_one_fastest_rank_has_another_pace_is_not_slow():
    """Rank 3 is slow, but has the longest mean compute, too: the pace of rank 2, which waits, is of an earlier step."""
    waits, slow = replace(pace(2, 44), steps=33), pace(3, 1)
    of_n2 = of_node("n2", [waits, slow])
    assert [peer.node_fastest for peer in of_n2] == [True, True]
    assert straggler(pace(0, 53), of_n2).why == "takes longer to compute a step"
    further = [replace(peer, steps=40) if peer.rank == 2 else peer for peer in of_n2]
    assert straggler(pace(0, 53), further).why == "takes longer to compute a step"


def test_a_node_whose_loaders_are_slow_is_slow():
    waits = dict(compute_seconds=18.0, exposed_wait_seconds=12.0, in_sync_samples=1)
    ranks = of_node("n2", [replace(pace(rank, 1), **waits) for rank in range(16, 32)])
    slow = straggler(pace(0, 40), candidates(ranks))
    assert slow.why == "waits for data; all 16 ranks of that node are waited for, so the node is slow"


# -- what other nodes say is some seconds old ---------------------------------------------------------------------


def window(rank: int, end: int, slow_steps: int, *, is_slow: bool = False, node: str | None = None) -> RankPace:
    """100 steps up to ``end``, each of 0.1 s; the last ones took 0.02 s longer because of the slow rank."""
    seconds = 10.0 + 0.02 * slow_steps
    in_sync = 0 if is_slow else round(100 * 0.02 * slow_steps / seconds)
    return replace(pace(rank, in_sync, node, 2), seconds=seconds, steps=100, compute_seconds=seconds, last_step=end)


def test_a_rank_is_not_slow_because_its_pace_is_of_an_earlier_time():
    """Rank 2 has become slow at step 1000. Node n2 was last heard of at step 1010, and rank 0 is at step 1060."""
    history = OwnPaces()
    for end in range(900, 1061, 10):
        history.add(window(0, end, max(0, end - 1000)), end / 10)
    peers = of_node("n2", [window(2, 1010, 10, is_slow=True), window(3, 1010, 10)])
    slow = straggler(window(0, 1060, 60), peers, history.at_the_time_of(peers))
    assert (slow.rank, slow.why) == (2, "takes longer to compute a step")
    assert slow.lost == pytest.approx(0.002, rel=0.1), "as much as then"


def test_paces_of_the_same_time_are_compared_as_they_are():
    history = OwnPaces()
    for end in range(900, 1061, 10):
        history.add(window(0, end, 0), end / 10)
    assert history.at_the_time_of([window(1, 1060, 0), window(2, 1058, 0)]) == ()
    assert [p.last_step for p in history.at_the_time_of([window(2, 1004, 0), window(3, 1006, 0)])] == [1000, 1010]
    assert history.at_the_time_of([window(2, 7, 0), window(3, 2000, 0)]) == (), "they count other steps"


# -- what a rank does outside of its steps ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("away_in", "cause", "why"),
    [
        ("evaluation", None, "is in an evaluation"),
        ("checkpoint", "checkpoint", "is in a checkpoint"),
        ("checkpoint", "gc_pause", "is in a checkpoint (gc_pause)"),
        ("other", None, "is busy outside of its steps"),
        (None, "gc_pause", "is busy outside of its steps (gc_pause)"),
    ],
)
def test_what_a_rank_does_while_the_others_wait(away_in, cause, why):
    away = replace(pace(1, 1), compute_seconds=18.0, away_seconds=12.0, away_in=away_in, cause=cause)
    assert straggler(pace(0, 40), [away]).why == why


# -- machines without enough cores --------------------------------------------------------------------------------


def without_core(seconds: float, busy: float | None, node: str | None = None) -> RankPace:
    return replace(pace(1, 1, node), core_wait_seconds=seconds, cores_busy_ratio=busy)


def measured(wait: float = 0.3) -> RankPace:
    return replace(pace(0, 40), core_wait_seconds=wait, cores_busy_ratio=0.97)


def test_a_rank_without_a_core_on_a_busy_machine_is_no_straggler():
    slow = without_core(12.3, 0.97, "n2")
    assert straggler(measured(), [slow]) is None
    short = short_of_cores(measured(), [slow])
    assert (short.name, short.lost) == ("rank 1 on n2", pytest.approx(0.4))
    assert short.why == "waits for a core, and all cores of its machine are busy"


def test_slow_compute_on_a_busy_machine_is_a_straggler():
    slow = straggler(measured(), [without_core(3.3, 0.97)])
    assert slow.why == "takes longer to compute a step"
    assert slow.lost == pytest.approx(0.39 - 0.1)


def test_a_rank_without_a_core_on_an_idle_machine_is_a_straggler():
    slow = straggler(measured(), [without_core(12.3, 0.4)])
    assert slow.lost == pytest.approx(0.39)
    assert slow.why == (
        "takes longer to compute a step; its training thread waits for a core, although its machine has idle ones"
    )
    assert short_of_cores(measured(), [without_core(12.3, 0.4)]) is None


@pytest.mark.parametrize("own_wait", [12.3, None])
def test_a_wait_for_cores_that_all_ranks_have_changes_nothing(own_wait):
    slow = straggler(replace(measured(), core_wait_seconds=own_wait), [without_core(12.3, 0.97)])
    assert (slow.lost, slow.why) == (pytest.approx(0.39), "takes longer to compute a step")
