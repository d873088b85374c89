"""Counts optimizer steps, also those in a CUDA graph.

They separate training from evaluation. If the training thread requests no batch, because another thread prefetches,
each step of the optimizer is a training step.

Torch calls the hook for each ``step`` of any optimizer. An optimizer that wraps another, or calls the ``step`` of its
base class, makes two calls for one step: the inner one does not count. If a graph has captured the step, a replay of
the graph is that step, because Python no longer calls the optimizer.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import deque
from threading import get_ident, get_native_id
from typing import TYPE_CHECKING, Any, Final

from telemetry.safety.errors import let_pass
from telemetry.seams import ring as r
from telemetry.seams.device import HOST
from telemetry.seams.loaders import own_value
from telemetry.seams.patching import FAILED, WeakMap
from telemetry.seams.state import NO_THREAD
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from types import FrameType

    import torch

    from telemetry.seams.patching import Patches
    from telemetry.seams.tracker import StepTracker

_BOUNDARY: Final = r.code(r.S_COMPUTE, r.S_COMPUTE, r.CLOSES | r.OPENS | r.BATCH)

_MAX_FRAMES: Final = 12
"""So many frames are searched for the step of an outer optimizer. A gradient scaler and a scheduler add some."""

_LOOKS: Final = 16
"""So many steps after a new optimizer are looked at: it may be in another one, or around one. A look takes 1 µs."""

_MAX_PARAMETERS: Final = 4096
"""So many parameters are asked for their device, once for an optimizer. That takes 0.1 us for each."""


_FOLLOWED: Final[list[tuple[StepTracker, OptimizerSteps]]] = []
"""Those of the running agent. The hook itself stays in torch's dictionary: a script may stop the agent in a hook of its
own, while torch goes through it."""


def _after_step(optimizer: object, _args: object, _kwargs: object, followed: list[Any] = _FOLLOWED) -> None:
    for tracker, steps in followed:
        if tracker.fast_path_iterator_id and not tracker.nested_steps:
            tracker.optimizer_steps += 1
            tracker.stepped_at = tracker.ring.head
            return
        try:
            steps.stepped(optimizer)
        except Exception as error:
            tracker.fault(error)


# torch.compiler.disable marks a function in this way, but imports Dynamo. A compiled step must not trace this.
_after_step._torchdynamo_disable = True  # type: ignore[attr-defined]


class OptimizerSteps:
    """Counts the steps of optimizers."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._known: WeakMap[bool] = WeakMap()  # optimizers that have stepped
        self._new: deque[weakref.ref[Any]] = deque()  # those of them that the agent thread has not read yet
        self._looks = 0  # how many of the next steps are looked at
        self._optimizer_id = 0  # id of the optimizer whose steps count as training steps if no batch is requested
        # The optimizers whose steps a graph contains. They are not kept alive: one may have a reference to its graph.
        self._in_graph: WeakMap[list[weakref.ref[Any]]] = WeakMap()

    def patch(self, module: Any, patches: Patches) -> None:
        """Have this called for each step, by the one hook of this process in ``torch.optim.optimizer``."""
        _FOLLOWED[:] = [(self._tracker, self)]
        patches.on_undo(_FOLLOWED.clear)
        if _after_step not in module._global_optimizer_post_hooks.values():
            module.register_optimizer_step_post_hook(_after_step)

    def patch_fastai(self, module: Any, patches: Patches) -> None:
        """Patch ``fastai.optimizer``: its own optimizer is none of torch's."""
        fault = self._tracker.fault
        patches.around(module.Optimizer, "step", after=self._stepped_of_fastai, on_error=fault)

    def _stepped_of_fastai(self, _noted: None, result: object, optimizer: object, *_: object, **__: object) -> None:
        if result is not FAILED:
            self._count(optimizer)

    def patch_graph(self, graph: Any, patches: Patches) -> None:
        """Patch a class of graphs, such as ``torch.cuda.CUDAGraph``, if it has the methods to patch."""
        if graph is None or not {"capture_begin", "capture_end"} <= vars(graph).keys():
            return
        fault = self._tracker.fault
        patches.around(graph, "capture_begin", before=self._capture_begins, after=self._capture_begun, on_error=fault)
        patches.around(graph, "capture_end", after=self._capture_ended, on_error=fault)
        if "replay" in vars(graph):
            patches.around(graph, "replay", after=self._replayed, on_error=fault)

    def stepped(self, optimizer: object) -> None:
        """Handle a step of an optimizer that is not on the fast path."""
        tracker = self._tracker
        if optimizer not in self._known:
            self._known[optimizer] = True
            self._looks = _LOOKS
            self._new.append(weakref.ref(optimizer))
        self._looks -= 1
        if (tracker.nested_steps or self._looks >= 0) and _is_nested(sys._getframe(2)):
            tracker.nested_steps = True  # the fast path cannot see it
        elif not self._only_captured(optimizer):
            self._count(optimizer)

    def _count(self, optimizer: object) -> None:
        """Count a step of an optimizer that ran now, or is in a graph that was replayed now."""
        tracker, here = self._tracker, get_ident()
        initializing = tracker.resume.initializing
        if here == tracker.thread and not initializing:
            tracker.settle(evaluates=False)
        tracker.optimizer_steps += 1
        tracker.stepped_at = tracker.ring.head
        if initializing:
            return
        if here != tracker.thread:
            if tracker.thread == NO_THREAD or tracker.batch_seen or self._optimizer_id or _in_backward():
                return
            # start() was called on another thread than the one that trains
            tracker.thread, tracker.native_thread = here, get_native_id()
        tracker.resume.stepped(optimizer)
        if tracker.gpu is not None:
            try:
                tracker.gpu.worked()
            except Exception as error:
                tracker.without_gpu(error)
        if tracker.in_phase or tracker.explicit:
            return
        if tracker.batches_unseen:
            tracker.batches_unseen = tracker.batch_seen = tracker.step_open = False
            tracker.step_iterators.clear()
        if not tracker.batch_seen:
            self._optimizer_id = self._optimizer_id or id(optimizer)
            if self._optimizer_id == id(optimizer):
                stamp = now_ns()
                tracker.ring.push(stamp, stamp, _BOUNDARY)
                tracker.unseen_steps += 1
                tracker.category = r.S_COMPUTE
                tracker.boundary_passed(opens=True)
        else:
            tracker.optimizer_stepped()

    def read_new(self) -> None:
        """Read the devices and the position of optimizers that are new. The agent thread calls it.

        There no mode of the script sees what is read of its tensors.
        """
        while self._new:
            optimizer = self._new.popleft()()
            if optimizer is not None:
                with sys.modules["torch"]._C.DisableTorchFunction():
                    self._read_devices(optimizer)
                    self._tracker.resume.read_position(optimizer, self._tracker)

    def _read_devices(self, optimizer: object) -> None:
        """Find out which devices hold the parameters. Those on the host count only while no others are known."""
        tracker = self._tracker
        found = _devices_of(optimizer)
        devices = [device for device in found if device.type not in HOST] or found
        if not devices:
            return
        if tracker.trained_on is None or (tracker.trained_on in HOST and devices[0].type not in HOST):
            tracker.trained_on, tracker.device, tracker.devices = devices[0].type, devices[0].index, []
        same = [device for device in devices if device.type == tracker.trained_on]
        tracker.devices = [*dict.fromkeys((*tracker.devices, *same))]

    # -- CUDA graphs ---------------------------------------------------------------------------------------------------

    def _capture_begins(self, graph: Any, *_: Any, **__: Any) -> None:
        if self._tracker.here:
            self._tracker.loop_changed()  # the slow path must see the optimizers' steps
        self._in_graph.discard(graph)
        self._tracker.captures.begin(graph)

    def _capture_begun(self, _noted: None, result: object, graph: Any, *_: Any, **__: Any) -> None:
        if result is FAILED:
            self._tracker.captures.graphs.discard(graph)

    def _capture_ended(self, _noted: None, _result: object, graph: Any) -> None:
        self._tracker.captures.graphs.discard(graph)

    def _only_captured(self, optimizer: object) -> bool:
        """Whether the step of an optimizer was only recorded in a graph, by this thread."""
        if not self._tracker.captures.under_way or not self._tracker.here:
            return False
        for graph in self._tracker.captures.graphs.objects():
            self._in_graph[graph] = [*(self._in_graph.get(graph) or []), weakref.ref(optimizer)]
        return True

    def _replayed(self, _noted: None, result: object, graph: Any) -> None:
        for reference in () if result is FAILED else self._in_graph.get(graph) or ():
            optimizer = reference()
            if optimizer is None:
                self._tracker.optimizer_steps += 1
            else:
                self._count(optimizer)


def _in_backward() -> bool:
    """Whether this thread is one of autograd's own, which run the backward passes of GPUs and their hooks."""
    return bool(sys.modules["torch"]._C._current_graph_task_id() != -1)


def _is_nested(step: FrameType) -> bool:
    """Whether an optimizer steps within another's step. ``step``: torch's frame that calls the hooks."""
    frame = step.f_back
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code is step.f_code:
            return True
        frame = frame.f_back
    return False


def _devices_of(optimizer: Any) -> list[torch.device]:
    """The devices that hold an optimizer's parameters, that of the first one first; empty if they are not known."""
    try:
        parameters = itertools.chain.from_iterable(group["params"] for group in own_value(optimizer, "param_groups"))
        return list(dict.fromkeys(each.device for each in itertools.islice(parameters, _MAX_PARAMETERS)))
    except Exception as error:
        let_pass(error)
        return []
