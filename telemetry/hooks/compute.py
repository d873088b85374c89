"""Splits the compute of some steps into copies to the device, forward, backward, optimizer and the rest.

The agent thread asks for a few steps at each tick. Their boundaries are stamped, on an accelerator by events in the
stream of the work. The hooks are there only while such a step runs: around a backward pass and in an optimizer they
cost microseconds in every step.

Torch shows where a backward pass and the step of an optimizer begin and end, and some frameworks where they move a
batch. The rest is named by what follows: forward is what comes before a backward pass, and everything else (clipping,
logging, the learning rate) is other. A loop that calls ``.to()`` itself shows no copies: a `Tensor.to` that is not
torch's own would break subclasses of tensors, and a mode that sees every operator costs 10 us for each.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from itertools import pairwise
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.hooks.patching import Patches, WeakMap, around, keep, release
from telemetry.records import BACKWARD, COPY, FORWARD, OPTIMIZER, OTHER
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from telemetry.hooks.device import DeviceEvents, DeviceStream
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

_MAX_PENDING: Final = 8
"""So many timed steps wait until the device has reached their ends. If it were one, the first step after each wait of
the host for the device would be timed, and no other: of accumulated gradients always the same pass."""

_KEY: Final = -1
"""The key of our hook among an optimizer's. Torch counts its own up from 0. With a new key each time, a step of the
optimizer that is compiled would be compiled again each time."""


class _Mark(NamedTuple):
    """A boundary between two parts, where our own code runs, too. Stamps are monotonic ns.

    Attributes:
        part: the part that begins here. ``at``: when the one before it ended. ``since``: when this one began.
        event: its event, on an accelerator.
    """

    part: int
    at: int
    since: int
    event: Any


class ComputeTimer:
    """Times the parts of the steps that are asked for.

    Attributes:
        wanted: how many of the next steps to time. The agent thread sets it.
        running: whether a step is timed now. Only the training thread writes it.
        ns: sums of the timed steps by part, in the order of `TIMED_PARTS`. ``steps``: their number.
        spent_ns: what it has cost to time steps. ``begun``: steps that were begun.
        events: makes events on the accelerator that the training uses; None on a host.
        failed: whether a call to the device raised. Then no step is timed any more.
    """

    __slots__ = (
        "_free", "_inside", "_made", "_marks", "_on", "_optimizer_begins", "_optimizers", "_patches", "_pending",
        "_state", "_stream", "_wrapped", "begun", "events", "failed", "ns", "running", "spent_ns", "steps", "wanted",
    )  # fmt: skip

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._patches = Patches()
        self._wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}  # a function, and the one that times it
        self._optimizers: WeakMap[bool] = WeakMap()
        self.wanted = 0
        self.running = False
        self.ns = [0] * len(TIMED_PARTS)
        self.steps = self.begun = self.spent_ns = 0
        self.events: DeviceEvents | None = None
        self.failed = False
        self._on: DeviceEvents | None = None  # those of the step that is timed: the agent thread may set others
        self._stream: DeviceStream | None = None
        self._marks: list[_Mark] = []
        self._inside: list[int] = []  # the parts that have begun and not ended
        self._pending: deque[tuple[int, list[_Mark]]] = deque()  # the device and the marks of steps it has not reached
        self._free: dict[int, list[Any]] = {}  # events by device: one belongs to the device that first records it
        self._made: list[Any] = []

        # A default value instead of a closure variable: see `hooks.dataloader.timed_next`.
        def begins(_optimizer: object, _args: object, _kwargs: object, timer: ComputeTimer = self) -> None:
            try:
                timer.enter(_OPTIMIZER)
            except Exception as error:
                timer.fail(error)

        begins._torchdynamo_disable = True  # type: ignore[attr-defined]  # as in `OptimizerSteps.patch`
        self._optimizer_begins = begins

    # -- the hooks -----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        # `Tensor.backward` calls the first name, which takes 54 us with cold caches before it calls the second one.
        # `torch.autograd.grad` calls the second one alone.
        for name in ("backward", "_engine_run_backward"):
            self._patches.replace(sys.modules["torch.autograd"], name, partial(self._timed, _BACKWARD))
        if self._on is not None:  # on a host, nothing is moved
            for name, function in _MOVES.items():
                module = sys.modules.get(name)
                if module is not None and function in vars(module):
                    self._patches.replace(module, function, partial(self._timed, _COPY))
        for optimizer in self._optimizers.objects():
            optimizer._optimizer_step_pre_hooks[_KEY] = self._optimizer_begins

    def _remove(self) -> None:
        self._patches.undo()
        for optimizer in self._optimizers.objects():
            optimizer._optimizer_step_pre_hooks.pop(_KEY, None)

    def _timed(self, part: int, original: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = self._wrapped.get(original)
        if wrapped is None:
            wrapped = self._wrapped[original] = around(
                original, before=partial(self._begins, part), after=self._ended, on_error=self.fail
            )
        return wrapped

    def _begins(self, part: int, *_: object, **__: object) -> bool:
        return self.enter(part)

    def _ended(self, entered: object, *_: object, **__: object) -> None:
        if entered is True:
            self.leave()

    def stepped(self, optimizer: Any) -> None:
        """Note the end of a step of an optimizer. A step with one that is new is not split."""
        if self._inside and self._inside[-1] == _OPTIMIZER:
            self.leave()
        elif optimizer not in self._optimizers:
            self.drop()
            self.follow(optimizer)

    def go_on_after_hook(self) -> None:
        """Go on after what a hook of ours has done since the newest mark."""
        if self._marks:
            self._marks[-1] = self._marks[-1]._replace(since=now_ns())

    def follow(self, optimizer: Any) -> None:
        """Place a hook in this optimizer, too, when the next step is timed."""
        if "_optimizer_step_pre_hooks" in vars(optimizer):
            self._optimizers[optimizer] = True

    def fail(self, error: BaseException) -> None:
        """Time no step any more, because a call to the device could fail in each."""
        self.failed, self.wanted = True, 0
        self.drop()
        self._state.note_error(error)

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, at: int) -> None:
        """Begin to time a step, whose batch came at this stamp (monotonic ns)."""
        began = now_ns()
        self._on = self.events
        self._collect()
        if len(self._pending) >= _MAX_PENDING or self.failed:
            return  # the device is behind, or has failed
        self.wanted -= 1
        self.begun += 1
        self._marks, self._inside, self._stream = [], [], None
        self.running = True
        try:
            self._place()
        except Exception as error:
            self.fail(error)
        self._spend(began)
        if self.running:
            self._mark(_UNNAMED, at)

    def wait(self, at: int) -> None:
        """Leave out what follows: a wait in the middle of the step, such as that for the batch of another loader."""
        self._mark(_LEFT_OUT, at)

    def go_on(self, at: int) -> None:
        """Go on after a wait that ended at this stamp."""
        self._mark(self._inside[-1] if self._inside else _UNNAMED, at)

    def enter(self, part: int) -> bool:
        """Begin a backward pass, the step of an optimizer, or a copy. Returns whether it is timed."""
        if not self.running or get_ident() != self._state.thread:
            return False
        nested = self._inside[-1:] == [part]
        self._inside.append(part)
        if not nested:
            self._mark(part, now_ns())
        return True

    def leave(self) -> None:
        """End what `enter` has begun."""
        if self.running and self._inside and get_ident() == self._state.thread:
            part, outer = self._inside.pop(), self._inside[-1] if self._inside else _UNNAMED
            if outer != part:
                self._mark(outer, now_ns())

    def end(self, at: int) -> None:
        """End the step, whose next batch was requested at this stamp."""
        if not self.running:
            return
        self._mark(_UNNAMED, at)
        began, marks = now_ns(), self._marks
        if self.running and any(mark.part == _BACKWARD for mark in marks):
            if self._on is None:
                self._add([(mark.part, later.at - mark.since) for mark, later in pairwise(marks)])
            elif self._stream is not None:
                self._pending.append((self._stream.device, marks))
                self._marks = []
        self.drop()
        self._spend(began)

    def drop(self) -> None:
        """Stop timing the step, which is not like others."""
        self.running = False
        self._remove()
        marks, self._marks = self._marks, []
        if self._stream is not None:
            self._give_back(self._stream.device, marks)

    def release(self) -> None:
        """Release every event. Must not be called in a forked child."""
        self.drop()
        made, self._made, self._free, self._pending = self._made, [], {}, deque()
        for event in made:
            release(event)

    def _mark(self, part: int, at: int) -> None:
        began, events = now_ns(), self._on
        if len(self._marks) >= _MAX_MARKS:
            self.drop()
        elif events is None:
            self._marks.append(_Mark(part, at, now_ns(), None))
        else:
            self._mark_on(events, part, at)
        self._spend(began)

    def _mark_on(self, events: DeviceEvents, part: int, at: int) -> None:
        try:
            place = events.begin()
            if place is None or (self._stream is not None and place != self._stream):
                self.drop()  # a graph is captured, or the step works on several streams
                return
            self._stream = place
            free = self._free.setdefault(place.device, [])
            if not free:
                event = events.event()
                keep(event)  # first, because a fork may come at any moment
                self._made.append(event)
                free.append(event)
            event = free.pop()
            events.record(event)
            self._marks.append(_Mark(part, at, at, event))
        except Exception as error:
            self.fail(error)
        finally:
            events.end()

    def _spend(self, since_ns: int) -> None:
        took = now_ns() - since_ns - (self._on.take_blocked() if self._on is not None else 0)
        self.spent_ns += max(0, took)
        self._state.overhead_ns += max(0, took)

    def _give_back(self, device: int, marks: Sequence[_Mark]) -> None:
        self._free.setdefault(device, []).extend(mark.event for mark in marks)

    def _collect(self) -> None:
        """Read the events of the steps whose ends the device has reached."""
        events = self._on
        if not self._pending or events is None:
            return
        try:
            if events.begin() is None:
                return
            while self._pending and self._pending[0][1][-1].event.query():
                device, marks = self._pending.popleft()
                self._add([(a.part, int(a.event.elapsed_time(b.event) * 1e6)) for a, b in pairwise(marks)])
                self._give_back(device, marks)
        except Exception as error:
            self.fail(error)
        finally:
            events.end()

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
