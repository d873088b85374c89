"""The state machine behind the hooks: what the training thread is doing.

The hooks of `seams.dataloader`, `seams.checkpoints` and `seams.optimizer` report what happens, and it writes spans into
the ring. It runs on the training thread, so it only compares and stores. The rules:

* A step opens with the request for a batch and closes with the next request. If a second loader is asked before the
  first one is asked again (or before the optimizer steps), its batch adds to the same step.
* accelerate requests each batch before it gives the one before to the loop. So the first request of an iteration gives
  no batch yet, and the one that finds the end begins the last step, which ends with the steps of the optimizers.
* A loader that is iterated with gradients off is evaluation, until it ends or training goes on. So is a loader that
  gives batch after batch while nothing is trained. Until that is known, its spans are held back.
* A checkpoint, or a phase that the user names, is a span of its own. Afterwards the previous category continues.
* If this thread requests no batch (a prefetching thread does), the optimizer's steps are the steps.
* After the first call of `step()`, only calls of it open and close steps.

On the fast path a step costs two stamps and two stores (`seams.dataloader.timed_next`). It handles only ordinary
batches of one iterator, and notifies no other part of the agent. It is on once an iterator has given two training
batches in a row, and no other part needs to see the next step: a snapshot, NVTX ranges, or a reading of CUDA's
allocator.
Every batch on the slow path checks this again, so the fast path is back one batch after the last reason has gone. The
agent thread may switch it off while the training thread switches it on. So `_fast_path_on` checks each lasting reason
itself, and the agent thread switches it off again at every tick.

The GPU's clock times one wait in many. In between the fast path is on, up to the batch before the next such wait. There
it meets the ring's ``limit``, which it looks at anyway.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.model.records import CHECKPOINT, EVALUATION, OTHER, PhaseSpan
from telemetry.seams import ring as r
from telemetry.seams.batches import BatchMark, iteration_begins, mark_of
from telemetry.seams.cuda_memory import AllocatorFigures
from telemetry.seams.device import CUDA, Captures
from telemetry.seams.evaluation_detector import EvaluationDetector
from telemetry.seams.garbage import GarbageTimer
from telemetry.seams.loaders import LoaderRegistry, is_loader_iterator
from telemetry.seams.profilers import ProfilerRanges
from telemetry.seams.resume import ResumeState
from telemetry.seams.state import NO_THREAD, StepState
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from telemetry.seams.device import GpuClock
    from telemetry.seams.loaders import BatchSource, LoaderHandle

_SAME_STEP: Final = r.code(r.S_DATA_WAIT, r.S_COMPUTE, r.JOINS)
_EVALUATION: Final = r.code(r.S_EVALUATION, r.S_EVALUATION)
_CATEGORY_OF: Final = {EVALUATION: r.S_EVALUATION, CHECKPOINT: r.S_CHECKPOINT}

_STEPS_WITHOUT_OPTIMIZER: Final = 16
"""If no optimizer of torch has stepped by then, the training is assumed to use the current device."""

OVERHEAD_EVERY: Final = 64
"""The fast path measures its own cost once in this many steps."""

OVERHEAD_MASK: Final = OVERHEAD_EVERY * r.STRIDE - 1

OVERHEAD_PARTS: Final = 3
"""What it measures is a third: the part after the arrival of the batch. The part before the request takes as long, and
so does the optimizer's hook (`benchmarks.overhead`, hot and cold)."""


class Held(NamedTuple):
    """A span that is held back, as an evaluation's: what it is if it turns out to be training's.

    Attributes:
        key: id of the iterator of a request, or of the loader whose iteration begins.
        ahead: whether it is the first request of an iteration that is read ahead.
        mark: the mark of the batch, or its source if the iteration goes on; None if one begins.
        ends: whether the iteration has ended.
    """

    key: int
    ahead: bool = False
    mark: BatchMark | BatchSource | None = None
    ends: bool = False


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


