"""Registers the iterators that give batches, without keeping them alive."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach import loader_types
from telemetry.attach.loader_handle import ON_THREAD, WATCHED, BatchSource, LoaderHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.attach.worker_block import WorkerBlock

_MAX_ITERATORS: Final = 64


class LoaderRegistry:
    """Written by the training thread. The agent thread may use `live`, `take_retired` and `newest`.

    Attributes:
        newest: returns the source of the newest batches; None before the first batch, and if it no longer exists.
        newest_begun: returns the handle of the iteration that began last, on any thread; None if it has no workers.
        finding: whether the first batch of a generator is being requested, which shows the source of its batches.
        known_iterators: iterator classes of other libraries, each with a function from an iterator to its source.
        sampling: what new workers are asked for: the session, and the stamp until which they sample their fetches.
            Written by the agent thread.
        asked: handles of the iterators that were registered with such a request. The agent thread takes them.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Any], LoaderHandle]] = {}
        self._gone: deque[weakref.KeyedRef[int, Any]] = deque()  # appended to when an iterator is freed
        self._retired: deque[LoaderHandle] = deque(maxlen=_MAX_ITERATORS)
        self.newest: Callable[[], BatchSource | None] = lambda: None  # or a weak reference
        self.newest_begun: Callable[[], LoaderHandle | None] = lambda: None  # or a weak reference
        self.finding = False
        self._batch_size: int | None = None
        self.known_iterators: list[tuple[type, Callable[[Any], BatchSource]]] = []
        self.sampling = (0, 0)
        self.asked: deque[LoaderHandle] = deque(maxlen=_MAX_ITERATORS)

    def register(self, iterator: object, block: WorkerBlock | None = None, *, again: bool = True) -> None:
        """Register the workers of an iterator, without keeping it alive.

        Only its pids and its queue are kept. With a strong reference, the agent thread could become the thread that
        shuts the workers down.

        Args:
            iterator: the iterator; one without workers is ignored.
            block: counters that its workers write, if there are any.
            again: whether its loader has made an iterator before.
        """
        iterator = loader_types.unwrapped(iterator)
        self._retire()
        if len(self._live) >= _MAX_ITERATORS or not loader_types.workers_of(iterator):
            return
        key = id(iterator)
        if key in self._live:
            return
        handle = LoaderHandle(iterator, block, again=again)
        self._live[key] = (weakref.KeyedRef(iterator, self._gone.append, key), handle)  # C code: see `core.weak_map`
        if block is not None and self.sampling[1]:
            self.asked.append(handle)

    def begun(self, iterator: object) -> None:
        """Note that an iteration has begun, on any thread."""
        handle = self.known(iterator)
        if handle is not None:
            self.newest_begun = weakref.ref(handle)

    def known(self, iterator: object) -> LoaderHandle | None:
        """The handle of a live iterator with workers, watched or not; None for any other."""
        self._retire()
        entry = self._live.get(id(loader_types.unwrapped(iterator)))
        return None if entry is None else entry[1]

    def delivered(self, iterator: object, *, training: bool) -> BatchSource:
        """Note a batch that came on the slow path. Returns its source. ``training``: whether it is for training."""
        source = self._of(iterator)
        if training:
            self.newest = weakref.ref(source)
            self._batch_size = loader_types.batch_size_of(loader_types.unwrapped(iterator))
            if isinstance(source, LoaderHandle):
                source.training = True
        return source

    def newest_batch_size(self) -> int | None:
        """How many samples a batch of the newest loader has; None if it does not tell."""
        return self._batch_size

    def live(self) -> list[LoaderHandle]:
        """Handles of the live iterators with workers."""
        self._retire()
        return [handle for _, handle in list(self._live.values())]

    def take_retired(self) -> Iterator[LoaderHandle]:
        """Handles of iterators that ended since the last call, and whose counters must still be read."""
        self._retire()
        while self._retired:
            yield self._retired.popleft()

    def _retire(self) -> None:
        """Move the iterators that were freed. Any thread may be first."""
        while self._gone:
            try:
                reference = self._gone.popleft()
            except IndexError:
                return
            entry = self._live.get(reference.key)
            if entry is not None and entry[0] is reference:
                del self._live[reference.key]
                self._retired.append(entry[1])
                if entry[1].block is not None:
                    entry[1].block.retired = True

    def _of(self, iterator: object) -> BatchSource:
        iterator = loader_types.unwrapped(iterator)
        if self.known(iterator) is None:
            self.register(iterator)  # it began before the agent
        handle = self.known(iterator)
        if handle is not None:
            return handle
        for kind, source_of in self.known_iterators:
            if issubclass(type(iterator), kind):
                return source_of(iterator)
        if not loader_types.is_loader_iterator(iterator):
            return WATCHED
        workers = getattr(iterator, "_num_workers", 0)
        return BatchSource("workers", {"num_workers": workers}) if workers else ON_THREAD
