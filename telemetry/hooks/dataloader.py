"""Hooks the DataLoader: requests for batches, the start and end of iterations, and the probe in its workers."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.patching import FAILED, WeakMap, around, forget_frame, unseen
from telemetry.hooks.ring import MASK, S_DATA_WAIT, STEP, STRIDE
from telemetry.hooks.timers import Clocks, TimedFetch, TimedWait, timeable
from telemetry.hooks.tracker import OVERHEAD_EVERY, OVERHEAD_MASK, OVERHEAD_PARTS, StepTracker
from telemetry.hooks.worker import WorkerProbe
from telemetry.hooks.worker_block import MAX_WORKERS, WorkerBlock
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.hooks.patching import Patches
    from telemetry.hooks.ring import Ring


_OVERHEAD_FACTOR: Final = OVERHEAD_EVERY * OVERHEAD_PARTS
_MAX_PART_NS: Final = 20_000
"""If the timed part takes longer, the kernel has stopped the thread in it."""


def patch_loader(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch ``torch.utils.data.dataloader``."""
    base, single = module._BaseDataLoaderIter, module._SingleProcessDataLoaderIter
    patches.replace(base, "__next__", lambda original: timed_next(original, tracker))
    patches.replace(module.DataLoader, "__iter__", lambda original: timed_iter(original, tracker))
    _time_sampler_start(base, module._DatasetKind.Map, tracker, patches)
    patches.around(
        single,
        "__init__",
        before=lambda _iterator, loader, *_, **__: begin_boundary(tracker, loader),
        after=lambda begun, result, iterator, *_, **__: end_boundary(
            tracker, begun, None if result is FAILED else iterator
        ),
        on_error=tracker.fault,
    )


# -- requests for batches ------------------------------------------------------------------------------------------


