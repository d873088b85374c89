"""Reads the samples and tokens of the batches that workers made, on the agent thread."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from telemetry.attach.batch_table import BEGUN, COUNTED, FAILED, FOUND, LEFT, LOST, RAISED, SLOTS, UNKNOWN

if TYPE_CHECKING:
    from telemetry.attach.batch_table import BatchTable
    from telemetry.attach.worker_block import WorkerBlock


_TOKENS, _SAMPLES = range(2)


class _WorkerCounts:
    """Reads the batches of an iteration, in the order in which they were delivered. On the agent thread.

    Until the first of them is read, it does not keep the block alive: the entry of that batch in the ring does.

    Args:
        block: of the loader. Its iteration is the one under way.
        number: of the first batch that is read, among those that were delivered. ``index``: by the worker's loop.
        every: whether workers note each batch. Then a number that is not there was not used.
    """

    __slots__ = ("_block", "_every", "_found", "_index", "_lost", "_number")

    def __init__(self, block: WorkerBlock, number: int, index: int, *, every: bool) -> None:
        self._found = weakref.ref(block)
        self._block: WorkerBlock | None = None
        self._number = number
        self._index = block.batches.base + index
        self._every = every
        self._lost = index < 0

    @property
    def ended(self) -> bool:
        """Whether the iterator is gone, so that there is no more to come than what the ring has now."""
        return self._block is not None and self._block.retired

    def release(self) -> None:
        """Do not keep the block alive any more: `ended`, and all was read."""
        self._block, self._lost = None, True

    def _table(self, number: int) -> BatchTable | None:
        """The table; None if nothing is known of the batches from this number on."""
        if self._block is None and not self._lost:
            self._block = self._found()
        if self._block is None or number < self._number:
            return None
        table = self._block.batches
        return None if table.has(LOST) or not table.has(BEGUN) else table

    def _sum(self, table: BatchTable, number: int, batches: int, which: int) -> int | None:
        """One of the counts of ``batches`` from this number on; None if one is not known. Numbers must increase."""
        counts = []
        while self._number < number + batches and not self._lost:
            found = self._next(table)
            if self._number >= number:
                counts.append(found[which])
            self._number += 1
        return None if self._lost or UNKNOWN in counts else sum(counts)

    def _next(self, table: BatchTable) -> tuple[int, int]:
        """The tokens and samples of the next batch."""
        for index in range(self._index, self._index + SLOTS):
            noted, code, samples = table.read(index)
            if noted > index:
                break  # a later batch has this slot by now
            if noted == index:
                if code == RAISED:
                    continue
                self._index = index + 1
                return code - COUNTED, samples
            if not self._every:
                self._index = index + 1
                return 0, UNKNOWN
            # Otherwise its worker had ended before, and no such batch was made.
        self._lost = True
        return UNKNOWN, UNKNOWN


class WorkerTokens(_WorkerCounts):
    """Reads the tokens of the batches of an iteration."""

    __slots__ = ()

    def of(self, number: int, batches: int = 1) -> int | None:
        """Tokens of ``batches`` from this number on; None if they are not known. Numbers must increase."""
        table = self._table(number)
        if table is None or table.has(FAILED):
            return None
        if table.has(LEFT):
            return None if table.has(FOUND) else 0
        return self._sum(table, number, batches, _TOKENS)


class WorkerSamples(_WorkerCounts):
    """Reads the samples of the batches of an iteration, if its workers note them."""

    __slots__ = ()

    def __init__(self, block: WorkerBlock, number: int, index: int) -> None:
        super().__init__(block, number, index, every=True)

    def of(self, number: int, batches: int = 1) -> int | None:
        """Samples of ``batches`` from this number on; None if they are not known. Numbers must increase."""
        table = self._table(number)
        return None if table is None else self._sum(table, number, batches, _SAMPLES)
