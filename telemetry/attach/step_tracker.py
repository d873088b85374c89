"""What the training thread is doing: the state machine behind the hooks.

The hooks of `loader_hooks`, `optimizer_hook` and `checkpoint_hooks` report what happens, and it writes spans into the
ring. It runs on the training thread, so it only compares and stores. The rules:

* A step opens with the request for a batch and closes with the next request. If a second loader is asked before the
  first one is asked again (or before the optimizer steps), its batch adds to the same step.
* A loader that is iterated with gradients off is evaluation, until it ends or training goes on. So is a loader that
  gives batch after batch while nothing is trained.
* A checkpoint, or a phase that the user names, is a span of its own. Afterwards the previous category continues.
* If no batch is requested on this thread (a prefetching thread does it), the optimizer's steps are the steps.
* After the first call of `step()`, only calls of it open and close steps.

The shared state is in `step_state`. Parts with a topic of their own: `fast_path`, `scopes` (phases, explicit steps),
`optimizer_hook`, `step_boundaries` (snapshots, NVTX).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach import ring as r
from telemetry.attach.batch_release import BatchRelease
from telemetry.attach.batch_sizes import BatchMarks
from telemetry.attach.evaluation_detector import EvaluationDetector
from telemetry.attach.fast_path import BATCHES_UNSEEN, LOOP_CHANGED, STOPPED, TIMED_BATCH, FastPath
from telemetry.attach.gc_timer import GarbageTimer
from telemetry.attach.graph_captures import Captures
from telemetry.attach.loader_handle import ON_THREAD, WATCHED
from telemetry.attach.loader_registry import LoaderRegistry
from telemetry.attach.optimizer_hook import OptimizerSteps
from telemetry.attach.profiler_ranges import ProfilerRanges
from telemetry.attach.resume_state import ResumeState
from telemetry.attach.sampler_timer import SamplerTimer
from telemetry.attach.scopes import Scopes
from telemetry.attach.step_boundaries import StepBoundaries
from telemetry.attach.step_state import NO_THREAD, StepState
from telemetry.core.clock import now_ns
from telemetry.core.labels import EVALUATION

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.attach.gpu_clock import GpuClock

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
        self._iterator_alive = weakref.ref(iterator, self.iterator_gone.append)  # C code: see `core.weak_map`

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
