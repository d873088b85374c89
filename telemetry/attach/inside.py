"""What the training thread does itself inside ``next()`` where workers fetch: above all, it runs the sampler.

A DataLoader with workers asks its sampler for the next indices on the thread that asks for batches, and before it
returns the batch that has come. However many workers there are, what that takes is added to every step. The iterator
does it in ``_next_index``. To time that, a callable of ours stands in the iterator's own ``__dict__`` for the length of
one call of ``next()``: for a few batches a second, and where an epoch begins. All other steps run torch's own code.
"""

from __future__ import annotations

import functools
import weakref
from threading import get_ident
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.frames import forget_frame, without_frames
from telemetry.attach.ring import S_DATA_WAIT
from telemetry.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.attach.patches import Patches
    from telemetry.attach.steps import StepTracker

_NAME: Final = "_next_index"


class Inside:
    """Sums over timed waits and over collections, nanoseconds. Written on the training thread.

    Attributes:
        wanted: so many of the next batches are to be timed. Set on the agent thread, and where an epoch begins.
        at_edge: an iteration has begun or ended since the newest batch. Not before the first batch of the run.
        batches: batches of workers that were timed, the first of an epoch not among them.
        sampler_ns, sampler_cpu_ns: what the sampler took for them, by the wall clock and by this thread's CPU clock;
            collections in it are not counted.
        receiving_cpu_ns: CPU time of this thread for the rest of those waits: to receive and unpickle the batch.
        edge_sampler_ns, edge_sampler_cpu_ns: what the sampler took where epochs began, in every epoch but the first.
        garbage_ns: collections that stopped this thread while it asked for a batch; ``edge_garbage_ns``: where an epoch
            ended or began. ``garbage_cpu_ns``: CPU time of this thread for all of them.
    """

    __slots__ = (
        "at_edge",
        "batches",
        "edge_garbage_ns",
        "edge_sampler_cpu_ns",
        "edge_sampler_ns",
        "garbage_cpu_ns",
        "garbage_ns",
        "receiving_cpu_ns",
        "sampler_cpu_ns",
        "sampler_ns",
        "wanted",
    )

    def __init__(self) -> None:
        self.wanted = 0
        self.at_edge = False
        self.batches = 0
        self.sampler_ns = self.sampler_cpu_ns = self.receiving_cpu_ns = 0
        self.edge_sampler_ns = self.edge_sampler_cpu_ns = 0
        self.garbage_ns = self.edge_garbage_ns = self.garbage_cpu_ns = 0

    def edge(self) -> None:
        """An iteration begins or has ended, and it is not the first of the run."""
        self.at_edge = True
        self.wanted = self.wanted or 1

    @property
    def collecting(self) -> tuple[int, int]:
        """Collections in waits so far, nanoseconds: by the wall clock, and by this thread's CPU clock."""
        return self.garbage_ns + self.edge_garbage_ns, self.garbage_cpu_ns

    def collected(self, lost_ns: int, cpu_ns: int) -> None:
        """A collection has stopped the training thread in a wait."""
        self.garbage_cpu_ns += cpu_ns
        if self.at_edge:
            self.edge_garbage_ns += lost_ns
        else:
            self.garbage_ns += lost_ns


class Timed:
    """One wait for a batch of workers, or one start of an epoch, whose parts are timed.

    Args:
        tracker: knows of collections, and takes the sums.
        iterator: of the loader.
    """

    __slots__ = ("_before", "_sampler", "_tracker")

    def __init__(self, tracker: StepTracker, iterator: object) -> None:
        self._tracker = tracker
        self._sampler = _Sampler(tracker, iterator)
        vars(iterator)[_NAME] = self._sampler
        self._before = _Clocks(tracker.inside)

    def end(self, iterator: object, *, batch: bool) -> None:
        """The wait is over. ``batch``: it brought one."""
        _, cpu = self._before.passed(self._tracker.inside)
        inside, sampler = self._tracker.inside, self._sampler
        if vars(iterator).get(_NAME) is sampler:
            del vars(iterator)[_NAME]
        if inside.at_edge:
            inside.edge_sampler_ns += sampler.ns
            inside.edge_sampler_cpu_ns += sampler.cpu_ns
        elif batch:
            inside.batches += 1
            inside.sampler_ns += sampler.ns
            inside.sampler_cpu_ns += sampler.cpu_ns
            inside.receiving_cpu_ns += max(0, cpu - sampler.cpu_ns)


