"""What the agent may know of a live iterator with workers, without keeping it alive."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.ring import BATCH, BEGINS, S_DATA_WAIT
from telemetry.records import Arrival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.attach.ring import Entry
    from telemetry.attach.worker_probe import WorkerBlock

_MOST_ARRIVALS: Final = 512
"""Kept from one reading to the next; of a loop with more steps a second the newest are looked at."""


class LoaderHandle:
    """The outside of an iterator with workers.

    Attributes:
        pids: of its workers.
        queue: where finished batches lie.
        block: what the workers write down of themselves; None where they were started before the agent.
        settings: of the loader, by the names of DataLoader's arguments.
        training: whether it has given a training batch.
        in_order: whether batch number ``n`` of an epoch comes from worker ``n % len(pids)``.
        epoch, delivered: iterations begun, and batches taken in the newest, None where the count was lost; the agent
            thread's.
        arrivals: training batches taken since they were last looked at; the agent thread's.
    """

    __slots__ = (
        "__weakref__",
        "arrivals",
        "block",
        "delivered",
        "epoch",
        "in_order",
        "pids",
        "queue",
        "settings",
        "training",
    )

    def __init__(self, iterator: Any, block: WorkerBlock | None) -> None:
        self.pids = tuple(worker.pid for worker in iterator._workers)
        self.queue = getattr(iterator, "_data_queue", None)
        self.block = block
        self.training = False
        self.in_order = bool(getattr(iterator, "_in_order", True))
        self.epoch = 0
        self.delivered: int | None = 0
        self.arrivals: deque[Arrival] = deque(maxlen=_MOST_ARRIVALS)
        self.settings = {
            "num_workers": len(self.pids),
            "prefetch_factor": getattr(iterator, "_prefetch_factor", None),
            "persistent_workers": bool(getattr(iterator, "_persistent_workers", False)),
            "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
        }
        if hasattr(iterator, "_in_order"):  # from torch 2.6 on
            self.settings["in_order"] = self.in_order


class Numbering:
    """Gives the batches in the ring their numbers, by which a worker's fetches are told apart."""

    def __init__(self) -> None:
        self._current: Callable[[], LoaderHandle | None] = lambda: None  # not to keep one that is done with

    def fold(self, entries: Iterable[Entry]) -> None:
        """Number entries of the ring, in the order in which they happened."""
        for start, end, code, loader in entries:
            if loader is not None and code & BEGINS:
                loader.epoch += 1
                loader.delivered = 0
            elif loader is not None or code & BATCH:
                waited = code & 7 == S_DATA_WAIT
                if loader is None:
                    loader = self._current()  # noqa: PLW2901 - an ordinary batch does not say where it is from
                elif waited:
                    self._current = weakref.ref(loader)
                if loader is not None and loader.delivered is not None:
                    if waited:
                        loader.arrivals.append(Arrival(loader.epoch, loader.delivered, start, end))
                    loader.delivered += 1

    def lost(self) -> None:
        """Entries were dropped: numbers mean nothing until the next iteration begins."""
        loader = self._current()
        if loader is not None:
            loader.delivered = None
