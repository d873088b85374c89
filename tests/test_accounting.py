"""From spans to the books: the ledger, what is dropped, distributions, and the totals of a tick."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.config import Config
from telemetry.loop.ledger import Accounting, ExposedWait, Ledger, StepStats
from telemetry.loop.tick_totals import GpuEnergy, Readings, integrated
from telemetry.model.records import (
    CATEGORIES,
    COMPUTE,
    DATA_WAIT,
    EVALUATION,
    OTHER,
    STARTUP,
    Deliveries,
    GpuSample,
    Histogram,
    HostSample,
    ProcessSample,
    Samples,
    Step,
)
from telemetry.model.totals import EpochTotals, Sampled, SampledTotals, Totals, WorkerTotals, difference, together
from telemetry.safety.errors import ErrorLog
from telemetry.seams import ring as r
from telemetry.seams.attachment import Attachment
from telemetry.seams.batches import BatchMark, TrainedBatches
from telemetry.seams.device import wait_class
from telemetry.seams.loaders import LoaderHandle
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.sources.proc import ProcessSource
from telemetry.util.sketch import Sketch
from tests.monitored_rank import Run

# -- the ledger --------------------------------------------------------------------------------------------------------

USUAL = (DATA_WAIT, COMPUTE, True, True, True, False)
stamps = st.integers(min_value=0, max_value=10**12)
categories, flags = st.sampled_from(CATEGORIES), st.tuples(*[st.booleans()] * 4)
any_kind = st.tuples(categories, categories, flags).map(lambda kind: (*kind[:2], *kind[2]))


def usual(start: int, end: int):
    """A batch in mid-epoch: it ends a step and begins the next."""
    return (start, end, *USUAL)


def request(start: int, end: int, *, closes: bool = False):
    """A request that brings no batch: an iteration begins or ends."""
    return (start, end, DATA_WAIT, OTHER, closes, False, False, False)


@given(st.lists(st.one_of(st.tuples(stamps, stamps, any_kind), stamps), max_size=60), stamps)
def test_every_instant_is_booked_once(events, waiting_since):
    """Spans in any order, overlapping, backwards, mixed with readings: the sum is the time since the start."""
    ledger = Ledger(0)
    seen = dict.fromkeys(CATEGORIES, 0)
    for event in events:
        if isinstance(event, int):
            ledger.advance(event, waiting_since)
        else:
            ledger.fold([(*event[:2], *event[2])])
        assert sum(ledger.ns.values()) == ledger.at_ns - ledger.start_ns
        assert all(ledger.ns[c] >= seen[c] for c in CATEGORIES)  # counters never fall
        seen = dict(ledger.ns)
    assert all(step.seconds >= step.wait_seconds >= 0 for step in ledger.take_steps())


class General(Ledger):
    """Books every span in the general way."""

    def _computes_until(self, stamp):
        return False


apart = st.tuples(st.integers(-3, 30), st.integers(-3, 30))


@given(st.lists(st.one_of(st.lists(apart, max_size=20), st.tuples(apart, st.one_of(any_kind, st.none()))), max_size=12))
def test_usual_spans_are_booked_as_all_others_are(events):
    """Many at once, as the agent finds them in the ring, with other spans and readings (None) between them."""
    quick, general, at = Ledger(0), General(0), 0
    for event in events:
        if isinstance(event, list):
            begun = []
            for gap, length in event:
                begun.append((at + gap, at + gap + length))
                at += gap + length
            general.fold([usual(*each) for each in begun])
            booked = quick.fold_steps([(*each, 0, None) for each in begun])
            quick.fold([usual(*each) for each in begun[booked:]])
        else:
            (gap, length), kind = event
            start, at = at + gap, at + gap + length
            for ledger in (quick, general):
                if kind is None:
                    ledger.advance(at, start if length > 10 else 0)
                else:
                    ledger.fold([(start, at, *kind)])
        assert quick.take_steps() == general.take_steps()
        assert quick.take_phases() == general.take_phases()
        ours, theirs = vars(quick).copy(), vars(general).copy()
        assert ours.pop("_epoch").extra_wait_ns() == theirs.pop("_epoch").extra_wait_ns()
        assert ours == theirs


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=50))
def test_steps_are_wait_and_compute_wherever_the_agent_looks(pairs):
    ledger, looked_at = Ledger(1), Ledger(1)
    at, wanted = 1, []  # 0 is "no request in progress"
    for wait, compute in pairs:
        looked_at.advance(at + wait // 2, at)  # in the middle of the wait
        for each in (ledger, looked_at):
            each.fold([usual(at, at + wait)])
        looked_at.advance(at + wait + compute // 2)
        wanted.append(Step((wait + compute) / 1e9, wait / 1e9))
        at += wait + compute
    for each in (ledger, looked_at):
        each.fold([request(at, at, closes=True)])
        assert each.take_steps() == wanted
        assert each.ns[DATA_WAIT] == sum(wait for wait, _ in pairs)
    assert ledger.ns == looked_at.ns


def test_a_request_in_progress_is_booked_before_its_batch_comes():
    ledger = Ledger(0)
    ledger.fold([usual(10, 20)])
    ledger.advance(40, 0)
    assert ledger.category == COMPUTE
    ledger.advance(50, 30)  # it began before the last look, after it was looked whether there is one
    assert ledger.category == DATA_WAIT
    assert ledger.ns == {**dict.fromkeys(CATEGORIES, 0), STARTUP: 10, DATA_WAIT: 10 + 10, COMPUTE: 20}
    ledger.fold([usual(45, 60)])
    ledger.advance(70, 45)  # whose span has come, is over
    assert ledger.category == COMPUTE


def test_a_phase_that_is_looked_at_stays_one_phase():
    ledger = Ledger(0)
    ledger.fold([(10, 10, EVALUATION, EVALUATION, *[False] * 4)])
    for now in (100, 200):
        ledger.advance(now)
    ledger.fold([(300, 310, EVALUATION, COMPUTE, *[False] * 4)])
    (phase,) = ledger.take_phases()
    assert (phase.name, phase.start_ns, phase.seconds) == (EVALUATION, 10, 300e-9)


def test_the_first_wait_and_the_waits_at_epoch_boundaries():
    ledger = Ledger(0)
    ledger.fold([request(10, 30)])  # the workers are started
    ledger.advance(500, 100)
    assert ledger.first_wait_ns == ledger.ns[DATA_WAIT] == 20 + 400, "while it is still waited for"
    ledger.fold([usual(100, 600), usual(700, 710), request(800, 804, closes=True)])
    ledger.advance(870, 810)
    assert ledger.at_epoch_boundary
    assert (ledger.first_wait_ns, ledger.boundary_wait_ns, ledger.epoch_boundaries) == (520, 4 + 60, 1)
    ledger.fold([(810, 880, DATA_WAIT, COMPUTE, False, True, True, False), usual(890, 930)])
    assert (ledger.boundary_wait_ns, ledger.epoch_boundaries) == (4 + 70, 1)
    assert ledger.ns[DATA_WAIT] == 520 + 10 + 4 + 70 + 40


def epoch(at: int, waits: list[int], *, left: bool = False):
    """Spans of an iteration: it begins, gives its batches, each computed on for 5 ns, and ends, or is left."""
    spans = [request(at, at)]
    for wait in waits:
        spans.append(usual(at, at + wait))
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


def test_neither_the_first_batch_nor_an_epoch_that_is_left_has_late_batches_next_to_an_edge():
    ledger = Ledger(0)
    spans, _ = epoch(0, [90, *[2] * 15])
    ledger.fold(spans[1:])  # of a loader that has nothing to start: every run has to begin, however long that takes
    assert (ledger.first_wait_ns, ledger.near_boundary_wait_ns) == (90, 0)
    ledger = Ledger(0)
    spans, at = epoch(0, [90, *[2] * 14, 70, 70], left=True)
    ledger.fold([*spans, *epoch(at, [90, *[2] * 14])[0]])
    assert ledger.near_boundary_wait_ns == 0


# -- distributions, and the exposed wait -------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=200), st.floats(0, 1), st.integers(0, 200))
def test_a_quantile_is_within_one_percent_and_sketches_add_up(values, share, cut):
    whole, parts = Sketch(), Sketch()
    whole.add(values)
    true = sorted(values)[math.floor(share * (len(values) - 1))]
    assert abs(whole.quantile(share) - true) <= 0.0101 * true
    assert whole.percentiles().max == max(values)
    for window in (values[:cut], values[cut:]):
        part = Sketch()
        part.add(window)
        parts.merge(((int(at), number) for at, number in part.as_log_field().items()), part.largest)
    assert (parts.counts, parts.percentiles()) == (whole.counts, whole.percentiles())


def test_the_histograms_count_each_step_once():
    stats = StepStats((0.1, 1.0))
    stats.add([Step(s, wait) for s, wait in ((0.05, 0.0), (0.1, 0.0005), (0.5, 0.05), (3.0, 2.0))])
    assert stats.histogram() == Histogram((0.1, 1.0), (2, 1, 1), 3.65)
    assert stats.wait_histogram() == Histogram((0.001, 0.1, 1.0), (2, 1, 0, 1), 2.0505), "with one for short waits"
    assert [sketch.total for sketch in (*stats.take_window(), *stats.take_window())] == [4, 4, 0, 0]


SHORT, LONG = wait_class(20_000), wait_class(200_000_000)


def waits(*seconds: float) -> list[tuple[int, int, int, None]]:
    return [(0, int(each * 1e9), r.STEP, None) for each in seconds]


def ns(exposed: float, waited: float) -> tuple[int, int]:
    return int(exposed * 1e9), int(waited * 1e9)


def test_exposed_wait_on_the_gpu_scales_what_was_timed():
    exposed = ExposedWait()
    exposed.host(1.0)  # before CUDA came into use: all of it
    exposed.gpu(11.0, {}, {})  # nothing read yet: nothing guessed
    assert exposed.seconds == 1.0
    exposed.gpu(11.0, {LONG: ns(0.5, 2.0)}, {})  # a quarter of what was timed
    assert exposed.seconds == 1.0 + 10.0 / 4
    exposed.gpu(15.0, {LONG: ns(0.5, 2.0)}, {LONG: ns(1.0, 3.0)})  # an epoch boundary: as it is, the rest waits
    assert exposed.seconds == 3.5 + 1.0
    exposed.gpu(15.0, {LONG: ns(1.5, 3.0)}, {LONG: ns(1.0, 3.0)})  # the second of the rest, all of it exposed
    assert exposed.seconds == 4.5 + 1.0
    exposed.absent(16.0)
    exposed.gpu(20.0, {LONG: ns(2.0, 4.0)}, {LONG: ns(1.0, 3.0)})
    assert exposed.seconds is None, "a run that misses a part never has a value again"


def test_long_and_short_waits_are_scaled_apart():
    exposed = ExposedWait()
    exposed.count(waits(*[0.2] * 40, *[0.00002] * 100_000))  # 8 s in long waits, 2 s in short ones
    exposed.gpu(10.0, {SHORT: ns(0.0, 0.002), LONG: ns(0.18, 0.2)}, {})  # one long wait and a hundred short ones
    assert exposed.seconds == pytest.approx(8.0 * 0.9)
    exposed.count(waits(*[0.2] * 40))
    exposed.gpu(18.0, {SHORT: ns(0.0, 0.004), LONG: ns(0.18, 0.2)}, {})  # no new long wait: its share stays
    assert exposed.seconds == pytest.approx(16.0 * 0.9)


# -- the ring: read in any pieces, and full ----------------------------------------------------------------------------

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
    """A ring of four entries with its reader, and a ledger that is told of every span there is."""

    def __init__(self) -> None:
        tracker, errors = StepTracker(Ring()), ErrorLog()
        attachment = Attachment(tracker, partial(errors.note, "attach"))
        self.accounting = Accounting(tracker, attachment, Config.load({}), errors, 0)
        self.ring, self.ledger, self.truth = tracker.ring, self.accounting.ledger, Ledger(0)
        self.now = 1
        self.steps: list[Step] = []
        self.true_steps: list[Step] = []

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
        during, after = CATEGORIES[code & 7], CATEGORIES[code >> 3 & 7]
        flags = (bool(code & flag) for flag in (r.CLOSES, r.OPENS, r.BATCH | r.JOINS, r.LEAVES))
        self.truth.fold([(start, end, during, after, *flags)])
        self.true_steps += self.truth.take_steps()

    def read(self, most: int = 1 << 20) -> None:
        """Read at most so many entries."""
        self.accounting._fold(self.ring.drain(most))
        self.steps += self.ledger.take_steps()
        assert sum(self.ledger.ns.values()) == self.ledger.at_ns


LENGTHS = st.integers(0, 50)


bursts = st.lists(st.tuples(LENGTHS, LENGTHS, st.sampled_from(CODES)), max_size=10)


@given(st.lists(st.tuples(bursts, st.integers(0, 4)), max_size=20))
def test_what_did_not_fit_into_the_ring_is_other_and_its_steps_are_counted(events):
    """Spans, and readings of so many entries, in any sequence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(r, "WORDS", 4 * r.STRIDE)
        patch.setattr(r, "MASK", 4 * r.STRIDE - 1)
        both, full = Both(), False
        for spans, most in events:
            for span in spans:
                both.span(*span)
                full |= bool(both.ring.gap_since)
            both.read(most)
        both.read()
        for _ in range(2):
            both.span(1, 1, r.STEP)  # a gap ends with the next span that fits
        both.read()
    ledger, truth = both.ledger, both.truth
    assert len(both.steps) + ledger.dropped_steps == len(both.true_steps) == both.ring.closed
    kept = iter(both.true_steps)
    assert all(step in kept for step in both.steps), "a step that was kept is measured as if none had been dropped"
    for name in ("at_ns", "category", "step_is_open", "last_step_ns"):
        assert getattr(ledger, name) == getattr(truth, name), name
    if full:
        assert all(ledger.ns[category] <= truth.ns[category] for category in CATEGORIES if category != OTHER)
    else:
        assert (ledger.ns, ledger.batches) == (truth.ns, truth.batches)


