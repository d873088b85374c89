"""What the training thread is doing: the state machine behind the hooks."""

from __future__ import annotations

import sys
import threading
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.hooks import ring as r
from telemetry.hooks.evaluation import EvaluationDetector
from telemetry.hooks.loaders import ON_THREAD, WATCHED, LoaderRegistry, is_loader_iterator
from telemetry.hooks.patching import WeakMap, around
from telemetry.hooks.profilers import ProfilerRanges
from telemetry.hooks.resume import ResumeState
from telemetry.hooks.samples import BatchMarks
from telemetry.hooks.state import NO_THREAD, StepState
from telemetry.hooks.timers import BatchRelease, GarbageTimer, SamplerTimer
from telemetry.records import CHECKPOINT, EVALUATION, OTHER, PhaseSpan
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, ModuleType

    from telemetry.hooks.evaluation import TrainingSigns
    from telemetry.hooks.gpu import GpuClock
    from telemetry.hooks.patching import Patches


# -- the fast path of the hooks, and the one place that switches it on and off -----------------------------------------
# On the fast path a step costs two stamps and two stores. It handles only ordinary batches of one iterator, and
# notifies no other part of the agent. Everything else takes the slow path, which notifies every part and decides anew.

LOOP_CHANGED: Final = "loop_changed"
STOPPED: Final = "stopped"
GPU_CLOCK: Final = "gpu_clock"
SNAPSHOT: Final = "snapshot"
NVTX: Final = "nvtx"
TIMED_BATCH: Final = "timed_batch"
BATCHES_UNSEEN: Final = "batches_unseen"

_LOOP_IS_OVER: Final = frozenset({LOOP_CHANGED, STOPPED})


class FastPath:
    """Owns ``state.fast_path_iterator_id``; nothing else writes it.

    The fast path is enabled once an iterator has given two training batches in a row and no reason below holds. Every
    batch on the slow path checks this again. So the fast path is back one batch after the last reason has ended.

    ================  ======================================================  ==========================================
    reason            set by, and why                                         until
    ================  ======================================================  ==========================================
    `LOOP_CHANGED`    `StepTracker`, `Scopes`: iteration, evaluation, phase   an iterator gives two training batches in
                      or ``step()`` begins or ends, or another loader gives   a row; or the phase ends, and the loop
                      a batch to the open step                                that it interrupted goes on
    `STOPPED`         `StepTracker.detach`: ``stop()``, or a forked child     never enabled again
    `GPU_CLOCK`       `Attachment.watch_gpu`: the GPU's clock times waits     the clock fails or is detached
    `SNAPSHOT`        `Capture.hold`: a snapshot needs each step boundary     the snapshot has ended
    `NVTX`            setting ``nvtx``: each step is a range                  never enabled again
    `TIMED_BATCH`     `StepTracker.time_next_batch`, and where an epoch       `SamplerTimer.wanted` batches were timed
                      begins: parts of the next waits are timed
    `BATCHES_UNSEEN`  `StepTracker.follow_optimizer`: each optimizer step is  batches are requested here again
                      a step
    ================  ======================================================  ==========================================

    The agent thread may disable it at the moment when the training thread is about to enable it. So a lasting reason is
    also a fact that `enable` checks (`_blocked`), and the agent thread disables the fast path again at every tick.

    Args:
        state: state of the training thread.

    Attributes:
        steady_iterator_id: ``id()`` of the iterator that gives ordinary batches, 0 for none. It stays if the fast path
            is off for another reason than the loop. Training thread only.
        disabled_by: the newest reason; None if the fast path is enabled. For debugging.
    """

    __slots__ = ("_state", "disabled_by", "steady_iterator_id")

    def __init__(self, state: StepTracker) -> None:
        self._state = state
        self.steady_iterator_id = 0
        self.disabled_by: str | None = LOOP_CHANGED

    def enable(self, iterator_id: int) -> None:
        """Expect ordinary batches from this iterator. On the training thread."""
        self.steady_iterator_id = iterator_id
        self.disabled_by = self._blocked()
        self._state.fast_path_iterator_id = 0 if self.disabled_by else iterator_id

    def disable(self, reason: str) -> None:
        """Send the next batch to the slow path. If the loop changes, only on the training thread.

        Args:
            reason: a reason of the table.
        """
        self.disabled_by = reason
        self._state.fast_path_iterator_id = 0
        if reason in _LOOP_IS_OVER:
            self.steady_iterator_id = 0

    def _blocked(self) -> str | None:
        """A reason that holds independently of the loop; None for none."""
        state = self._state
        if state.gpu is not None:
            return GPU_CLOCK
        if state.recorder is not None:
            return SNAPSHOT
        if state.profiler_ranges.nvtx:
            return NVTX
        return TIMED_BATCH if state.sampler_timer.wanted else None


