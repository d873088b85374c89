"""Hooks the DataLoader: requests for batches, the start and end of iterations, and the probe in its workers."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.seams.patching import FAILED, WeakMap, around, forget_frame, unseen
from telemetry.seams.ring import MASK, S_DATA_WAIT, STEP, STRIDE
from telemetry.seams.tracker import OVERHEAD_EVERY, OVERHEAD_MASK, OVERHEAD_PARTS, StepTracker
from telemetry.seams.worker import WorkerLoop
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.seams.patching import Patches
    from telemetry.seams.ring import Ring


_OVERHEAD_FACTOR: Final = OVERHEAD_EVERY * OVERHEAD_PARTS
_MAX_PART_NS: Final = 20_000
"""If the timed part takes longer, the kernel has stopped the thread in it."""


def patch_loader(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch ``torch.utils.data.dataloader``."""
    patches.replace(module._BaseDataLoaderIter, "__next__", lambda original: timed_next(original, tracker))
    patches.replace(module.DataLoader, "__iter__", lambda original: timed_iter(original, tracker))


def before_each_batch(
    module: Any, call: Callable[[object], None], patches: Patches, on_error: Callable[[BaseException], None]
) -> None:
    """Call a function before each request for a batch, with the iterator. ``module``: as for `patch_loader`."""
    patches.around(module._BaseDataLoaderIter, "__next__", before=call, on_error=on_error)


# -- requests for batches ------------------------------------------------------------------------------------------


def timed_next(original: Callable[[Any], Any], tracker: StepTracker) -> Callable[[Any], Any]:
    """Wrap the ``__next__`` of an iterator, so that the ring gets its wait.

    The fast path (see `seams.tracker`) is inlined, because a call costs more than all the stores together. All that it
    needs is in default values of parameters, which are adjacent in memory. A closure variable has its own cell and a
    global needs two dictionaries; a real step evicts these from the caches. Between the arrival of the batch and the
    last store there is no call, so neither a signal nor a thread switch can interrupt.
    """
    grad_enabled = getattr(sys.modules.get("torch"), "is_grad_enabled", tracker.gradients_on)

    @functools.wraps(original)
    @unseen
    def __next__(  # noqa: N807, PLR0917
        self: Any,
        tracker: StepTracker = tracker,
        identity: Callable[[object], int] = id,
        thread: Callable[[], int] = get_ident,
        grad_enabled: Callable[[], bool] = grad_enabled,
        now: Callable[[], int] = now_ns,
        original: Callable[[Any], Any] = original,
        ring: Ring = tracker.ring,
        words: list[Any] = tracker.ring.words,
        mask: int = MASK,
        stride: int = STRIDE,
        sampled: int = OVERHEAD_MASK,
        slow_path: Callable[[Any], Any] = _timed_on_slow_path(original, tracker),  # noqa: B008
    ) -> Any:
        if identity(self) != tracker.fast_path_iterator_id or thread() != tracker.thread or not grad_enabled():
            try:
                return slow_path(self)
            except BaseException as error:
                forget_frame(error)
                raise
        start = now()
        tracker.waiting_since = start
        try:
            batch = original(self)
            end = now()
        except BaseException as error:
            try:
                _failed(tracker, self, start, STEP, error)
            finally:
                tracker.waiting_since = 0
            forget_frame(error)
            raise
        try:
            head = ring.head
            if head < ring.limit:
                slot = head & mask
                words[slot] = start
                words[slot + 1] = end
                ring.head = head + stride
            else:
                ring.push(start, end, STEP)
                if tracker.gpu is not None:
                    tracker.time_next_wait()
            tracker.waiting_since = 0
            if not head & sampled:
                tracker.overhead_ns += min(now() - end, _MAX_PART_NS) * _OVERHEAD_FACTOR
        except BaseException as error:
            tracker.fault(error)
        return batch

    return __next__


def _timed_on_slow_path(original: Callable[[Any], Any], tracker: StepTracker) -> Callable[[Any], Any]:
    """``__next__`` in all other cases: another thread or loader, evaluation, a phase, a wait timed on the GPU."""

    @unseen
    def __next__(self: Any) -> Any:  # noqa: N807
        elsewhere = get_ident() != tracker.thread
        if elsewhere or tracker.waiting_since:
            tracker.requests_elsewhere += elsewhere
            try:
                return original(self)
            except BaseException as error:
                forget_frame(error)
                raise
        try:
            began = now_ns()
            entry = tracker.request(self)
            waits = entry & 7 == S_DATA_WAIT
            tracker.boundary_ahead(entry)
            if tracker.gpu is not None:
                tracker.mark_request(self, entry, began)
            ranges = tracker.wait_ranges(self) if tracker.profiler_ranges.makers else ()
            start = now_ns()
            tracker.waiting_since = start if waits else -start
        except BaseException as error:
            tracker.fault(error)
            return original(self)
        try:
            try:
                batch = original(self)
                end = now_ns()
            except BaseException as error:
                _failed(tracker, self, start, entry, error)
                forget_frame(error)
                raise
            finally:
                if ranges:
                    _end_ranges(tracker, ranges)
        except BaseException:  # also of a signal handler, in our own code
            tracker.waiting_since = 0
            raise
        try:
            tracker.delivered(self, start, end, entry)
            if tracker.gpu is not None:
                tracker.mark_arrival(start, end)
            else:
                tracker.overhead_ns += now_ns() - end
        except BaseException as error:
            tracker.fault(error)
        return batch

    return __next__


