"""The ring between the training thread, which writes, and the agent thread, which reads.

One entry is a span of the training thread's time: two monotonic stamps and a code that says which category of the
ledger the thread was in between them, which one it is in afterwards, and whether a step closes or opens at its
start. Preallocated and without a lock: one writer, one reader, and every operation the two share is atomic under the
GIL. A full ring drops the entry and never waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP

if TYPE_CHECKING:
    from telemetry.attach.handle import Source

Entry = tuple[int, int, int, "Source | None"]
"""start, end (monotonic ns), code, and where the batch is from; None for the source of the entry before."""

CAPACITY: Final = 1 << 12
"""Entries. At one drain a second this is a step of 244 µs; faster loops than that lose entries, counted. The garbage
collector looks through the list in a full collection, so it is no longer than it has to be."""

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
"""A batch was delivered that adds to the open step."""
BEGINS: Final = 1 << 9
"""An iteration of the loader began: its batches are numbered from 0 again."""
LEAVES: Final = 1 << 11
"""The workers of an iteration that was left in the middle were stopped."""


def code(during: int, after: int, flags: int = 0) -> int:
    """Pack the category during a span, the one after it, and the flags."""
    return during | after << 3 | flags


STEP: Final = code(S_DATA_WAIT, S_COMPUTE, CLOSES | OPENS | BATCH)
"""The ordinary batch: closes the step before it, opens the next."""


class Ring:
    """Spans of the training thread, in one list: start, end, code and source to an entry.

    A list, because a store into it is one pointer: into an ``array`` it goes through the C library's argument parsing,
    which a real step has evicted from the caches, and costs twice as much there (`benchmarks/`: the floor, cold). For
    the same reason the code of an ordinary batch, and the None of a source that is the same as before, are not stored
    but stand there already; the reader puts them back.

    The hot path writes ``words`` and ``head`` itself: a method call would double its cost. Everything else goes
    through `push`. ``head`` and ``tail`` count words and only ever grow; ``limit`` is where the ring is full.

    Attributes:
        open: whether a step is open, after the newest entry.
        dropped: batches that found no room.
    """

    __slots__ = ("_unclosing", "dropped", "dropped_ns", "head", "limit", "open", "tail", "words")

    def __init__(self) -> None:
        self.words: list[Any] = [0, 0, STEP, None] * CAPACITY
        self.head = 0
        self.tail = 0
        self.limit = WORDS
        self.open = False
        self._unclosing = 0  # entries that closed no step; the short path writes none of these
        self.dropped = 0
        # What dropped spans took, by category: the ledger stays right where steps could not be kept.
        self.dropped_ns = [0] * len(CATEGORIES)

    def push(self, start: int, end: int, entry: int, source: Source | None = None) -> None:
        """Write one span, or count it as dropped."""
        head = self.head
        if head >= self.limit:
            self.drop(start, end, entry)
            return
        slot = head & MASK
        self.words[slot] = start
        self.words[slot + 1] = end
        self.words[slot + 2] = entry
        self.words[slot + 3] = source
        self.head = head + STRIDE
        if not (entry & CLOSES and self.open):
            self._unclosing += 1
        if entry & (CLOSES | OPENS):
            self.open = bool(entry & OPENS)

    @property
    def closed(self) -> int:
        """Steps that have ended, those dropped included: exact on the training thread, and free on the short path."""
        return self.head // STRIDE - self._unclosing + self.dropped

    def drop(self, start: int, end: int, entry: int) -> None:
        """Count a span that found no room."""
        if entry & BATCH:
            self.dropped += 1
        self.dropped_ns[entry & 7] += end - start

    def drain(self, limit: int, head: int | None = None) -> list[Entry]:
        """Take up to ``limit`` entries out, oldest first and none from ``head`` on."""
        tail = self.tail
        stop = min(self.head if head is None else head, tail + limit * STRIDE)
        words, taken = self.words, []
        while tail < stop:
            slot = tail & MASK
            taken.append((words[slot], words[slot + 1], words[slot + 2], words[slot + 3]))
            words[slot] = words[slot + 1] = 0  # not to keep the numbers alive
            words[slot + 2] = STEP
            words[slot + 3] = None
            tail += STRIDE
        self.tail = tail
        self.limit = tail + WORDS
        return taken