def timed_next(original: Callable[[Any], Any], tracker: StepTracker) -> Callable[[Any], Any]:
    """Wrap the ``__next__`` of an iterator, so that the ring gets its wait.

    The fast path (see `hooks.tracker`) is inlined, because a call costs more than all the stores together. All that it
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
            requested = now_ns()
            entry = tracker.request(self)
            waits = entry & 7 == S_DATA_WAIT
            tracker.boundary_ahead(entry, requested)
            if tracker.gpu is not None:
                tracker.mark_request(self, entry)
            fetch = TimedFetch(self) if tracker.time_fetches and waits else None
            ranges = tracker.wait_ranges(self) if tracker.profiler_ranges.makers else ()
            timed = _time_wait(tracker, self) if tracker.sampler_timer.wanted and waits else None
            start = now_ns()
            tracker.waiting_since = start if waits else -start
        except BaseException as error:
            tracker.fault(error)
            return original(self)
        end = 0
        try:
            try:
                batch = original(self)
                end = now_ns()
            except BaseException as error:
                _failed(tracker, self, start, entry, error)
                forget_frame(error)
                raise
            finally:
                _end_parts(tracker, self, ranges, timed, fetch, batch=end > 0)
        except BaseException:  # also of a signal handler, in our own code
            tracker.waiting_since = 0
            raise
        try:
            if fetch is not None:
                tracker.fetch_timed(fetch, end - start)
            tracker.delivered(self, start, end, entry, batch)
            if tracker.batch_release.wanted and waits:
                tracker.batch_release.follow(batch)
            tracker.overhead_ns += now_ns() - end
            if tracker.gpu is not None:
                tracker.mark_arrival(start, end)
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


def _time_wait(tracker: StepTracker, iterator: object) -> TimedWait | None:
    """Time the parts of the wait that is about to begin. None if no known workers fetch."""
    tracker.sampler_timer.wanted -= 1
    if tracker.loaders.known(iterator) is None or not timeable(iterator):
        return None
    return TimedWait(tracker.sampler_timer, tracker.garbage, iterator)


def _end_parts(
    tracker: StepTracker,
    iterator: object,
    ranges: Sequence[Callable[[], object]],
    timed: TimedWait | None,
    fetch: TimedFetch | None,
    *,
    batch: bool,
) -> None:
    try:
        if fetch is not None:
            fetch.end()
        if timed is not None:
            timed.end(iterator, batch=batch)
        if ranges:
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
    requested = now_ns()
    entry = tracker.leaving(subject) if leaves else tracker.iteration(subject)
    if not leaves:
        tracker.loaders.note_caller(sys._getframe(1))
    if entry is None:
        return None
    tracker.boundary_ahead(entry, requested)
    if tracker.gpu is not None:
        tracker.mark_request(None, entry)
    start = now_ns()
    tracker.waiting_since = start if entry & 7 == S_DATA_WAIT else -start
    return start, entry


def end_boundary(tracker: StepTracker, begun: tuple[int, int] | None, iterator: Any) -> None:
    """End what `begin_boundary` began. ``iterator``: what an iteration has made; None if nothing was made."""
    if begun is not None:
        start, entry = begun
        try:
            end = now_ns()
            tracker.iterated(start, end, entry, iterator)
            if tracker.gpu is not None:
                tracker.mark_arrival(start, end)
        finally:
            tracker.waiting_since = 0
    if iterator is not None and tracker.active:
        tracker.loaders.begun(iterator)
        if get_ident() == tracker.thread:
            tracker.marks.made(iterator)


def timed_iter(original: Callable[[Any], Any], tracker: StepTracker) -> Callable[[Any], Any]:
    """Wrap the ``__iter__`` of a loader, so that the ring gets the start of the workers."""
    return around(
        original,
        before=lambda loader: begin_boundary(tracker, loader),
        after=lambda begun, made, _loader: end_boundary(tracker, begun, None if made is FAILED else made),
        on_error=tracker.fault,
    )


def _time_sampler_start(iterators: Any, map_style: object, tracker: StepTracker, patches: Patches) -> None:
    """Time what begins an iteration in the base class of all iterators, which calls ``iter(sampler)``."""

    def before(_iterator: Any, *_: Any, **__: Any) -> Clocks | None:
        return Clocks(tracker.garbage) if _in_boundary(tracker) else None

    def after(clocks: Clocks | None, result: object, iterator: Any, *_: Any, **__: Any) -> None:
        # An iterable data set has no sampler of its own. But the ranks may have to agree on a seed.
        map_in_workers = getattr(iterator, "_num_workers", 0) and getattr(iterator, "_dataset_kind", None) == map_style
        if clocks is not None and result is not FAILED and map_in_workers:
            ns, cpu_ns = clocks.passed()
            tracker.sampler_timer.boundary_sampler_ns += ns
            tracker.sampler_timer.boundary_sampler_cpu_ns += cpu_ns

    for name in ("__init__", "_reset"):
        patches.around(iterators, name, before=before, after=after, on_error=tracker.fault)


def _in_boundary(tracker: StepTracker) -> bool:
    return tracker.sampler_timer.at_boundary and get_ident() == tracker.thread and tracker.waiting_since > 0


# -- iterators with workers: their constructor starts the workers, and the probe gets into these -----------------------


def patch_workers(iterators: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch a class of iterators with workers.

    The constructor takes ``worker_init_fn`` from its loader, keeps it as ``_worker_init_fn`` and passes that to each
    worker. While it runs, the descriptor `_InitFunction` returns a probe instead. Nothing is set on the loader or kept
    in the iterator: loaders are shared between threads, copied, pickled and sealed, and their iterators are made inside
    one another.
    """
    init_function = _InitFunction(tracker)
    used: WeakMap[None] = WeakMap()  # loaders that have made an iterator

    def making(iterator: Any, loader: Any, *_: Any, **__: Any) -> tuple[int, int] | None:
        if tracker.active:
            init_function.making[id(iterator)] = []
        return begin_boundary(tracker, loader)

    def made(begun: tuple[int, int] | None, result: object, iterator: Any, loader: Any, *_: Any, **__: Any) -> None:
        blocks = init_function.making.pop(id(iterator), None)
        try:
            if result is FAILED:
                _forget_notes(sys.exc_info()[1])
            elif blocks is not None and tracker.active:
                tracker.loaders.register(iterator, blocks[0] if blocks else None, again=loader in used)
                used[loader] = None
        finally:
            end_boundary(tracker, begun, None if result is FAILED else iterator)

    def resetting(iterator: Any, *_: Any, **__: Any) -> TimedWait | None:
        """``_reset`` draws the indices of all prefetched batches."""
        loader = tracker.loaders.known(iterator)
        if loader is not None and loader.block is not None:
            loader.block.begin_iteration()
        timed = _in_boundary(tracker) and timeable(iterator)
        return TimedWait(tracker.sampler_timer, tracker.garbage, iterator) if timed else None

    def reset(timed: TimedWait | None, _result: object, iterator: Any, *_: Any, **__: Any) -> None:
        if timed is not None:
            timed.end(iterator, batch=False)

    iterators._worker_init_fn = init_function
    patches.on_undo(lambda: delattr(iterators, _NAME))
    patches.around(iterators, "__init__", before=making, after=made, on_error=tracker.fault)
    patches.around(iterators, "_reset", before=resetting, after=reset, on_error=tracker.note_error)
    patches.around(
        iterators,
        "_shutdown_workers",
        before=lambda iterator: begin_boundary(tracker, iterator, leaves=True),
        after=lambda begun, _result, _iterator: end_boundary(tracker, begun, None),
        on_error=tracker.fault,
    )