class _Clocks:
    """The wall clock, this thread's CPU clock, and what collections have taken of both."""

    __slots__ = ("_collecting", "_cpu_ns", "_wall_ns")

    def __init__(self, inside: Inside) -> None:
        self._collecting = inside.collecting
        self._cpu_ns = thread_time_ns()
        self._wall_ns = now_ns()

    def passed(self, inside: Inside) -> tuple[int, int]:
        """Since then, without collections: by the wall clock, and on the CPU."""
        wall, cpu = now_ns() - self._wall_ns, thread_time_ns() - self._cpu_ns
        (wall_after, cpu_after), (wall_before, cpu_before) = inside.collecting, self._collecting
        return max(0, wall - wall_after + wall_before), max(0, cpu - cpu_after + cpu_before)


class _Sampler:
    """Stands in for ``_next_index`` of one iterator, and times it on the training thread.

    It does not keep the iterator alive: one that stayed behind would keep the workers from ending.
    """

    __slots__ = ("_inside", "_iterator", "_thread", "cpu_ns", "ns")

    def __init__(self, tracker: StepTracker, iterator: object) -> None:
        self._inside = tracker.inside
        self._iterator = weakref.ref(iterator)
        self._thread = get_ident()
        self.ns = self.cpu_ns = 0

    def __call__(self) -> Any:
        iterator: Any = self._iterator()
        before = _Clocks(self._inside) if get_ident() == self._thread else None
        try:
            return type(iterator)._next_index(iterator)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            if before is not None:
                ns, cpu_ns = before.passed(self._inside)
                self.ns += ns
                self.cpu_ns += cpu_ns


def time_wait(tracker: StepTracker, iterator: object, entry: int) -> Timed | None:
    """Time a wait that is about to begin. Not one that is for no training, or where no workers are known to fetch.

    ``entry``: the code of its span.
    """
    if entry & 7 != S_DATA_WAIT:
        return None
    tracker.inside.wanted -= 1
    return Timed(tracker, iterator) if tracker.sources.known(iterator) is not None and _timeable(iterator) else None


def end_timed(tracker: StepTracker, timed: Timed, iterator: object, *, batch: bool) -> None:
    """End what `time_wait` began. Fails never."""
    try:
        timed.end(iterator, batch=batch)
    except Exception as error:
        tracker.errors += 1
        tracker.last_error = without_frames(error)


def _timeable(iterator: object) -> bool:
    own = getattr(iterator, "__dict__", None)
    return own is not None and hasattr(type(iterator), _NAME) and isinstance(own.get(_NAME), (_Sampler, type(None)))


def time_starts(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch what calls ``iter(sampler)``, in the class under all iterators: when one is made, and for a new epoch."""
    map_style = module._DatasetKind.Map
    for name in ("__init__", "_reset"):
        patches.replace(module._BaseDataLoaderIter, name, lambda original: _timed_start(original, tracker, map_style))


def _at_edge(tracker: StepTracker) -> bool:
    return tracker.inside.at_edge and get_ident() == tracker.thread and tracker.waiting_since > 0


def _timed_start(original: Callable[..., Any], tracker: StepTracker, map_style: object) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _Clocks(tracker.inside) if _at_edge(tracker) else None
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            forget_frame(error)
            raise
        # An iterable data set has no sampler of its own; but there may be a seed to agree on with other ranks.
        if before is not None and _fetches_in_workers(self, map_style):
            ns, cpu_ns = before.passed(tracker.inside)
            tracker.inside.edge_sampler_ns += ns
            tracker.inside.edge_sampler_cpu_ns += cpu_ns
        return result

    return start


def _fetches_in_workers(iterator: Any, map_style: object) -> bool:
    return bool(getattr(iterator, "_num_workers", 0)) and getattr(iterator, "_dataset_kind", None) == map_style


def timed_reset(original: Callable[..., Any], tracker: StepTracker) -> Callable[..., Any]:
    """``_reset`` of an iterator with workers: it draws the indices of all batches that are prefetched."""

    @functools.wraps(original)
    def _reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        timed: Timed | None = None
        try:
            if _at_edge(tracker) and _timeable(self):
                timed = Timed(tracker, self)
        except Exception as error:
            tracker.fault(error)
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            if timed is not None:
                end_timed(tracker, timed, self, batch=False)

    return _reset
