"""Splits the compute of some steps into copies to the device, forward, backward, optimizer and the rest.

The agent thread asks for a few steps at each tick. Their boundaries are stamped, on an accelerator by events in the
stream of the work. The hooks are placed when the first such step begins: a run with very short steps, whose split
would cost too much, never has them.

Torch shows where a backward pass and the step of an optimizer begin and end, and some frameworks where they move a
batch. The rest is named by what follows: forward is what comes before a backward pass, and everything else (clipping,
logging, the learning rate) is other. A loop that calls ``.to()`` itself shows no copies: a `Tensor.to` that is not
torch's own would break subclasses of tensors, and a mode that sees every operator costs 10 us for each.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.hooks.patching import keep, release
from telemetry.records import BACKWARD, COPY, FORWARD, OPTIMIZER, OTHER
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from telemetry.hooks.device import DeviceEvents, DeviceStream
    from telemetry.hooks.patching import Patches
    from telemetry.hooks.state import StepState

TIMED_PARTS: Final = (FORWARD, BACKWARD, OPTIMIZER, COPY, OTHER)

_FORWARD, _BACKWARD, _OPTIMIZER, _COPY, _OTHER, _UNNAMED, _LEFT_OUT = range(7)

_MOVES: Final[Mapping[str, str]] = {
    "accelerate.data_loader": "send_to_device",
    "fastai.data.load": "to_device",
    "ignite.engine": "convert_tensor",
    "lightning.fabric.wrappers": "move_data_to_device",
    "lightning.pytorch.core.hooks": "move_data_to_device",
    "lightning_fabric.wrappers": "move_data_to_device",
    "pytorch_lightning.core.hooks": "move_data_to_device",
}
"""The name by which the loop of a framework, in this module, calls the function that moves a batch to the device."""

_MAX_MARKS: Final = 256
"""A step with more boundaries is not split. It accumulates the gradients of over a hundred passes."""

_MAX_EVENTS: Final = 24
"""The same on an accelerator, where a boundary takes microseconds."""


class _Mark(NamedTuple):
    """A boundary: the part that begins here, its stamp (monotonic ns), and its event on an accelerator."""

    part: int
    at: int
    event: Any


class ComputeTimer:
    """Times the parts of the steps that are asked for.

    Attributes:
        wanted: how many of the next steps to time. The agent thread sets it.
        running: whether a step is timed now. Only the training thread writes it.
        ns: sums of the timed steps by part, in the order of `TIMED_PARTS`. ``steps``: their number.
        events: makes events on the accelerator that the training uses; None on a host.
        failed: whether a call to the device raised. Then no step is timed any more.
    """

    __slots__ = (
        "_free", "_inside", "_made", "_marks", "_patches", "_pending", "_state", "_stream", "events", "failed", "ns",
        "running", "steps", "wanted",
    )  # fmt: skip

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._patches: Patches | None = None
        self.wanted = 0
        self.running = False
        self.ns = [0] * len(TIMED_PARTS)
        self.steps = 0
        self.events: DeviceEvents | None = None
        self.failed = False
        self._stream: DeviceStream | None = None
        self._marks: list[_Mark] = []
        self._inside: list[int] = []  # the parts that have begun and not ended
        self._pending: list[_Mark] = []  # a step whose events the device has not reached
        self._free: list[Any] = []
        self._made: list[Any] = []

    # -- the hooks -----------------------------------------------------------------------------------------------------

    def use(self, patches: Patches) -> None:
        """Place the hooks with these patches, once a step is to be timed."""
        self._patches = patches

    def _place(self, patches: Patches) -> None:
        autograd, optimizers = sys.modules["torch.autograd"], sys.modules["torch.optim.optimizer"]
        # `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all call this name.
        patches.around(
            autograd, "_engine_run_backward", before=self._backward_begins, after=self._ended, on_error=self.fail
        )
        for name, function in _MOVES.items():
            module = sys.modules.get(name)
            if module is not None and function in vars(module):
                patches.around(module, function, before=self._copy_begins, after=self._ended, on_error=self.fail)

        # A default value instead of a closure variable: see `hooks.dataloader.timed_next`.
        def begins(_optimizer: object, _args: object, _kwargs: object, timer: ComputeTimer = self) -> None:
            try:
                timer.enter(_OPTIMIZER)
            except Exception as error:
                timer.fail(error)

        begins._torchdynamo_disable = True  # type: ignore[attr-defined]  # as in `OptimizerSteps.patch`
        register = optimizers.register_optimizer_step_pre_hook
        if "torch._dynamo" in sys.modules:  # in a loop that is compiled, Dynamo would compile this function of torch's
            register = sys.modules["torch"].compiler.disable(register)
        patches.on_undo(register(begins).remove)

    def _backward_begins(self, *_: object, **__: object) -> bool:
        return self.enter(_BACKWARD)

    def _copy_begins(self, *_: object, **__: object) -> bool:
        return self.events is not None and self.enter(_COPY)  # on a host, nothing is moved

    def _ended(self, entered: object, *_: object, **__: object) -> None:
        if entered is True:
            self.leave()

    def fail(self, error: BaseException) -> None:
        """Time no step any more, because a call to the device could fail in each."""
        self.failed, self.running, self.wanted = True, False, 0
        self._state.note_error(error)

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, at: int) -> None:
        """Begin to time a step, whose batch came at this stamp (monotonic ns)."""
        if self._patches is not None:
            patches, self._patches = self._patches, None
            self._place(patches)
        self._collect()
        if self._pending or self.failed:
            return  # the device is behind, or has failed
        self.wanted -= 1
        self._marks, self._inside, self._stream = [], [], None
        self.running = True
        self._mark(_UNNAMED, at)

    def wait(self) -> None:
        """Leave out what follows: a wait in the middle of the step, such as that for the batch of another loader."""
        self._mark(_LEFT_OUT, now_ns())

    def go_on(self, at: int) -> None:
        """Go on after a wait that ended at this stamp."""
        self._mark(self._inside[-1] if self._inside else _UNNAMED, at)

    def enter(self, part: int) -> bool:
        """Begin a backward pass, the step of an optimizer, or a copy. Returns whether it is timed."""
        if not self.running or get_ident() != self._state.thread:
            return False
        self._inside.append(part)
        self._mark(part, now_ns())
        return True

    def leave(self) -> None:
        """End what `enter` has begun."""
        if self.running and self._inside and get_ident() == self._state.thread:
            self._inside.pop()
            self._mark(self._inside[-1] if self._inside else _UNNAMED, now_ns())

    def end(self) -> None:
        """End the step now: the next batch is about to be requested."""
        if not self.running:
            return
        self._mark(_UNNAMED, now_ns())
        marks = self._marks
        if self.running and any(mark.part == _BACKWARD for mark in marks):
            if self.events is None:
                self._add([(mark.part, later.at - mark.at) for mark, later in pairwise(marks)])
            else:
                self._pending, self._marks = marks, []
        self.drop()

    def drop(self) -> None:
        """Stop timing the step, which is not like others."""
        self.running = False
        self._free += [mark.event for mark in self._marks if mark.event is not None]
        self._marks = []

    def release(self) -> None:
        """Release every event. Must not be called in a forked child."""
        self.drop()
        made, self._made, self._free, self._pending = self._made, [], [], []
        for event in made:
            release(event)

    def _mark(self, part: int, at: int) -> None:
        marks, events = self._marks, self.events
        if len(marks) >= (_MAX_MARKS if events is None else _MAX_EVENTS):
            self.drop()
        elif events is None:
            marks.append(_Mark(part, at, None))
        else:
            self._mark_on(events, part, at)

    def _mark_on(self, events: DeviceEvents, part: int, at: int) -> None:
        began = now_ns()
        try:
            place = events.begin()
            if place is None or (self._stream is not None and place != self._stream):
                self.drop()  # a graph is captured, or the step works on several streams
                return
            self._stream = place
            if not self._free:
                event = events.event()
                keep(event)  # first, because a fork may come at any moment
                self._made.append(event)
                self._free.append(event)
            event = self._free.pop()
            events.record(event)
            self._marks.append(_Mark(part, at, event))
        except Exception as error:
            self.fail(error)
        finally:
            events.end()
            self._state.overhead_ns += now_ns() - began

    def _collect(self) -> None:
        """Read the events of the newest step, if the device has reached them."""
        marks, events = self._pending, self.events
        if not marks or events is None:
            return
        try:
            if events.begin() is None or not marks[-1].event.query():
                return
            took = [(mark.part, int(mark.event.elapsed_time(later.event) * 1e6)) for mark, later in pairwise(marks)]
        except Exception as error:
            self.fail(error)
            return
        finally:
            events.end()
        self._pending = []
        self._free += [mark.event for mark in marks]
        self._add(took)

    def _add(self, took: list[tuple[int, int]]) -> None:
        """Add the parts of a step, in ns, in their order."""
        later = _OTHER  # what an unnamed part is, going backwards
        for part, ns in reversed(took):
            if part == _UNNAMED:
                self.ns[later] += ns
            elif part != _LEFT_OUT:
                self.ns[part] += ns
                if part != _COPY:
                    later = _FORWARD if part == _BACKWARD else _OTHER
        self.steps += 1
