"""When a run is stuck: the decision, a pure function of what the ticks have seen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.diagnose.hang_detector import (
    EXPECTED,
    MIN_STEPS,
    OVERDUE,
    HangDetector,
    Moment,
    StepTimes,
    hang_advice,
    hang_after_seconds,
    hang_cause,
    longest_phase,
    paused,
)
from telemetry.records import CATEGORIES, CAUSES
from tests.slice_cases import STARVED, a_slice
from tests.slices import Detector

QUICK = StepTimes(p99=0.1, longest=1.0)


def moment(*, loop=1.0, progress=1, steps=100, loop_left=False, at_epoch_boundary=False, far=False, **more) -> Moment:
    return Moment(loop, (progress,), steps, loop_left, at_epoch_boundary, waits_for_far_ranks=far, **more)


def ticks(watch: HangDetector, moments, steps: StepTimes = QUICK) -> list[str | None]:
    return [watch.update(each, lambda: steps) for each in moments]


def test_it_opens_once_and_closes_when_the_run_goes_on():
    watch = HangDetector(None, 1.0)
    said = ticks(watch, [moment() for _ in range(40)])
    assert said[:30] == [None] * 30  # the first tick is the one that has seen the progress
    assert said[30:] == ["opened"] + ["held"] * 9
    assert watch.seconds == 39
    assert ticks(watch, [moment(progress=2), *[moment(progress=2)] * 5]) == ["closed"] + [None] * 5


@pytest.mark.parametrize(("setting", "seconds"), [(None, 45), (1.0, 6), (20.0, 45), (60.0, 60)])
def test_a_rank_that_waits_for_another_node_is_given_time(setting, seconds):
    """One of that node's ranks may be in an evaluation, which this node hears of later."""
    said = ticks(HangDetector(setting, 1.0), [moment(far=True) for _ in range(70)])
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
    assert hang_after_seconds(setting, StepTimes(p99, longest), at_epoch_boundary=at_epoch_boundary) == seconds


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
    assert ticks(HangDetector(None, 1.0), NOT_STUCK[what], steps) == [None] * len(NOT_STUCK[what])


@pytest.mark.parametrize("setting", [None, 5.0, 1000.0])
def test_a_hang_in_the_first_steps_is_reported_before_nccl_ends_it(setting):
    said = ticks(HangDetector(setting, 1.0), [moment(steps=1) for _ in range(1100)])
    assert said.index("opened") == max(540, setting or 0)


# -- evaluations and checkpoints ----------------------------------------------------------------------------------

NCCL_SECONDS = 600


def noticed(setting, p99, longest, *, far, steps=1000) -> int:
    """A rank hangs in a checkpoint. After so many seconds one that waits for it is stuck."""
    watch, longest_now = HangDetector(setting, 1.0), longest_phase(setting, longest)
    for second in range(2000):
        phase = EXPECTED if second < longest_now else OVERDUE
        seen = moment(steps=steps, far=far, peer_phase=phase)
        if watch.update(seen, lambda: StepTimes(p99, p99)) == "opened":
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
    watch = HangDetector(None, 1.0)
    assert ticks(watch, [moment(peer_phase=EXPECTED)] * 400) == [None] * 400
    assert ticks(watch, [moment()] * 30) == [None] * 29 + ["opened"]


@pytest.mark.parametrize(("setting", "seconds"), [(None, 510), (5.0, 35)])
def test_a_rank_that_stays_at_one_place_of_a_checkpoint_is_stuck(setting, seconds):
    """All ranks are in it, so none waits for them in the loop."""
    watch = HangDetector(setting, 1.0)
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
    assert ticks(HangDetector(None, 1.0), LONG_PHASES[what]) == [None] * 3000


def test_a_checkpoint_may_take_twice_as_long_as_the_longest_so_far():
    watch = HangDetector(5.0, 1.0)
    save = [moment(loop=0.0, seconds=1.0, phase_at="write", progress=1)] * 60
    assert ticks(watch, save).index("opened") == 35
    ticks(watch, [moment(progress=2)])
    again = [moment(loop=0.0, seconds=1.0, phase_at="write", progress=3)] * 200
    assert ticks(watch, again).index("opened") == 2 * 59 + 5


def test_time_after_the_loop_closes_it_and_does_not_count():
    watch = HangDetector(None, 1.0)
    assert ticks(watch, [moment()] * 32)[-2:] == ["opened", "held"]
    assert ticks(watch, [moment(loop_left=True)] * 100) == ["closed"] + [None] * 99
    assert ticks(watch, [moment()] * 29) == [None] * 29


def test_what_is_excused_counts_anew():
    watch = HangDetector(None, 1.0)
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
    assert hang_cause(category, source, fetching, 30.0) == cause


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
    assert machine.open_hang("worker_stuck", 30.0, piece).cause == "worker_stuck"
    for _ in range(10):
        assert machine.update(piece).kind == "held"
    assert machine.stall.lost_seconds == {"worker_stuck": 10.0}  # the 30 s before stand in the other
    assert machine.stall.exposed_ratio == 1.0
    machine.close_hang(a_slice())
    assert [machine.update(a_slice()) for _ in range(40)] == [None] * 40


def test_a_stuck_run_where_nothing_was_open_has_lost_all_of_it():
    machine = Detector(30, 0.2, 0.1)
    machine.open_hang("unknown", 30.0, a_slice(steps=0))
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
    watch = HangDetector(setting, interval)
    opened = False
    for each, steps in seen:
        said = watch.update(each, lambda steps=steps: steps)
        assert said in ({"held", "closed"} if opened else {"opened", None})
        opened = said in {"opened", "held"}
        assert watch.hanging == opened
        assert watch.seconds >= 0
        assert not opened or (not each.loop_left and (watch.seconds >= (setting or 30.0)))


@given(kinds, durations, st.lists(amount, min_size=1, max_size=50), st.integers(0, 1))
def test_more_seconds_never_close_it(setting, steps, more, boundary):
    watch = HangDetector(setting, 1.0)
    ticks(watch, [moment(at_epoch_boundary=bool(boundary))] * 100, steps)
    was = watch.hanging
    ticks(watch, [moment(loop=seconds, at_epoch_boundary=bool(boundary)) for seconds in more], steps)
    assert watch.hanging >= was


@given(st.sampled_from(CATEGORIES), st.text() | st.none(), amount, amount)
def test_the_cause_is_of_the_closed_set(category, source, fetching, seconds):
    assert hang_cause(category, source, fetching, seconds) in CAUSES
    assert hang_advice(category, seconds, "f (x.py:1)")
