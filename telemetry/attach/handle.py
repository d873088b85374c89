"""Where batches come from: what the agent may know of an iterator without keeping it alive."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.ring import BATCH, BEGINS, S_DATA_WAIT
from telemetry.clock import NS
from telemetry.records import FETCH_BUCKETS, Arrival, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.attach.ring import Entry
    from telemetry.attach.worker_probe import WorkerBlock

_MOST_ARRIVALS: Final = 512
"""Kept from one reading to the next; of a loop with more steps a second the newest are looked at."""


class Source:
    """Where batches come from.

    Attributes:
        kind: in the words of `records.Slice`.
        settings: of the loader, by the names of DataLoader's arguments; and ``loader_used_again``, whether the newest
            iteration was not its first.
    """

    __slots__ = ("__weakref__", "kind", "settings")

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        self.kind = kind
        self.settings = settings


ON_THREAD: Final = Source("training_thread", {"num_workers": 0})
WATCHED: Final = Source("watched", {})


class LoaderHandle(Source):
    """The outside of an iterator with workers.

    Attributes:
        pids: of its workers.
        queue: where finished batches lie.
        block: what the workers write down of themselves; None where they were started before the agent.
        training: whether it has given a training batch.
        in_order: whether batch number ``n`` of an epoch comes from worker ``n % len(pids)``.
        epoch, delivered: iterations begun, and batches taken in the newest, None where the count was lost; the agent
            thread's.
        arrivals: training batches taken since they were last looked at; the agent thread's.
    """

    __slots__ = ("arrivals", "block", "delivered", "epoch", "in_order", "pids", "queue", "training")

    def __init__(self, iterator: Any, block: WorkerBlock | None, *, again: bool = True) -> None:
        self.pids = tuple(worker.pid for worker in iterator._workers)
        self.queue = getattr(iterator, "_data_queue", None)
        self.block = block
        self.training = False
        self.in_order = bool(getattr(iterator, "_in_order", True))
        self.epoch = 0
        self.delivered: int | None = 0
        self.arrivals: deque[Arrival] = deque(maxlen=_MOST_ARRIVALS)
        settings = {
            "num_workers": len(self.pids),
            "prefetch_factor": getattr(iterator, "_prefetch_factor", None),
            "persistent_workers": bool(getattr(iterator, "_persistent_workers", False)),
            "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
            "loader_used_again": again,
        }
        if hasattr(iterator, "_in_order"):  # from torch 2.6 on
            settings["in_order"] = self.in_order
        super().__init__("workers", settings)


class Numbering:
    """Gives the batches in the ring their numbers, which tell a worker's fetches apart, and adds up the waits."""

    def __init__(self) -> None:
        self._current: Callable[[], Source | None] = lambda: None  # not to keep one that is done with
        self._waits: dict[Source, int] = {}
        self._own_counts = [0] * (len(FETCH_BUCKETS) + 1)
        self._own_ns = 0

    def fold(self, entries: Iterable[Entry]) -> None:
        """Number entries of the ring, in the order in which they happened."""
        for start, end, code, loader in entries:
            if isinstance(loader, LoaderHandle) and code & BEGINS:
                loader.epoch += 1
                loader.delivered = 0
            elif loader is not None or code & BATCH:
                waited = code & 7 == S_DATA_WAIT
                if loader is None:
                    loader = self._current()  # noqa: PLW2901 - an ordinary batch does not say where it is from
                elif waited:
                    self._current = weakref.ref(loader)
                if loader is not None and waited:
                    self._waits[loader] = self._waits.get(loader, 0) + end - start
                    if loader is ON_THREAD:  # without workers the wait is the fetch
                        self._own_counts[bisect_left(FETCH_BUCKETS, (end - start) / NS)] += 1
                        self._own_ns += end - start
                if isinstance(loader, LoaderHandle) and loader.delivered is not None:
                    if waited:
                        loader.arrivals.append(Arrival(loader.epoch, loader.delivered, start, end))
                    loader.delivered += 1

    def lost(self) -> None:
        """Entries were dropped: numbers mean nothing until the next iteration begins."""
        loader = self._current()
        if isinstance(loader, LoaderHandle):
            loader.delivered = None

    def own_fetches(self) -> Histogram | None:
        """What the training thread took for batches that it fetched itself; None before the first."""
        if not self._own_ns:
            return None
        return Histogram(FETCH_BUCKETS, tuple(self._own_counts), self._own_ns / NS)

    def take_source(self) -> Source | None:
        """The source that was waited for most since the last call; None where nothing was waited for."""
        waits, self._waits = self._waits, {}
        return max(waits, key=lambda source: waits[source], default=None)
