"""Keeps what the training thread has done with checkpoints: which it has written, and where it has resumed."""

from __future__ import annotations

import sys
import threading
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from telemetry.model.records import SavedCheckpoint
from telemetry.safety.errors import let_pass
from telemetry.seams.loaders import own_value
from telemetry.seams.ring import S_STARTUP
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.seams.state import StepState

OPTIMIZER: Final = "optimizer"
TOLD: Final = "told"

_MAX_SAVES: Final = 1024
_MAX_ENTRIES: Final = 64
_MAX_PARAMETERS: Final = 8


class ResumeState:
    """The training thread writes it, off the fast path. The agent thread reads it and takes ``saves``.

    Attributes:
        saves: checkpoints that have been written, or whose writing has failed.
        restore_ns: time spent in loading functions before the first step.
        restoring_since: start of a loading function in progress, monotonic ns, else 0.
        step: number of optimizer steps in the loaded state, if known.
        at_optimizer_steps: optimizer steps of this process when ``step`` was loaded.
        source: where ``step`` comes from: ``optimizer`` or ``told``.
        counts: steps that had closed, and steps of optimizers, when a step opened on the slow path.
        writing_elsewhere: asynchronous checkpoints in progress, whose parts other threads save.
        initializing: a step that trains nothing is creating an optimizer's state.
    """

    def __init__(self) -> None:
        self.saves: deque[SavedCheckpoint] = deque(maxlen=_MAX_SAVES)
        self.restore_ns = 0
        self.restoring_since = 0
        self.step: int | None = None
        self.at_optimizer_steps = 0
        self.source: str | None = None
        self.initializing = False
        self.counts = (0, 0)
        self.writing_elsewhere = 0
        self._optimizer_ids: set[int] = set()
        self._read = False
        self._holds_optimizer: bool | None = None  # whether the checkpoint in progress does
        self._failed = False
        self._writing: list[Any] = []  # futures of its asynchronous part

    @property
    def optimizers(self) -> int:
        """How many optimizers have been seen to step."""
        return len(self._optimizer_ids)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def saving(self, *, holds_optimizer: bool) -> None:
        """Note that a saving function is about to be called on the training thread."""
        self._holds_optimizer = bool(self._holds_optimizer) or holds_optimizer

    def failed(self) -> None:
        """Note that the checkpoint in progress has raised."""
        self._failed = True

    def returned(self, result: Any) -> None:
        """Note what a saving function has returned. If it is a future, the checkpoint is complete when that is done."""
        future = getattr(result, "upload_completion", result)
        if callable(getattr(future, "add_done_callback", None)):
            self._writing.append(future)

    def checkpoint_ended(self, state: StepState, start: int, end: int) -> None:
        """Note that the training thread's outermost checkpoint has ended."""
        futures, failed, holds = self._writing, self._failed, self._holds_optimizer
        self._writing, self._failed, self._holds_optimizer = [], False, None
        save = SavedCheckpoint(
            start,
            end,
            state.optimizer_steps,
            state.ring.closed + state.ring.open,
            complete=not failed and not futures,
            holds_optimizer=holds is not False,  # a user's phase without a saving function counts as a checkpoint
        )
        self.saves.append(save)
        left = len(futures)
        self.writing_elsewhere += left

        def written(future: Any) -> None:  # runs on a thread of torch's
            nonlocal left
            left -= 1
            self.writing_elsewhere -= 1
            if not failed and not left and _succeeded(future):
                self.saves.append(save._replace(end_ns=now_ns(), complete=True, background=True))

        for future in futures:
            future.add_done_callback(written)

    def saved_elsewhere(self, start: int, steps: tuple[int, int], *, holds_optimizer: bool) -> None:
        """Note a save on another thread. ``steps``: steps of optimizers and of the loop when it began."""
        self.saves.append(
            SavedCheckpoint(start, now_ns(), *steps, True, holds_optimizer=holds_optimizer, background=True)
        )

    # -- restoring ---------------------------------------------------------------------------------------------

    def begin_restore(self, state: StepState) -> bool:
        """Begin a loading function. Returns whether its time counts: only if it is the outermost, before a step."""
        starting = state.category == S_STARTUP and not state.batch_seen
        if not starting or self.restoring_since or threading.get_ident() != state.thread:
            return False
        self.restoring_since = now_ns()
        return True

    def end_restore(self) -> None:
        """End a loading function that has returned or raised."""
        since, self.restoring_since = self.restoring_since, 0
        self.restore_ns += now_ns() - since

    def loaded(self, state: StepState, optimizer: Any, given: Any) -> None:
        """Read the state that an optimizer has loaded. ``given``: what it got, which may still be on the host."""
        if self.source is not None or threading.get_ident() != state.thread or state.ring.closed:
            return
        step = _counted_in(own_value(optimizer, "state"))
        if step is None and isinstance(given, dict):
            step = _counted_in(dict.get(given, "state"))
        if step is not None:
            self.step, self.source, self.at_optimizer_steps = step, OPTIMIZER, state.optimizer_steps

    def stepped(self, optimizer: Any) -> None:
        """Note an optimizer's step off the fast path."""
        if len(self._optimizer_ids) < _MAX_PARAMETERS:
            self._optimizer_ids.add(id(optimizer))

    def read_position(self, optimizer: Any, state: StepState) -> None:
        """Read how many steps the state of the first optimizer has had, on the agent thread."""
        if self._read:
            return
        self._read = True
        steps, step = -1, None
        while steps != state.optimizer_steps:  # it may step meanwhile
            steps, step = state.optimizer_steps, _counted_in(own_value(optimizer, "state"))
        if self.source is None and step is not None and step >= steps:
            self.step, self.source, self.at_optimizer_steps = step - steps, OPTIMIZER, 0

    def told(self, state: StepState, step: int) -> None:
        """Take from the script how many steps its loaded state contains."""
        self.step, self.source, self.at_optimizer_steps = step, TOLD, state.optimizer_steps


