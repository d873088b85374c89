"""Describes where batches come from, without keeping the iterator alive."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from telemetry.attach.worker_block import WorkerBlock
    from telemetry.core.worker_records import Arrival

_MAX_ARRIVALS: Final = 512
"""Maximum number of arrivals between two readings. In a faster loop only the newest are used."""


class BatchSource:
    """Where batches come from.

    Attributes:
        kind: ``training_thread``, ``workers``, ``watched`` or ``read_ahead``.
        settings: the loader's settings, by the names of DataLoader's arguments. Also ``loader_used_again`` (whether the
            newest iteration was not its first) and, if workers are forked, ``sharing_strategy`` of
            torch.multiprocessing.
        unseen: iterations whose start was dropped because the ring was full. Written by the training thread.
    """

    __slots__ = ("__weakref__", "kind", "settings", "unseen")

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        self.kind = kind
        self.settings = settings
        self.unseen = 0


ON_THREAD: Final = BatchSource("training_thread", {"num_workers": 0})
WATCHED: Final = BatchSource("watched", {})
READ_AHEAD: Final = BatchSource("read_ahead", {})


class LoaderHandle(BatchSource):
    """An iterator with workers.

    Attributes:
        pids: the pids of its workers, 0 for a worker that is a thread of this process.
        threads: how many workers are threads of this process.
        queue: the queue of finished batches.
        block: counters that the workers write; None if they were started before the agent, or are threads.
        training: whether it has given a training batch.
        resumed: whether its first iteration began in the middle. Then its batches cannot be matched with fetches.
        in_order: whether batch number ``n`` of an epoch comes from worker ``n % len(pids)``.
        epoch: how many iterations have begun. Agent thread only.
        delivered: how many batches were taken in the newest iteration; None if the count was lost. Agent thread only.
        arrivals: training batches taken since the last reading. Agent thread only.
    """

    __slots__ = (
        "arrivals",
        "block",
        "delivered",
        "epoch",
        "in_order",
        "pids",
        "queue",
        "resumed",
        "threads",
        "training",
    )

    def __init__(self, iterator: Any, block: WorkerBlock | None, *, again: bool = True) -> None:
        threads = [isinstance(worker, threading.Thread) for worker in iterator._workers]
        self.threads = sum(threads)
        self.pids = tuple(0 if one else worker.pid for one, worker in zip(threads, iterator._workers, strict=True))
        self.queue = getattr(iterator, "_data_queue", None)
        self.block = block if not self.threads else None
        self.training = False
        self.resumed = getattr(iterator, "_num_yielded", 0) > 0  # torchdata's StatefulDataLoader restores a state
        self.in_order = bool(getattr(iterator, "_in_order", True))
        self.epoch = 0
        self.delivered: int | None = 0
        self.arrivals: deque[Arrival] = deque(maxlen=_MAX_ARRIVALS)
        settings = {
            "num_workers": len(self.pids),
            "prefetch_factor": getattr(iterator, "_prefetch_factor", None),
            "persistent_workers": bool(getattr(iterator, "_persistent_workers", False)),
            "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
            "loader_used_again": again,
        }
        if hasattr(iterator, "_in_order"):  # from torch 2.6 on
            settings["in_order"] = self.in_order
        multiprocessing = sys.modules.get("torch.multiprocessing")
        if multiprocessing is not None and all(map(_is_forked, iterator._workers)):  # others do not inherit it
            settings["sharing_strategy"] = multiprocessing.get_sharing_strategy()
        super().__init__("workers", settings)


def _is_forked(worker: Any) -> bool:
    return getattr(getattr(worker, "_popen", None), "method", None) == "fork"
