"""Follows which batches the training takes: where they come from, their waits, and how many samples they have.

On the slow path the tracker notes the iteration in a batch's entry of the ring (`BatchMark`). From there on the agent
thread gives each batch its place in its iteration, so that it can be matched with its fetch.

A batch has as many samples as indices. Workers count these (`seams.worker`). Without workers it has the loader's batch
size, and the last one has what is left. If an unknown sampler draws the indices, that one counts as a whole batch.
"""

from __future__ import annotations

from itertools import count, repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.model.records import FETCH_BUCKETS, Histogram
from telemetry.seams import loaders
from telemetry.seams.loaders import ON_THREAD, Arrival, BatchSource, LoaderHandle
from telemetry.seams.ring import BATCH, BEGINS, ENDS, GAP, JOINS, S_DATA_WAIT, STEP
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.seams.ring import Entry


class BatchMark(NamedTuple):
    """Stands for the source of a batch in the ring, where another iteration's batches begin or go on.

    Attributes:
        source: where they come from.
        place: the place in its iteration of this batch, or of the next one if the entry has none. None if it is
            unknown.
        epoch: the number of the iteration, as its workers count them; 0 if none of them count.
        size: samples of a batch of a loader without workers; None if unknown.
        left: samples that such a loader has still to give, with this batch; None if unknown.
    """

    source: BatchSource
    place: int | None
    epoch: int
    size: int | None = None
    left: int | None = None


def mark_of(iterator: object, source: BatchSource, *, late: bool = False) -> BatchMark:
    """The mark of the newest batch of an iterator. ``late``: it stands for the batch before, which was read ahead."""
    inside = loaders.unwrapped(iterator)
    place, size, left = None, None, None
    if isinstance(source, LoaderHandle):
        received = loaders.own_value(inside, "_rcvd_idx") if source.block is not None and source.in_order else None
        place = received - 1 if isinstance(received, int) and received > 0 else None
    elif source is ON_THREAD:
        size, left = loaders.batch_size_of(inside), loaders.samples_left(inside)
        left = left if left is None or size is None else left + late * size
    return BatchMark(source, place, _epoch_of(source), size, left)


def iteration_begins(loader: LoaderHandle) -> BatchMark:
    """The mark of the start of an iteration with workers."""
    return BatchMark(loader, 0, _epoch_of(loader))


def _epoch_of(source: BatchSource) -> int:
    return source.block.head.iteration if isinstance(source, LoaderHandle) and source.block is not None else 0


# -- on the agent thread -----------------------------------------------------------------------------------------------

_LAST_BUCKET: Final = len(FETCH_BUCKETS)


