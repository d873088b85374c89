"""From spans to the books: the ledger, what is dropped, distributions, and the totals of a tick."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.agent.accounting import ExposedWait, Ledger, StepStats, spans
from telemetry.hooks import ring as r
from telemetry.hooks.batches import BatchMark, TrainedBatches
from telemetry.hooks.device import wait_class
from telemetry.hooks.loaders import LoaderHandle
from telemetry.hooks.ring import CAPACITY, Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.records import (
    CATEGORIES,
    CHECKPOINT,
    COMPUTE,
    DATA_WAIT,
    EVALUATION,
    OTHER,
    STARTUP,
    Deliveries,
    EpochTotals,
    Histogram,
    HostSample,
    ProcessSample,
    Sampled,
    SampledTotals,
    Step,
    Totals,
    WorkerTotals,
)
from telemetry.sources.proc import ProcessSource
from telemetry.util.sketch import Sketch
from tests.monitored_rank import Run

stamps = st.integers(min_value=0, max_value=10**12)
any_span = st.tuples(
    stamps,
    stamps,
    st.sampled_from(CATEGORIES),
    st.sampled_from(CATEGORIES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(st.one_of(any_span, stamps), max_size=60), stamps)
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
kinds = st.one_of(st.just(USUAL), st.just(USUAL), st.just(USUAL), any_span.map(lambda span: span[2:]))
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


SHORT, LONG = wait_class(20_000), wait_class(200_000_000)


def waits(*seconds: float) -> list[tuple[int, int, int, None]]:
    return [(0, int(each * 1e9), r.STEP, None) for each in seconds]


def ns(exposed: float, waited: float) -> tuple[int, int]:
    return int(exposed * 1e9), int(waited * 1e9)


def test_exposed_wait_on_the_gpu_scales_what_was_timed():
    exposed = ExposedWait()
    exposed.host(1.0)  # before CUDA came into use
    exposed.gpu(11.0, {}, {})  # nothing read yet: nothing guessed
    assert exposed.seconds == 1.0
    exposed.gpu(11.0, {LONG: ns(0.5, 2.0)}, {})  # a quarter of what was timed
    assert exposed.seconds == 1.0 + 10.0 / 4
    exposed.gpu(15.0, {LONG: ns(0.5, 2.0)}, {LONG: ns(1.0, 3.0)})  # an epoch boundary: as it is, the rest waits
    assert exposed.seconds == 3.5 + 1.0
    exposed.gpu(15.0, {LONG: ns(1.5, 3.0)}, {LONG: ns(1.0, 3.0)})  # the second of the rest, all of it exposed
    assert exposed.seconds == 4.5 + 1.0


def test_long_and_short_waits_are_scaled_apart():
    exposed = ExposedWait()
    exposed.count(waits(*[0.2] * 40, *[0.00002] * 100_000))  # 8 s in long waits, 2 s in short ones
    exposed.gpu(10.0, {SHORT: ns(0.0, 0.002), LONG: ns(0.18, 0.2)}, {})  # one long wait and a hundred short ones
    assert exposed.seconds == pytest.approx(8.0 * 0.9)
    exposed.count(waits(*[0.2] * 40))
    exposed.gpu(18.0, {SHORT: ns(0.0, 0.004), LONG: ns(0.18, 0.2)}, {})  # no new long wait: its share stays
    assert exposed.seconds == pytest.approx(16.0 * 0.9)


def test_exposed_wait_that_cannot_be_told_is_absent():
    exposed = ExposedWait()
    exposed.host(1.0)
    exposed.absent(2.0)
    exposed.gpu(5.0, {LONG: ns(1.0, 2.0)}, {})
    assert exposed.seconds is None


# -- a ring that overflows ---------------------------------------------------------------------------------------------

CODES = (
    r.STEP,
    r.code(r.S_DATA_WAIT, r.S_COMPUTE, r.JOINS),
    r.code(r.S_DATA_WAIT, r.S_OTHER, r.CLOSES),
    r.code(r.S_EVALUATION, r.S_EVALUATION),
    r.code(r.S_CHECKPOINT, r.S_CHECKPOINT),
    r.code(r.S_COMPUTE, r.S_COMPUTE),
    r.code(r.S_COMPUTE, r.S_COMPUTE, r.OPENS),
    r.code(r.S_OTHER, r.S_OTHER, r.CLOSES),
)


class Both:
    """A ring with its reader, and a ledger that is told of every span there is."""

    def __init__(self) -> None:
        self.ring, self.ledger, self.truth = Ring(), Ledger(0), Ledger(0)
        self.now = 0
        self.steps: list = []
        self.true_steps: list = []

    def span(self, gap: int, length: int, code: int) -> None:
        """The next span. An ordinary batch is stored as the hook does it."""
        start = self.now + gap
        self.now = end = start + length
        ring = self.ring
        if code == r.STEP and ring.open and ring.head < ring.limit:
            slot = ring.head & r.MASK
            ring.words[slot], ring.words[slot + 1] = start, end
            ring.head += r.STRIDE
        else:
            ring.push(start, end, code)
        self.truth.fold(spans([(start, end, code, None)]))
        self.true_steps += self.truth.take_steps()

    def read(self, most: int = 1 << 20, *, waiting: int = 0) -> None:
        """What the agent thread does: as far as ``most`` entries, or to the end and on to now."""
        before, last_step = dict(self.ledger.ns), self.ledger.last_step_ns or 0
        lost, head = self.ring.lost, self.ring.head
        self.ledger.fold(spans(self.ring.drain(most, head)))
        if self.ring.tail == head:
            if lost is not None:
                self.ledger.fold([lost])
            self.ledger.advance(self.now, waiting)
        self.steps += self.ledger.take_steps()
        assert all(self.ledger.ns[category] >= before[category] for category in CATEGORIES)
        assert (self.ledger.last_step_ns or 0) >= last_step
        assert sum(self.ledger.ns.values()) == self.ledger.at_ns

    def check(self) -> None:
        self.read()
        self.truth.advance(self.now)
        assert self.ledger.ns == self.truth.ns
        assert self.ledger.category == self.truth.category
        assert self.ledger.batches == self.truth.batches
        assert self.ledger.step_is_open == self.truth.step_is_open
        assert self.ledger.last_step_ns == self.truth.last_step_ns
        assert len(self.steps) + self.ledger.dropped_steps == len(self.true_steps) == self.ring.closed
        assert self.ledger.dropped_steps == self.ring.dropped
        kept = iter(self.true_steps)
        assert all(step in kept for step in self.steps), "a step that was kept is measured as if none had been dropped"


LENGTHS = st.integers(0, 50)


@given(
    st.lists(
        st.one_of(
            st.tuples(LENGTHS, LENGTHS, st.sampled_from(CODES)),
            st.sampled_from([1, 3, 7, 1 << 20]),
        ),
        max_size=80,
    )
)
@settings(deadline=None, max_examples=60)
def test_whatever_is_dropped_the_books_are_exact(events):
    """With no room but for a few entries, at any point of any sequence of spans and readings."""
    both = Both()
    for number in range(CAPACITY - 4):
        both.span(1, 1, r.STEP if number % 3 else r.code(r.S_EVALUATION, r.S_EVALUATION))
    for event in events:
        if isinstance(event, int):
            both.read(event)
        else:
            both.span(*event)
    both.check()


@given(st.lists(st.tuples(LENGTHS, LENGTHS, st.integers(0, 50), st.booleans()), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_a_wait_seen_in_progress_and_then_dropped_is_booked_once(waits):
    """The reader looks in the middle of a wait, and empties the ring only when its span has been dropped."""
    both = Both()
    for compute, before, after, dropping in waits:
        while both.ring.head < both.ring.tail + r.WORDS:
            both.span(1, 1, r.STEP)
        if dropping:
            both.span(1, 1, r.STEP)
        start = both.now + compute
        seen, lost, head = start + before, both.ring.lost, both.ring.head
        both.span(compute, before + after, r.STEP)
        taken = both.ring.drain(1 << 20, head)
        both.ledger.fold(spans(taken))
        if lost is not None:
            both.ledger.fold([lost])
        both.ledger.advance(seen, start)
        both.steps += both.ledger.take_steps()
    both.check()


def test_evaluation_and_checkpoint_in_a_full_ring_are_booked_as_such():
    both = Both()
    for _ in range(CAPACITY):
        both.span(90, 10, r.STEP)
    both.span(0, 0, r.code(r.S_EVALUATION, r.S_EVALUATION))
    both.span(50_000, 0, r.code(r.S_CHECKPOINT, r.S_CHECKPOINT))
    both.span(70_000, 0, r.code(r.S_COMPUTE, r.S_COMPUTE))
    both.read()
    assert both.ledger.ns[EVALUATION] == 50_000
    assert both.ledger.ns[CHECKPOINT] == 70_000
    assert both.ledger.ns[COMPUTE] == 90 * (CAPACITY - 1)
    both.now += 1000
    both.read()
    assert both.ledger.ns[COMPUTE] == 90 * (CAPACITY - 1) + 1000
    both.check()


def test_the_sums_of_what_was_dropped_come_before_what_is_kept_after_it():
    both = Both()
    for _ in range(CAPACITY + 100):
        both.span(90, 10, r.STEP)
    both.ring.drain(1)
    both.span(90, 10, r.STEP)  # there is room for one: not for the sums as well
    assert both.ring.head == CAPACITY * r.STRIDE
    both.ring.drain(1)
    both.span(90, 10, r.STEP)
    entries = both.ring.drain(1 << 20)
    assert [bool(code & r.GAP) for _, _, code, _ in entries[-2:]] == [True, False]
    assert entries[-2][3].steps == 101
    assert both.ring.closed == CAPACITY + 101


@pytest.mark.parametrize("dropped", [1, 3])
def test_batches_are_numbered_again_once_the_iteration_is_certain(dropped):
    handle = LoaderHandle(type("Iterator", (), {"_workers": []})(), None)
    batches, ring, epochs = TrainedBatches(), Ring(), count(1)
    begins = r.code(r.S_DATA_WAIT, r.S_COMPUTE, r.BEGINS)

    def epoch() -> None:
        number = next(epochs)
        ring.push(1, 2, begins, BatchMark(handle, None, 0, number))
        ring.push(2, 3, r.STEP, BatchMark(handle, None, 0, number))

    epoch()
    batches.fold(ring.drain(1 << 20))
    while ring.head < ring.tail + r.WORDS:
        ring.push(3, 4, r.STEP)
    for _ in range(dropped):
        epoch()
    batches.fold(ring.drain(1 << 20))
    handle.arrivals.clear()
    ring.push(3, 4, r.STEP)
    batches.fold(ring.drain(1 << 20))
    assert not handle.arrivals
    epoch()
    batches.fold(ring.drain(1 << 20))
    assert [(a.epoch, a.number) for a in handle.arrivals] == [(2 + dropped, 0)]


def test_a_wait_for_the_first_batch_that_was_dropped_is_the_first_wait():
    both = Both()
    for _ in range(CAPACITY + 1):
        both.span(0, 10, r.code(r.S_DATA_WAIT, r.S_STARTUP))
    both.check()
    assert both.ledger.first_wait_ns == both.ledger.ns[DATA_WAIT] == 10 * (CAPACITY + 1)


# -- the difference of two totals --------------------------------------------------------------------------------------


def test_counters_are_subtracted_in_every_group():
    oldest = Totals(
        steps=3, ledger_seconds={"compute": 1.0}, epochs=EpochTotals(boundaries=1), fetch_counts=(1, 2),
        deliveries=Deliveries(batches=4, head_of_line_worker_seconds={0: 0.5}),
        sampled=SampledTotals(workers=WorkerTotals(busy_ratio=Sampled(0.5, 1.0))),
    )  # fmt: skip
    newest = Totals(
        steps=5, ledger_seconds={"compute": 4.0, "other": 2.0}, epochs=EpochTotals(boundaries=1, left=2), fetch_counts=(1, 5),
        deliveries=Deliveries(batches=9, head_of_line_worker_seconds={0: 0.75, 1: 1.0}),
        sampled=SampledTotals(workers=WorkerTotals(busy_ratio=Sampled(2.5, 5.0))),
    )  # fmt: skip
    added = newest - oldest
    assert (added.steps, added.ledger_seconds, added.epochs) == (2, {"compute": 3.0, "other": 2.0}, EpochTotals(left=2))
    assert added.fetch_counts == (0, 3)
    assert added.deliveries == Deliveries(batches=5, head_of_line_worker_seconds={0: 0.25, 1: 1.0})
    assert added.sampled.workers.busy_ratio.mean == 0.5


def test_what_one_end_does_not_tell_the_difference_does_not_tell():
    known, unknown = Totals(exposed_wait_seconds=2.0), Totals(exposed_wait_seconds=None)
    assert (known - Totals()).exposed_wait_seconds == 2.0
    assert (unknown - known).exposed_wait_seconds is None
    assert (known - unknown).exposed_wait_seconds is None
    assert (unknown - unknown).exposed_wait_seconds is None


def test_a_value_that_was_never_known_has_no_mean():
    assert (Sampled().plus(None, 1.0).mean, Sampled().plus(None, 1.0).known) == (None, None)
    assert Sampled().plus(0.5, 1.0).plus(None, 5.0).plus(1.0, 3.0).mean == 0.875


def test_a_rounding_difference_is_not_a_sample():
    """After a skip, ``a - (a - b)`` differs from ``b`` by the last bit."""
    assert Sampled(3e-17, 1e-16).mean is None
    assert Sampled(3e-17, 1e-16).known is None
    assert Sampled(1.0, 2.0).mean == 0.5


# -- CPU time of a run's own short processes: it is not that of other programs -----------------------------------------

BURN = "import time\nwhile time.process_time() < 0.2:\n    pass"


def test_a_child_that_has_ended_is_read():
    source = ProcessSource(threading.get_native_id)
    before = source.read()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    after = source.read()
    assert after.children_cpu_seconds - before.children_cpu_seconds > 0.1  # in ticks of 10 ms
    assert after.runnable_seconds is not None
    assert after.running_seconds is not None


@pytest.fixture
def run():
    return Run(StepTracker(Ring()))


@pytest.mark.parametrize(
    ("children", "used", "others"),
    [
        (lambda second: 1.0 * second, 1.5, 0.5),
        (lambda second: 5.0 * second, 0.5, 1.5),  # no second has so much: they lived for longer
        (lambda second: 3.0 * second, 2.0, 0.0),  # more than is in use
        (lambda second: 1000.0, 0.5, 1.5),  # before the agent began
    ],
)
def test_children_that_have_ended_are_no_other_programs(run, children, used, others):
    """Such as a decoder that the training thread starts for each sample."""
    run.samples["host"] = HostSample(0.5, 4, 0, 0)
    for second in range(1, 11):
        run.samples["process"] = ProcessSample(second / 2, 0, 1, children_cpu_seconds=children(second))
        run.request(second - 0.5, second - 0.1)
        run.tick(second, cpu_ratio=0.0)
    cpu = run.builder.totals.sampled.cpu
    assert cpu.used_cores.mean == pytest.approx(used, rel=0.12)
    assert cpu.other_cores.mean == pytest.approx(others, rel=0.12, abs=0.2)
