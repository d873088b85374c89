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

from telemetry.attach.traceback_frames import forget_frame, unseen
from telemetry.core.clock import now_ns, thread_time_ns

if TYPE_CHECKING:
    from telemetry.attach.gc_timer import GarbageTimer

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
        timer: gets the sums.
        garbage: knows of garbage collections.
        iterator: the iterator of the loader.
    """

    __slots__ = ("_before", "_sampler", "_timer")

    def __init__(self, timer: SamplerTimer, garbage: GarbageTimer, iterator: object) -> None:
        self._timer = timer
        self._sampler = _TimedSampler(garbage, iterator)
        vars(iterator)[_NAME] = self._sampler
        self._before = Clocks(garbage)

    def end(self, iterator: object, *, batch: bool) -> None:
        """End the wait. ``batch``: whether it returned a batch."""
        timer, sampler = self._timer, self._sampler
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


class Clocks:
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
        before = Clocks(self._garbage) if get_ident() == self._thread else None
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


def timeable(iterator: object) -> bool:
    """Whether a callable of ours can be put into this iterator: nobody else has put one there."""
    own = getattr(iterator, "__dict__", None)
    return (
        own is not None and hasattr(type(iterator), _NAME) and isinstance(own.get(_NAME), (_TimedSampler, type(None)))
    )
