"""Hooks the DataLoader: requests for batches, the start and end of iterations, and the probe in its workers."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.patching import WeakMap, around, forget_frame, unseen
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
    base, map_style = module._BaseDataLoaderIter, module._DatasetKind.Map
    patches.replace(base, "__next__", lambda original: timed_next(original, tracker))
    patch_epoch_boundaries(module.DataLoader, module._MultiProcessingDataLoaderIter, tracker, patches)
    for name in ("__init__", "_reset"):  # the callers of ``iter(sampler)``
        patches.replace(base, name, lambda original: _timed_start(original, tracker, map_style))
    single = module._SingleProcessDataLoaderIter
    patches.replace(single, "__init__", lambda original: _timed_constructor(original, tracker))


def patch_epoch_boundaries(loader: Any, workers: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch the start and the end of an iteration.

    Args:
        loader: the class of loaders.
        workers: the class of its iterators with workers.
        tracker: gets the spans.
        patches: can undo the patches.
    """
    patches.replace(loader, "__iter__", lambda original: timed_iter(original, tracker))
    patches.replace(workers, "__init__", lambda original: _timed_constructor(original, tracker))
    patches.replace(workers, "_shutdown_workers", lambda original: _timed_shutdown(original, tracker))
    patches.replace(workers, "_reset", lambda original: _timed_reset(original, tracker))


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
            entry = tracker.request(self)
            waits = entry & 7 == S_DATA_WAIT
            tracker.boundary_ahead(entry)
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
            batch = original(self)
            end = now_ns()
        except BaseException as error:
            try:
                _failed(tracker, self, start, entry, error)
            finally:
                tracker.waiting_since = 0
            forget_frame(error)
            raise
        finally:
            if ranges or timed is not None or fetch is not None:
                _end_parts(tracker, self, ranges, timed, fetch, batch=end > 0)
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
    """Note a failed request. The caller ends the wait, because a signal handler may raise before this runs."""
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
    fetch: TimedFetch | None = None,
    *,
    batch: bool,
) -> None:
    try:
        if fetch is not None:
            fetch.end()
        if timed is not None:
            timed.end(iterator, batch=batch)
        tracker.profiler_ranges.end(ranges)
    except Exception as error:
        tracker.note_error(error)


# -- start and end of an iteration ---------------------------------------------------------------------------------


def timed_iter(original: Callable[[Any], Any], tracker: StepTracker) -> Callable[[Any], Any]:
    """Wrap ``DataLoader.__iter__``, so that the ring gets the start of the workers."""
    timed = _timed_boundary(original, tracker, leaves=False)
    timed._telemetry_timed = True  # type: ignore[attr-defined]
    return timed


def _timed_constructor(original: Callable[..., None], tracker: StepTracker) -> Callable[..., None]:
    """Time an iterator's constructor as the start of an iteration. Inside ``__iter__`` it is part of that span."""

    @functools.wraps(original)
    @unseen
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        @unseen
        def made(loader: Any) -> Any:
            try:
                original(self, loader, *args, **kwargs)
            except BaseException as error:
                forget_frame(error)
                raise
            return self

        try:
            at_boundary(made, tracker, loader)
        except BaseException as error:
            forget_frame(error)
            raise

    return __init__


def _timed_shutdown(original: Callable[[Any], Any], tracker: StepTracker) -> Callable[[Any], Any]:
    """Wrap ``_shutdown_workers``, so that the ring gets its time.

    At the end of an epoch it is part of a request. But if an iterator is left (with ``break``, or after one batch), its
    workers are stopped when it is freed. The training thread waits for that, because a fetch in progress is not
    cancelled.
    """
    return _timed_boundary(original, tracker, leaves=True)


def _timed_boundary(original: Callable[[Any], Any], tracker: StepTracker, *, leaves: bool) -> Callable[[Any], Any]:
    @functools.wraps(original)
    @unseen
    def boundary(self: Any) -> Any:
        try:
            return at_boundary(original, tracker, self, leaves=leaves)
        except BaseException as error:
            forget_frame(error)
            raise

    return boundary


@unseen
def at_boundary(original: Callable[[Any], Any], tracker: StepTracker, subject: Any, *, leaves: bool = False) -> Any:
    """Call what begins or ends an iteration, and write its span into the ring if the tracker has a code for it.

    Args:
        original: makes an iterator of a loader, or stops the workers of an iterator.
        tracker: gets the span.
        subject: the argument of ``original``.
        leaves: whether ``original`` stops workers.
    """
    entry = None
    try:
        if get_ident() == tracker.thread and not tracker.waiting_since:
            entry = tracker.leaving(subject) if leaves else tracker.iteration(subject)
            if not leaves:
                tracker.loaders.note_caller(sys._getframe(1))
        if entry is not None:
            tracker.boundary_ahead(entry)
            if tracker.gpu is not None:
                tracker.mark_request(None, entry)
            start = now_ns()
            tracker.waiting_since = start if entry & 7 == S_DATA_WAIT else -start
    except BaseException as error:
        tracker.fault(error)
        return original(subject)
    result = None
    try:
        result = original(subject)
    except BaseException as error:
        forget_frame(error)
        raise
    finally:
        if entry is not None:
            try:
                _boundary_passed(tracker, start, entry, result)
            finally:
                tracker.waiting_since = 0
    try:
        if not leaves and tracker.active:
            tracker.loaders.begun(result)
            if get_ident() == tracker.thread:
                tracker.marks.made(result)
    except Exception as error:
        tracker.fault(error)
    return result