def _failed(tracker: StepTracker, iterator: object, start: int, entry: int, error: BaseException) -> None:
    """Note a failed request. The caller ends the wait, because a signal handler may raise here."""
    try:
        tracker.failed(iterator, start, entry, error)
        if tracker.gpu is not None:
            tracker.mark_arrival(start, now_ns())
    except BaseException as ours:
        tracker.fault(ours)


def _end_ranges(tracker: StepTracker, ranges: Sequence[Callable[[], object]]) -> None:
    try:
        tracker.profiler_ranges.end(ranges)
    except Exception as error:
        tracker.note_error(error)


# -- start and end of an iteration ---------------------------------------------------------------------------------


def begin_boundary(tracker: StepTracker, subject: Any, *, leaves: bool = False) -> tuple[int, int] | None:
    """Begin what begins or ends an iteration. Returns its start and its code, if it gets a span in the ring.

    Args:
        tracker: gets the span.
        subject: the loader, or with ``leaves`` the iterator whose workers are about to be stopped.
        leaves: whether workers are stopped. At the end of an epoch that is part of a request. But if an iterator is
            left (with ``break``, or after one batch), its workers are stopped when it is freed. The training thread
            waits for that, because a fetch in progress is not cancelled.
    """
    if get_ident() != tracker.thread or tracker.waiting_since:
        return None
    if not leaves:
        tracker.loaders.note_caller(sys._getframe(1))
    entry = tracker.leaving(subject) if leaves else tracker.iteration(subject)
    if entry is None:
        return None
    tracker.boundary_ahead(entry)
    if tracker.gpu is not None:
        tracker.mark_request(None, entry, now_ns())
    start = now_ns()
    tracker.waiting_since = start if entry & 7 == S_DATA_WAIT else -start
    return start, entry


def end_boundary(tracker: StepTracker, begun: tuple[int, int] | None, iterator: Any) -> None:
    """End what `begin_boundary` began. ``iterator``: what an iteration has made; None if nothing was made."""
    end = now_ns()
    try:
        loader = tracker.loaders.begun(iterator) if iterator is not None and tracker.active else None
        if begun is not None:
            start, entry = begun
            tracker.iterated(start, end, entry, loader)
            if tracker.gpu is not None:
                tracker.mark_arrival(start, end)
    finally:
        if begun is not None:
            tracker.waiting_since = 0


def timed_iter(original: Callable[[Any], Any], tracker: StepTracker) -> Callable[[Any], Any]:
    """Wrap the ``__iter__`` of a loader, so that the ring gets the start of the workers."""
    return around(
        original,
        before=lambda loader: begin_boundary(tracker, loader),
        after=lambda begun, made, _loader: end_boundary(tracker, begun, None if made is FAILED else made),
        on_error=tracker.fault,
    )


# -- iterators with workers: their constructor starts the workers, and the probe gets into these -----------------------


def patch_workers(iterators: Any, module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch a class of iterators with workers. ``module``: where its constructor finds ``_worker_loop``."""
    loop: WorkerLoop | None = None
    used: WeakMap[None] = WeakMap()  # loaders that have made an iterator

    def stand_in(original: Callable[..., Any]) -> WorkerLoop:
        nonlocal loop
        loop = WorkerLoop(original, tracker)
        return loop

    def making(_iterator: Any, loader: Any, *_: Any, **__: Any) -> tuple[int, int] | None:
        if loop is not None and tracker.active:
            workers = vars(loader).get("num_workers")
            loop.begin(workers if isinstance(workers, int) else 0)
        return begin_boundary(tracker, loader)

    def made(begun: tuple[int, int] | None, result: object, iterator: Any, loader: Any, *_: Any, **__: Any) -> None:
        block = None if loop is None else loop.end()
        try:
            if result is not FAILED and tracker.active:
                tracker.loaders.register(iterator, block, again=loader in used)
                used[loader] = None
        finally:
            end_boundary(tracker, begun, None if result is FAILED else iterator)

    def resetting(iterator: Any, *_: Any, **__: Any) -> None:
        loader = tracker.loaders.known(iterator)
        if loader is not None and loader.block is not None:
            loader.block.begin_iteration()

    patches.replace(module, "_worker_loop", stand_in)
    patches.around(iterators, "__init__", before=making, after=made, on_error=tracker.fault)
    patches.around(iterators, "_reset", before=resetting, on_error=tracker.note_error)
    patches.around(
        iterators,
        "_shutdown_workers",
        before=lambda iterator: begin_boundary(tracker, iterator, leaves=True),
        after=lambda begun, _result, _iterator: end_boundary(tracker, begun, None),
        on_error=tracker.fault,
    )
