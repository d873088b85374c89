"""The hook that runs after every optimizer step.

It counts the steps, which distinguishes training from evaluation. If no batch is requested on the training thread,
because another thread prefetches, then each step of the optimizer is a training step.

Torch calls the hook for each ``step`` of any optimizer. One that wraps another, or whose class calls the ``step`` of
its base class, makes two calls for one step: the inner one does not count.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach import ring as r
from telemetry.attach.step_state import NO_THREAD
from telemetry.core.clock import now_ns
from telemetry.core.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from telemetry.attach.evaluation_detector import TrainingSigns
    from telemetry.attach.graph_captures import Captures
    from telemetry.attach.step_boundaries import StepBoundaries
    from telemetry.attach.step_tracker import StepTracker

_BOUNDARY: Final = r.code(r.S_COMPUTE, r.S_COMPUTE, r.CLOSES | r.OPENS | r.BATCH)

_MAX_FRAMES: Final = 12
"""Between the step of an optimizer and that of one around it. A gradient scaler and a scheduler add some."""

_LOOKS: Final = 16
"""So many steps after a new optimizer are looked at: it may be in another one, or around one. A look takes 1 µs."""

_MAX_OPTIMIZERS: Final = 64


def optimizer_hook(tracker: StepTracker) -> Callable[[object, object, object], None]:
    """The hook to register with torch. Outside the fast path it calls `OptimizerSteps.stepped`."""

    # The tracker is a default value and not a closure variable: see `loader_hooks.timed_next`.
    def stepped(optimizer: object, _args: object, _kwargs: object, tracker: StepTracker = tracker) -> None:
        if tracker.fast_path_iterator_id and not tracker.nested_steps:
            tracker.optimizer_steps += 1
            return
        try:
            tracker.optimizer.stepped(optimizer)
        except Exception as error:
            tracker.fault(error)

    # As torch.compiler.disable marks a function. That would import Dynamo. A compiled step must not trace this hook.
    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]
    return stepped


class OptimizerSteps:
    """Handles an optimizer's step outside the fast path.

    Args:
        state: state of the training thread.
        boundaries: gets the steps that optimizers make.
        signs: gets the optimizers.
        captures: gets the steps that are only recorded, in a graph.
    """

    __slots__ = (
        "_boundaries",
        "_captures",
        "_device_read_from",
        "_known",
        "_looks",
        "_optimizer_id",
        "_signs",
        "_state",
    )

    def __init__(
        self, state: StepTracker, boundaries: StepBoundaries, signs: TrainingSigns, captures: Captures
    ) -> None:
        self._state = state
        self._boundaries = boundaries
        self._signs = signs
        self._captures = captures
        self._known: set[int] = set()  # ids of optimizers that have stepped
        self._looks = 0  # how many of the next steps are looked at
        self._device_read_from = 0  # id of the optimizer whose parameters gave the device
        self._optimizer_id = 0  # id of the optimizer whose steps count as training steps, if no batch is requested

    def stepped(self, optimizer: object) -> None:
        """The ``step`` of an optimizer has returned."""
        state = self._state
        if id(optimizer) not in self._known:
            self._known = {id(optimizer), *(self._known if len(self._known) < _MAX_OPTIMIZERS else ())}
            self._looks = _LOOKS
        self._looks -= 1
        if (state.nested_steps or self._looks >= 0) and _is_nested(sys._getframe(2)):
            state.nested_steps = True  # the fast path cannot tell
            state.resume.read_position(optimizer, state.optimizer_steps + 1)
        elif not self._captures.recorded(optimizer):
            self.count(optimizer)

    def count(self, optimizer: object) -> None:
        """Count a step of an optimizer: now, or captured in a graph that was replayed now."""
        state = self._state
        state.optimizer_steps += 1
        if state.resume.initializing:
            return
        here = threading.get_ident()
        if here != state.thread:
            if state.thread == NO_THREAD or state.batch_seen or self._optimizer_id:
                return
            # start() was called on another thread than the one that trains
            state.thread, state.native_thread = here, threading.get_native_id()
            state.garbage.follow_thread()
        if state.trained_on in {None, "cpu"} and id(optimizer) != self._device_read_from:
            self._device_read_from = id(optimizer)
            state.trained_on = _device_of(optimizer) or state.trained_on
        state.resume.stepped(optimizer, state.optimizer_steps)
        self._signs.follow(optimizer)
        if state.gpu is not None:
            try:
                state.gpu.worked()
            except Exception as error:
                state.without_gpu(error)
        if state.in_phase or state.explicit:
            return
        if state.batches_unseen:
            state.batches_unseen = state.batch_seen = state.step_open = False
            state.step_iterators.clear()
        if not state.batch_seen:
            self._optimizer_id = self._optimizer_id or id(optimizer)
            if self._optimizer_id == id(optimizer):
                stamp = now_ns()
                state.ring.push(stamp, stamp, _BOUNDARY)
                state.unseen_steps += 1
                state.category = r.S_COMPUTE
                self._boundaries.passed(opens=True)
        elif state.category == r.S_EVALUATION:  # an evaluation loop was left with break
            state.switch(r.S_COMPUTE if state.step_open else r.S_OTHER)


def _is_nested(step: FrameType) -> bool:
    """Whether an optimizer steps within the step of another. ``step``: torch's frame that calls the hooks."""
    frame = step.f_back
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code is step.f_code:
            return True
        frame = frame.f_back
    return False


def _device_of(optimizer: Any) -> str | None:
    """The type of device that holds an optimizer's parameters; None if it is unknown."""
    try:
        return str(optimizer.param_groups[0]["params"][0].device.type)
    except Exception as error:
        let_pass(error)
        return None
