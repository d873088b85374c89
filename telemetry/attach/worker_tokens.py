"""Reads the tokens of the batches that workers made, on the agent thread."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from telemetry.attach.token_table import BEGUN, COUNTED, FAILED, FOUND, LEFT, RAISED, SLOTS

if TYPE_CHECKING:
    from telemetry.attach.token_table import TokenTable
    from telemetry.attach.worker_block import WorkerBlock


class WorkerTokens:
    """Reads the tokens of the batches of an iteration, in the order in which they were delivered. On the agent thread.

    Until the first of them is read, it does not keep the block alive: the entry of that batch in the ring does.

    Args:
        block: of the loader. Its iteration is the one under way.
        number: of the first batch that is read, among those that were delivered. ``index``: by the worker's loop.
        every: as for `TokenWriter`.
    """

    __slots__ = ("_block", "_every", "_found", "_index", "_lost", "_number")

    def __init__(self, block: WorkerBlock, number: int, index: int, *, every: bool) -> None:
        self._found = weakref.ref(block)
        self._block: WorkerBlock | None = None
        self._number = number
        self._index = block.tokens.base + index
        self._every = every
        self._lost = index < 0

    @property
    def ended(self) -> bool:
        """Whether the iterator is gone, so that there is no more to come than what the ring has now."""
        return self._block is not None and self._block.retired

    def release(self) -> None:
        """Do not keep the block alive any more: `ended`, and all was read."""
        self._block, self._lost = None, True

    def of(self, number: int, batches: int = 1) -> int | None:
        """Tokens of ``batches`` from this number on; None if they are not known. Numbers must increase."""
        if self._block is None and not self._lost:
            self._block = self._found()
        if self._block is None or number < self._number:
            return None
        table = self._block.tokens
        if table.has(FAILED) or not table.has(BEGUN):
            return None
        if table.has(LEFT):
            return None if table.has(FOUND) else 0
        tokens = 0
        while self._number < number + batches and not self._lost:
            found = self._next(table) or 0
            tokens += found if self._number >= number else 0
            self._number += 1
        return None if self._lost else tokens

    def _next(self, table: TokenTable) -> int | None:
        for index in range(self._index, self._index + SLOTS):
            noted, code = table.read(index)
            if noted > index:
                break  # a later batch has this slot by now
            if noted == index:
                if code == RAISED:
                    continue
                self._index = index + 1
                return code - COUNTED
            if not self._every:
                self._index = index + 1
                return 0
            # Otherwise its worker had ended before, and no such batch was made.
        self._lost = True
        return None
