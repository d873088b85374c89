"""The ring between the training thread, which writes, and the agent thread, which reads."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from telemetry.util.clock import sleep

Entry = tuple[int, int, int, Any]
"""Start and end (monotonic ns), code, and source of the batch (a `BatchSource`, or a `BatchMark` with one). The source
None means the same source as before. With the code `GAP`, it is the sums of the dropped entries."""

CAPACITY: Final = 1 << 12
"""Entries. With one drain a second this is enough for steps of 244 µs. In faster loops entries are dropped and counted.
A full garbage collection visits the whole list, so it is no longer than needed."""

_MAX_READS: Final = 100
"""The reader tries this often to read the sums while the writer changes them. A change takes under a microsecond."""

STRIDE: Final = 4
WORDS: Final = CAPACITY * STRIDE
MASK: Final = WORDS - 1

_CODE_OF: Final = {name: index for index, name in enumerate(CATEGORIES)}
S_STARTUP: Final = _CODE_OF[STARTUP]
S_DATA_WAIT: Final = _CODE_OF[DATA_WAIT]
S_COMPUTE: Final = _CODE_OF[COMPUTE]
S_EVALUATION: Final = _CODE_OF[EVALUATION]
S_CHECKPOINT: Final = _CODE_OF[CHECKPOINT]
S_OTHER: Final = _CODE_OF[OTHER]

CLOSES: Final = 1 << 6
"""A step ends at the entry's start."""
OPENS: Final = 1 << 7
"""A step begins at the entry's start."""
BATCH: Final = 1 << 8
"""A training batch was delivered at the entry's end."""
JOINS: Final = 1 << 10
"""A batch was delivered and added to the open step."""
BEGINS: Final = 1 << 9
"""An iteration of the loader began. Its batches are numbered from 0."""
LEAVES: Final = 1 << 11
"""The workers of an iteration were stopped before its end."""
GAP: Final = 1 << 12
"""This is no span: it has the sums of the entries that were dropped here."""


def code(during: int, after: int, flags: int = 0) -> int:
    """Make one number of the category during a span, the category after it, and the flags."""
    return during | after << 3 | flags


STEP: Final = code(S_DATA_WAIT, S_COMPUTE, CLOSES | OPENS | BATCH)
"""The ordinary batch: it closes the step before it and opens the next."""

_UNWRITTEN: Final = (0, 0, STEP, None)
"""An entry before the fast path stores its two stamps."""


class DroppedSpans(NamedTuple):
    """The sums of one stretch of spans that did not fit into the ring, from its first span to its newest.

    Stamps are monotonic nanoseconds; categories are indices into `CATEGORIES`.

    Attributes:
        stretch: number of the stretch in this run, from 1. No span was kept between the spans of one stretch.
        start_ns, end_ns: start of its first span, end of its newest.
        ns: time by category. The sum is ``end_ns - start_ns``.
        first, category: category of the training thread during the first span, and after the newest.
        entered_ns: when the thread entered ``category``; 0 if it has been in it since the start.
        steps, batches: steps that ended, and training batches that came.
        last_step_ns: end of the newest of those steps; 0 for none.
        open: whether a step is open after the newest span. ``opened``: whether a step was opened in this stretch.
        wait_ns, compute_ns, checkpoint: wait and compute of the newest step in this stretch, and whether it has a
            checkpoint in this stretch.
    """

    stretch: int
    start_ns: int
    end_ns: int
    ns: tuple[int, ...]
    first: int
    category: int
    entered_ns: int
    steps: int
    batches: int
    last_step_ns: int
    open: bool
    opened: bool
    wait_ns: int
    compute_ns: int
    checkpoint: bool