def _succeeded(future: Any) -> bool:
    """Whether a future has a result. Torch's thread would log an exception here."""
    try:
        return not future.cancelled() and future.exception() is None
    except Exception as error:  # another kind of future
        let_pass(error)
        return False


def _counted_in(states: Any) -> int | None:
    """The steps in an optimizer's state. Calls no method of a class of the user's."""
    try:
        return step_of(dict.values(states)) if isinstance(states, dict) else None
    except (OverflowError, ValueError, RuntimeError):  # infinite, no number, or several numbers
        return None


def step_of(states: Iterable[Any]) -> int | None:
    """How many steps an optimizer has had, if the states of its parameters count them as Adam's and others' do.

    Only a number on the host is read. Reading one on a device would wait for the device, and reading a distributed
    tensor perhaps for the other ranks.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    newest: int | None = None
    for state in islice(states, _MAX_PARAMETERS):
        value: Any = dict.get(state, "step") if isinstance(state, dict) else None
        kind = type(value)  # not a subclass, such as a DTensor
        if kind in {int, float} or (kind is tensor and value.device.type == "cpu"):
            newest = max(newest or 0, int(value))
    return newest


def holds_optimizer(value: Any, depth: int = 2) -> bool:
    """Whether the outer levels of a saved object contain an optimizer's state.

    A class of the user's may load its contents on access, so no method of it is called.
    """
    if isinstance(value, dict):
        if dict.__contains__(value, "param_groups") and dict.__contains__(value, "state"):
            return True
        values: Any = dict.values(value)
    elif isinstance(value, list):
        values = list.__iter__(value)
    elif isinstance(value, tuple):
        values = tuple.__iter__(value)
    else:
        return False
    return depth > 0 and any(holds_optimizer(each, depth - 1) for each in islice(values, _MAX_ENTRIES))
