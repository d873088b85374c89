"""The iterators that give batches, without keeping them alive."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach import loader_types
from telemetry.attach.loader_handle import ON_THREAD, WATCHED, BatchSource, LoaderHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.attach.worker_probe import WorkerBlock

_MAX_ITERATORS: Final = 64


class LoaderRegistry:
    """Written by the training thread. The agent thread may use `live`, `take_retired` and `newest`.

    Attributes:
        newest: returns where the newest batches come from; None before the first, and when it is gone.
        newest_begun: returns the handle of the iteration that began last, on any thread; None where it has no workers.
        finding: the first batch of a generator is being requested, which shows where its batches come from.
        told: known iterators of other libraries: their class, and a function from an iterator to its source.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Any], LoaderHandle]] = {}
        self._retired: deque[LoaderHandle] = deque(maxlen=_MAX_ITERATORS)
        self.newest: Callable[[], BatchSource | None] = lambda: None  # or a weak reference
        self.newest_begun: Callable[[], LoaderHandle | None] = lambda: None  # or a weak reference
        self.finding = False
        self.told: list[tuple[type, Callable[[Any], BatchSource]]] = []

    def register(self, iterator: object, block: WorkerBlock | None = None, *, again: bool = True) -> None:
        """Note the workers of an iterator, without keeping it alive.

        Only its pids and its queue are kept. With a strong reference, the agent thread could become the one that shuts
        the workers down.

        Args:
            iterator: one without workers is ignored.
            block: counters that its workers write, if there are any.
            again: whether its loader has made an iterator before.
        """
        iterator = loader_types.unwrapped(iterator)
        if len(self._live) >= _MAX_ITERATORS or not loader_types.workers_of(iterator):
            return
        key, live, retired = id(iterator), self._live, self._retired
        if key in live:
            return

        def gone(reference: object) -> None:
            del reference
            entry = live.pop(key, None)
            if entry is not None:
                retired.append(entry[1])

        live[key] = (weakref.ref(iterator, gone), LoaderHandle(iterator, block, again=again))

    def begun(self, iterator: object) -> None:
        """An iteration has begun, on any thread."""
        handle = self.known(iterator)
        if handle is not None:
            self.newest_begun = weakref.ref(handle)

    def known(self, iterator: object) -> LoaderHandle | None:
        """The handle of a live iterator with workers, watched or not; None for any other."""
        entry = self._live.get(id(loader_types.unwrapped(iterator)))
        return None if entry is None else entry[1]

    def delivered(self, iterator: object, *, training: bool) -> BatchSource:
        """A batch has come on the slow path. Returns its source. ``training``: it is trained on, as far as is known."""
        source = self._of(iterator)
        if training:
            self.newest = weakref.ref(source)
            if isinstance(source, LoaderHandle):
                source.training = True
        return source

    def live(self) -> list[LoaderHandle]:
        """Handles of the iterators with workers that are alive."""
        return [handle for _, handle in list(self._live.values())]

    def take_retired(self) -> Iterator[LoaderHandle]:
        """Handles of those that are gone since the last call, and whose counters are still to be read."""
        while self._retired:
            yield self._retired.popleft()

    def _of(self, iterator: object) -> BatchSource:
        iterator = loader_types.unwrapped(iterator)
        if id(iterator) not in self._live:
            self.register(iterator)  # begun before the agent
        handle = self.known(iterator)
        if handle is not None:
            return handle
        for kind, source_of in self.told:
            if issubclass(type(iterator), kind):
                return source_of(iterator)
        if not loader_types.is_loader_iterator(iterator):
            return WATCHED
        workers = getattr(iterator, "_num_workers", 0)
        return BatchSource("workers", {"num_workers": workers}) if workers else ON_THREAD
