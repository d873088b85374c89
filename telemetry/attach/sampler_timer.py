"""Times what the training thread itself does inside ``next()`` if workers fetch. Mostly it runs the sampler.

A DataLoader with workers asks its sampler for the next indices on the thread that requests batches, before it returns a
batch. That time is added to every step, however many workers there are. The iterator does it in ``_next_index``. To
time it, a callable of ours is put into the iterator's own ``__dict__`` during one call of ``next()``: for a few batches
a second, and at the start of an epoch. All other steps run torch's own code.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.patches import around
from telemetry.attach.ring import S_DATA_WAIT
from telemetry.attach.traceback_frames import forget_frame, unseen
from telemetry.core.clock import now_ns, thread_time_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.attach.gc_timer import GarbageTimer
    from telemetry.attach.patches import Patches
    from telemetry.attach.step_tracker import StepTracker

_NAME: Final = "_next_index"


class SamplerTimer:
    """Sums over timed waits, nanoseconds. Written on the training thread.

    Attributes:
        wanted: how many of the next batches to time. Set on the agent thread, and at the start of an epoch.
        at_boundary: whether an iteration has begun or ended since the newest batch. False before the first batch.
        batches: how many batches of workers were timed, without the first of each epoch.
        sampler_ns, sampler_cpu_ns: time of the sampler for them, wall clock and CPU clock of this thread, without
            garbage collections.
        receiving_cpu_ns: CPU time of this thread for the rest of these waits: to receive and unpickle the batch.
        boundary_sampler_ns, boundary_sampler_cpu_ns: time of the sampler at the start of every epoch except the first.
    """

    __slots__ = (
        "at_boundary",
        "batches",
        "boundary_sampler_cpu_ns",
        "boundary_sampler_ns",
        "receiving_cpu_ns",
        "sampler_cpu_ns",
        "sampler_ns",
        "wanted",
    )

    def __init__(self) -> None:
        self.wanted = 0
        self.at_boundary = False
        self.batches = 0
        self.sampler_ns = self.sampler_cpu_ns = self.receiving_cpu_ns = 0
        self.boundary_sampler_ns = self.boundary_sampler_cpu_ns = 0

    def epoch_boundary(self) -> None:
        """Note that an iteration begins or has ended, except the first of the run."""
        self.at_boundary = True
        self.wanted = self.wanted or 1


class TimedWait:
    """A wait for a batch of workers, or the start of an epoch, whose parts are timed.

    Args:
        tracker: knows of garbage collections, and gets the sums.
        iterator: the iterator of the loader.
    """

    __slots__ = ("_before", "_sampler", "_tracker")

    def __init__(self, tracker: StepTracker, iterator: object) -> None:
        self._tracker = tracker
        self._sampler = _TimedSampler(tracker.garbage, iterator)
        vars(iterator)[_NAME] = self._sampler
        self._before = _Clocks(tracker.garbage)

    def end(self, iterator: object, *, batch: bool) -> None:
        """End the wait. ``batch``: whether it returned a batch."""
        timer, sampler = self._tracker.sampler_timer, self._sampler
        _, cpu = self._before.passed()
        if vars(iterator).get(_NAME) is sampler:
            del vars(iterator)[_NAME]
        if timer.at_boundary:
            timer.boundary_sampler_ns += sampler.ns
            timer.boundary_sampler_cpu_ns += sampler.cpu_ns
        elif batch:
            timer.batches += 1
            timer.sampler_ns += sampler.ns
            timer.sampler_cpu_ns += sampler.cpu_ns
            timer.receiving_cpu_ns += max(0, cpu - sampler.cpu_ns)


class _Clocks:
    """The wall clock and this thread's CPU clock, from which garbage collections are subtracted."""

    __slots__ = ("_cpu_ns", "_garbage", "_wall_ns")

    def __init__(self, garbage: GarbageTimer) -> None:
        self._garbage = garbage
        self._cpu_ns = thread_time_ns()
        self._wall_ns = now_ns()

    def passed(self) -> tuple[int, int]:
        """Nanoseconds since the start without garbage collections: wall clock, and CPU clock."""
        wall, cpu = now_ns() - self._wall_ns, thread_time_ns() - self._cpu_ns
        collecting, collecting_cpu = self._garbage.within_wait(self._wall_ns)
        return max(0, wall - collecting), max(0, cpu - collecting_cpu)


