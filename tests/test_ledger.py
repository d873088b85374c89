"""The ledger adds up, whatever happens; sketches and histograms count what they are given."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.agent.accounting import ExposedWait, Ledger, StepStats
from telemetry.records import CATEGORIES, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP, Histogram, Step
from telemetry.util.sketch import Sketch

stamps = st.integers(min_value=0, max_value=10**12)
spans = st.tuples(
    stamps,
    stamps,
    st.sampled_from(CATEGORIES),
    st.sampled_from(CATEGORIES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(st.one_of(spans, stamps), max_size=60), stamps)
def test_every_instant_is_booked_once(events, waiting_since):
    """Spans in any order, overlapping, backwards, mixed with readings: the sum is the time since the start."""
    ledger = Ledger(0)
    seen = dict.fromkeys(CATEGORIES, 0)
    for event in events:
        if isinstance(event, int):
            ledger.advance(event, waiting_since)
        else:
            ledger.fold([event])
        assert sum(ledger.ns.values()) == ledger.at_ns - ledger.start_ns
        assert all(ledger.ns[c] >= seen[c] for c in CATEGORIES)  # counters never fall
        seen = dict(ledger.ns)
    assert all(step.seconds >= step.wait_seconds >= 0 for step in ledger.take_steps())


class General(Ledger):
    """Books every span in the general way."""

    def _computes_until(self, stamp):
        return False


USUAL = (DATA_WAIT, COMPUTE, True, True, True, False)
kinds = st.one_of(st.just(USUAL), st.just(USUAL), st.just(USUAL), spans.map(lambda span: span[2:]))
apart, lengths = st.integers(-3, 30), st.integers(-3, 30)


@given(st.lists(st.tuples(apart, lengths, st.one_of(kinds, st.none())), max_size=80))
def test_usual_spans_are_booked_as_all_others_are(events):
    """The two ways of booking give the same, whatever comes between the usual spans; None is a reading."""
    quick, general, at = Ledger(0), General(0), 0
    for gap, length, kind in events:
        at += gap
        for ledger in (quick, general):
            if kind is None:
                ledger.advance(at + length, at if length > 10 else 0)
            else:
                ledger.fold([(at, at + length, *kind)])
        at += length
        assert quick.take_steps() == general.take_steps()
        assert quick.take_phases() == general.take_phases()
        ours, theirs = vars(quick).copy(), vars(general).copy()
        assert ours.pop("_epoch").extra_wait_ns() == theirs.pop("_epoch").extra_wait_ns()
        assert ours == theirs


@given(st.lists(st.lists(st.tuples(apart, lengths), max_size=20), max_size=6))
def test_usual_spans_are_booked_together_as_one_by_one(readings):
    """As the agent books what it finds in the ring; a reading may come in the middle of a wait."""
    together, general, at = Ledger(0), General(0), 0
    for found in readings:
        begun = []
        for gap, length in found:
            at += gap
            begun.append((at, at + length))
            at += length
        for start, end in begun:
            general.fold([(start, end, *USUAL)])
        booked = together.fold_steps([(start, end, 0, None) for start, end in begun])
        together.fold([(start, end, *USUAL) for start, end in begun[booked:]])
        for ledger in (together, general):
            ledger.advance(at + 20, at + 10 if len(found) % 2 else 0)
        at += 25
        assert together.take_steps() == general.take_steps()
        ours, theirs = vars(together).copy(), vars(general).copy()
        assert ours.pop("_epoch").extra_wait_ns() == theirs.pop("_epoch").extra_wait_ns()
        assert ours == theirs


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=50))
def test_steps_are_wait_and_compute_wherever_the_agent_looks(pairs):
    ledger, looked_at = Ledger(1), Ledger(1)
    at, wanted = 1, []  # 0 is "no request in progress"
    for wait, compute in pairs:
        span = (at, at + wait, DATA_WAIT, COMPUTE, True, True, True, False)
        looked_at.advance(at + wait // 2, at)  # in the middle of the wait
        looked_at.fold([span])
        looked_at.advance(at + wait + compute // 2)
        ledger.fold([span])
        wanted.append(Step((wait + compute) / 1e9, wait / 1e9))
        at += wait + compute
    end = (at, at, DATA_WAIT, "other", True, False, False, False)
    for each in (ledger, looked_at):
        each.fold([end])
        assert each.take_steps() == wanted
        assert each.ns[DATA_WAIT] == sum(wait for wait, _ in pairs)
    assert ledger.ns == looked_at.ns


def test_a_request_in_progress_is_booked_before_its_batch_comes():
    ledger = Ledger(0)
    ledger.fold([(10, 20, DATA_WAIT, COMPUTE, True, True, True, False)])
    ledger.advance(50, 30)
    assert ledger.ns == {**dict.fromkeys(CATEGORIES, 0), STARTUP: 10, DATA_WAIT: 10 + 20, COMPUTE: 10}
    ledger.fold([(30, 60, DATA_WAIT, COMPUTE, True, True, True, False)])
    assert ledger.ns[DATA_WAIT] == 40


def test_a_phase_that_is_looked_at_stays_one_phase():
    ledger = Ledger(0)
    ledger.fold([(10, 10, EVALUATION, EVALUATION, False, False, False, False)])
    for now in (100, 200):
        ledger.advance(now)
    ledger.fold([(300, 310, EVALUATION, COMPUTE, False, False, False, False)])
    (phase,) = ledger.take_phases()
    assert (phase.name, phase.start_ns, phase.seconds) == (EVALUATION, 10, 300e-9)


@given(st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_is_within_one_percent(values, share):
    sketch = Sketch()
    for value in values:
        sketch.add([value])
    true = sorted(values)[math.floor(share * (len(values) - 1))]
    assert abs(sketch.quantile(share) - true) <= 0.0101 * true
    assert sketch.percentiles().max == max(values)


@given(st.lists(st.floats(0, 1e4), max_size=50), st.lists(st.floats(0, 1e4), max_size=50))
def test_sketches_of_windows_add_up(first, second):
    whole, parts = Sketch(), Sketch()
    for values in (first, second):
        part = Sketch()
        for value in values:
            part.add([value])
            whole.add([value])
        parts.merge(((int(at), count) for at, count in part.as_log_field().items()), part.largest)
    assert parts.counts == whole.counts
    assert parts.percentiles() == whole.percentiles()


def test_a_wait_that_began_while_nobody_looked_is_seen_the_next_time():
    ledger = Ledger(0)
    ledger.fold([(0, 10, DATA_WAIT, COMPUTE, True, True, True, False)])
    ledger.advance(20, 0)  # the wait began at 15, after it was looked whether there is one
    assert ledger.category == COMPUTE
    ledger.advance(1000, 15)
    assert ledger.category == DATA_WAIT
    assert (ledger.ns[DATA_WAIT], ledger.ns[COMPUTE]) == (10 + 980, 10)


def test_a_wait_whose_span_has_come_is_over():
    ledger = Ledger(0)
    ledger.fold(
        [(0, 10, DATA_WAIT, COMPUTE, True, True, True, False), (15, 30, DATA_WAIT, COMPUTE, True, True, True, False)]
    )
    ledger.advance(40, 15)
    assert ledger.category == COMPUTE
    assert (ledger.ns[DATA_WAIT], ledger.ns[COMPUTE]) == (25, 15)


def test_the_first_batch_is_the_first_while_it_is_still_waited_for():
    ledger = Ledger(0)
    ledger.fold([(10, 30, DATA_WAIT, OTHER, False, False, False, False)])  # the workers are started
    ledger.advance(500, 100)
    assert ledger.first_wait_ns == ledger.ns[DATA_WAIT] == 20 + 400
    ledger.fold(
        [
            (100, 600, DATA_WAIT, COMPUTE, True, True, True, False),
            (700, 710, DATA_WAIT, COMPUTE, True, True, True, False),
        ]
    )
    ledger.advance(900, 800)
    assert (ledger.first_wait_ns, ledger.boundary_wait_ns, ledger.epoch_boundaries) == (520, 0, 0)


def test_the_wait_for_a_first_batch_is_at_the_epoch_boundary():
    ledger = Ledger(0)
    ledger.fold(
        [(0, 10, DATA_WAIT, COMPUTE, True, True, True, False), (20, 24, DATA_WAIT, OTHER, True, False, False, False)]
    )
    ledger.advance(90, 30)
    assert ledger.at_epoch_boundary
    assert (ledger.boundary_wait_ns, ledger.epoch_boundaries) == (4 + 60, 1)
    ledger.fold(
        [
            (30, 100, DATA_WAIT, COMPUTE, False, True, True, False),
            (110, 150, DATA_WAIT, COMPUTE, True, True, True, False),
        ]
    )
    assert (ledger.boundary_wait_ns, ledger.epoch_boundaries) == (4 + 70, 1)
    assert ledger.ns[DATA_WAIT] == 10 + 4 + 70 + 40


def epoch(at: int, waits: list[int], *, left: bool = False):
    """Spans of an iteration: it begins, gives its batches, each computed on for 5 ns, and ends, or is left."""
    spans = [(at, at, DATA_WAIT, OTHER, False, False, False, False)]
    for wait in waits:
        spans.append((at, at + wait, DATA_WAIT, COMPUTE, True, True, True, False))
        at += wait + 5
    spans.append((at, at, DATA_WAIT, OTHER, True, False, False, left))
    return spans, at


@pytest.mark.parametrize(
    ("waits", "later"),
    [
        ([90, 30, *[2] * 15, 70, 10], 28 + 68 + 8),  # the second worker is late, and both as they end
        ([90, *[2] * 15], 0),
        ([90, 2, 2, 2, *[8] * 12, 2, 2, 2], -6 * 6),  # of 18 the first and the last four are near, at 2 and one at 8
        ([90, 50, 60], 0),  # too few to have a middle
    ],
)
def test_how_much_longer_batches_next_to_the_edges_of_an_epoch_take(waits, later):
    ledger = Ledger(0)
    spans, at = epoch(0, waits)
    ledger.fold(spans)
    assert ledger.near_boundary_wait_ns == later
    ledger.fold(epoch(at, waits)[0])
    assert ledger.near_boundary_wait_ns == 2 * later


def test_the_first_batch_of_a_run_is_not_next_to_an_edge():
    """Of a loader that has nothing to start: every run has to begin, however long that takes."""
    ledger = Ledger(0)
    spans, _ = epoch(0, [90, *[2] * 15])
    ledger.fold(spans[1:])
    assert (ledger.first_wait_ns, ledger.near_boundary_wait_ns) == (90, 0)


def test_an_epoch_that_is_left_has_not_ended():
    ledger = Ledger(0)
    spans, at = epoch(0, [90, *[2] * 14, 70, 70], left=True)
    ledger.fold(spans)
    ledger.fold(epoch(at, [90, *[2] * 14])[0])
    assert ledger.near_boundary_wait_ns == 0


def test_the_histogram_counts_each_step_once():
    stats = StepStats((0.1, 1.0))
    stats.add([Step(s, 0.0) for s in (0.05, 0.1, 0.5, 2.0)])
    assert stats.histogram().counts == (2, 1, 1)
    assert stats.histogram().total == 2.65
    assert (stats.take_window().steps, stats.take_window().steps) == (4, 0)


def test_the_histogram_of_waits_has_a_bucket_for_short_ones():
    stats = StepStats((0.1, 1.0))
    stats.add([Step(3.0, wait) for wait in (0.0, 0.0005, 0.05, 0.25, 2.0)])
    assert stats.wait_histogram() == Histogram((0.001, 0.1, 1.0), (2, 1, 1, 1), 2.3005)


def test_exposed_wait_on_the_host_is_all_of_it():
    exposed = ExposedWait()
    exposed.host(1.5)
    exposed.host(4.0)
    assert exposed.seconds == 4.0


def test_exposed_wait_on_the_gpu_scales_what_was_timed():
    exposed = ExposedWait()
    exposed.host(1.0)  # before CUDA came into use
    exposed.gpu(11.0, (0.0, 0.0), (0.0, 0.0))  # nothing read yet: nothing guessed
    assert exposed.seconds == 1.0
    exposed.gpu(11.0, (0.5, 2.0), (0.0, 0.0))  # a quarter of what was timed
    assert exposed.seconds == 1.0 + 10.0 / 4
    exposed.gpu(15.0, (0.5, 2.0), (1.0, 3.0))  # an edge of an epoch: as it is, the rest waits for a reading
    assert exposed.seconds == 3.5 + 1.0
    exposed.gpu(15.0, (1.5, 3.0), (1.0, 3.0))  # the second of the rest, all of it exposed
    assert exposed.seconds == 4.5 + 1.0


def test_exposed_wait_that_cannot_be_told_is_absent():
    exposed = ExposedWait()
    exposed.host(1.0)
    exposed.absent(2.0)
    exposed.gpu(5.0, (1.0, 2.0), (0.0, 0.0))
    assert exposed.seconds is None
