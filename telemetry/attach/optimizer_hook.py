"""The hook that runs after every optimizer step.

It counts the steps, which distinguishes training from evaluation. If no batch is requested on the training thread,
because another thread prefetches, then each step of the optimizer is a training step.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach import ring as r
from telemetry.attach.step_state import NO_THREAD
from telemetry.core.clock import now_ns
from telemetry.core.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.attach.step_boundaries import StepBoundaries
    from telemetry.attach.step_state import StepState
    from telemetry.attach.step_tracker import StepTracker

_BOUNDARY: Final = r.code(r.S_COMPUTE, r.S_COMPUTE, r.CLOSES | r.OPENS | r.BATCH)


def optimizer_hook(tracker: StepTracker) -> Callable[[object, object, object], None]:
    """The hook to register with torch. Outside the fast path it calls `OptimizerSteps.stepped`."""

    # The tracker is a default value and not a closure variable: see `loader_hooks.timed_next`.
    def stepped(optimizer: object, _args: object, _kwargs: object, tracker: StepTracker = tracker) -> None:
        tracker.optimizer_steps += 1
        if not tracker.fast_path_iterator_id:
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
    """

    __slots__ = ("_boundaries", "_device_read_from", "_optimizer_id", "_state")

    def __init__(self, state: StepState, boundaries: StepBoundaries) -> None:
        self._state = state
        self._boundaries = boundaries
        self._device_read_from = 0  # id of the optimizer whose parameters gave the device
        self._optimizer_id = 0  # id of the optimizer whose steps count as training steps, if no batch is requested

    def stepped(self, optimizer: object) -> None:
        """An optimizer has stepped. The hook has already counted it."""
        state = self._state
        if state.resume.initializing:
            return
        here = threading.get_ident()
        if here != state.thread:
            if state.thread == NO_THREAD or state.batch_seen or self._optimizer_id:
                return
            # start() was called on another thread than the one that trains
            state.thread, state.native_thread = here, threading.get_native_id()
        if state.trained_on in {None, "cpu"} and id(optimizer) != self._device_read_from:
            self._device_read_from = id(optimizer)
            state.trained_on = _device_of(optimizer) or state.trained_on
        state.resume.stepped(state, optimizer)
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


def _device_of(optimizer: Any) -> str | None:
    """The type of device that holds an optimizer's parameters; None if it is unknown."""
    try:
        return str(optimizer.param_groups[0]["params"][0].device.type)
    except Exception as error:
        let_pass(error)
        return None