def loader_with_one_worker() -> LoaderHandle:
    return LoaderHandle(SimpleNamespace(_workers=[SimpleNamespace(pid=1)]), None)


BEGINS = r.code(r.S_DATA_WAIT, r.S_COMPUTE, r.BEGINS)
JOINED = r.code(r.S_DATA_WAIT, r.S_COMPUTE, r.BATCH | r.JOINS)


@pytest.mark.parametrize("dropped", [1, 3])
def test_batches_are_numbered_again_once_the_iteration_is_certain(dropped):
    loader, batches, ring, epochs = loader_with_one_worker(), TrainedBatches(), Ring(), count(1)

    def epoch() -> None:
        number = next(epochs)
        ring.push(1, 2, BEGINS, BatchMark(loader, 0, number))
        ring.push(2, 3, r.STEP, BatchMark(loader, 0, number))

    epoch()
    batches.fold(ring.drain(1 << 20))
    while not ring.gap_since:
        ring.push(3, 4, r.STEP)
    for _ in range(dropped):
        epoch()
    batches.fold(ring.drain(1 << 20))
    loader.arrivals.clear()
    ring.push(3, 4, r.STEP)
    batches.fold(ring.drain(1 << 20))
    assert not loader.arrivals
    epoch()
    batches.fold(ring.drain(1 << 20))
    assert [(a.epoch, a.number) for a in loader.arrivals] == [(2 + dropped, 0)]


