"""Which ranks a hanging job waits for, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.core.hang_records import ENDED, GONE, LEFT, STOPPED, Collective, HangState
from telemetry.core.rank_ranges import named, ranges
from telemetry.diagnose.hang_verdict import decide, with_sentence

SINCE = "14:05:12"


def waits(
    rank: int,
    name: str = "all_reduce",
    sequence: int | None = 81234,
    shapes: str = "",
    group: str = "default",
    **fields,
) -> HangState:
    return HangState(
        rank, f"n{rank // 2 + 1}", "compute", stuck=True, seconds=60.0, waits=True, where="train.py:40",
        collective=Collective(name, sequence, group, shapes), **fields,
    )  # fmt: skip


def stands(rank: int, doing: str = "compute", where: str | None = "train.py:12", **fields) -> HangState:
    return HangState(rank, f"n{rank // 2 + 1}", doing, **{"stuck": True, "seconds": 70.0} | fields, where=where)


def job(*odd: HangState, ranks: int = 4) -> list[HangState]:
    """All ranks wait in the same collective, but those given."""
    other = {state.rank: state for state in odd}
    return [other.get(rank, waits(rank)) for rank in range(ranks)]


def verdict(states, world_size=0):
    found = decide(states, world_size)
    assert found is not None
    return with_sentence(found, SINCE)


def blamed(found) -> list[int]:
    return [suspect.rank for suspect in found.suspects]


def test_a_rank_in_a_fetch_is_named_with_node_and_line():
    found = verdict(job(stands(3, "data_wait", "data.py:88", call="read")))
    assert found.kind == "fetch"
    assert found.sentence == (
        "ranks 0-2 have waited in all_reduce #81234 since 14:05:12; rank 3 on n2 is in a fetch at data.py:88 (read)"
    )
    (suspect,) = found.suspects
    assert (suspect.rank, suspect.node, suspect.where, suspect.doing) == (3, "n2", "data.py:88 (read)", "in a fetch")
    (waiting,) = found.fields()["waiting"]
    assert waiting == {"ranks": [(0, 2)], "collective": "all_reduce", "sequence": 81234}


CASES = [
    (stands(2, process=GONE), "rank_gone", "rank 2 on n2 is gone: its process has ended"),
    (stands(2, process=STOPPED), "rank_stopped", "rank 2 on n2 is stopped at train.py:12, by a signal or a debugger"),
    (stands(2, state="sleeping in futex_do_wait"), "compute", "rank 2 on n2 is in a step at train.py:12, waiting for a lock"),
    (stands(2, state="running"), "compute", "rank 2 on n2 is in a step at train.py:12, running"),
    (stands(2, "checkpoint", stuck=False), "phase", "rank 2 on n2 is in a checkpoint at train.py:12"),
    (stands(2, "evaluation", stuck=False), "phase", "rank 2 on n2 is in an evaluation at train.py:12"),
    (stands(2, "startup", None, stuck=False), "phase", "rank 2 on n2 is starting up"),
    (stands(2, "other", stuck=False), "phase", "rank 2 on n2 is outside of its training loop at train.py:12"),
    (
        stands(2, LEFT, "train.py:50", stuck=False, steps=90),
        "rank_left",
        "rank 2 on n2 is out of its training loop at train.py:50, after 90 steps",
    ),
    (stands(2, ENDED, None, stuck=False), "rank_left", "rank 2 on n2 is at its end: it has left the job by itself"),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "kind", "says"), CASES, ids=[f"{kind}-{odd.doing}" for odd, kind, _ in CASES])
def test_the_rank_that_does_not_wait_is_the_suspect(odd, kind, says):
    found = verdict(job(odd))
    assert (found.kind, blamed(found)) == (kind, [2])
    assert found.sentence == f"ranks 0-1, 3 have waited in all_reduce #81234 since 14:05:12; {says}"


def test_a_process_that_is_gone_outweighs_what_others_do():
    states = job(stands(1, "data_wait"), stands(2, process=GONE), stands(3, process=STOPPED))
    assert (verdict(states).kind, blamed(verdict(states))) == ("rank_gone", [2])


def test_a_rank_that_was_started_again_is_not_gone():
    states = [*job(stands(3, "data_wait")), stands(3, process=GONE), stands(2, process=GONE)]
    for order in (states, states[::-1]):
        assert (verdict(order).kind, blamed(verdict(order))) == ("fetch", [3])


def test_no_rank_is_stuck_no_hang():
    assert decide([]) is None
    assert decide([replace(state, stuck=False) for state in job(stands(1, process=GONE))]) is None


def test_a_rank_that_left_is_not_blamed_for_one_in_a_fetch():
    found = verdict(job(stands(1, LEFT, stuck=False), stands(2, "data_wait")))
    assert (found.kind, blamed(found)) == ("fetch", [2])
    alone = verdict([stands(0, "data_wait"), stands(1, ENDED, None, stuck=False)])
    assert (alone.kind, blamed(alone)) == ("fetch", [0])


def test_a_stuck_rank_comes_before_one_that_is_not():
    found = verdict(job(stands(1, "compute", stuck=False), stands(2, "data_wait"), stands(3, "data_wait")))
    assert (found.kind, blamed(found)) == ("fetch", [2, 3])


def test_a_rank_that_left_and_waits_in_a_barrier_has_left():
    odd = replace(waits(1, "barrier"), doing=LEFT, steps=90, where="train.py:60")
    found = verdict(job(odd))
    assert (found.kind, blamed(found)) == ("rank_left", [1])
    assert found.sentence == (
        "ranks 0, 2-3 have waited in all_reduce #81234 since 14:05:12; rank 1 on n1 is out of its training loop at "
        "train.py:60, after 90 steps, waiting for the others in barrier"
    )
    everyone = [replace(odd, rank=rank) for rank in range(4)]
    assert verdict(everyone).kind == "unknown"


# -- all of them wait ---------------------------------------------------------------------------------------------


def test_collectives_in_another_order():
    found = verdict(job(waits(1, "broadcast"), ranks=3))
    assert (found.kind, blamed(found)) == ("mismatch", [1])
    assert found.sentence == (
        "ranks 0, 2 have waited in all_reduce #81234 since 14:05:12; rank 1 has waited in broadcast #81234 since "
        "14:05:12; these are different collectives, and rank 1 on n1 is the odd one at train.py:40"
    )


def test_another_shape_of_the_same_collective():
    found = verdict([waits(rank, shapes="4x9 Float" if rank == 2 else "4x8 Float") for rank in range(4)])
    assert (found.kind, blamed(found)) == ("mismatch", [2])
    assert "all_reduce #81234 of 4x9 Float" in found.sentence


def test_shapes_may_differ_where_they_do_in_a_sound_run():
    found = verdict([waits(rank, "all_to_all", shapes=f"{rank} Float") for rank in range(4)])
    assert (found.kind, found.suspects) == ("unknown", ())
    assert found.waiting[0].ranks == (0, 1, 2, 3)


def test_of_two_ranks_the_one_behind_is_the_suspect():
    found = verdict([waits(0, sequence=10), waits(1, sequence=9)])
    assert (found.kind, blamed(found)) == ("mismatch", [1])


def test_of_two_ranks_abreast_both_are_named():
    found = verdict([waits(0), waits(1, "broadcast")])
    assert (found.kind, blamed(found)) == ("mismatch", [0, 1])
    assert found.sentence.endswith("these are different collectives")


def test_a_rank_that_is_ahead_of_a_clash_is_no_suspect():
    """Rank 2 has got what rank 0 broadcast, and is in the next step. Rank 1 makes another call in place of that."""
    ahead = waits(2, "broadcast", 81235, "112 Float")
    found = verdict([waits(0, "broadcast"), waits(1), ahead, waits(3, "broadcast")])
    assert (found.kind, blamed(found)) == ("mismatch", [1])
    assert found.sentence.endswith("; these are different collectives, and rank 1 on n1 is the odd one at train.py:40")
    more_ahead = verdict([waits(0, "broadcast"), waits(1), ahead, waits(3, "broadcast", 81235, "112 Float")])
    assert blamed(more_ahead) == [0, 1], "of two that clash, either may be wrong"


def test_without_numbers_the_line_tells_the_collectives_apart():
    states = [replace(waits(rank, sequence=None), where=f"train.py:{50 if rank == 2 else 40}") for rank in range(4)]
    assert (verdict(states).kind, blamed(verdict(states))) == ("mismatch", [2])


def split(tensor_parallel: str = "all_gather", data_parallel: str = "all_reduce", groups: bool = True):
    """The network between ranks 0 and 1 is broken. They wait in their tensor parallel group; the others for them."""
    stand = [waits(rank, tensor_parallel, 9000, group="tp0" if groups else "") for rank in (0, 1)]
    return stand + [waits(rank, data_parallel, 71, group=f"dp{rank % 2}" if groups else "") for rank in range(2, 8)]


@pytest.mark.parametrize(("tensor", "data"), [("all_gather", "all_reduce"), ("", "")], ids=["names", "numbers"])
def test_ranks_that_wait_in_different_process_groups_are_no_mismatch(tensor, data):
    found = verdict(split(tensor, data))
    assert (found.kind, found.suspects) == ("unknown", ())
    assert [group.ranks for group in found.waiting] == [(2, 4, 6), (3, 5, 7), (0, 1)]
    assert found.sentence.endswith(
        "; these are different process groups, and no rank is elsewhere: look at the network between them"
    )


def test_a_mismatch_is_looked_for_within_each_process_group():
    """Rank 5 makes another call in its data parallel group. That the others wait elsewhere is not their fault."""
    odd = waits(5, "broadcast", 71, group="dp1")
    found = verdict([odd if state.rank == 5 else state for state in split()])
    assert (found.kind, blamed(found)) == ("mismatch", [5])


def test_of_unknown_process_groups_a_mismatch_is_told():
    assert verdict(split(groups=False)).kind == "mismatch"
    some = [waits(0, "broadcast", 71, group=""), *(waits(rank, group="0") for rank in (1, 2, 3))]
    assert (verdict(some).kind, blamed(verdict(some))) == ("mismatch", [0])


def test_all_in_one_collective_accuses_nobody():
    found = verdict(job())
    assert (found.kind, found.suspects) == ("unknown", ())
    assert found.sentence == (
        "ranks 0-3 have waited in all_reduce #81234 since 14:05:12; no rank is elsewhere: look at the network between "
        "them"
    )


def test_ranks_of_which_nothing_is_known_are_told_and_not_accused():
    found = verdict(job(ranks=3), world_size=6)
    assert (found.kind, found.suspects, found.silent) == ("unknown", (), (3, 4, 5))
    assert found.sentence.endswith("; nothing is known of ranks 3-5")
    mixed = verdict(job(waits(1, "broadcast"), ranks=3), world_size=6)
    assert mixed.kind == "unknown", "the others may be the ones to blame"


# -- none of them is seen to wait ---------------------------------------------------------------------------------


def test_all_in_the_same_fetch():
    found = verdict([stands(rank, "data_wait", "data.py:88", call="read") for rank in range(3)])
    assert (found.kind, blamed(found)) == ("fetch", [0, 1, 2])
    assert found.sentence == (
        "ranks 0-1 on n1 are in a fetch at data.py:88 (read); rank 2 on n2 is in a fetch at data.py:88 (read), since "
        "14:05:12"
    )


def test_where_nobody_is_seen_to_wait_the_minority_is_suspected():
    states = [stands(rank, stack="b" if rank == 5 else "a") for rank in range(8)]
    assert blamed(verdict(states)) == [5]
    assert blamed(verdict([replace(state, stack="a") for state in states])) == list(range(8))


def test_a_job_of_one_rank():
    found = verdict([stands(0, "data_wait", "data.py:88")])
    assert (found.kind, found.sentence) == ("fetch", "rank 0 on n1 is in a fetch at data.py:88, since 14:05:12")


# -- large jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1_000, 10_000])
@pytest.mark.parametrize("odd", [0, 77, 999])
def test_one_of_very_many(ranks, odd):
    states = job(stands(odd, "data_wait", "data.py:88"), ranks=ranks)
    found = verdict(states, ranks)
    assert (found.kind, blamed(found)) == ("fetch", [odd])
    assert len(found.waiting[0].ranks) == ranks - 1
    assert len(found.sentence) < 200


def test_very_many_suspects_are_counted():
    found = verdict(job(*(stands(rank, "data_wait", "data.py:88") for rank in range(500)), ranks=1000))
    assert (found.kind, len(found.suspects), found.suspects_total) == ("fetch", 16, 500)
    assert found.sentence.endswith("; so are 494 more")


STATES = st.builds(
    HangState,
    rank=st.integers(0, 9),
    node=st.sampled_from(["a", "b"]),
    doing=st.sampled_from(["data_wait", "compute", "evaluation", "checkpoint", "other", LEFT, ENDED]),
    process=st.sampled_from(["alive", "alive", STOPPED, GONE]),
    stuck=st.booleans(),
    waits=st.booleans(),
    where=st.sampled_from([None, "a.py:1", "b.py:2"]),
    stack=st.sampled_from(["", "x", "y"]),
    collective=st.none()
    | st.builds(
        Collective,
        st.sampled_from(["", "all_reduce", "broadcast"]),
        st.sampled_from([None, 1, 2]),
        st.sampled_from(["", "tp", "dp"]),
    ),
)


@given(st.lists(STATES, max_size=12))
def test_any_picture_has_a_verdict_that_accuses_only_ranks_there_are(states):
    found = decide(states, 10)
    if found is None:
        return
    found = with_sentence(found, SINCE)
    known = {state.rank for state in states}
    assert found.sentence
    assert set(blamed(found)) <= known
    assert {rank for group in found.waiting for rank in group.ranks} | set(found.silent) <= set(range(10))
    assert set(found.silent) == set(range(10)) - known


COLLECTIVES = st.builds(
    waits,
    rank=st.integers(0, 9),
    name=st.sampled_from(["", "all_reduce", "broadcast"]),
    sequence=st.sampled_from([None, 1, 2]),
    group=st.sampled_from(["", "tp", "dp"]),
)


@given(st.lists(COLLECTIVES, min_size=1, max_size=12, unique_by=lambda state: state.rank))
def test_a_mismatch_is_of_ranks_in_one_process_group(states):
    found = verdict(states)
    assert found.kind in {"mismatch", "unknown"}
    newest = {state.rank: state.collective.group for state in states}
    groups = [newest[group.ranks[0]] for group in found.waiting]
    if "" not in groups:
        assert (found.kind == "mismatch") is (len(set(groups)) < len(groups))
    if found.kind == "mismatch" and "" not in groups:
        assert {newest[rank] for rank in blamed(found)} <= {group for group in groups if groups.count(group) > 1}


def test_ranges():
    assert ranges([5, 1, 2, 3]) == [(1, 3), (5, 5)]
    assert named([4]) == "rank 4"
    assert named([0, 1, 2, 7]) == "ranks 0-2, 7"
    assert named(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10 and 14 more"