def _boundary_passed(tracker: StepTracker, start: int, entry: int, iterator: object | None) -> None:
    try:
        end = now_ns()
        tracker.iterated(start, end, entry, iterator)
        if tracker.gpu is not None:
            tracker.mark_arrival(start, end)
    except BaseException as error:
        tracker.fault(error)


def _timed_start(original: Callable[..., Any], tracker: StepTracker, map_style: object) -> Callable[..., Any]:
    """Time what begins an iteration in the base class of all iterators, which calls ``iter(sampler)``."""

    def before(_iterator: Any) -> Clocks | None:
        return Clocks(tracker.garbage) if _at_boundary(tracker) else None

    def after(iterator: Any, clocks: Clocks | None, failed: bool) -> None:  # noqa: FBT001
        # An iterable data set has no sampler of its own. But the ranks may have to agree on a seed.
        map_in_workers = getattr(iterator, "_num_workers", 0) and getattr(iterator, "_dataset_kind", None) == map_style
        if clocks is not None and not failed and map_in_workers:
            ns, cpu_ns = clocks.passed()
            tracker.sampler_timer.boundary_sampler_ns += ns
            tracker.sampler_timer.boundary_sampler_cpu_ns += cpu_ns

    return around(original, before=before, after=after)


def _timed_reset(original: Callable[..., Any], tracker: StepTracker) -> Callable[..., Any]:
    """Time ``_reset`` of an iterator with workers, which draws the indices of all prefetched batches."""

    def before(iterator: Any) -> TimedWait | None:
        try:
            loader = tracker.loaders.known(iterator)
            if loader is not None and loader.block is not None:
                loader.block.begin_iteration()
            if _at_boundary(tracker) and timeable(iterator):
                return TimedWait(tracker.sampler_timer, tracker.garbage, iterator)
        except Exception as error:
            tracker.fault(error)
        return None

    def after(iterator: Any, timed: TimedWait | None, _failed: bool) -> None:  # noqa: FBT001
        if timed is not None:
            _end_parts(tracker, iterator, (), timed, batch=False)

    return around(original, before=before, after=after)


def _at_boundary(tracker: StepTracker) -> bool:
    return tracker.sampler_timer.at_boundary and get_ident() == tracker.thread and tracker.waiting_since > 0


# -- how the probe gets into the workers, in the training process ------------------------------------------------------

_NAME: Final = "_worker_init_fn"


def patch_workers(iterators: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch the constructor of iterators with workers, which starts the workers.

    The constructor takes ``worker_init_fn`` from its loader, keeps it as ``_worker_init_fn`` and passes that to each
    worker. While it runs, the descriptor `_InitFunction` returns a probe instead. Nothing is set on the loader or kept
    in the iterator: loaders are shared between threads, copied, pickled and sealed, and their iterators are made inside
    one another.

    Args:
        iterators: the class of iterators.
        tracker: its registry gets each iterator.
        patches: can undo the patches.

    Raises:
        AttributeError: the class itself has a ``_worker_init_fn``, so this version of torch is unknown.
    """
    for kind in iterators.__mro__:
        if not isinstance(vars(kind).get(_NAME), _InitFunction | None):  # the parent's may still be there after a fork
            raise AttributeError(f"{kind.__name__} has {_NAME} already")  # noqa: TRY004
    init_function = _InitFunction(tracker)
    patches.put(iterators, _NAME, init_function)
    patches.replace(iterators, "__init__", lambda original: _probed(original, init_function, tracker))


def _probed(original: Callable[..., None], init_function: _InitFunction, tracker: StepTracker) -> Callable[..., None]:
    begun: WeakMap[None] = WeakMap()  # loaders

    @functools.wraps(original)
    @unseen
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if tracker.active:
            init_function.making[id(self)] = []
        try:
            original(self, loader, *args, **kwargs)
        except BaseException as error:
            init_function.making.pop(id(self), None)
            forget_frame(error)
            _forget_notes(error)
            raise
        making = init_function.making.pop(id(self), None)
        if making is None or not tracker.active:
            return
        try:
            tracker.loaders.register(self, making[0] if making else None, again=loader in begun)
            begun[loader] = None
        except Exception as error:
            tracker.fault(error)

    return __init__


def _forget_notes(error: BaseException) -> None:
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
        error.__notes__ = kept  # type: ignore[attr-defined]


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
        if iterator is None:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {_NAME!r}")
        try:
            user = vars(iterator)[_NAME]
        except KeyError:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {_NAME!r}") from None
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
