"""Whether a rank hangs, and which ranks a hanging job waits for: pure functions of what the ticks have seen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from telemetry.agent.accounting import StepTimes
from telemetry.agent.stuck import (
    EXPECTED,
    MIN_STEPS,
    OVERDUE,
    Moment,
    StuckDetector,
    longest_phase,
    paused,
    stuck_advice,
    stuck_after_seconds,
    stuck_cause,
)
from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.hangs import (
    ENDED,
    GONE,
    LEFT,
    STOPPED,
    Collective,
    HangState,
    decide,
    with_sentence,
)
from telemetry.records import CATEGORIES
from telemetry.util.text import named, ranges
from tests.slice_cases import STARVED, a_slice
from tests.slices import Detector

QUICK = StepTimes(p99=0.1, longest=1.0)


def moment(*, loop=1.0, progress=1, steps=100, loop_left=False, at_epoch_boundary=False, far=False, **more) -> Moment:
    return Moment(loop, (progress,), steps, loop_left, at_epoch_boundary, waits_for_far_ranks=far, **more)


class Steps:
    """As much of `StepStats` as is read."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def step_times(self) -> StepTimes:
        return self._times


def ticks(watch: StuckDetector, moments, steps: StepTimes = QUICK) -> list[str | None]:
    return [watch.update(each, Steps(steps)) for each in moments]


def test_it_opens_once_and_closes_when_the_run_goes_on():
    watch = StuckDetector(None, 1.0)
    said = ticks(watch, [moment() for _ in range(40)])
    assert said[:30] == [None] * 30  # the first tick is the one that has seen the progress
    assert said[30:] == ["opened"] + ["held"] * 9
    assert watch.seconds == 39
    assert ticks(watch, [moment(progress=2), *[moment(progress=2)] * 5]) == ["closed"] + [None] * 5


@pytest.mark.parametrize(("setting", "seconds"), [(None, 45), (1.0, 6), (20.0, 45), (60.0, 60)])
def test_a_rank_that_waits_for_another_node_is_given_time(setting, seconds):
    """One of that node's ranks may be in an evaluation, which this node hears of later."""
    said = ticks(StuckDetector(setting, 1.0), [moment(far=True) for _ in range(70)])
    assert said.index("opened") == seconds


@pytest.mark.parametrize(
    ("setting", "p99", "longest", "at_epoch_boundary", "seconds"),
    [
        (None, 0.1, 1.0, False, 30.0),  # at least 30 s
        (None, 10.0, 12.0, False, 200.0),  # many times the p99
        (None, 60.0, 70.0, False, 540.0),  # but less than NCCL's timeout
        (None, 150.0, 150.0, False, 600.0),  # as long as that is some multiple
        (None, None, None, False, 30.0),
        (7.0, 10.0, 12.0, False, 7.0),
        (7.0, 0.1, 20.0, True, 40.0),  # the first batch of an epoch, where the run's own took 20 s
        (None, 0.1, 1.0, True, 30.0),
        (None, 0.1, 50.0, True, 100.0),
    ],
)
def test_how_long_is_too_long(setting, p99, longest, at_epoch_boundary, seconds):
    assert stuck_after_seconds(setting, StepTimes(p99, longest), at_epoch_boundary=at_epoch_boundary) == seconds