class _TimedSampler:
    """Replaces ``_next_index`` of one iterator, and times it on the training thread.

    It does not keep the iterator alive, because the workers end with the iterator.
    """

    __slots__ = ("_garbage", "_iterator", "_thread", "cpu_ns", "ns")

    def __init__(self, garbage: GarbageTimer, iterator: object) -> None:
        self._garbage = garbage
        self._iterator = weakref.ref(iterator)
        self._thread = get_ident()
        self.ns = self.cpu_ns = 0

    @unseen
    def __call__(self) -> Any:
        iterator: Any = self._iterator()
        before = _Clocks(self._garbage) if get_ident() == self._thread else None
        try:
            return type(iterator)._next_index(iterator)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            if before is not None:
                ns, cpu_ns = before.passed()
                self.ns += ns
                self.cpu_ns += cpu_ns


def time_wait(tracker: StepTracker, iterator: object, entry: int) -> TimedWait | None:
    """Time a wait that is about to begin. None if it is not for training, or if no known workers fetch.

    Args:
        tracker: requests the measurement.
        iterator: the iterator of the loader.
        entry: the code of the wait's span.
    """
    if entry & 7 != S_DATA_WAIT:
        return None
    tracker.sampler_timer.wanted -= 1
    return TimedWait(tracker, iterator) if tracker.sources.known(iterator) is not None and _timeable(iterator) else None


def end_timed(tracker: StepTracker, timed: TimedWait, iterator: object, *, batch: bool) -> None:
    """End what `time_wait` began. Never raises."""
    try:
        timed.end(iterator, batch=batch)
    except Exception as error:
        tracker.note_error(error)


def _timeable(iterator: object) -> bool:
    own = getattr(iterator, "__dict__", None)
    return (
        own is not None and hasattr(type(iterator), _NAME) and isinstance(own.get(_NAME), (_TimedSampler, type(None)))
    )


def time_starts(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch the callers of ``iter(sampler)`` in the base class of all iterators: the constructor, and ``_reset``.

    Args:
        module: ``torch.utils.data.dataloader``.
        tracker: gets the sums.
        patches: undo it.
    """
    map_style = module._DatasetKind.Map

    def before(_iterator: Any) -> _Clocks | None:
        return _Clocks(tracker.garbage) if _at_boundary(tracker) else None

    def after(iterator: Any, clocks: _Clocks | None, failed: bool) -> None:  # noqa: FBT001
        # An iterable data set has no sampler of its own. But the ranks may have to agree on a seed.
        if clocks is None or failed or not _fetches_in_workers(iterator, map_style):
            return
        ns, cpu_ns = clocks.passed()
        tracker.sampler_timer.boundary_sampler_ns += ns
        tracker.sampler_timer.boundary_sampler_cpu_ns += cpu_ns

    for name in ("__init__", "_reset"):
        patches.replace(module._BaseDataLoaderIter, name, lambda original: around(original, before=before, after=after))


def _at_boundary(tracker: StepTracker) -> bool:
    return tracker.sampler_timer.at_boundary and get_ident() == tracker.thread and tracker.waiting_since > 0


def _fetches_in_workers(iterator: Any, map_style: object) -> bool:
    return bool(getattr(iterator, "_num_workers", 0)) and getattr(iterator, "_dataset_kind", None) == map_style


def timed_reset(original: Callable[..., Any], tracker: StepTracker) -> Callable[..., Any]:
    """``_reset`` of an iterator with workers, timed. It draws the indices of all batches that are prefetched."""

    def before(iterator: Any) -> TimedWait | None:
        try:
            loader = tracker.sources.known(iterator)
            if loader is not None and loader.block is not None:
                loader.block.batches.begin_again(vars(iterator).get("_send_idx", 0))
            return TimedWait(tracker, iterator) if _at_boundary(tracker) and _timeable(iterator) else None
        except Exception as error:
            tracker.fault(error)
            return None

    def after(iterator: Any, timed: TimedWait | None, _failed: bool) -> None:  # noqa: FBT001
        if timed is not None:
            end_timed(tracker, timed, iterator, batch=False)

    return around(original, before=before, after=after)