# -- passes step boundaries on to a snapshot that is armed or recording, and to NVTX ranges ----------------------------


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


# -- scopes ------------------------------------------------------------------------------------------------------------
# Phases, steps and checkpoints that the script marks: ``telemetry.phase(...)``, ``telemetry.step()``, saving.

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


# -- the hook that runs after every optimizer step ---------------------------------------------------------------------
# It counts the steps, which distinguishes training from evaluation. If no batch is requested on the training thread,
# because another thread prefetches, then each step of the optimizer is a training step.
#
# Torch calls the hook for each ``step`` of any optimizer. One that wraps another, or whose class calls the ``step`` of
# its base class, makes two calls for one step: the inner one does not count.

_BOUNDARY: Final = r.code(r.S_COMPUTE, r.S_COMPUTE, r.CLOSES | r.OPENS | r.BATCH)

_MAX_FRAMES: Final = 12
"""Between the step of an optimizer and that of one around it. A gradient scaler and a scheduler add some."""

_LOOKS: Final = 16
"""So many steps after a new optimizer are looked at: it may be in another one, or around one. A look takes 1 µs."""

_MAX_OPTIMIZERS: Final = 64


def optimizer_hook(tracker: StepTracker) -> Callable[[object, object, object], None]:
    """The hook to register with torch. Outside the fast path it calls `OptimizerSteps.stepped`."""

    # The tracker is a default value and not a closure variable: see `hooks.dataloader.timed_next`.
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


# -- tracks captures of CUDA graphs in progress in this process, on any thread -----------------------------------------
# In torch's default capture mode, "global", a capture fails if any thread of the process makes a call that CUDA
# considers unsafe, such as the query of an event. Torch only reports captures on the calling thread's own stream. So
# the start and the end of every capture are recorded here.
#
# Where the step of an optimizer is captured, a replay of the graph is that step: Python no longer calls the optimizer.

_MAX_NS: Final = NS
"""How long the start of a capture waits at most until a call of the agent returns. Such a call takes microseconds."""