class Ring:
    """Spans of the training thread, in one list with four words per entry: start, end, code and source.

    It is a list because storing into a list writes one pointer. Storing into an ``array`` parses arguments in C, which
    takes twice as long when a real step has evicted that code from the caches (`benchmarks/`: the floor, cold). For the
    same reason the code of an ordinary batch, and None for an unchanged source, are not stored: the reader resets each
    entry to them.

    The fast path writes ``words`` and ``head`` itself: a method call would double its cost. Everything else goes
    through `push`. ``head`` and ``tail`` count words and never decrease. ``limit`` is how far the writer may go before
    it has to check where the reader is, or the fast path has to end. Only the writer sets it, and it does not rise
    while entries are being dropped. So the fast path stores nothing before the sums of the dropped entries are in their
    place.

    Attributes:
        open: whether a step is open after the newest entry.
        dropped: steps that were dropped because the ring was full when they ended.
    """

    __slots__ = ("_lost", "_stretch", "_stretches", "_unclosing", "dropped", "head", "limit", "open", "tail", "words")

    def __init__(self) -> None:
        self.words: list[Any] = [*_UNWRITTEN] * CAPACITY
        self.head = 0
        self.tail = 0
        self.limit = WORDS
        self.open = False
        self._unclosing = 0  # entries that closed no step; the fast path writes no such entries
        self.dropped = 0
        self._lost: DroppedSpans | None = None
        self._stretch: _Stretch | None = None  # while spans are being dropped
        self._stretches = 0

    def push(self, start: int, end: int, entry: int, source: Any = None) -> None:
        """Write one span (see `Entry`). If the ring is full, add it to the dropped ones."""
        stretch = self._stretch
        if stretch is not None and entry == STEP and self.open and self.head + 2 * STRIDE > self.tail + WORDS:
            stretch.add_step(start, end)  # the fast path, while the ring is full
            self.dropped += 1
            return
        closes = bool(entry & CLOSES) and self.open
        if self.head < self.limit or self._find_room():
            self._store(start, end, entry, source)
            self._unclosing += not closes
            if entry & (CLOSES | OPENS):
                self.open = bool(entry & OPENS)
            return
        if entry & (CLOSES | OPENS):
            self.open = bool(entry & OPENS)
        if self._stretch is None:
            self._stretches += 1
            stretch = _Stretch(self._stretches, start, entry & 7)
            stretch.add(start, end, entry, closes=closes, is_open=self.open)
            self._stretch = stretch
        else:
            self._stretch.add(start, end, entry, closes=closes, is_open=self.open)
        self.dropped += closes

    @property
    def lost(self) -> DroppedSpans | None:
        """The sums of the newest stretch of dropped spans, for the reader; None before the first.

        Read it before ``head``. Then the entries before ``head`` come before the stretch, or contain it.
        """
        stretch = self._stretch
        sums = stretch.read() if stretch is not None else None
        return sums if sums is not None else self._lost

    @property
    def closed(self) -> int:
        """Steps that have ended, with dropped ones. Exact on the training thread; costs the fast path nothing."""
        return self.head // STRIDE - self._unclosing + self.dropped

    def drain(self, limit: int, head: int | None = None) -> list[Entry]:
        """Take out up to ``limit`` entries, oldest first, and none from ``head`` on."""
        tail = self.tail
        stop = min(self.head if head is None else head, tail + limit * STRIDE)
        words = self.words
        taken: list[Entry] = []
        while tail < stop:
            begin = tail & MASK
            end = min(begin + stop - tail, WORDS)
            part = words[begin:end]
            taken += zip(part[0::STRIDE], part[1::STRIDE], part[2::STRIDE], part[3::STRIDE], strict=True)
            words[begin:end] = _UNWRITTEN * (len(part) // STRIDE)  # also frees the numbers
            tail += len(part)
        self.tail = tail
        return taken

    def _store(self, start: int, end: int, entry: int, source: Any) -> None:
        head = self.head
        slot = head & MASK
        self.words[slot] = start
        self.words[slot + 1] = end
        self.words[slot + 2] = entry
        self.words[slot + 3] = source
        self.head = head + STRIDE

    def _find_room(self) -> bool:
        """Check how far the reader is. Sums of dropped spans go in first, and need an entry themselves."""
        limit = self.tail + WORDS
        dropped = self._stretch.sums() if self._stretch is not None else None
        if self.head + (2 if dropped is not None else 1) * STRIDE > limit:
            return False
        if dropped is not None:
            self._store(dropped.start_ns, dropped.end_ns, GAP, dropped)
            self._unclosing += 1
            self._lost = dropped
            self._stretch = None
        self.limit = limit
        return True


class _Stretch:
    """Adds up consecutive dropped spans as the reader would.

    The writer changes it in several stores, and the reader may read in between. So ``_version`` is odd during a change.
    A new object for every span would cost the writer 1.5 µs more per step (7 µs steps, a full ring).
    """

    __slots__ = (
        "_batches", "_category", "_checkpoint", "_compute_ns", "_end", "_entered", "_first", "_is_open", "_last_step",
        "_ns", "_number", "_opened", "_start", "_steps", "_version", "_wait_ns",
    )  # fmt: skip

    def __init__(self, number: int, start: int, first: int) -> None:
        self._version = 0
        self._number = number
        self._start = self._end = start
        self._first = self._category = first
        self._entered = 0
        self._ns = [0] * len(CATEGORIES)
        self._steps = self._batches = self._last_step = 0
        self._is_open = self._opened = False
        self._wait_ns = self._compute_ns = 0
        self._checkpoint = first == S_CHECKPOINT

    def add_step(self, start: int, end: int) -> None:
        """Add an ordinary span: a step ends with it and the next one begins."""
        passed, waited = start - self._end, end - start
        if self._category != S_COMPUTE or passed < 0 or waited < 0:
            self.add(start, end, STEP, closes=True, is_open=True)
            return
        self._version |= 1
        ns = self._ns
        ns[S_COMPUTE] += passed
        ns[S_DATA_WAIT] += waited
        self._end = self._entered = end
        self._steps += 1
        self._batches += 1
        self._last_step = start
        self._is_open = self._opened = True
        self._wait_ns, self._compute_ns, self._checkpoint = waited, 0, False
        self._version += 1

    def add(self, start: int, end: int, entry: int, *, closes: bool, is_open: bool) -> None:
        """Add any span. ``closes``: a step ends with it. ``is_open``: a step is open after it."""
        self._version |= 1
        self._pass(start)
        if closes:
            self._steps += 1
            self._last_step = start
        if entry & OPENS:
            self._opened = True
            self._wait_ns = self._compute_ns = 0
            self._checkpoint = False
        self._enter(entry & 7, start)
        self._pass(end)
        self._enter(entry >> 3 & 7, end)
        self._batches += bool(entry & (BATCH | JOINS))
        self._is_open = is_open
        self._version += 1

    def read(self) -> DroppedSpans | None:
        """The sums, for the reader; None if the writer was changing them at every try."""
        for _ in range(_MAX_READS):
            version = self._version
            if not version & 1:
                sums = self.sums()
                if self._version == version:
                    return sums
            sleep(0)
        return None

    def sums(self) -> DroppedSpans:
        return DroppedSpans(
            self._number,
            self._start,
            self._end,
            tuple(self._ns),
            self._first,
            self._category,
            self._entered,
            self._steps,
            self._batches,
            self._last_step,
            self._is_open,
            self._opened,
            self._wait_ns,
            self._compute_ns,
            self._checkpoint,
        )

    def _pass(self, stamp: int) -> None:
        passed = stamp - self._end
        if passed <= 0:
            return
        self._end = stamp
        self._ns[self._category] += passed
        if self._category == S_DATA_WAIT:
            self._wait_ns += passed
        elif self._category == S_COMPUTE:
            self._compute_ns += passed

    def _enter(self, category: int, stamp: int) -> None:
        if category != self._category:
            self._category, self._entered = category, stamp
            self._checkpoint |= category == S_CHECKPOINT
