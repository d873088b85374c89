"""Times garbage collections that stop the training thread.

The callback in ``gc.callbacks`` consists of C functions that only take stamps. A signal that arrives during a
collection waits for the next bytecode. If that were ours, the exception of its handler (Ctrl-C) would be raised in the
callback, and Python drops what a callback raises.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from functools import partial
from itertools import repeat, takewhile
from operator import attrgetter, methodcaller
from threading import get_ident, get_native_id
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.attach.ring import S_COMPUTE
from telemetry.core.clock import clock_gettime_ns, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.attach.patches import Patches
    from telemetry.attach.sampler_timer import SamplerTimer
    from telemetry.attach.step_state import StepState

_MAX_STAMPS: Final = 1 << 12
"""Two for each collection. With one reading a second this is enough for a collection every 0.5 ms."""

_STATE: Final = attrgetter("category", "waiting_since", "batch_seen", "thread")
_AT_BOUNDARY: Final = attrgetter("at_boundary")


class _Stamp(NamedTuple):
    """The start or the end of a collection.

    Attributes:
        begins: whether it begins.
        at_ns: when, monotonic ns.
        thread: ident of the collecting thread.
        ran_ns: CPU time of the training thread, if another one collects: that takes 2 µs to read.
        state: what the training thread was doing, as `_STATE` reads it.
        at_boundary: whether an iteration had begun or ended since the newest batch.
    """

    begins: bool
    at_ns: int
    thread: int
    ran_ns: int
    state: tuple[int, int, bool, int]
    at_boundary: bool


class _Collection(NamedTuple):
    """A collection that stopped the training thread. ``own``: on that thread."""

    began_ns: int
    ended_ns: int
    lost_ns: int
    own: bool
    in_wait: bool
    at_boundary: bool


class GarbageTimer:
    """Sums over the collections that stopped the training thread. The agent thread reads them.

    A collection on another thread holds the GIL, so it stops the training thread, too. Time in which that ran meanwhile
    (code that does not need the GIL) is not counted, and nothing while it waited for a batch of its workers. During
    startup and evaluations no step loses time.

    Attributes:
        ns: time lost.
        wait_ns: the part of it in which a batch was requested. ``boundary_wait_ns``: that at epoch boundaries, which is
            not in ``wait_ns``.
    """

    def __init__(self, state: StepState, sampler: SamplerTimer) -> None:
        self._stamps: deque[_Stamp] = deque(maxlen=_MAX_STAMPS)
        self._state = state
        self._sampler = sampler
        self._attached = False
        self._callback: Callable[..., object] | None = None
        self._read_until_ns = 0
        self.ns = self.wait_ns = self.boundary_wait_ns = 0

    def attach(self, patches: Patches) -> None:
        """Add the callback. ``patches`` removes it."""
        self._attached = True
        patches.on_undo(self.detach)
        self.follow_thread()

    def follow_thread(self) -> None:
        """The calling thread is the training thread from now on."""
        if not self._attached:
            return
        self.detach()
        begins, ends = (self._noting(begins=begins) for begins in (True, False))
        clock = type("GarbageClock", (), {"start": property(begins), "stop": property(ends)})()
        # Python calls it with the phase, "start" or "stop", and details: getattr(clock, phase, details).
        self._callback = partial(getattr, clock)
        gc.callbacks.append(self._callback)

    def detach(self) -> None:
        """Remove the callback."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    @property
    def collecting(self) -> bool:
        """Whether the calling thread collects."""
        newest = [*self._stamps][-1:]
        return [(stamp[0], stamp[2]) for stamp in newest] == [(True, get_ident())]

    def read(self, *, workers: bool) -> None:
        """Add up the collections that have ended since the last call. On the agent thread.

        Args:
            workers: whether workers fetch the batches.
        """
        for each in self._collections(self._read_until_ns, workers=workers):
            self._read_until_ns = each.ended_ns
            self.ns += each.lost_ns
            if each.in_wait and each.at_boundary:
                self.boundary_wait_ns += each.lost_ns
            elif each.in_wait:
                self.wait_ns += each.lost_ns

    def within_wait(self, since_ns: int) -> tuple[int, int]:
        """Collections since a stamp in which the training thread, which calls this, requested a batch of workers.

        Returns:
            Their time, and the part of it in which this thread has collected, ns.
        """
        inside = [each for each in self._collections(since_ns, workers=True) if each.in_wait]
        return sum(each.lost_ns for each in inside), sum(each.lost_ns for each in inside if each.own)

    def _noting(self, *, begins: bool) -> Callable[[object], object]:
        """A C function of one argument, which it ignores, that appends a `_Stamp`."""
        call, native = methodcaller("__call__"), get_native_id()
        append: Callable[[Any], None] = self._stamps.append
        # The clock of this thread, as pthread_getcpuclockid computes its number. It fails once the thread has ended.
        clock = {True: partial(clock_gettime_ns, ~native << 3 | 6), False: int}
        exists = map(os.access, repeat(f"/proc/self/task/{native}"), repeat(os.F_OK))
        ran = partial(next, map(call, map(clock.get, exists)))
        stamp = zip(
            repeat(begins),
            iter(now_ns, None),
            iter(get_ident, None),
            map(call, map({get_ident(): int}.get, iter(get_ident, None), repeat(ran))),  # int() is 0
            map(_STATE, repeat(self._state)),
            map(_AT_BOUNDARY, repeat(self._sampler)),
            strict=False,
        )
        return partial(next, map(append, stamp))  # next(..., argument): the argument is the default, unused

    def _collections(self, since_ns: int, *, workers: bool) -> Iterator[_Collection]:
        """Those that began at or after a stamp, oldest first."""
        newer = takewhile(lambda stamp: stamp[1] >= since_ns, reversed([*self._stamps]))
        began: _Stamp | None = None
        for stamp in map(_Stamp._make, reversed([*newer])):
            if stamp.begins:
                began = stamp
            elif began is not None:
                found = _collection(began, stamp, workers=workers)
                began = None
                if found is not None:
                    yield found


def _collection(began: _Stamp, ended: _Stamp, *, workers: bool) -> _Collection | None:
    category, waiting_since, batch_seen, training = began.state
    elsewhere = began.thread != training
    asking = waiting_since > 0 and batch_seen
    if category != S_COMPUTE and (elsewhere or not asking):
        return None
    if elsewhere and waiting_since and workers:
        return None
    lost = max(0, ended.at_ns - began.at_ns - (ended.ran_ns - began.ran_ns))
    return _Collection(began.at_ns, ended.at_ns, lost, not elsewhere, asking, began.at_boundary)
