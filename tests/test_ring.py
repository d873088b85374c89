"""The ring: what is dropped is counted, and what is read is the same whether it is read at once or in pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.agent.accounting import Ledger, spans
from telemetry.hooks import ring as r
from telemetry.hooks.loaders import ON_THREAD, LoaderHandle
from telemetry.hooks.ring import (
    BATCH,
    BEGINS,
    CAPACITY,
    JOINS,
    S_COMPUTE,
    S_DATA_WAIT,
    S_OTHER,
    STEP,
    Ring,
    code,
)
from telemetry.hooks.samples import BatchCounts, BatchMark, BatchNumbering, BatchSizes, SampleCounter
from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION

# -- a ring that overflows: what is dropped is counted, and the ledger stays exact and never goes back -----------------


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
    numbering, ring = BatchNumbering(), Ring()
    begins = r.code(r.S_DATA_WAIT, r.S_COMPUTE, r.BEGINS)

    def epoch() -> None:
        ring.push(1, 2, begins, handle)
        ring.push(2, 3, r.STEP, handle)

    epoch()
    numbering.fold(ring.drain(1 << 20))
    while ring.head < ring.tail + r.WORDS:
        ring.push(3, 4, r.STEP)
    for _ in range(dropped):
        epoch()
    numbering.fold(ring.drain(1 << 20))
    handle.arrivals.clear()
    epoch()
    numbering.fold(ring.drain(1 << 20))
    assert not handle.arrivals
    epoch()
    numbering.fold(ring.drain(1 << 20))
    assert [(a.epoch, a.number) for a in handle.arrivals] == [(3 + dropped, 0)]


def test_a_wait_for_the_first_batch_that_was_dropped_is_the_first_wait():
    both = Both()
    for _ in range(CAPACITY + 1):
        both.span(0, 10, r.code(r.S_DATA_WAIT, r.S_STARTUP))
    both.check()
    assert both.ledger.first_wait_ns == both.ledger.ns[DATA_WAIT] == 10 * (CAPACITY + 1)


# -- what is read from the ring is the same whether it is read at once, batch by batch, or in any pieces between -------


JOINED = code(S_DATA_WAIT, S_COMPUTE, BATCH | JOINS)
BEGUN = code(S_OTHER, S_OTHER, BEGINS)


class Lengths:
    """Tokens: batch ``n`` has ``n + 1``."""

    def of(self, number: int, batches: int) -> tuple[None, int]:
        return None, sum(range(number + 1, number + batches + 1))


def pieces(entries: list, cuts: list[int]) -> list[list]:
    """The entries in pieces, some of which are empty."""
    edges = [0, *sorted(cut % (len(entries) + 1) for cut in cuts), len(entries)]
    return [entries[first:last] for first, last in zip(edges, edges[1:], strict=False)]


@given(
    epochs=st.lists(
        st.tuples(st.integers(1, 5), st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 12)), max_size=4
    ),
    cuts=st.lists(st.integers(0, 99), max_size=12),
    joined=st.sets(st.integers(0, 40)),
    replayed=st.integers(0, 2),
)
def test_samples_and_tokens(epochs, cuts, joined, replayed):
    entries: list = []
    for size, total, batches in epochs:
        mark = BatchMark(ON_THREAD, BatchCounts(BatchSizes(size, total), Lengths(), False), 0)
        for place in range(batches):
            number = len(entries)
            kind = JOINED if number in joined else STEP
            entries.append((10 * number, 10 * number + 5, kind, None if place else mark))

    def counted(parts: list[list]) -> tuple[int | None, int | None]:
        counter = SampleCounter()
        counter.settle(replayed)
        for part in parts:
            counter.fold(part)
        return counter.samples, counter.tokens(None)

    assert counted(pieces(entries, cuts)) == counted([[entry] for entry in entries])


@given(
    epochs=st.lists(st.integers(0, 8), max_size=4),
    cuts=st.lists(st.integers(0, 99), max_size=12),
    joined=st.sets(st.integers(0, 40)),
)
def test_numbers_of_batches_and_waits(epochs, cuts, joined):
    def numbered(in_pieces: bool) -> tuple[list, int]:
        iterator = SimpleNamespace(_workers=[SimpleNamespace(pid=1)])
        loader, entries = LoaderHandle(iterator, None), []
        for batches in epochs:
            entries.append((0, 0, BEGUN, loader))
            for place in range(batches):
                number = len(entries)
                kind = JOINED if number in joined else STEP
                entries.append((10 * number, 11 * number, kind, None if place else loader))
        numbering = BatchNumbering()
        for part in pieces(entries, cuts) if in_pieces else [[entry] for entry in entries]:
            numbering.fold(part)
        return list(loader.arrivals), numbering._waits.get(loader, 0)

    assert numbered(True) == numbered(False)
