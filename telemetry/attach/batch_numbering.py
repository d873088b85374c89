"""Numbers batches, so that they can be matched with the workers' fetches, and sums the waits by source."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from itertools import count, repeat
from typing import TYPE_CHECKING

from telemetry.core.worker_records import FETCH_BUCKETS, Arrival
from telemetry.hooks.loaders import ON_THREAD, BatchSource, LoaderHandle
from telemetry.hooks.patching import WeakMap
from telemetry.hooks.ring import BATCH, BEGINS, S_DATA_WAIT, STEP
from telemetry.records import DroppedSpans, Histogram
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.hooks.ring import Entry


class BatchNumbering:
    """Numbers the batches in the ring, and sums the waits by source."""

    def __init__(self) -> None:
        self._current: Callable[[], BatchSource | None] = lambda: None  # or a weak reference
        self._waits: dict[BatchSource, int] = {}
        self._own_counts = [0] * (len(FETCH_BUCKETS) + 1)
        self._own_ns = 0
        self._numbered: WeakMap[int] = WeakMap()

    def fold(self, entries: Sequence[Entry]) -> None:
        """Number entries of the ring, in the order in which they happened."""
        if not entries:
            return
        current = self._current()
        if isinstance(current, LoaderHandle) and all(c == STEP and source is None for _, _, c, source in entries):
            self._ordinary(entries, current)
            return
        for start, end, code, source in entries:
            if source is None:
                if code & BATCH:
                    self._batch(start, end, code, current)  # an ordinary batch has no source in its entry
            elif isinstance(source, DroppedSpans):
                self._lost()
            elif code & BEGINS and isinstance(source, LoaderHandle):
                self._begin(source)
            else:
                if code & 7 == S_DATA_WAIT:
                    self._current, current = weakref.ref(source), source
                self._batch(start, end, code, source)

    def _ordinary(self, entries: Sequence[Entry], loader: LoaderHandle) -> None:
        """The next batches of an iteration with workers, which is what nearly all entries are."""
        starts, ends, _, _ = zip(*entries, strict=True)
        self._waits[loader] = self._waits.get(loader, 0) + sum(ends) - sum(starts)
        if loader.delivered is not None:
            loader.arrivals.extend(map(Arrival, repeat(loader.epoch), count(loader.delivered), starts, ends))
            loader.delivered += len(entries)

    def _batch(self, start: int, end: int, code: int, source: BatchSource | None) -> None:
        if source is None:
            return
        waited = code & 7 == S_DATA_WAIT
        if waited:
            self._waits[source] = self._waits.get(source, 0) + end - start
            if source is ON_THREAD:  # without workers the wait is the fetch
                self._own_counts[bisect_left(FETCH_BUCKETS, (end - start) / NS)] += 1
                self._own_ns += end - start
        if isinstance(source, LoaderHandle) and source.delivered is not None:
            if waited:
                source.arrivals.append(Arrival(source.epoch, source.delivered, start, end))
            source.delivered += 1

    def own_fetches(self) -> Histogram | None:
        """Durations of the training thread's own fetches; None before the first."""
        if not self._own_ns:
            return None
        return Histogram(FETCH_BUCKETS, tuple(self._own_counts), self._own_ns / NS)

    def take_source(self) -> BatchSource | None:
        """The source with the longest wait since the last call; None without a wait."""
        waits, self._waits = self._waits, {}
        return max(waits, key=lambda source: waits[source], default=None)

    def _begin(self, loader: LoaderHandle) -> None:
        """Begin an iteration. Its batches cannot be numbered if the starts of others were dropped."""
        seen = self._numbered.get(loader) or 0
        unseen = self._numbered[loader] = loader.unseen
        loader.epoch += 1 + unseen - seen
        unknown = unseen != seen or (loader.resumed and loader.epoch == 1)
        loader.delivered = None if unknown else 0

    def _lost(self) -> None:
        """Note that entries were dropped. Batches cannot be matched with fetches until the next iteration begins."""
        for loader in (*self._numbered.objects(), self._current()):
            if isinstance(loader, LoaderHandle):
                loader.delivered = None