@given(
    epochs=st.lists(st.integers(0, 8), max_size=4),
    cuts=st.lists(st.integers(0, 99), max_size=12),
    joined=st.sets(st.integers(0, 40)),
)
def test_batches_have_the_same_numbers_and_waits_in_whatever_pieces_they_are_read(epochs, cuts, joined):
    def numbered(*, in_pieces: bool) -> tuple[list, int]:
        loader, followed, entries = loader_with_one_worker(), TrainedBatches(), []
        for epoch, batches in enumerate(epochs):
            mark = BatchMark(loader, 0, epoch)
            entries.append((0, 0, BEGINS, mark))
            for place in range(batches):
                number = len(entries)
                kind = JOINED if number in joined else r.STEP
                entries.append((10 * number, 11 * number, kind, None if place else mark))
        edges = sorted(cut % (len(entries) + 1) for cut in cuts) if in_pieces else range(len(entries) + 1)
        for first, last in pairwise([0, *edges, len(entries)]):
            followed.fold(entries[first:last])
        return list(loader.arrivals), followed._waits.get(loader, 0)

    assert numbered(in_pieces=True) == numbered(in_pieces=False)


# -- the sum and the difference of two totals --------------------------------------------------------------------------


def test_counters_are_added_and_subtracted_in_every_group():
    oldest = Totals(
        steps=3, ledger_seconds={"compute": 1.0}, epochs=EpochTotals(boundaries=1), fetch_counts=(1, 2),
        deliveries=Deliveries(matched=4, slack_seconds=0.5),
        sampled=SampledTotals(workers=WorkerTotals(busy_ratio=Sampled(0.5, 1.0))),
    )  # fmt: skip
    newest = Totals(
        steps=5, ledger_seconds={"compute": 4.0, "other": 2.0}, epochs=EpochTotals(boundaries=1, left=2), fetch_counts=(1, 5),
        deliveries=Deliveries(matched=9, slack_seconds=0.75),
        sampled=SampledTotals(workers=WorkerTotals(busy_ratio=Sampled(2.5, 5.0))),
    )  # fmt: skip
    added = newest - oldest
    assert (added.steps, added.ledger_seconds, added.epochs) == (2, {"compute": 3.0, "other": 2.0}, EpochTotals(left=2))
    assert added.fetch_counts == (0, 3)
    assert added.deliveries == Deliveries(matched=5, slack_seconds=0.25)
    assert added.sampled.workers.busy_ratio.mean == 0.5
    assert together(oldest, added) == newest


