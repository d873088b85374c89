"""The ring between the training thread, which writes, and the agent thread, which reads."""

from __future__ import annotations

from typing import Any, Final

from telemetry.model.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP

Entry = tuple[int, int, int, Any]
"""Start and end (monotonic ns), code, and source of the batch (a `BatchSource`, or a `BatchMark` with one). The source
None means the same source as before. With the code `GAP`, it is the number of steps that were dropped so far."""

CAPACITY: Final = 1 << 12
"""Entries. With one drain a second this is enough for steps of 244 µs. In faster loops entries are dropped and counted.
A full garbage collection visits the whole list, so it is no longer than needed."""

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
ENDS: Final = 1 << 13
"""The request found the end of the iteration, whose last batch was read ahead: its step begins now."""
GAP: Final = 1 << 12
"""Spans were dropped from the entry's start to its end. With `OPENS`, a step is open at its end."""


def code(during: int, after: int, flags: int = 0) -> int:
    """Make one number of the category during a span, the category after it, and the flags."""
    return during | after << 3 | flags


STEP: Final = code(S_DATA_WAIT, S_COMPUTE, CLOSES | OPENS | BATCH)
"""The ordinary batch: it closes the step before it and opens the next."""

_UNWRITTEN: Final = (0, 0, STEP, None)
"""An entry before the fast path stores its two stamps."""


class Ring:
    """Spans of the training thread, in one list with four words per entry: start, end, code and source.

    It is a list because storing into a list writes one pointer. Storing into an ``array`` parses arguments in C, which
    takes twice as long when a real step has evicted that code from the caches (`benchmarks/`: the floor, cold). For the
    same reason the code of an ordinary batch, and None for an unchanged source, are not stored: the reader resets each
    entry to them.

    The fast path writes ``words`` and ``head`` itself: a method call would double its cost. Everything else goes
    through `push`. ``head`` and ``tail`` count words and never decrease. ``limit`` is how far the writer may go before
    it has to check where the reader is, or the fast path has to end. Only the writer sets it, and it does not rise
    while entries are being dropped. So the fast path stores nothing before the entry of the gap.

    If the ring is full, spans are dropped. The first that fits again comes after a gap: its time is no part of a step,
    and the steps that ended in it are only counted.

    Attributes:
        open: whether a step is open after the newest entry.
        dropped: steps that ended in gaps.
        gap_since: start of the first span that was dropped; 0 if the newest was not.
        held: spans that wait until it is known what they are; None if none wait. ``held_since``: start of the first.
    """

    __slots__ = (
        *("_unclosing", "dropped", "gap_since", "head", "held", "held_since"),
        *("limit", "open", "tail", "words"),
    )

    def __init__(self) -> None:
        self.words: list[Any] = [*_UNWRITTEN] * CAPACITY
        self.head = 0
        self.tail = 0
        self.limit = WORDS
        self.open = False
        self._unclosing = 0  # entries that closed no step; the fast path writes no such entries
        self.dropped = 0
        self.gap_since = 0
        self.held: list[Entry] | None = None
        self.held_since = 0

    def hold(self, since: int) -> None:
        """Keep the spans from here on back. The fast path must be off. ``since``: monotonic ns."""
        self.held_since, self.held = since, []

    def push(self, start: int, end: int, entry: int, source: Any = None) -> None:
        """Write one span (see `Entry`). If the ring is full, drop it."""
        if self.held is not None:
            self.held.append((start, end, entry, source))
            return
        was_open = self.open
        closes = bool(entry & CLOSES) and was_open
        if entry & (CLOSES | OPENS):
            self.open = bool(entry & OPENS)
        if self.head < self.limit or self._find_room(start, was_open=was_open):
            self._store(start, end, entry, source)
            self._unclosing += not closes
            return
        self.gap_since = self.gap_since or start
        self.dropped += closes

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

    def _find_room(self, start: int, *, was_open: bool) -> bool:
        """Check how far the reader is. After dropped spans, an entry of the gap up to ``start`` goes in first."""
        limit, gap = self.tail + WORDS, self.gap_since
        if self.head + (2 if gap else 1) * STRIDE > limit:
            return False
        if gap:
            self._store(gap, start, code(S_OTHER, S_OTHER, GAP | (OPENS if was_open else 0)), self.dropped)
            self._unclosing += 1
            self.gap_since = 0
        self.limit = limit
        return True
