"""Counts the samples and tokens that the training took, on the agent thread."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from telemetry.attach.ring import BATCH, GAP, JOINS, STRIDE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.attach.batch_sizes import BatchMarks, BatchSizes
    from telemetry.attach.ring import Entry

_MAX_REPLAYED: Final = 1 << 22
"""Batches before it is known which were thrown away. After more, the samples are not known."""


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
        self._first: array[int] = array("q")  # the sum after each batch, until `settle`
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
            elif code & (BATCH | JOINS):
                while marks and marks[0].position <= position:
                    _, self._sizes, self._number = marks.popleft()
                size = None if self._sizes is None else self._sizes.of(self._number)
                self._number += 1
                self._batches += 1
                if size is None:
                    self._unknown = True
                else:
                    self._sum += size
                if not self._settled and len(self._first) < _MAX_REPLAYED:
                    self._first.append(self._sum)
            position += STRIDE
        self._unknown |= self._marks.lost

    def settle(self, replayed_batches: int) -> None:
        """It is known how many of the first batches were thrown away: the rest was trained."""
        if self._settled:
            return
        self._settled = True
        if replayed_batches > len(self._first):
            self._unknown = True
        elif replayed_batches:
            self._replayed = self._first[replayed_batches - 1]
        self._first = array("q")

    @property
    def samples(self) -> int | None:
        """Samples of the training batches so far; None if that is not known, or not yet."""
        if self._unknown or not self._batches or not self._settled:
            return None
        return self._sum - self._replayed