class TrainedBatches:
    """Follows the batches in the ring: their places, the waits for each source, and samples."""

    def __init__(self) -> None:
        self._source: BatchSource | None = None  # of the newest batches
        self._size: int | None = None
        self._left: int | None = None
        self._place: int | None = None  # of the next batch
        self._waits: dict[BatchSource, int] = {}
        self._own_counts = [0] * (_LAST_BUCKET + 1)
        self._own_ns = 0
        self._samples = 0  # of all but the iterations with workers that go on
        self._taken: dict[LoaderHandle, int] = {}  # batches of those
        self._unknown = False
        self._replayed: int | None = None
        self._newest = 0

    def fold(self, entries: Sequence[Entry]) -> None:
        """Follow entries of the ring in the order in which they happened."""
        if entries and all(code == STEP and source is None for _, _, code, source in entries):
            starts, ends, _, _ = zip(*entries, strict=True)
            self._take(starts, ends)
            return
        for start, end, code, origin in entries:
            if code & GAP:
                self._place, self._unknown = None, True
                self._move(0)
                continue
            if isinstance(origin, BatchMark):
                self._go_on(origin, ends=bool(code & ENDS))
            source = self._source if origin is None or isinstance(origin, BatchMark) else origin
            if code & (BATCH | JOINS):
                self._source = source
                self._take((start,), (end,), waited=code & 7 == S_DATA_WAIT and not code & ENDS)
            elif origin is not None and not code & BEGINS:  # it was not for training, or raised
                if code & 7 == S_DATA_WAIT:
                    self._wait(source, (start,), (end,))
                if source is self._source:
                    self._move(1)

    def _go_on(self, mark: BatchMark, *, ends: bool) -> None:
        """Begin an iteration, or go on with another one. ``ends``: the loader has nothing left but a last batch."""
        source = mark.source
        if isinstance(source, LoaderHandle) and source.epoch != mark.epoch:
            self._close(source)
            source.epoch = mark.epoch
        if mark.place is not None or source is not self._source:  # else it goes on from where it began
            self._place = mark.place
        self._source, self._size = source, mark.size
        if mark.size is not None and not ends:
            self._left = mark.left
        self._move(0)

    def _take(self, starts: Sequence[int], ends: Sequence[int], *, waited: bool = True) -> None:
        """Count consecutive training batches of one iteration. ``waited``: this thread has requested them."""
        source, batches = self._source, len(starts)
        if isinstance(source, LoaderHandle):
            self._taken[source] = self._taken.get(source, 0) + batches
        elif self._size is not None:
            samples = batches * self._size
            if self._left is not None:
                samples = min(samples, self._left)
                self._left -= samples
            self._samples += samples
        else:
            self._unknown = True
        if waited:
            self._wait(source, starts, ends)
        self._move(batches)

    def _close(self, loader: LoaderHandle) -> None:
        """End an iteration with workers: all its batches were read from the ring."""
        self._samples += self._of_workers(loader)
        self._taken.pop(loader, None)

    def _of_workers(self, loader: LoaderHandle) -> int:
        """Samples of the batches taken from an iteration with workers: as many as theirs have in the mean."""
        taken = self._taken.get(loader, 0)
        samples, batches = loader.samples() if taken else (0, 1)
        if not batches:
            self._unknown = True
            return 0
        return round(taken * samples / batches)

    def _wait(self, source: BatchSource | None, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Count waits for consecutive batches of one source."""
        if source is None:
            return
        waited = sum(ends) - sum(starts)
        self._waits[source] = self._waits.get(source, 0) + waited
        if source is ON_THREAD:  # without workers the wait is the fetch
            self._own_ns += waited
            for start, end in zip(starts, ends, strict=True):
                self._own_counts[min(((end - start) >> 20).bit_length(), _LAST_BUCKET)] += 1  # as in `seams.worker`
        elif isinstance(source, LoaderHandle) and source is self._source and source.delivered is not None:
            source.arrivals.extend(map(Arrival, repeat(source.epoch), count(source.delivered), starts, ends))

    def _move(self, batches: int) -> None:
        """Go on by some batches. Those of an iteration that began in the middle have no place among the fetches."""
        if self._place is not None:
            self._place += batches
        if isinstance(self._source, LoaderHandle):
            resumed = self._source.resumed and self._source.epoch == 1
            self._source.delivered = None if resumed else self._place

    @property
    def exhausted(self) -> bool:
        """Whether the newest loader, which has no workers, has given all its samples."""
        return self._size is not None and self._left == 0

    @property
    def ended(self) -> list[LoaderHandle]:
        """The iterators with workers that are gone. The ring has all their batches."""
        followed = {*self._taken, self._source}
        return [loader for loader in followed if isinstance(loader, LoaderHandle) and loader.retired]

    def forget(self, ended: Sequence[LoaderHandle]) -> None:
        """Drop iterators that had `ended` before the ring was read. They would keep the workers' memory."""
        for loader in ended:
            self._close(loader)
            if loader is self._source:
                self._source = self._size = self._left = self._place = None

    def settle(self, replayed_share: float) -> None:
        """Leave out the samples that a resumed run has thrown away, which are this share of those so far."""
        if self._replayed is None:
            self._replayed = round(replayed_share * (self._all() or 0))

    @property
    def samples(self) -> int | None:
        """Samples of the training batches so far; None if unknown, or before `settle`. They never become fewer."""
        known = None if self._replayed is None else self._all()
        if known is not None:
            self._newest = known = max(self._newest, known - (self._replayed or 0))
        return known

    def _all(self) -> int | None:
        found = self._samples + sum(map(self._of_workers, self._taken))
        return found if found and not self._unknown else None

    def own_fetches(self) -> Histogram | None:
        """Durations of the training thread's own fetches; None before the first."""
        if not self._own_ns:
            return None
        return Histogram(FETCH_BUCKETS, tuple(self._own_counts), self._own_ns / NS)

    def take_source(self) -> BatchSource | None:
        """The source with the longest wait since the last call; None without a wait."""
        waits, self._waits = self._waits, {}
        return max(waits, key=lambda source: waits[source], default=None)
