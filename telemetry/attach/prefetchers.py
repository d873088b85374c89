"""Times libraries that read ahead on their own threads: the training thread waits for their queue, not a DataLoader.

Each library is patched when it is imported, where the training thread takes its next batch. A request there is timed
like one to a DataLoader. Requests inside it, on the same thread, are part of it.
"""

from __future__ import annotations

import functools
from functools import partial
from inspect import isgeneratorfunction, unwrap
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach import loader_hooks
from telemetry.attach import ring as r
from telemetry.attach.loader_handle import READ_AHEAD, WATCHED, BatchSource, LoaderHandle
from telemetry.attach.patches import around
from telemetry.attach.traceback_frames import forget_frame, unseen
from telemetry.core.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from telemetry.attach.patches import Patches
    from telemetry.attach.step_tracker import StepTracker

_DALI: Final = BatchSource("read_ahead", {"reader": "DALI"})
_AHEAD: Final = frozenset({"Prefetcher", "ParallelMapper", "PinMemory"})
_MAX_DEPTH: Final = 64


def patch_monai(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """MONAI: a thread iterates over the DataLoader, and a generator yields its batches."""
    _know_feeds(tracker)
    for owner in (module.ThreadDataLoader, module.ThreadBuffer):
        patches.replace(owner, "__iter__", lambda original: timed_generator(original, tracker))


def patch_nodes(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """``torchdata.nodes``: the loop asks the outermost node. That node asks the others, on this thread or on others."""
    base = module.BaseNode
    tracker.sources.known_iterators.append((base, _source_of_node))
    patches.replace(base, "__next__", lambda original: loader_hooks.timed_next(original, tracker, tracker.gradients_on))


def patch_node_loader(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """``torchdata.nodes.Loader``: ``__iter__`` starts the threads. If a state is loaded, it takes the first batch."""
    patches.replace(module.Loader, "__iter__", lambda original: loader_hooks.timed_iter(original, tracker))


def patch_dali(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """NVIDIA DALI: the threads of its pipeline and the GPU make the batches.

    A constructor takes the first batch already, long before the loop requests it: that is no request of the training.
    """

    def building(_iterator: Any) -> bool:
        outermost = get_ident() == tracker.thread and not tracker.waiting_since
        if outermost:
            tracker.waiting_since = -now_ns()
        return outermost

    def built(_iterator: Any, outermost: bool, _failed: bool) -> None:  # noqa: FBT001
        if outermost:
            tracker.waiting_since = 0

    for name in ("DALIGenericIterator", "DALIRaggedIterator"):
        iterator = getattr(module, name, None)
        if iterator is None:
            continue  # of a newer version
        tracker.sources.known_iterators.append((iterator, lambda _: _DALI))
        patches.replace(iterator, "__init__", lambda original: around(original, before=building, after=built))
        patches.replace(
            iterator, "__next__", lambda original: loader_hooks.timed_next(original, tracker, tracker.gradients_on)
        )


PATCHES: Final[Mapping[str, Callable[[Any, StepTracker, Patches], None]]] = {
    "monai.data.thread_buffer": patch_monai,
    "torchdata.nodes.base_node": patch_nodes,
    "torchdata.nodes.loader": patch_node_loader,
    "nvidia.dali.plugin.pytorch": patch_dali,
}
"""The patch for each module, applied when it is imported."""


def watch_class(cls: type, tracker: StepTracker, patches: Patches) -> bool:
    """Time the ``__iter__`` of a class of loaders, if it is a generator function.

    Args:
        cls: the class.
        tracker: gets its batches.
        patches: undo it.

    Returns:
        Whether iterations of its instances are timed from now on.
    """
    owner = next(base for base in cls.__mro__ if "__iter__" in vars(base))
    iterates = vars(owner)["__iter__"]
    if hasattr(iterates, "_telemetry_timed"):
        return True
    if not isgeneratorfunction(unwrap(iterates)):
        return False
    _know_feeds(tracker)
    patches.replace(owner, "__iter__", lambda original: timed_generator(original, tracker, numbered=False))
    return True


class Feed:
    """One iteration by a generator. For the tracker it stands for an iterator.

    Args:
        iterator: the generator.
        owner: the object that is iterated over. Its sampler and data set, if any, identify it.
        numbered: whether its batches are those of the DataLoader inside, each once and in the same order.

    Attributes:
        source: where its batches come from; None until the first batch has come.
    """

    __slots__ = ("__weakref__", "_dataset", "_index_sampler", "iterator", "numbered", "source")

    def __init__(self, iterator: Any, owner: Any, *, numbered: bool) -> None:
        self.iterator = iterator
        self.numbered = numbered
        self.source: BatchSource | None = None
        self._index_sampler = getattr(owner, "_index_sampler", None)
        self._dataset = getattr(owner, "dataset", None)


def timed_generator(
    original: Callable[[Any], Generator[Any, Any, Any]], tracker: StepTracker, *, numbered: bool = True
) -> Callable[[Any], Generator[Any, Any, Any]]:
    """Time the batches of a generator function. The result is one, too: nothing runs before the first request."""

    @unseen
    def pull(feed: Feed) -> Any:
        sources = tracker.sources
        if feed.source is not None or sources.finding or get_ident() != tracker.thread:
            return next(feed.iterator)
        sources.finding, sources.newest_begun = True, lambda: None
        try:
            batch = next(feed.iterator)
        finally:
            sources.finding = False
        try:
            _find_source(feed, tracker)
        except Exception as error:
            tracker.fault(error)
        return batch

    begin = loader_hooks.timed_iter(original, tracker)
    ask = loader_hooks.timed_next(pull, tracker, tracker.gradients_on)

    @functools.wraps(original)
    @unseen
    def __iter__(self: Any) -> Generator[Any, Any, Any]:  # noqa: N807
        iterator = begin(self)
        feed = Feed(iterator, self, numbered=numbered and getattr(self, "repeats", 1) == 1)
        following = advance = partial(ask, feed)
        while True:
            try:
                batch = [advance()]
            except StopIteration as end:
                return end.value
            except BaseException as error:
                forget_frame(error)
                raise
            advance = following
            try:
                sent = yield batch.pop()  # while the batch is in use, no reference to it is kept here
            except GeneratorExit:
                iterator.close()
                raise
            except BaseException as error:  # thrown in: the generator inside may handle it
                advance = partial(iterator.throw, error)
            else:
                if sent is not None:
                    advance = partial(iterator.send, sent)

    __iter__._telemetry_timed = True  # type: ignore[attr-defined]
    return __iter__


def _know_feeds(tracker: StepTracker) -> None:
    if not any(kind is Feed for kind, _ in tracker.sources.known_iterators):
        tracker.sources.known_iterators.append((Feed, lambda feed: feed.source or READ_AHEAD))


def _find_source(feed: Feed, tracker: StepTracker) -> None:
    """After the first batch: if an iteration with workers began meanwhile, it is the source of the generator."""
    handle = tracker.sources.newest_begun()
    feed.source = handle or READ_AHEAD
    if isinstance(handle, LoaderHandle) and feed.numbered and tracker.waiting_since > 0:
        stamp = tracker.waiting_since  # the request began with the iteration
        tracker.ring.push(stamp, stamp, r.code(r.S_DATA_WAIT, r.S_DATA_WAIT, r.BEGINS), handle)


def _source_of_node(node: Any) -> BatchSource:
    """Whether a node reads ahead on threads, or makes its batches on request."""
    for _ in range(_MAX_DEPTH):
        # A mapper without workers maps on the requesting thread.
        if type(node).__name__ in _AHEAD and getattr(node, "num_workers", None) != 0:
            return READ_AHEAD
        node = getattr(node, "root", None) or getattr(node, "source", None)
        if node is None:
            break
    return WATCHED
