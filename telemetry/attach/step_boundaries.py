"""Passes step boundaries on to a snapshot that is armed or recording, and to NVTX ranges."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from telemetry.attach import ring as r
from telemetry.attach.loader_types import is_loader_iterator
from telemetry.core.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.attach.step_tracker import StepTracker


class StepBoundaries:
    """Notifies the recorder and the profiler ranges of each step boundary, off the fast path.

    Args:
        state: state of the training thread; it has the recorder and the ranges.
    """

    __slots__ = ("_state",)

    def __init__(self, state: StepTracker) -> None:
        self._state = state

    def requested(self, entry: int) -> None:
        """A span with this code is about to begin: notify of its boundary before the wait begins."""
        state = self._state
        if state.recorder is not None or state.profiler_ranges.nvtx:
            self.passed(opens=bool(entry & r.OPENS), closing=bool(entry & r.CLOSES) and state.ring.open)

    def passed(self, *, opens: bool = False, closing: bool = False) -> None:
        """A step has ended, or begins now. ``closing``: the step ends with an entry that is not in the ring yet."""
        state = self._state
        ended = state.ring.closed + closing
        if state.profiler_ranges.nvtx and (opens or not state.ring.open):
            state.profiler_ranges.step(ended, opens=opens)
        if state.recorder is not None:
            recorder = state.recorder
            self._paused(lambda: recorder.boundary(ended, opens=opens))

    def interrupt(self, why: str) -> None:
        """Something other than training begins, or the run ends."""
        state = self._state
        if state.recorder is not None and threading.get_ident() == state.thread:
            recorder, ended = state.recorder, state.ring.closed
            self._paused(lambda: recorder.interrupt(ended, why))

    def wait_begins(self, iterator: object) -> Sequence[Callable[[], object]]:
        """Begin a range for a wait. Torch itself marks waits for a DataLoader. Returns the functions that end it."""
        ranges = self._state.profiler_ranges
        if is_loader_iterator(iterator) and not ranges.nvtx:
            return ()
        return ranges.begin(f"enumerate(DataLoader)#{type(iterator).__name__}.__next__")

    def _paused(self, call: Callable[[], bool]) -> None:
        """Call the recorder. Starting or stopping a profiler takes milliseconds, which do not count as training."""
        state = self._state
        start = now_ns()
        try:
            worked = call()
        except Exception as error:
            state.recorder, worked = None, True
            state.fault(error)
        end = now_ns()
        state.overhead_ns += end - start
        if worked:
            state.ring.push(start, end, r.code(r.S_OTHER, state.category))
