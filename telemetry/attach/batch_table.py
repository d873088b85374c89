"""The part of the shared block in which workers write how many samples and tokens each batch has, by its number.

The DataLoader numbers the batches of an iteration from 0, whichever worker makes them. Kept workers make several
iterations: ``base`` is the sum of the numbers that earlier ones have used, so that the numbers here go on. An iteration
may be over, and the next one under way, before the agent reads the first. Batch number ``n`` has slot ``n % SLOTS``,
with the number, the tokens and the samples. A worker writes before it sends the batch, so what has been delivered is
there. The kernel gives memory for these pages only when they are written.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Final

from telemetry.attach.batch_tokens import tokens_in
from telemetry.attach.fetched_samples import FetchedSamples
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from mmap import mmap

SLOTS: Final = 4096
"""As many as the ring has entries."""

_HEAD_BYTES: Final = 64
_SLOT: Final = struct.Struct("=3q")
TABLE_BYTES: Final = _HEAD_BYTES + SLOTS * _SLOT.size

RAISED: Final = 0
COUNTED: Final = 1
"""What a slot says: the fetch has raised, or this plus the tokens."""

UNKNOWN: Final = -1
"""Samples of a batch for which they are not known, or not asked for."""

_BASE: Final = struct.Struct("=q")
_BASE_AT: Final = 8
_MAX_CODE: Final = (1 << 32) - 1
_MAX_NUMBER: Final = 1 << 30
_MAX_FRAMES: Final = 8

LOOKS: Final = 16
"""A worker whose first so many batches have no tokens does not look at any more."""

BEGUN, FAILED, FOUND, LEFT, LOST, WANTED = range(6)
"""Bytes of the head: a worker has begun; one has had a batch whose tokens are not known; one has found tokens; one does
not look for them any more; one could not note a batch. WANTED is set before the workers start: note the samples."""


class BatchTable:
    """The samples and tokens of the newest batches of a loader.

    Args:
        memory: the shared block.
        start: offset of the table.
    """

    __slots__ = ("_memory", "_start")

    def __init__(self, memory: mmap, start: int) -> None:
        self._memory = memory
        self._start = start

    @property
    def base(self) -> int:
        """What is added to the numbers of the iteration that is under way."""
        base: int = _BASE.unpack_from(self._memory, self._start + _BASE_AT)[0]
        return base

    def begin_again(self, used: int) -> None:
        """Another iteration begins with the same workers. ``used``: numbers of the one before. Training thread only."""
        _BASE.pack_into(self._memory, self._start + _BASE_AT, self.base + used)

    def write(self, number: int, code: int, samples: int = UNKNOWN) -> None:
        """Note a batch. Used by the worker that makes it."""
        at = self._start + _HEAD_BYTES + number % SLOTS * _SLOT.size
        _SLOT.pack_into(self._memory, at, number + 1, min(code, _MAX_CODE), samples)

    def read(self, number: int) -> tuple[int, int, int]:
        """The number (-1 for none), the code and the samples that are in the slot of this batch number."""
        at = self._start + _HEAD_BYTES + number % SLOTS * _SLOT.size
        noted, code, samples = _SLOT.unpack_from(self._memory, at)
        return noted - 1, code, samples

    def has(self, what: int) -> bool:
        """Whether a byte of the head is set."""
        return self._memory[self._start + what] != 0

    def set(self, what: int) -> None:
        """Set a byte of the head."""
        self._memory[self._start + what] = 1


class BatchWriter:
    """Notes the batches that a worker makes.

    Args:
        table: of its loader.
        stream: the data set is iterable. Its workers end at different times, and then the numbers that were noted tell
            which batches there are. So all batches are noted, also those without tokens. Where samples are wanted, too.
    """

    __slots__ = ("_base", "_every", "_looking", "_looks_left", "_samples", "_table")

    def __init__(self, table: BatchTable, *, stream: bool) -> None:
        self._table = table
        self._samples = FetchedSamples(stream=stream) if table.has(WANTED) else None
        self._every = stream or self._samples is not None
        self._looking = True
        self._looks_left = LOOKS
        self._base = 0
        table.set(BEGUN)

    def iteration_begins(self, fetcher: object) -> None:
        """The next fetch is the worker's first of an iteration. One that was left may have had fetches until now.

        Never raises.
        """
        self._base = self._table.base
        if self._samples is not None:
            try:
                self._samples.begin(fetcher)
            except Exception as error:
                let_pass(error)
                self._table.set(LOST)

    def made(self, indices: object, batch: object) -> bool:
        """A fetch has made this batch. Returns whether it wants more of them. Never raises."""
        try:
            tokens = self._tokens_of(batch) if self._looking else 0
        except Exception as error:
            let_pass(error)
            self._table.set(FAILED)
            tokens = 0
        try:
            samples = None if self._samples is None else self._samples.of(indices)
            if tokens or self._every:
                self._note(COUNTED + tokens, UNKNOWN if samples is None else samples)
        except Exception as error:
            let_pass(error)
            self._table.set(LOST)
        return self._looking or self._samples is not None

    def raised(self) -> None:
        """A fetch has raised. Its number is used up. Never raises."""
        try:
            self._note(RAISED, UNKNOWN)
        except Exception as error:
            let_pass(error)
            self._table.set(LOST)

    def _tokens_of(self, batch: object) -> int:
        tokens = tokens_in(batch)
        if tokens is None:
            self._table.set(FAILED)
            self._looking = False
            return 0
        if self._looks_left:
            self._looks_left = 0 if tokens else self._looks_left - 1
            if tokens:
                self._every = True
                self._table.set(FOUND)
            elif not self._looks_left and not self._table.has(FOUND):
                self._table.set(LEFT)
                self._looking = False
        return tokens

    def _note(self, code: int, samples: int) -> None:
        number = _batch_number()
        if number is None or not 0 <= number < _MAX_NUMBER:
            self._table.set(LOST)
        else:
            self._table.write(self._base + number, code, samples)


def _batch_number() -> int | None:
    """The number of the batch that is made, from the worker's loop; None if that is not torch's loop.

    Nothing else tells it: the fetcher gets only indices, and workers of an iterable data set take no turns once one has
    ended.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame.f_code.co_name == "_worker_loop":
            found = frame.f_locals
            number = found.get("idx")
            if type(found) is dict:  # up to Python 3.12: a copy that the frame keeps, and in it an old fetcher
                found.clear()
            return number if type(number) is int else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