NOT_STUCK = {
    "the first steps of a run, a compile": [moment(steps=MIN_STEPS - 1)] * 540,
    "steps end": [moment(progress=number // 20) for number in range(1000)],
    "an evaluation": [moment(loop=0.0)] * 1000,
    "after the loop": [moment(loop_left=True)] * 1000,
    "a machine that slept": [moment(), moment(loop=90_000.0), moment(progress=2)],
    "slow steps": [moment()] * 190,
}


@pytest.mark.parametrize("what", NOT_STUCK)
def test_what_is_not_stuck(what):
    steps = StepTimes(p99=10.0, longest=10.0) if what == "slow steps" else QUICK
    assert ticks(StuckDetector(None, 1.0), NOT_STUCK[what], steps) == [None] * len(NOT_STUCK[what])


@pytest.mark.parametrize("setting", [None, 5.0, 1000.0])
def test_a_hang_in_the_first_steps_is_reported_before_nccl_ends_it(setting):
    said = ticks(StuckDetector(setting, 1.0), [moment(steps=1) for _ in range(1100)])
    assert said.index("opened") == max(540, setting or 0)


# -- evaluations and checkpoints ----------------------------------------------------------------------------------

NCCL_SECONDS = 600


def noticed(setting, p99, longest, *, far, steps=1000) -> int:
    """A rank hangs in a checkpoint. After so many seconds one that waits for it is stuck."""
    watch, longest_now = StuckDetector(setting, 1.0), longest_phase(setting, longest)
    for second in range(2000):
        phase = EXPECTED if second < longest_now else OVERDUE
        seen = moment(steps=steps, far=far, peer_phase=phase)
        if watch.update(seen, Steps(StepTimes(p99, p99))) == "opened":
            assert watch.seconds == second, "all of it is lost"
            return second
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("p99", "longest", "far", "seconds"),
    [
        (1, 60, False, 509),
        (5, 60, True, 524),
        (10, 60, True, 524),
        (20, 60, True, 524),
        (40, 60, True, 540),  # its steps are long
        (130, 60, True, 540),
        (1, 300, True, 554),
        (2, 260, True, 554),
        (1, 400, True, 554),
    ],
)
def test_a_hang_in_a_checkpoint_is_noticed_before_nccl_ends_it(p99, longest, far, seconds):
    assert noticed(None, p99, longest, far=far) == seconds < NCCL_SECONDS - 40
    assert noticed(None, p99, longest, far=far, steps=1) < NCCL_SECONDS - 40, "in the first steps, too"


@pytest.mark.parametrize(("setting", "seconds"), [(1.0, 11), (12.0, 116), (60.0, 419)])
def test_a_hang_in_a_checkpoint_with_a_setting(setting, seconds):
    assert noticed(setting, 10, 1, far=True) == seconds


def test_checkpoints_that_take_longer_than_nccl_waits_are_given_time():
    assert longest_phase(None, 700.0) == pytest.approx(770.0)


def test_time_in_a_checkpoint_of_another_rank_does_not_count_afterwards():
    watch = StuckDetector(None, 1.0)
    assert ticks(watch, [moment(peer_phase=EXPECTED)] * 400) == [None] * 400
    assert ticks(watch, [moment()] * 30) == [None] * 29 + ["opened"]


@pytest.mark.parametrize(("setting", "seconds"), [(None, 510), (5.0, 35)])
def test_a_rank_that_stays_at_one_place_of_a_checkpoint_is_stuck(setting, seconds):
    """All ranks are in it, so none waits for them in the loop."""
    watch = StuckDetector(setting, 1.0)
    said = ticks(watch, [moment(loop=0.0, seconds=1.0, phase_at="write") for _ in range(600)])
    assert said.index("opened") == seconds < NCCL_SECONDS - 40
    assert said[seconds + 1 :] == ["held"] * (599 - seconds)
    assert watch.seconds == 599
    assert ticks(watch, [moment(progress=2)]) == ["closed"]


LONG_PHASES = {
    "an evaluation without batches": [moment(loop=0.0, seconds=1.0, phase_at=str(n % 7)) for n in range(3000)],
    "a few slow batches": [
        moment(loop=0.0, seconds=1.0, phase_at="batch", progress=number // 400) for number in range(3000)
    ],
    "a debugger in an evaluation": [moment(loop=0.0, phase_at="pdb")] * 3000,
    "a phase of the user": [moment(loop=0.0, seconds=1.0)] * 3000,
}


@pytest.mark.parametrize("what", LONG_PHASES)
def test_long_phases_on_all_ranks_are_no_hang(what):
    assert ticks(StuckDetector(None, 1.0), LONG_PHASES[what]) == [None] * 3000


def test_a_checkpoint_may_take_twice_as_long_as_the_longest_so_far():
    watch = StuckDetector(5.0, 1.0)
    save = [moment(loop=0.0, seconds=1.0, phase_at="write", progress=1)] * 60
    assert ticks(watch, save).index("opened") == 35
    ticks(watch, [moment(progress=2)])
    again = [moment(loop=0.0, seconds=1.0, phase_at="write", progress=3)] * 200
    assert ticks(watch, again).index("opened") == 2 * 59 + 5


def test_time_after_the_loop_closes_it_and_does_not_count():
    watch = StuckDetector(None, 1.0)
    assert ticks(watch, [moment()] * 32)[-2:] == ["opened", "held"]
    assert ticks(watch, [moment(loop_left=True)] * 100) == ["closed"] + [None] * 99
    assert ticks(watch, [moment()] * 29) == [None] * 29


def test_what_is_excused_counts_anew():
    watch = StuckDetector(None, 1.0)
    assert ticks(watch, [moment()] * 31)[-1] == "opened"
    watch.excuse()
    assert ticks(watch, [moment()] * 30) == [None] * 29 + ["opened"]
    watch.excuse()
    assert watch.excuses == 2
    ticks(watch, [moment(progress=2)])
    assert watch.excuses == 0


@pytest.mark.parametrize(
    ("category", "source", "fetching", "cause"),
    [
        ("data_wait", "workers", 31.0, "worker_stuck"),
        ("data_wait", "workers", 1.0, "unknown"),
        ("data_wait", "workers", 0.0, "unknown"),
        ("data_wait", "watched", 0.0, "source_slow"),
        ("data_wait", "training_thread", 0.0, "loader_on_training_thread"),
        ("data_wait", None, 0.0, "unknown"),
        ("data_wait", None, 31.0, "worker_stuck"),
        ("data_wait", "training_thread", 31.0, "loader_on_training_thread"),
        ("compute", "workers", 31.0, "unknown"),
    ],
)
def test_the_cause(category, source, fetching, cause):
    assert stuck_cause(category, source, fetching, 30.0) == cause


@pytest.mark.parametrize(
    ("seconds", "intervals", "cpu", "stood_still"),
    [
        (1.0, 1, 0.0, False),
        (20.0, 1, 0.01, True),
        (20.0, 1, 15.0, False),
        (20.0, 1, None, False),
        (5.0, 1, 0.01, True),
        (5.0, 5, 0.01, False),  # of a calm loop that waits for a GPU
        (20.0, 5, 0.01, True),
    ],
)
def test_a_late_tick_without_any_cpu_time_is_a_process_that_stood_still(seconds, intervals, cpu, stood_still):
    assert paused(seconds, 1.0, cpu, intervals=intervals) is stood_still


def test_a_stuck_run_replaces_the_open_stall_and_clears_the_window():
    machine = Detector(30, 0.2, 0.1)
    for _ in range(40):
        machine.update(a_slice(source="training_thread", **STARVED))
    assert machine.stall.cause == "loader_on_training_thread"
    piece = a_slice(wait=1.0, compute=0.0, steps=0, source="workers")
    assert machine.open_stuck("worker_stuck", 30.0, piece).cause == "worker_stuck"
    for _ in range(10):
        assert machine.update(piece).kind == "held"
    assert machine.stall.lost_seconds == {"worker_stuck": 10.0}  # the 30 s before stand in the other
    assert machine.stall.exposed_ratio == 1.0
    machine.close_stuck(a_slice())
    assert [machine.update(a_slice()) for _ in range(40)] == [None] * 40


def test_a_stuck_run_where_nothing_was_open_has_lost_all_of_it():
    machine = Detector(30, 0.2, 0.1)
    machine.open_stuck("unknown", 30.0, a_slice(steps=0))
    assert machine.stall.lost_seconds == {"unknown": 30.0}
    assert machine.stall.exposed_ratio == 0.0


# -- properties ---------------------------------------------------------------------------------------------------

amount = st.floats(0, 1e9) | st.sampled_from([0.0, 1e-9])
moments = st.builds(
    Moment, loop_seconds=amount, progress=st.tuples(st.integers(0, 3)), steps=st.integers(0, 1000),
    loop_left=st.booleans(), at_epoch_boundary=st.booleans(), seconds=amount,
    phase_at=st.sampled_from([None, None, "a", "b"]), peer_phase=st.sampled_from([None, EXPECTED, OVERDUE]),
)  # fmt: skip
durations = st.builds(StepTimes, p99=st.none() | amount, longest=st.none() | amount)
kinds = st.none() | st.floats(1, 604800)


@given(kinds, st.floats(0.1, 3600), st.lists(st.tuples(moments, durations), max_size=50))
@settings(max_examples=300, deadline=None)
def test_no_input_crashes_it_and_what_it_says_is_in_order(setting, interval, seen):
    watch = StuckDetector(setting, interval)
    opened = False
    for each, steps in seen:
        said = watch.update(each, Steps(steps))
        assert said in ({"held", "closed"} if opened else {"opened", None})
        opened = said in {"opened", "held"}
        assert watch.stuck == opened
        assert watch.seconds >= 0
        assert not opened or (not each.loop_left and (watch.seconds >= (setting or 30.0)))


@given(kinds, durations, st.lists(amount, min_size=1, max_size=50), st.integers(0, 1))
def test_more_seconds_never_close_it(setting, steps, more, boundary):
    watch = StuckDetector(setting, 1.0)
    ticks(watch, [moment(at_epoch_boundary=bool(boundary))] * 100, steps)
    was = watch.stuck
    ticks(watch, [moment(loop=seconds, at_epoch_boundary=bool(boundary)) for seconds in more], steps)
    assert watch.stuck >= was


@given(st.sampled_from(CATEGORIES), st.text() | st.none(), amount, amount)
def test_the_cause_is_of_the_closed_set(category, source, fetching, seconds):
    assert stuck_cause(category, source, fetching, seconds) in CAUSES
    assert stuck_advice(category, seconds, "f (x.py:1)")


# -- why the job hangs -------------------------------------------------------------------------------------------------

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