class Captures:
    """Tracks the captures.

    Each side first announces what it is about to do and then checks the other side. So no event is used during a
    capture, even if both begin at the same moment.

    Args:
        tracker: gets the steps of optimizers in graphs that are replayed.

    Attributes:
        touching: ident of the thread that makes calls to the device for the agent right now; 0 for none.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._graphs: WeakMap[None] = WeakMap()
        # The optimizers whose steps a graph contains. They are not kept alive: one may have a reference to its graph.
        self._optimizers: WeakMap[list[weakref.ref[Any]]] = WeakMap()
        self.touching = 0

    @property
    def under_way(self) -> bool:
        """Whether a graph is being captured."""
        return len(self._graphs) > 0

    def patch(self, graph: Any, patches: Patches) -> None:
        """Patch a class of graphs, such as ``torch.cuda.CUDAGraph``, if it has the methods to patch."""
        if graph is None or not {"capture_begin", "capture_end"} <= vars(graph).keys():
            return
        patches.replace(
            graph, "capture_begin", lambda original: around(original, before=self._begin, after=self._begun)
        )
        patches.replace(graph, "capture_end", lambda original: around(original, after=self._ended))
        if "replay" in vars(graph):
            patches.replace(graph, "replay", lambda original: around(original, after=self._replayed))

    def recorded(self, optimizer: object) -> bool:
        """An optimizer has stepped. Returns whether that was only recorded in a graph, by this thread."""
        if not self._graphs or not self._tracker.here:
            return False
        for graph in self._graphs.objects():
            captured = self._optimizers.get(graph) or []
            self._optimizers[graph] = [*captured, weakref.ref(optimizer)]
        return True

    def _replayed(self, graph: Any, _noted: None, failed: bool) -> None:  # noqa: FBT001
        captured = self._optimizers.get(graph)
        if failed or captured is None:
            return
        tracker = self._tracker
        try:
            for reference in captured:
                optimizer = reference()
                if optimizer is None:
                    tracker.optimizer_steps += 1
                else:
                    tracker.optimizer.count(optimizer)
        except Exception as error:
            tracker.fault(error)

    def _begin(self, graph: Any) -> None:
        if self._tracker.here:
            self._tracker.fast_path.disable(LOOP_CHANGED)  # the steps of optimizers are to be seen
        self._optimizers.discard(graph)
        self._graphs[graph] = None
        deadline = now_ns() + _MAX_NS
        while self.touching not in {0, get_ident()} and now_ns() < deadline:
            sleep(0.0001)

    def _begun(self, graph: Any, _noted: None, failed: bool) -> None:  # noqa: FBT001
        if failed:
            self._graphs.discard(graph)

    def _ended(self, graph: Any, _noted: None, _failed: bool) -> None:  # noqa: FBT001
        self._graphs.discard(graph)


# -- what the training thread is doing: the state machine behind the hooks ---------------------------------------------
# The hooks of `hooks.dataloader`, `hooks.checkpoints` and the optimizer report what happens, and it writes spans into
# the ring. It runs on the training thread, so it only compares and stores. The rules:
#
# * A step opens with the request for a batch and closes with the next request. If a second loader is asked before the
#   first one is asked again (or before the optimizer steps), its batch adds to the same step.
# * A loader that is iterated with gradients off is evaluation, until it ends or training goes on. So is a loader that
#   gives batch after batch while nothing is trained.
# * A checkpoint, or a phase that the user names, is a span of its own. Afterwards the previous category continues.
# * If no batch is requested on this thread (a prefetching thread does it), the optimizer's steps are the steps.
# * After the first call of `step()`, only calls of it open and close steps.

_SAME_STEP: Final = r.code(r.S_DATA_WAIT, r.S_COMPUTE, r.JOINS)
_EVALUATION: Final = r.code(r.S_EVALUATION, r.S_EVALUATION)

OVERHEAD_EVERY: Final = 64
"""The fast path measures its own cost once in this many steps."""

OVERHEAD_MASK: Final = OVERHEAD_EVERY * r.STRIDE - 1


class StepTracker(StepState):
    """Follows the batches of the training thread.

    Args:
        ring: gets the spans.

    Attributes:
        fast_path: switches the fast path on and off.
        boundaries: notifies a snapshot and NVTX ranges of each step.
        scopes: phases and steps that the script names.
        optimizer: handles optimizer steps.
        captures: of CUDA graphs, in progress.
        sources: where batches come from. ``marks``: how many samples and tokens they have.
        tokens_told: tokens that the script has told; None before the first.
        gpu: the clock that times waits on the GPU; else None.
        profiler_ranges: ranges for the profilers that are recording.
        resume: checkpoints that were written, and where the training has resumed.
        sampler_timer: times what this thread itself does inside ``next()``: the sampler, garbage collections.
        garbage: times garbage collections.
        batch_release: follows a batch of workers until it is freed.
        time_fetches: how many of the next fetches on this thread to time on its CPU clock, too. ``timed_fetch_ns`` and
            ``timed_fetch_cpu_ns`` are the sums of those.
    """

    __slots__ = (
        "_current_device",
        "_detector",
        "_iterator_alive",
        "_loader_id",
        "_optimizer_steps_at_open",
        "_steps_at_open_unknown",
        "batch_release",
        "boundaries",
        "captures",
        "fast_path",
        "garbage",
        "gpu",
        "marks",
        "optimizer",
        "profiler_ranges",
        "resume",
        "sampler_timer",
        "scopes",
        "sources",
        "time_fetches",
        "timed_fetch_cpu_ns",
        "timed_fetch_ns",
        "tokens_told",
    )

    def __init__(self, ring: r.Ring) -> None:
        super().__init__(ring)
        self.gpu: GpuClock | None = None
        self.profiler_ranges = ProfilerRanges()
        self.resume = ResumeState()
        self.sampler_timer = SamplerTimer()
        self.garbage = GarbageTimer(self, self.sampler_timer)
        self.fast_path = FastPath(self)
        self.boundaries = StepBoundaries(self)
        self.scopes = Scopes(self, self.fast_path, self.boundaries)
        self.captures = Captures(self)
        self._detector = EvaluationDetector()  # whether the newest batches are for training
        self.optimizer = OptimizerSteps(self, self.boundaries, self._detector.signs, self.captures)
        self.sources = LoaderRegistry()
        self.marks = BatchMarks()
        self.tokens_told: int | None = None
        self.batch_release = BatchRelease(ring)
        self.time_fetches = 0
        self.timed_fetch_ns = 0
        self.timed_fetch_cpu_ns = 0
        self._current_device: Callable[[], int | None] = lambda: None
        self._optimizer_steps_at_open = 0
        self._steps_at_open_unknown = False  # whether the open step may have been opened on the fast path, now off
        self._loader_id = 0  # id of the loader whose iteration the steps follow
        self._iterator_alive: weakref.ref[Any] | None = None

    def use_torch(self, torch: ModuleType, current_device: Callable[[], int | None]) -> None:
        """Use torch, now imported, and what tells which CUDA device (None for none) is current."""
        self.grad_enabled = torch.is_grad_enabled
        self._detector.signs.use_torch(torch)
        self._current_device = current_device

    def gradients_on(self) -> bool:
        """Whether gradients are on. True before torch is imported."""
        return self.grad_enabled()

    # -- batches -----------------------------------------------------------------------------------------------

    def request(self, iterator: object) -> int:
        """A batch is about to be requested on the slow path. Returns the code of its span."""
        if self.in_phase:
            return r.code(self.category, self.category)
        if not self.grad_enabled():
            self._enter_evaluation()
            return _EVALUATION
        if not self.explicit and self._detector.requested(iterator, self.optimizer_steps, self.ring.closed):
            self._enter_evaluation(own=id(iterator))
            return _EVALUATION
        if self.explicit:
            after = r.S_COMPUTE if self.step_open and self.category == r.S_COMPUTE else r.S_OTHER
            return r.code(r.S_DATA_WAIT, after, r.BATCH if self.step_open else r.OPENS | r.BATCH)
        if not self.step_open or id(iterator) in self.step_iterators or self._stepped_since_open():
            return r.STEP
        return _SAME_STEP

    def delivered(self, iterator: object, start: int, end: int, entry: int, batch: object) -> None:
        """A batch has come on the slow path.

        Args:
            iterator: the iterator that gave it.
            start: start of the wait, monotonic ns.
            end: end of the wait, monotonic ns.
            entry: the code of its span.
            batch: the batch.
        """
        category = entry >> 3 & 7
        training = not self.in_phase and category != r.S_EVALUATION
        likely = training and (self.explicit or self._detector.likely(self.optimizer_steps))
        source = self.sources.delivered(iterator, training=likely)
        if training:
            self.marks.batch(iterator, self.ring.head, batch, source, told=self.tokens_told is not None)
        self.ring.push(start, end, entry, source)
        self.waiting_since = 0
        if not training:
            self.marks.not_training(iterator, self.ring.head)
            return
        self.category = category
        self.batch_seen = self.batch_since_step = True
        self._steps_at_open_unknown = self.sampler_timer.at_boundary = False
        self.device = self._current_device()
        if id(iterator) != self.iterator_id or self.iterator_gone:
            self._follow(iterator)
        if self.explicit:
            self.step_open = True
            return
        # the second batch in a row that comes from this loader only
        alone = entry == r.STEP and self.step_iterators == {id(iterator)}
        alone = alone and self._detector.settled(self.optimizer_steps)
        if entry == r.STEP:
            self.step_iterators = {id(iterator)}
            self.step_open, self._optimizer_steps_at_open = True, self.optimizer_steps
        else:
            self.step_iterators.add(id(iterator))
        if alone:
            self.fast_path.enable(id(iterator))
        else:
            self.fast_path.disable(LOOP_CHANGED)

    def failed(self, iterator: object, start: int, entry: int, error: BaseException) -> None:
        """The request raised: the end of an epoch, or an error for the user. Arguments as `delivered`."""
        end = now_ns()
        self.waiting_since = 0
        if self.in_phase:
            return
        during, ended = entry & 7, isinstance(error, StopIteration)
        if during == r.S_DATA_WAIT and self.batch_seen:
            self.sampler_timer.epoch_boundary()
        self._detector.leave(self.optimizer_steps)
        loader = None if ended else self.sources.known(iterator)  # a batch that raised has a number, too
        if during == r.S_EVALUATION:
            self.category = r.S_COMPUTE if self.step_open else r.S_OTHER
            self.ring.push(start, end, r.code(during, self.category), loader)
        elif self.explicit or (ended and entry == _SAME_STEP):
            self.ring.push(start, end, r.code(during, self.category), loader)
            self.step_iterators.discard(id(iterator))
        else:
            self.ring.push(start, end, r.code(during, r.S_OTHER, r.CLOSES if self.step_open else 0), loader)
            self.category, self.step_open = r.S_OTHER, False
            self.fast_path.disable(LOOP_CHANGED)
            self.step_iterators.clear()
            self.boundaries.passed()

    def iteration(self, loader: object) -> int:
        """``iter(loader)`` is about to be called. Returns the code of its span, in which workers are started."""
        self.marks.begun()
        if self.in_phase:
            return r.code(self.category, self.category)
        self._detector.leave(self.optimizer_steps)
        if not self.grad_enabled() or (not self.explicit and self._detector.known_to_evaluate(loader)):
            self._enter_evaluation()
            return _EVALUATION
        flags = 0
        if self.batch_seen:
            self.sampler_timer.epoch_boundary()
        if self.category == r.S_EVALUATION:  # an evaluation loop was left with break
            self.category = r.S_COMPUTE if self.step_open else r.S_OTHER
        if not self.explicit:
            if not self.step_open:
                self._loader_id = id(loader)
            elif self._loader_id == id(loader):  # the epoch was left with break
                flags = r.CLOSES
                self.step_open, self.category = False, r.S_OTHER
                self.step_iterators.clear()
        self.fast_path.disable(LOOP_CHANGED)
        return r.code(r.S_DATA_WAIT, self.category, flags)

    def leaving(self, iterator: object) -> int | None:
        """The workers of an iterator that was left are about to be stopped. Returns the code of that span, or None.

        None if the iterator had ended, because then its workers are stopped already. Also None in a garbage
        collection, which may run in the middle of any of these methods and has its own timer.
        """
        if getattr(iterator, "_shutdown", False) or self.garbage.collecting:
            return None
        if self.in_phase or self.category not in {r.S_COMPUTE, r.S_OTHER}:
            return None
        return r.code(r.S_DATA_WAIT, self.category, r.LEAVES)

    def iterated(self, start: int, end: int, entry: int, iterator: object | None) -> None:
        """An epoch boundary has passed: ``iter(loader)`` returned; or raised, or workers were stopped (iterator None).

        ``start``, ``end`` and ``entry`` as for `delivered`.
        """
        if iterator is not None:
            self.sources.register(iterator)
        loader = self.sources.known(iterator)
        if loader is None:
            self.ring.push(start, end, entry)
        else:
            self.ring.push(start, end, entry | r.BEGINS, loader)
        self.waiting_since = 0

    def mark_request(self, iterator: object, entry: int) -> None:
        """Mark the request on the GPU's clock, if the span will count as waiting for data.

        Only some ordinary steps are timed. Everything else (iterator None: an iteration begins) is always timed.
        """
        if self.gpu is None or entry & 7 != r.S_DATA_WAIT:
            return
        if entry == r.STEP and id(iterator) == self.fast_path.steady_iterator_id:
            self.gpu.step_ended()
        else:
            self.gpu.epoch_boundary()

    def fetch_timed(self, wall_ns: int, cpu_ns: int) -> None:
        """Count a fetch on this thread: its time, and the CPU time of it, in nanoseconds."""
        self.time_fetches -= 1
        self.timed_fetch_ns += wall_ns
        self.timed_fetch_cpu_ns += cpu_ns

    def tell_tokens(self, number: int) -> None:
        """The script trains on so many more tokens. Those of an evaluation or a checkpoint do not count."""
        if not self.in_phase and self.category != r.S_EVALUATION:
            self.tokens_told = (self.tokens_told or 0) + number

    def _follow(self, iterator: object) -> None:
        """Note when the iterator is freed, without keeping it alive and without ever holding it on another thread."""
        self.iterator_id, self.iterator_gone = id(iterator), []
        self._iterator_alive = weakref.ref(iterator, self.iterator_gone.append)  # C code: see `hooks.patching.WeakMap`

    def _enter_evaluation(self, own: int = 0) -> None:
        """Change to evaluation. ``own``: id of an iterator that is only now known to evaluate; its step ends here."""
        if self.category == r.S_EVALUATION:
            return
        self.boundaries.interrupt(EVALUATION)
        closes = self.step_open and self.step_iterators == {own}
        stamp = now_ns()
        self.ring.push(stamp, stamp, _EVALUATION | r.CLOSES if closes else _EVALUATION)
        self.category = r.S_EVALUATION
        self.fast_path.disable(LOOP_CHANGED)
        if closes:
            self.step_open = False
            self.step_iterators.clear()
            self.boundaries.passed()

    def _stepped_since_open(self) -> bool:
        # The fast path does not record how many optimizer steps there were when a step opened. A loader that joins
        # such a step is assumed to add to it, once. From then on the number is known.
        if self.fast_path_iterator_id or self._steps_at_open_unknown:
            return False
        return self.optimizer_steps > self._optimizer_steps_at_open

    # -- requests of the agent thread --------------------------------------------------------------------------

    def time_next_batch(self, waits: int = 1) -> None:
        """Time more of the next batch than its wait.

        Without workers, time the fetch on the CPU clock: one fetch of each loader of a step, because the very next one
        is mostly that of the loader that follows the slowest. With workers, time how long freeing the batch takes, and
        what this thread itself does inside ``next()`` for the next ``waits`` batches. That takes microseconds, so it is
        not done at every step.
        """
        source = self.sources.newest() if self.active else None
        if source is None:
            return
        if source in {ON_THREAD, WATCHED}:
            self.time_fetches = max(1, len(self.step_iterators))
        elif source.kind == "workers":
            self.batch_release.wanted = True
            self.sampler_timer.wanted = waits
        if self.fast_path_iterator_id:
            self._steps_at_open_unknown = True
            self.fast_path.disable(TIMED_BATCH)

    def follow_optimizer(self) -> None:
        """No batch is requested on this thread any more: the optimizer's steps are the steps, until one is again."""
        self.batches_unseen = True
        self.fast_path.disable(BATCHES_UNSEEN)

    def without_gpu(self, error: Exception) -> None:
        """Stop using the GPU's clock after it failed: it could fail at every step. Exposed wait is no longer measured.

        Its events are not released: no more calls are made to a device that fails.
        """
        if self.gpu is not None:
            self.gpu.failed = True
        self.gpu = None
        self.note_error(error)

    # -- life --------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Make every hook pass straight through: after ``stop()``, and in a forked child."""
        self.thread = NO_THREAD
        self.waiting_since = 0
        self.fast_path.disable(STOPPED)
        self.gpu = None
        self.recorder = None
        self.sampler_timer.wanted = 0
        self.batch_release.forget()
        self.marks.forget()