_NAME: Final = "_worker_init_fn"


def _forget_notes(error: BaseException | None) -> None:
    """Remove the probe from Python 3.14's notes on a function of the user's that cannot be pickled for a worker.

    From the inside out, each note names an object that holds the object of the note before. Two of them are the probe's
    state and the probe. The note before these names the part of that state.
    """
    kept: list[str] = []
    for note in getattr(error, "__notes__", ()):
        if not str(note).startswith(f"when serializing {WorkerProbe.__module__}."):
            kept.append(note)
        elif str(note).endswith(" state"):
            del kept[-1:]
    if kept:
        error.__notes__ = kept  # type: ignore[union-attr]


class _InitFunction:
    """``_worker_init_fn`` of a class of iterators: the user's function, with a probe around it in the constructor.

    Attributes:
        making: the iterators whose constructors run, on any thread, by id. Each has its block, or None if no block can
            be made; its list is empty until the constructor has read the function.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self.making: dict[int, list[WorkerBlock | None]] = {}
        self._tracker = tracker

    def __get__(self, iterator: Any, kind: type) -> Any:
        if iterator is None or _NAME not in vars(iterator):  # as without us
            raise AttributeError(f"{kind.__name__!r} has no attribute {_NAME!r}")
        user = vars(iterator)[_NAME]
        making = self.making.get(id(iterator))
        if making is None:
            return user
        try:
            if not making:
                making.append(None)  # stays if no block can be made, so that it is tried only once
                making[0] = self._block_for(iterator)
            block = making[0]
            return user if block is None else WorkerProbe(user, block, nvtx=self._tracker.profiler_ranges.nvtx)
        except Exception as error:
            self._tracker.fault(error)
            return user

    def __set__(self, iterator: Any, value: Any) -> None:
        vars(iterator)[_NAME] = _without_probe(value)

    def __delete__(self, iterator: Any) -> None:
        del vars(iterator)[_NAME]

    def _block_for(self, iterator: Any) -> WorkerBlock | None:
        if not 0 < iterator._num_workers <= MAX_WORKERS:
            return None
        block = WorkerBlock(iterator._num_workers)
        if self._tracker.marks.counts_samples(iterator):
            block.head.samples_wanted = 1
        session, until = self._tracker.loaders.sampling
        if until:
            block.ask_samples(session, until)
        return block


def _without_probe(value: Any) -> Any:
    """The user's function. For a data pipe, the constructor reads the probe and keeps it in a ``partial``."""
    if type(value) is functools.partial and any(isinstance(argument, WorkerProbe) for argument in value.args):
        return functools.partial(value.func, *map(_without_probe, value.args), **value.keywords)
    return value.user if isinstance(value, WorkerProbe) else value