def test_what_one_end_does_not_tell_the_difference_does_not_tell():
    assert [difference(*ends) for ends in ((2.0, 0.5), (None, 2.0), (2.0, None), (None, None))] == [1.5, *[None] * 3]
    assert difference({"compute": 9.0}, None) is None


def test_a_value_that_was_never_known_has_no_mean():
    assert (Sampled.over(None, 1.0).mean, Sampled.over(None, 1.0).known) == (None, None)
    assert together(Sampled.over(0.5, 1.0), Sampled.over(1.0, 3.0)).mean == 0.875
    rounded = Sampled(3e-17, 1e-16)  # after a skip, `a - (a - b)` differs from `b` by the last bit
    assert (rounded.mean, rounded.known) == (None, None)


# -- what is sampled: the energy, and the CPU time of a run's own short processes --------------------------------------


@pytest.mark.parametrize(
    ("joules", "ledger", "expected"),
    [
        (500, {"compute": 8.0, "data_wait": 1.0}, {"compute": 300.0, "data_wait": 100.0}),  # by time
        (50, {"compute": 6.0}, None),  # its counter began anew
        (1e9, {"compute": 6.0}, None),  # impossible
        (200, {"compute": 5.0}, None),  # no time has passed
    ],
)
def test_the_energy_is_split_by_time_and_its_sum_is_the_counters(joules, ledger, expected):
    energy, sample = GpuEnergy(), GpuSample(0, "GPU-1", "", energy_joules=joules)
    energy.add(GpuSample(0, "GPU-1", "", energy_joules=100.0), {"compute": 5.0})
    assert energy.joules is None
    for _ in range(2):  # the same sample again is no new reading
        energy.add(sample, ledger)
    assert energy.joules == expected
    energy.add(GpuSample(0, "GPU-1", "", energy_joules=joules + 30), ledger | {"compute": ledger["compute"] + 1.0})
    assert sum(energy.joules.values()) == pytest.approx(30 + sum((expected or {}).values()))


