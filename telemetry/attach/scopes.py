"""Phases, steps and checkpoints that the script marks: ``telemetry.phase(...)``, ``telemetry.step()``, saving."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.attach import ring as r
from telemetry.attach.fast_path import LOOP_CHANGED
from telemetry.core.clock import NS, now_ns
from telemetry.core.labels import CHECKPOINT, EVALUATION, OTHER
from telemetry.core.spans import PhaseSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.attach.fast_path import FastPath
    from telemetry.attach.step_boundaries import StepBoundaries
    from telemetry.attach.step_tracker import StepTracker

_CATEGORY_OF: Final = {EVALUATION: r.S_EVALUATION, CHECKPOINT: r.S_CHECKPOINT}


class Interrupted(NamedTuple):
    """The state of the training thread when a phase began.

    Attributes:
        category: the category of the ledger, as a code ``S_*``.
        in_phase: whether a checkpoint or an evaluation phase was in progress.
        steady_iterator_id: the iterator of the fast path.
        at: when the phase began, monotonic ns.
        ranges: functions that end the profiler ranges of the phase.
    """

    category: int
    in_phase: bool
    steady_iterator_id: int
    at: int
    ranges: Sequence[Callable[[], object]]


class Scopes:
    """Enters and leaves the phases and steps of the training thread. Does nothing on any other thread.

    Args:
        state: state of the training thread.
        fast_path: disabled when a phase or a step begins.
        boundaries: gets steps that begin and end.
    """

    __slots__ = ("_boundaries", "_fast_path", "_state")

    def __init__(self, state: StepTracker, fast_path: FastPath, boundaries: StepBoundaries) -> None:
        self._state = state
        self._fast_path = fast_path
        self._boundaries = boundaries

    def enter_phase(self, name: str) -> Interrupted | None:
        """Begin a phase. Returns the argument for `exit_phase`; None on any other thread."""
        state = self._state
        if threading.get_ident() != state.thread:
            return None
        if name == EVALUATION:
            self._boundaries.interrupt(EVALUATION)
        ranges = state.profiler_ranges.begin(name) if state.profiler_ranges.makers else ()
        before = Interrupted(state.category, state.in_phase, self._fast_path.steady_iterator_id, now_ns(), ranges)
        if name in _CATEGORY_OF:
            self._fast_path.disable(LOOP_CHANGED)
            state.switch(_CATEGORY_OF[name], before.at)
            state.in_phase = True  # last: a phase that a signal handler interrupts here is never left
        elif not state.in_phase:
            self._fast_path.disable(LOOP_CHANGED)
            state.switch(r.S_OTHER, before.at)
        return before

    def exit_phase(self, name: str, before: Interrupted | None, start: int) -> None:
        """End a phase, and go back to the state before it.

        Args:
            name: name of the phase.
            before: what `enter_phase` returned.
            start: start of the phase, monotonic ns.
        """
        state = self._state
        if before is not None:
            state.in_phase = before.in_phase  # first: a signal handler may interrupt the rest
        end = now_ns()
        category = name if name in _CATEGORY_OF else OTHER
        if category == OTHER or before is None:  # other phases are in the ring
            state.phases.append(PhaseSpan(name, category, start, (end - start) / NS))
        if before is None:
            return
        if name == CHECKPOINT and not (before.in_phase and before.category == r.S_CHECKPOINT):
            state.resume.checkpoint_ended(state, before.at, end)
        state.profiler_ranges.end(before.ranges)
        if category == OTHER and state.category != r.S_OTHER:
            return  # training has gone on inside the phase
        if state.batch_seen and not state.step_open and before.category in {r.S_STARTUP, r.S_COMPUTE}:
            self._fast_path.disable(LOOP_CHANGED)  # the loop before the phase has ended inside it
            state.switch(r.S_OTHER, end)
            return
        if before.steady_iterator_id:
            self._fast_path.enable(before.steady_iterator_id)
        else:
            self._fast_path.disable(LOOP_CHANGED)
        state.switch(before.category, end)

    def enter_step(self) -> None:
        """Begin the user's step. A batch that was requested since the last step belongs to it."""
        state = self._state
        if threading.get_ident() != state.thread or state.in_phase:
            return
        stamp = now_ns()
        flags = 0 if state.step_open else r.OPENS
        state.explicit = state.step_open = state.batch_seen = True
        self._fast_path.disable(LOOP_CHANGED)
        state.category = r.S_COMPUTE
        state.ring.push(stamp, stamp, r.code(r.S_COMPUTE, r.S_COMPUTE, flags))
        self._boundaries.passed(opens=bool(flags))

    def exit_step(self) -> None:
        """End the user's step."""
        state = self._state
        if threading.get_ident() != state.thread or state.in_phase or not state.step_open:
            return
        stamp = now_ns()
        state.unseen_steps += not state.batch_since_step
        state.step_open = state.batch_since_step = False
        state.category = r.S_OTHER
        state.ring.push(stamp, stamp, r.code(r.S_OTHER, r.S_OTHER, r.CLOSES))
        self._boundaries.passed()
