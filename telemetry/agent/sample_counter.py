"""Counts the samples and tokens that the training took, on the agent thread."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from telemetry.attach.ring import BATCH, CLOSES, GAP, JOINS, OPENS, STRIDE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.attach.batch_sizes import BatchMarks, BatchSizes
    from telemetry.attach.ring import Entry

_MAX_REPLAYED: Final = 1 << 17
"""Steps before it is known how many of them threw their batches away. If it was more, the samples are not known."""


class SampleCounter:
    """Adds up the sizes of the batches in the ring. One batch of unknown size makes the whole sum unknown.

    Args:
        marks: which iteration the batches belong to.
    """

    def __init__(self, marks: BatchMarks) -> None:
        self._marks = marks
        self._sizes: BatchSizes | None = None
        self._number = 0
        self._sum = 0
        self._unknown = False
        self._batches = 0
        self._settled = False
        self._first: array[int] = array("q")  # the sum after each step, until `settle`
        self._in_step = False
        self._replayed = 0

    def fold(self, entries: Iterable[Entry], position: int) -> None:
        """Count entries of the ring, in their order.

        Args:
            entries: the entries.
            position: of the first one in the ring.
        """
        marks = self._marks.taken
        for _start, _end, code, _source in entries:
            if code & GAP:
                self._unknown = True
            if not self._settled:
                self._note_step(code)
            if not code & GAP and code & (BATCH | JOINS):
                while marks and marks[0].position <= position:
                    _, self._sizes, self._number = marks.popleft()
                size = None if self._sizes is None else self._sizes.of(self._number)
                self._number += 1
                self._batches += 1
                if size is None:
                    self._unknown = True
                else:
                    self._sum += size
            position += STRIDE
        self._unknown |= self._marks.lost

    def _note_step(self, code: int) -> None:
        """Keep the sum at the end of a step."""
        if code & CLOSES:
            if self._in_step and len(self._first) < _MAX_REPLAYED:
                self._first.append(self._sum)
            self._in_step = False
        if code & OPENS:
            self._in_step = True

    def settle(self, replayed_steps: int) -> None:
        """It is known how many of the first steps threw their batches away: the rest was trained."""
        if self._settled:
            return
        self._settled = True
        if replayed_steps > len(self._first):
            self._unknown = True
        elif replayed_steps:
            self._replayed = self._first[replayed_steps - 1]
        self._first = array("q")

    @property
    def samples(self) -> int | None:
        """Samples of the training batches so far; None if that is not known, or not yet."""
        if self._unknown or not self._batches or not self._settled:
            return None
        return self._sum - self._replayed
