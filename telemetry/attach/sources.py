"""The iterators that give batches, as far as the agent may know them."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach import kinds
from telemetry.attach.handle import ON_THREAD, WATCHED, LoaderHandle, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.attach.worker_probe import WorkerBlock

_MOST: Final = 64


class Sources:
    """Kept by the training thread; `live`, `take_retired` and `newest` are for the agent thread too.

    Attributes:
        newest: gives where the newest batches come from; None before the first, and when it is gone.
        newest_begun: the workers of the iteration that began last, on any thread; gives None where it has none.
        finding: the first batch of a generator is being asked for, and with it where its batches come from.
        told: iterators that are no DataLoader's but known: their class, and what tells where their batches are from.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Any], LoaderHandle]] = {}
        self._retired: deque[LoaderHandle] = deque(maxlen=_MOST)
        self.newest: Callable[[], Source | None] = lambda: None  # a reference that keeps nothing
        self.newest_begun: Callable[[], LoaderHandle | None] = lambda: None  # the same
        self.finding = False
        self.told: list[tuple[type, Callable[[Any], Source]]] = []

    def register(self, iterator: object, block: WorkerBlock | None = None, *, again: bool = True) -> None:
        """Note the workers of an iterator, without keeping it alive. ``again``: its loader has had one before.

        Only its pids and its queue are kept: a strong reference on the agent thread could make that thread the one
        that shuts the workers down.
        """
        iterator = kinds.unwrapped(iterator)
        if len(self._live) >= _MOST or not kinds.workers_of(iterator):
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
        """An iteration has begun, on whatever thread."""
        handle = self.known(iterator)
        if handle is not None:
            self.newest_begun = weakref.ref(handle)

    def known(self, iterator: object) -> LoaderHandle | None:
        """The handle of a live iterator with workers, watched or not; None for any other."""
        entry = self._live.get(id(kinds.unwrapped(iterator)))
        return None if entry is None else entry[1]

    def delivered(self, iterator: object, *, training: bool) -> Source:
        """A batch has come, and the short path does not hold. Returns where it is from."""
        source = self._of(iterator)
        if training:
            self.newest = weakref.ref(source)
            if isinstance(source, LoaderHandle):
                source.training = True
        return source

    def live(self) -> list[LoaderHandle]:
        """Of the iterators with workers that are alive."""
        return [handle for _, handle in list(self._live.values())]

    def take_retired(self) -> Iterator[LoaderHandle]:
        """Of those that are gone since the last call, and whose counts are still to be read."""
        while self._retired:
            yield self._retired.popleft()

    def _of(self, iterator: object) -> Source:
        iterator = kinds.unwrapped(iterator)
        if id(iterator) not in self._live:
            self.register(iterator)  # begun before the agent
        handle = self.known(iterator)
        if handle is not None:
            return handle
        for kind, source_of in self.told:
            if issubclass(type(iterator), kind):
                return source_of(iterator)
        if not kinds.is_loader_iterator(iterator):
            return WATCHED
        workers = getattr(iterator, "_num_workers", 0)
        return Source("workers", {"num_workers": workers}) if workers else ON_THREAD
