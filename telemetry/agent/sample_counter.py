"""Counts the samples and tokens that the training took, on the agent thread."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from telemetry.hooks.ring import BATCH, CLOSES, GAP, JOINS, OPENS, STEP, STRIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.attach.batch_sizes import BatchCounts, BatchMarks
    from telemetry.hooks.ring import Entry

_MAX_REPLAYED: Final = 1 << 17
"""Steps before it is known how many of them threw their batches away. If it was more, the samples are not known."""


class SampleCounter:
    """Adds up the sizes of the batches in the ring, and their tokens.

    One batch of unknown size makes the whole sum unknown.

    Args:
        marks: which iteration the batches belong to.
    """

    def __init__(self, marks: BatchMarks) -> None:
        self._marks = marks
        self._sizes: BatchCounts | None = None
        self._tokens_of: BatchCounts | None = None
        self._number = 0
        self._samples = _TrainedSum()
        self._tokens = _TrainedSum()
        self._tokens_before = 0  # that were counted when the script began to tell them
        self._settled = False
        self._in_step = False

    def fold(self, entries: Sequence[Entry], position: int) -> None:
        """Count entries of the ring, in their order.

        Args:
            entries: the entries.
            position: of the first one in the ring.
        """
        marks, after = self._marks.taken, position + len(entries) * STRIDE
        same = self._settled and (not marks or marks[0].position >= after)
        if not same or any(entry[2] != STEP for entry in entries):
            self._fold_each(entries, position)
        elif entries:
            self._add_batches(len(entries))
        if self._marks.lost:
            self._samples.add(None)
            self._tokens.add(None)

    def _add_batches(self, batches: int) -> None:
        """The next batches of the same iteration."""
        sizes, tokens, number = self._sizes, self._tokens_of, self._number
        self._samples.add(None if sizes is None else sizes.of(number, batches))
        self._tokens.add(None if tokens is None else tokens.of(number, batches))
        self._number += batches

    def _fold_each(self, entries: Sequence[Entry], position: int) -> None:
        marks = self._marks.taken
        for _start, _end, code, _source in entries:
            if code & GAP:
                self._samples.add(None)
                self._tokens.add(None)
            if not self._settled:
                self._note_step(code)
            if not code & GAP and code & (BATCH | JOINS):
                while marks and marks[0].position <= position:
                    _, self._sizes, self._tokens_of, self._number = marks.popleft()
                self._add_batches(1)
            position += STRIDE

    @property
    def ended(self) -> list[BatchCounts]:
        """The counts of an iteration of which no batch is to come that the ring does not have yet."""
        return [counts for counts in (self._sizes, self._tokens_of) if counts is not None and counts.ended]

    def forget(self, ended: list[BatchCounts]) -> None:
        """The ring was read since they had `ended`. They would keep the memory of the workers."""
        for counts in ended:
            if counts is self._sizes:
                self._sizes = None
            elif counts is self._tokens_of:
                self._tokens_of = None
            else:
                continue
            counts.release()

    def _note_step(self, code: int) -> None:
        """Keep the sums at the end of a step."""
        if code & CLOSES:
            if self._in_step:
                self._samples.step_ended()
                self._tokens.step_ended()
            self._in_step = False
        if code & OPENS:
            self._in_step = True

    def settle(self, replayed_steps: int) -> None:
        """It is known how many of the first steps threw their batches away: the rest was trained."""
        if not self._settled:
            self._settled = True
            self._samples.settle(replayed_steps)
            self._tokens.settle(replayed_steps)

    @property
    def samples(self) -> int | None:
        """Samples of the training batches so far; None if that is not known, or not yet."""
        return self._samples.trained

    def tokens(self, told: int | None) -> int | None:
        """Tokens of the training batches so far; None if that is not known, or not yet.

        Args:
            told: tokens that the script has told, which count instead from then on; None if it tells none.
        """
        if told is not None:
            return self._tokens_before + told
        counted = self._tokens.trained or None  # batches without `input_ids` are no 0 tokens
        self._tokens_before = counted or self._tokens_before
        return counted


class _TrainedSum:
    """One sum over the training batches."""

    __slots__ = ("_first", "_known", "_settled", "_sum")

    def __init__(self) -> None:
        self._sum = 0
        self._known: bool | None = None  # None before the first batch
        self._settled = False
        self._first: array[int] = array("q")  # the sum after each step, until `settle`

    def add(self, count: int | None) -> None:
        """Add a batch; None makes the sum unknown."""
        if count is None:
            self._known = False
        elif self._known is not False:
            self._known = True
            self._sum += count

    def step_ended(self) -> None:
        """Keep the sum so far."""
        if len(self._first) < _MAX_REPLAYED:
            self._first.append(self._sum)

    def settle(self, replayed_steps: int) -> None:
        """Take the batches of the first steps out of the sum."""
        if replayed_steps > len(self._first):
            self._known = False
        elif replayed_steps:
            self._sum -= self._first[replayed_steps - 1]
        self._first = array("q")
        self._settled = True

    @property
    def trained(self) -> int | None:
        """The sum; None if it is not known, or not yet."""
        return self._sum if self._known and self._settled else None
