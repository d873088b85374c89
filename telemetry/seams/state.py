"""The state of the training thread as plain values. The tracker extends it, and its parts read it."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from telemetry.safety.errors import kind_of, let_pass
from telemetry.seams import ring as r
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from telemetry.model.records import PhaseSpan

NO_THREAD: Final = -1
"""The training thread's ident while no hook may do anything."""

_MAX_PHASES: Final = 4096


class Recorder(Protocol):
    """A snapshot that is armed or recording, and needs step boundaries."""

    def boundary(self, ended: int, *, opens: bool) -> bool:
        """Note that ``ended`` steps have ended. With ``opens`` the next begins. Returns whether the call was slow."""

    def interrupt(self, ended: int, why: str) -> bool:
        """Note that something other than training begins. Returns as `boundary`."""


class HotState:
    """The state that the hooks use at every step. A base class's slots come first, so these are adjacent.

    Attributes:
        fast_path_iterator_id: ``id()`` of the iterator for which the fast path is enabled, 0 while it is disabled. Only
            `slow_path`, and the tracker's `loop_changed` and `_fast_path_on` write it.
        nested_steps: whether an optimizer has stepped within another's step.
        optimizer_steps: steps of optimizers. ``stepped_at``: the head of the ring at the newest.
        thread: ident of the training thread. Hooks on any other thread pass straight through.
        waiting_since: start of the request in progress, monotonic ns: negative if it is not for training data, 0
            without a request. It also identifies an inner fetch (a data set that reads another loader).
    """

    __slots__ = ("fast_path_iterator_id", "nested_steps", "optimizer_steps", "stepped_at", "thread", "waiting_since")


class StepState(HotState):
    """The state of the training thread, which writes it. The agent thread reads it.

    Attributes:
        ring: the spans.
        native_thread: the kernel's thread ID of the training thread.
        category: the current category of the ledger, as one of the codes ``S_*`` of `ring`.
        step_open: whether a step is open.
        in_phase: whether a checkpoint or an evaluation phase is in progress. Then batches do not change the category.
        explicit: whether the user calls ``step()``.
        batch_seen: whether a batch was requested on this thread.
        batch_since_step: whether a batch has come since the user's last ``step()``.
        at_boundary: whether an iteration has begun or ended since the newest batch. False before the first batch.
        batches_unseen: whether the agent thread has found that another thread now requests the batches.
        step_iterators: ids of the iterators that gave a batch to the open step.
        steps_at_open_unknown: whether the fast path, now off, may have opened the step.
        iterator_id: id of the iterator that gave the newest batch.
        iterator_gone: not empty once that iterator is freed, or while no batch has come.
        device: index of the accelerator that holds the optimizer's parameters; None until known, and for none. If the
            parameters are on the host, or no optimizer steps, it is the current device some steps later.
        accelerator: type of the asynchronous device in use; None for none.
        trained_on: type of the device that holds the parameters of an optimizer that steps; None until known.
            ``devices``: all devices of this type that hold them.
        recorder: gets every step boundary; None while no snapshot needs them.
        phases: named phases that have ended, for the log.
        requests_elsewhere: batches that other threads have requested.
        unseen_steps: steps before which this thread requested no batch. Their wait is unknown.
        overhead_ns: time of the hooks. The fast path's is extrapolated from a part of one call in ``OVERHEAD_EVERY``.
        errors: failures of the hooks. ``last_error``: the newest, in the words of `kind_of`.
    """

    __slots__ = (
        "accelerator", "at_boundary", "batch_seen", "batch_since_step", "batches_unseen", "category", "device",
        "devices", "errors", "explicit", "grad_enabled", "in_phase", "iterator_gone", "iterator_id", "last_error",
        "native_thread", "overhead_ns", "phases", "recorder", "requests_elsewhere", "ring", "step_iterators",
        "step_open", "steps_at_open_unknown", "trained_on", "unseen_steps",
    )  # fmt: skip

    def __init__(self, ring: r.Ring) -> None:
        self.fast_path_iterator_id = 0
        self.nested_steps = False
        self.optimizer_steps = self.stepped_at = 0
        self.thread = threading.get_ident()
        self.waiting_since = 0
        self.ring = ring
        self.native_thread = threading.get_native_id()
        self.category = r.S_STARTUP
        self.step_open = False
        self.in_phase = False
        self.explicit = False
        self.batch_seen = False
        self.batch_since_step = False
        self.batches_unseen = False
        self.at_boundary = False
        self.step_iterators: set[int] = set()
        self.steps_at_open_unknown = False
        self.iterator_id = 0
        self.iterator_gone: list[object] = [None]
        self.device: int | None = None
        self.accelerator: str | None = None
        self.trained_on: str | None = None
        self.devices: list[torch.device] = []
        self.recorder: Recorder | None = None
        self.phases: deque[PhaseSpan] = deque(maxlen=_MAX_PHASES)
        self.requests_elsewhere = 0
        self.unseen_steps = 0
        self.overhead_ns = 0
        self.errors = 0
        self.last_error: str | None = None
        self.grad_enabled: Callable[[], bool] = lambda: True  # until torch is imported

    @property
    def active(self) -> bool:
        """Whether the hooks may do anything. They may not after ``stop()``, and in a forked child."""
        return self.thread != NO_THREAD

    @property
    def here(self) -> bool:
        """Whether this is the training thread."""
        return threading.get_ident() == self.thread

    @property
    def stepping(self) -> bool:
        """Whether the training thread is in a step: not in startup, evaluation or a checkpoint."""
        return self.category == r.S_COMPUTE

    @property
    def evaluating(self) -> bool:
        """Whether the training thread evaluates."""
        return self.category == r.S_EVALUATION

    @property
    def checkpointing(self) -> bool:
        """Whether a checkpoint is in progress on the training thread."""
        return self.in_phase and self.category == r.S_CHECKPOINT

    @property
    def batches_since_optimizer(self) -> int:
        """Batches since the newest step of an optimizer, in a loop that requests them."""
        return (self.ring.head - self.stepped_at) // r.STRIDE

    @property
    def between_loops(self) -> bool:
        """Whether a training iteration has ended, no other has begun, and no phase is in progress."""
        return self.batch_seen and not (self.explicit or self.in_phase or self.step_open) and self.category == r.S_OTHER

    @property
    def loop_left(self) -> bool:
        """Whether the newest batch's iterator is gone: ``break`` has left the loop, so no step is open."""
        return self.batch_seen and not self.explicit and bool(self.iterator_gone)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes with everything that the hooks see of the training thread."""
        return self.ring.head + len(self.ring.held or ()), self.optimizer_steps, self.waiting_since

    def slow_path(self) -> None:
        """Send the next batch to the slow path. Any thread may call it."""
        if self.fast_path_iterator_id:
            self.steps_at_open_unknown = True
            self.fast_path_iterator_id = 0

    def switch(self, category: int, stamp: int | None = None) -> None:
        """Change the category of the ledger at ``stamp`` (monotonic ns; now by default)."""
        stamp = now_ns() if stamp is None else stamp
        self.category = category
        self.ring.push(stamp, stamp, r.code(category, category))

    def fault(self, error: BaseException) -> None:
        """Count and keep a failure of our code on the training thread. The training goes on.

        Raises:
            BaseException: the error, if it comes from the script.
        """
        self.waiting_since = 0
        self.note_error(error)

    def note_error(self, error: BaseException) -> None:
        """Count and keep a failure that does not affect the wait in progress."""
        let_pass(error)
        self.errors += 1
        self.last_error = kind_of(error)