@pytest.mark.parametrize(
    ("shares", "unused"), [((0.5, 0.5), 0.0), ((0.3, 0.2), 0.5), ((0.9, 0.8), 0.0), ((0.5, None), None)]
)
def test_gpus_that_take_turns_are_not_idle(shares, unused):
    """As those of a model whose layers are on several."""
    gpus = tuple(GpuSample(i, str(i), "", utilization_ratio=share) for i, share in enumerate(shares))
    readings = Readings(10.0, loop_seconds=10.0, exposed_wait_seconds=0.0, samples=Samples(gpus=gpus))
    assert integrated(SampledTotals(), readings).gpu.unused_ratio.mean == unused


BURN = "import time\nwhile time.process_time() < 0.2:\n    pass"


def test_a_child_that_has_ended_is_read():
    source = ProcessSource(threading.get_native_id)
    before = source.read()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    after = source.read()
    assert after.children_cpu_seconds - before.children_cpu_seconds > 0.1  # in ticks of 10 ms
    assert after.runnable_seconds is not None
    assert after.running_seconds is not None


@pytest.mark.parametrize(
    ("children", "used", "others"),
    [
        (lambda second: 1.0 * second, 1.5, 0.5),
        (lambda second: 5.0 * second, 0.5, 1.5),  # no second has so much: they lived for longer
        (lambda second: 3.0 * second, 2.0, 0.0),  # more than is in use
        (lambda second: 1000.0, 0.5, 1.5),  # before the agent began
    ],
)
def test_children_that_have_ended_are_no_other_programs(children, used, others):
    """Such as a decoder that the training thread starts for each sample."""
    run = Run(StepTracker(Ring()))
    run.samples["host"] = HostSample(0.5, 4, 0, 0)
    for second in range(1, 11):
        run.samples["process"] = ProcessSample(second / 2, 0, 1, children_cpu_seconds=children(second))
        run.request(second - 0.5, second - 0.1)
        run.tick(second, cpu_ratio=0.0)
    cpu = run.builder.totals.sampled.cpu
    assert cpu.used_cores.mean == pytest.approx(used, rel=0.12)
    assert cpu.other_cores.mean == pytest.approx(others, rel=0.12, abs=0.2)