class StepTracker(StepState):
    """Follows the training thread.

    Attributes:
        steady_iterator_id: ``id()`` of the iterator that gives ordinary batches, 0 for none. It stays if something
            other than the loop switches the fast path off. Training thread only.
        loaders: where batches come from.
        detector: whether the newest batches are for training.
        last_steps: so many steps of optimizers end the step of the last batch, which accelerate has read ahead; 0 if no
            such step is open.
        tokens_told: tokens that the script has reported; None before the first.
        gpu: the clock that times waits on the GPU, if there is one.
        allocator: what CUDA's allocator has in use.
        captures: tracks which CUDA graphs are being captured.
        profiler_ranges: ranges for the profilers that are recording.
        resume: checkpoints that were written, and where the training has resumed.
        garbage: times garbage collections.
    """

    __slots__ = (
        "_ahead_id",
        "_begins",
        "_first_ahead",
        "_held",
        "_iterator_alive",
        "_loader_id",
        "_marked",
        "_optimizer_steps_at_open",
        "_torch",
        "_unread",
        "allocator",
        "captures",
        "detector",
        "garbage",
        "gpu",
        "last_steps",
        "loaders",
        "profiler_ranges",
        "resume",
        "steady_iterator_id",
        "tokens_told",
    )  # fmt: skip

    def __init__(self, ring: r.Ring) -> None:
        super().__init__(ring)
        self.steady_iterator_id = 0
        self.loaders = LoaderRegistry()
        self.detector = EvaluationDetector()
        self.tokens_told: int | None = None
        self.gpu: GpuClock | None = None
        self.captures = Captures()
        self.allocator = AllocatorFigures(self)
        self.profiler_ranges = ProfilerRanges()
        self.resume = ResumeState()
        self.garbage = GarbageTimer(self)
        self._torch: Any = None
        self._optimizer_steps_at_open = 0
        self._begins = False  # whether an iteration has begun, and no batch was requested since
        self._ahead_id = 0  # id of the iterator that accelerate reads ahead
        self._first_ahead = False  # whether the newest request was the first of such an iteration
        self._unread = 0  # id of the iterator of such a request, until the second one
        self.last_steps = 0
        self._held: dict[int, Held] = {}  # by place in the list of spans that the ring holds back
        self._marked = 0  # id of the iterator whose batches the newest mark in the ring is for
        self._loader_id = 0  # id of the loader whose iteration the steps follow
        self._iterator_alive: weakref.ref[Any] | None = None

    def use_torch(self, torch: ModuleType) -> None:
        """Use torch, which is now imported."""
        self._torch = torch
        self.grad_enabled = torch.is_grad_enabled

    def gradients_on(self) -> bool:
        """Whether gradients are on. True before torch is imported."""
        return self.grad_enabled()

    # -- the fast path -------------------------------------------------------------------------------------------------

    def loop_changed(self) -> None:
        """Forget the steady iterator, because the loop begins, ends or is interrupted."""
        self.fast_path_iterator_id = self.steady_iterator_id = 0

    def _fast_path_on(self, iterator_id: int) -> None:
        self.steady_iterator_id = iterator_id
        wanted = self.recorder is None and self.allocator.wanted is None and not self.profiler_ranges.nvtx
        gpu, ring = self.gpu, self.ring
        if gpu is not None:
            wanted = wanted and ring.head < gpu.due
            ring.limit = min(ring.limit, max(ring.head, gpu.due - r.STRIDE))
        self.fast_path_iterator_id = iterator_id if wanted else 0

    def time_next_wait(self) -> None:
        """End the fast path with the batch that has just opened a step: the GPU's clock times the next wait."""
        self._optimizer_steps_at_open = self.optimizer_steps
        self.fast_path_iterator_id = 0

    # -- step boundaries, for a snapshot that is armed or recording, NVTX ranges, and a reading of CUDA's allocator ----

    def boundary_ahead(self, entry: int) -> None:
        """Report the boundary of a span with this code, before its wait begins."""
        if self.recorder is not None or self.allocator.wanted is not None or self.profiler_ranges.nvtx:
            self.boundary_passed(opens=bool(entry & r.OPENS), closing=bool(entry & r.CLOSES) and self.ring.open)

    def boundary_passed(self, *, opens: bool = False, closing: bool = False) -> None:
        """Report a step that has ended or begins now. ``closing``: the ring has no entry yet that ends the step."""
        if not self.captures.under_way:
            self.allocator.take()
        ended = self.ring.closed + closing
        if self.profiler_ranges.nvtx and (opens or not self.ring.open):
            self.profiler_ranges.step(ended, opens=opens)
        recorder = self.recorder
        if recorder is not None:
            self._record(lambda: recorder.boundary(ended, opens=opens))

    def interrupt(self, why: str) -> None:
        """Report to the recorder that something other than training begins, or that the run ends."""
        recorder = self.recorder
        if recorder is not None and self.here:
            ended = self.ring.closed
            self._record(lambda: recorder.interrupt(ended, why))

    def _record(self, call: Callable[[], bool]) -> None:
        """Call the recorder. Starting or stopping a profiler takes milliseconds, which do not count as training."""
        start = now_ns()
        try:
            worked = call()
        except Exception as error:
            self.recorder, worked = None, True
            self.fault(error)
        end = now_ns()
        self.overhead_ns += end - start
        if worked:
            self.ring.push(start, end, r.code(r.S_OTHER, self.category))

    # -- phases and steps that the script marks, and checkpoints. Nothing happens on any other thread. -----------------

    def enter_phase(self, name: str) -> Interrupted | None:
        """Begin a phase. Returns the argument for `exit_phase`; None on any other thread."""
        if not self.here:
            return None
        self.settle(evaluates=True)
        if name == EVALUATION:
            self.interrupt(EVALUATION)
        ranges = self.profiler_ranges.begin(name) if self.profiler_ranges.makers else ()
        before = Interrupted(self.category, self.in_phase, self.steady_iterator_id, now_ns(), ranges)
        if name in _CATEGORY_OF:
            self.loop_changed()
            self.switch(_CATEGORY_OF[name], before.at)
            self.in_phase = True  # last: a phase that a signal handler interrupts here is never left
        elif not self.in_phase:
            self.loop_changed()
            self.switch(r.S_OTHER, before.at)
        return before

    def exit_phase(self, name: str, before: Interrupted | None, start: int) -> None:
        """End a phase that began at ``start`` (monotonic ns), and return to the state ``before`` it."""
        if before is not None:
            self.in_phase = before.in_phase  # first: a signal handler may interrupt the rest
        end = now_ns()
        category = name if name in _CATEGORY_OF else OTHER
        if category == OTHER or before is None:  # the ring has the other phases
            self.phases.append(PhaseSpan(name, category, start, (end - start) / NS))
        if before is None:
            return
        if name == CHECKPOINT and not (before.in_phase and before.category == r.S_CHECKPOINT):
            self.resume.checkpoint_ended(self, before.at, end)
        self.profiler_ranges.end(before.ranges)
        if category == OTHER and self.category != r.S_OTHER:
            return  # training has gone on inside the phase
        if self.batch_seen and not self.step_open and before.category in {r.S_STARTUP, r.S_COMPUTE}:
            self.loop_changed()  # the loop from before the phase has ended inside it
            self.switch(r.S_OTHER, end)
            return
        if before.steady_iterator_id:
            self._fast_path_on(before.steady_iterator_id)
        else:
            self.loop_changed()
        self.switch(before.category, end)

    def enter_step(self) -> None:
        """Begin the user's step. A batch that was requested since the last step belongs to it."""
        if not self.here or self.in_phase:
            return
        self.settle(evaluates=True)
        stamp = now_ns()
        flags = 0 if self.step_open else r.OPENS
        self.explicit = self.step_open = self.batch_seen = True
        self.loop_changed()
        self.category = r.S_COMPUTE
        self.ring.push(stamp, stamp, r.code(r.S_COMPUTE, r.S_COMPUTE, flags))
        self.boundary_passed(opens=bool(flags))

    def exit_step(self) -> None:
        """End the user's step."""
        if not self.here or self.in_phase or not self.step_open:
            return
        stamp = now_ns()
        self.unseen_steps += not self.batch_since_step
        self.step_open = self.batch_since_step = False
        self.category = r.S_OTHER
        self.ring.push(stamp, stamp, r.code(r.S_OTHER, r.S_OTHER, r.CLOSES))
        self.boundary_passed()

    # -- batches -------------------------------------------------------------------------------------------------------

    def request(self, iterator: object) -> int:
        """Begin a request for a batch on the slow path. Returns the code of its span."""
        if self.in_phase:
            return r.code(self.category, self.category)
        gradients, steps, key = self.grad_enabled(), self.optimizer_steps, id(iterator)
        evaluates: bool | None = not gradients and self.explicit
        if not self.explicit:
            resumed = self.step_open and not self._begins and key in self.step_iterators
            self._first_ahead, self._begins = self._begins and self.loaders.read_ahead, False
            evaluates = self.detector.requested(iterator, steps, self.ring.closed, gradients=gradients, resumed=resumed)
        if self._evaluates(evaluates):
            self._enter_evaluation(own=key)
            return _EVALUATION
        if self.explicit:
            after = r.S_COMPUTE if self.step_open and self.category == r.S_COMPUTE else r.S_OTHER
            return r.code(r.S_DATA_WAIT, after, r.BATCH if self.step_open else r.OPENS | r.BATCH)
        return self._code_of_batch(key, ahead=self._first_ahead)

    def _code_of_batch(self, iterator_id: int, *, ahead: bool) -> int:
        """The code of a request for a training batch: it opens a step, or joins the open one.

        ``ahead``: it is the first of an iteration that is read ahead, so the loop gets no batch yet.
        """
        opens = not self.step_open or iterator_id in self.step_iterators or self._stepped_since_open()
        opens = (opens or bool(self.last_steps)) and iterator_id != self._unread
        entry = r.STEP if opens else _SAME_STEP
        return entry & ~(r.BATCH | r.JOINS) if ahead else entry

    def delivered(self, iterator: object, start: int, end: int, entry: int) -> None:
        """Handle a batch that has come on the slow path, after a wait with this code and stamps (monotonic ns)."""
        category = entry >> 3 & 7
        training = not self.in_phase and category != r.S_EVALUATION
        likely = training and (self.explicit or self.detector.likely)
        source = self.loaders.delivered(iterator, training=likely)
        late = id(iterator) == self._ahead_id and not self._first_ahead
        marked = source if (id(iterator) == self._marked) is training else mark_of(iterator, source, late=late)
        if training:
            self._marked = id(iterator)
        elif self.ring.held is not None:
            self._hold_batch(iterator, source)
        self.ring.push(start, end, entry, marked)
        self.waiting_since = 0
        if not training:
            return
        self.category = category
        if self.device is None and (self.trained_on == "cpu" or self.ring.closed >= _STEPS_WITHOUT_OPTIMIZER):
            self.device = self._current_device()
        if id(iterator) != self.iterator_id or self.iterator_gone:
            # Note when it is freed, without keeping it alive. The callback is C code: see `seams.patching.WeakMap`.
            self.iterator_id, self.iterator_gone = id(iterator), []
            self._iterator_alive = weakref.ref(iterator, self.iterator_gone.append)
        # the second batch in a row that comes from this loader only
        alone = entry == r.STEP and self.step_iterators == {id(iterator)}
        alone = alone and not self.explicit and self.detector.settled(self.optimizer_steps)
        self._count_batch(id(iterator), entry)
        if alone:
            self._fast_path_on(id(iterator))
        elif not self.explicit:
            self.fast_path_iterator_id = self.steady_iterator_id = 0

    def _hold_batch(self, iterator: object, source: BatchSource) -> None:
        """Note what the next span, which is held back, is if it turns out to be training's."""
        key = id(iterator)
        goes_on = any(each.key == key for each in self._held.values())
        mark = None if goes_on else mark_of(iterator, source)
        self._held[len(self.ring.held or ())] = Held(key, self._first_ahead, mark or source)

    def _count_batch(self, iterator_id: int, entry: int) -> None:
        """Note that a training batch has come."""
        self.batch_seen = self.batch_since_step = True
        self.steps_at_open_unknown = self.at_boundary = False
        if self.explicit:
            self.step_open = True
            return
        if entry & r.OPENS:
            self.step_iterators = {iterator_id}
            self.step_open, self._optimizer_steps_at_open, self.last_steps = True, self.optimizer_steps, 0
            self.resume.counts = self.ring.closed, self.optimizer_steps
        else:
            self.step_iterators.add(iterator_id)
        if not entry & (r.BATCH | r.JOINS):
            self._ahead_id = self._unread = iterator_id
        elif iterator_id == self._unread:
            self._unread = 0

    def _evaluates(self, verdict: bool | None) -> bool:  # noqa: FBT001 - as the detector says it
        """Whether the training thread evaluates, as far as that is known: None holds the spans back from here on."""
        if verdict is not None:
            # What went before: batches, or the begin of the iteration to which this request belongs.
            self.settle(evaluates=verdict or any(each.mark is not None for each in self._held.values()))
            return verdict
        if self.ring.held is None:
            self.slow_path()
            self.ring.hold(now_ns())
        return True

    def settle(self, *, evaluates: bool) -> None:
        """Write the spans that are held back, now that it is known what they are. An optimizer's step decides."""
        ring, held = self.ring, self.ring.held
        if held is None:
            return
        about, self._held, ring.held = self._held, {}, None
        self.detector.settle(evaluates=evaluates)
        try:
            if evaluates:
                self.interrupt(EVALUATION)
                for each in held:
                    ring.push(*each)
                return
            self.category = r.S_COMPUTE if self.step_open else r.S_OTHER
            for place, (start, end, entry, source) in enumerate(held):
                what = about.get(place)
                if what is None:  # here the evaluation would have begun
                    continue
                if what.mark is None:
                    ring.push(start, end, self._code_of_iteration(what.key) | entry & r.BEGINS, source)
                    continue
                code = self._code_of_batch(what.key, ahead=what.ahead)
                if what.ends:
                    self._read_last(start, end, code, what.mark)
                else:
                    ring.push(start, end, code, what.mark)
                    self.category = r.S_COMPUTE
                    self._count_batch(what.key, code)
            self._marked = 0
        finally:
            ring.held_since = 0

    def failed(self, iterator: object, start: int, entry: int, error: BaseException) -> None:
        """Handle a request that raised, at the end of an epoch or as an error for the user. See `delivered`."""
        end = now_ns()
        self.waiting_since = 0
        if self.in_phase:
            return
        during, ended = entry & 7, isinstance(error, StopIteration)
        if during == r.S_DATA_WAIT and self.batch_seen:
            self.at_boundary = True
        self.detector.leave(self.optimizer_steps)
        loader = None if ended else self.loaders.known(iterator)  # a batch that raised has a number, too
        if during == r.S_EVALUATION:
            self.category = r.S_COMPUTE if self.step_open else r.S_OTHER
            ahead = ended and self._may_train(id(iterator))
            if ahead:
                self._held[len(self.ring.held or ())] = Held(id(iterator), mark=self._mark_of_last(iterator), ends=True)
            self.ring.push(start, end, r.code(during, self.category), loader)
            if not ahead:
                self.settle(evaluates=True)
        elif ended and id(iterator) == self._ahead_id:
            self._read_last(start, end, entry, self._mark_of_last(iterator))
        elif self.explicit or (ended and entry == _SAME_STEP):
            self.ring.push(start, end, r.code(during, self.category), loader)
            self.step_iterators.discard(id(iterator))
        else:
            self.ring.push(start, end, r.code(during, r.S_OTHER, r.CLOSES if self.step_open else 0), loader)
            self.category, self.step_open = r.S_OTHER, False
            self.loop_changed()
            self.step_iterators.clear()
            self.boundary_passed()

    def _may_train(self, iterator_id: int) -> bool:
        """Whether an iteration that ends may still be training: it was read ahead, and no step was due in it yet."""
        spans = [each for each in self._held.values() if each.key == iterator_id]
        return any(each.ahead for each in spans) and len(spans) <= max(
            1, round(self.ring.closed / max(1, self.optimizer_steps))
        )

    def _mark_of_last(self, iterator: object) -> BatchMark:
        return mark_of(iterator, self.loaders.delivered(iterator, training=False))

    def _read_last(self, start: int, end: int, entry: int, mark: BatchMark | BatchSource) -> None:
        """Begin the step of the last batch, which was read ahead. It ends when the optimizers have stepped."""
        self.ring.push(start, end, entry | r.ENDS, mark)
        self.category, self.step_open = r.S_COMPUTE, True
        self._ahead_id = self._unread = 0
        self.last_steps = max(1, self.resume.optimizers)
        self.step_iterators.clear()
        self.loop_changed()

    def optimizer_stepped(self) -> None:
        """Note an optimizer's step in the loop. The last one after a batch that was read ahead ends the last step."""
        if self.category == r.S_EVALUATION:  # an evaluation loop was left with break
            self.switch(r.S_COMPUTE if self.step_open else r.S_OTHER)
        elif self.last_steps:
            self.last_steps -= 1
            if not self.last_steps:
                stamp = now_ns()
                self.step_open, self.category = False, r.S_OTHER
                self.ring.push(stamp, stamp, r.code(r.S_OTHER, r.S_OTHER, r.CLOSES))
                self.boundary_passed()

    def iteration(self, loader: object) -> int:
        """Begin a call of ``iter(loader)``. Returns the code of its span, in which workers are started."""
        self._marked = 0
        if self.in_phase:
            return r.code(self.category, self.category)
        self.detector.leave(self.optimizer_steps)
        self._begins = True
        gradients, place = self.grad_enabled(), self.loaders.place
        evaluates: bool | None = not gradients
        if not self.explicit:
            evaluates = self.detector.begins(loader, place, self.optimizer_steps, gradients=gradients)
        if self._evaluates(evaluates):
            self._enter_evaluation()
            if self.ring.held is not None:
                self._held[len(self.ring.held)] = Held(id(loader))
            return _EVALUATION
        if self.category == r.S_EVALUATION:  # ``break`` has left an evaluation loop
            self.category = r.S_COMPUTE if self.step_open else r.S_OTHER
        entry = self._code_of_iteration(id(loader))
        self.loop_changed()
        return entry

    def _code_of_iteration(self, loader_id: int) -> int:
        """The code of the start of a training iteration. It closes the step of one that ``break`` has left."""
        flags = 0
        if self.batch_seen:
            self.at_boundary = True
        if not self.explicit:
            if not self.step_open:
                self._loader_id = loader_id
            elif self._loader_id == loader_id or self.last_steps:  # ``break`` has left the epoch
                flags = r.CLOSES
                self.step_open, self.category, self.last_steps = False, r.S_OTHER, 0
                self.step_iterators.clear()
        return r.code(r.S_DATA_WAIT, self.category, flags)

    def leaving(self, iterator: object) -> int | None:
        """Begin to stop the workers of an iterator that was left. Returns the code of that span, or None.

        It is None if the iterator had ended, because then its workers are stopped already. It is also None in a garbage
        collection, which can run in the middle of these methods, and has its own timer.
        """
        if getattr(iterator, "_shutdown", False) or self.garbage.collecting:
            return None
        if self.in_phase or self.category not in {r.S_COMPUTE, r.S_OTHER}:
            return None
        return r.code(r.S_DATA_WAIT, self.category, r.LEAVES)

    def iterated(self, start: int, end: int, entry: int, loader: LoaderHandle | None) -> None:
        """Pass an epoch boundary. The handle is None if no iteration with workers has begun."""
        if loader is None:
            self.ring.push(start, end, entry)
        else:
            self.ring.push(start, end, entry | r.BEGINS, iteration_begins(loader))
        self.waiting_since = 0

    def wait_ranges(self, iterator: object) -> Sequence[Callable[[], object]]:
        """Begin a range for a wait. Torch itself marks DataLoaders' waits. Returns the functions that end it."""
        if is_loader_iterator(iterator) and not self.profiler_ranges.nvtx:
            return ()
        return self.profiler_ranges.begin(f"enumerate(DataLoader)#{type(iterator).__name__}.__next__")

    def tell_tokens(self, number: int) -> None:
        """Add tokens that the script reports. Tokens of an evaluation or a checkpoint do not count."""
        if not self.in_phase and self.category != r.S_EVALUATION:
            self.tokens_told = (self.tokens_told or 0) + number

    def _enter_evaluation(self, own: int = 0) -> None:
        """Change to evaluation. ``own``: id of an iterator that turns out to evaluate, and whose step ends here."""
        if self.category == r.S_EVALUATION:
            return
        if self.ring.held is None:  # if it may be training, a snapshot goes on
            self.interrupt(EVALUATION)
        closes = self.step_open and (self.step_iterators == {own} or self.last_steps > 0)
        stamp = now_ns()
        self.ring.push(stamp, stamp, _EVALUATION | r.CLOSES if closes else _EVALUATION)
        self.category = r.S_EVALUATION
        self.loop_changed()
        if closes:
            self.step_open, self.last_steps = False, 0
            self.step_iterators.clear()
            self.boundary_passed()

    def _stepped_since_open(self) -> bool:
        # The fast path does not record how many optimizer steps there were when a step opened. A loader that joins
        # such a step is assumed to add to it, once. From then on the number is known.
        if self.fast_path_iterator_id or self.steps_at_open_unknown:
            return False
        return self.optimizer_steps > self._optimizer_steps_at_open

    # -- the GPU's clock -----------------------------------------------------------------------------------------------

    def mark_request(self, iterator: object, entry: int, began: int) -> None:
        """Mark the request on the GPU's clock, if the span will count as waiting for data. Never raises.

        The start of an iteration (iterator None) and its first batch are always timed, and only some of the others.
        ``began``: when the hook began, monotonic ns.
        """
        gpu = self.gpu
        if gpu is None or entry & 7 != r.S_DATA_WAIT:
            return
        try:
            gpu.requested(None if iterator is None else id(iterator), began)
        except Exception as error:
            self.without_gpu(error)

    def mark_arrival(self, start: int, end: int) -> None:
        """Mark the end of a wait on the GPU's clock. Never raises."""
        gpu = self.gpu
        try:
            if gpu is not None:
                gpu.batch_arrived(start, end)
        except Exception as error:
            self.without_gpu(error)

    def without_gpu(self, error: Exception) -> None:
        """Stop using the GPU's clock and measuring exposed wait, because it could fail at every step."""
        if self.gpu is not None:
            self.gpu.failed = True
        self.gpu = None
        self.note_error(error)

    def _current_device(self) -> int | None:
        name = self.accelerator or CUDA
        module: Any = getattr(self._torch, name, None)
        if module is None or not hasattr(module, "current_device") or not module.is_initialized():
            return None
        index = int(module.current_device())
        # A device without a context is not the training's. The first call to it would take about 500 MiB of its memory.
        has_context = getattr(self._torch._C, "_cuda_hasPrimaryContext", None)
        return index if name != CUDA or has_context is None or has_context(index) else None

    # -- requests of the agent thread ----------------------------------------------------------------------------------

    def follow_optimizer(self) -> None:
        """Take the optimizer's steps as steps until this thread requests a batch again."""
        self.batches_unseen = True
        self.slow_path()

    def detach(self) -> None:
        """Make every hook pass straight through, after ``stop()`` and in a forked child."""
        self.thread = NO_THREAD
        self.waiting_since = 0
        self.loop_changed()
        self.gpu = None
        self.recorder = None
