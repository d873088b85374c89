"""Times the garbage collections of the training thread."""

from __future__ import annotations

import gc
from collections import deque
from functools import partial
from itertools import repeat
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.seams.ring import S_COMPUTE
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.seams.patching import Patches
    from telemetry.seams.state import StepState

_MAX_STAMPS: Final = 1 << 12
"""Each collection has two stamps. With one reading a second there is room for a collection every 0.5 ms."""

_MAX_ENDS: Final = 100

_MAX_CALL_NS: Final = 20_000
"""If a call takes longer, the kernel has stopped the thread in it."""

_CALL_PARTS: Final = 2
"""A call of the callback takes twice as long as the part of it between the two readings of the clock. Beside steps with
500 small tensors (`benchmarks.small_steps`) it took 2.8 us for both calls of a collection, and that part 1.5 us."""

_STATE: Final = attrgetter("category", "waiting_since", "batch_seen", "at_boundary", "thread")


class _Stamp(NamedTuple):
    """The start or the end of a collection: monotonic ns, the collecting thread, and what the training thread does."""

    begins: bool
    at_ns: int
    thread: int
    state: tuple[int, int, bool, bool, int]
    done_ns: int


class GarbageTimer:
    """Sums over the collections on the training thread. The agent thread reads them.

    The callback in ``gc.callbacks`` consists of C functions that only take stamps. A signal that arrives during a
    collection waits for the next bytecode. If our code had it, the exception of the signal's handler (Ctrl-C) would be
    raised in the callback, and Python drops what a callback raises. During startup and evaluations no step loses time.

    Attributes:
        ns: time lost. ``wait_ns``: the part in requests for batches in mid-epoch. ``boundary_wait_ns``: at boundaries.
        cost_ns: what the callback itself has cost.
    """

    def __init__(self, state: StepState) -> None:
        self._stamps: deque[_Stamp] = deque(maxlen=_MAX_STAMPS)
        self._state = state
        self._callback = _noting(self._stamps.append, state)
        self._ends: deque[int] = deque(maxlen=_MAX_ENDS)
        self.ns = self.wait_ns = self.boundary_wait_ns = 0
        self.cost_ns = 0

    def attach(self, patches: Patches) -> None:
        """Add the callback. ``patches`` removes it."""
        gc.callbacks.append(self._callback)
        patches.on_undo(self.detach)

    def detach(self) -> None:
        """Remove the callback."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    @property
    def collecting(self) -> bool:
        """Whether the calling thread collects."""
        return any((stamp[0], stamp[2]) == (True, get_ident()) for stamp in [*self._stamps][-1:])

    def ended_within(self, after_ns: int, until_ns: int) -> int:
        """When the newest collection of the training thread has ended between two stamps of the last moments, or 0."""
        self.read()
        return max((end for end in self._ends if after_ns < end <= until_ns), default=0)

    def read(self) -> None:
        """Add up the collections that have ended since the last call. The agent thread calls it."""
        began: _Stamp | None = None
        while self._stamps:
            stamp = _Stamp._make(self._stamps[0])
            if stamp.begins and len(self._stamps) < 2:
                return  # it goes on
            self._stamps.popleft()
            self.cost_ns += _CALL_PARTS * min(stamp.done_ns - stamp.at_ns, _MAX_CALL_NS)
            if not stamp.begins and began is not None:
                self._add(began, stamp.at_ns - began.at_ns)
            began = stamp if stamp.begins else None

    def _add(self, began: _Stamp, lost_ns: int) -> None:
        category, waiting_since, batch_seen, at_boundary, training = began.state
        asking = waiting_since > 0 and batch_seen
        if began.thread != training:
            return
        self._ends.append(began.at_ns + lost_ns)
        if category == S_COMPUTE or asking:
            self.ns += lost_ns
            self.wait_ns += lost_ns * (asking and not at_boundary)
            self.boundary_wait_ns += lost_ns * (asking and at_boundary)


def _noting(append: Callable[[Any], None], state: StepState) -> Callable[..., object]:
    """Make a callback for `gc.callbacks` that appends a `_Stamp`."""
    begins, ends = (
        property(
            partial(
                next,
                map(
                    append,
                    zip(
                        repeat(begins),
                        iter(now_ns, None),
                        iter(get_ident, None),
                        map(_STATE, repeat(state)),
                        iter(now_ns, None),
                        strict=False,
                    ),
                ),
            )
        )
        for begins in (True, False)
    )
    # Python calls this with the phase, "start" or "stop", and details: getattr(clock, phase, details). A property calls
    # next(stamps, clock): the second is a default, unused.
    return partial(getattr, type("GarbageClock", (), {"start": begins, "stop": ends})())
