"""What the training thread is doing: the state machine behind the hooks.

The hooks of `loader`, `optimizers` and `checkpoints` tell it what happens; it writes spans into the ring. It runs on
the training thread, so it only compares and stores. The rules:

* A step opens with the request for a batch and closes with the next request. A second loader that is asked before
  the first one again (or before the optimizer steps) adds to the same step.
* A loader iterated with gradients off is evaluation, until it ends or training goes on; so is one that gives batch
  after batch while no optimizer steps.
* A checkpoint, or a phase the user names, is a span of its own; what was going on before goes on after it.
* Where no batch is requested on this thread (a prefetching thread does it), the optimizer's steps are the steps.
* `step()` says it explicitly, and from then on only it opens and closes steps.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from telemetry.attach import ring as r
from telemetry.attach.frames import without_frames
from telemetry.attach.freeing import Freeing
from telemetry.attach.handle import ON_THREAD, WATCHED
from telemetry.attach.inside import Inside
from telemetry.attach.judged import Judged
from telemetry.attach.kinds import is_loader_iterator
from telemetry.attach.marks import Marks
from telemetry.attach.sources import Sources
from telemetry.clock import now_ns
from telemetry.records import CHECKPOINT, EVALUATION, OTHER, PhaseSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.attach.gpu_clock import GpuClock

_SAME_STEP: Final = r.code(r.S_DATA_WAIT, r.S_COMPUTE, r.JOINS)
_EVALUATION: Final = r.code(r.S_EVALUATION, r.S_EVALUATION)
_BOUNDARY: Final = r.code(r.S_COMPUTE, r.S_COMPUTE, r.CLOSES | r.OPENS | r.BATCH)

_NO_THREAD: Final = -1
_MAX_PHASES: Final = 4096

OVERHEAD_EVERY: Final = 64
"""Every so many steps the hook takes one stamp more, to measure itself where it runs."""

OVERHEAD_MASK: Final = OVERHEAD_EVERY * r.STRIDE - 1


class Recorder(Protocol):
    """What wants to know of step boundaries: a snapshot that is armed or recording."""

    def boundary(self, ended: int, *, opens: bool) -> bool:
        """``ended`` steps have ended; with ``opens`` the next begins right now. Returns whether that took its time."""

    def interrupt(self, ended: int, why: str) -> bool:
        """Something that is no training begins. Returns as `boundary`."""


class Before(NamedTuple):
    """What was going on when a phase began, at a stamp, and the ranges that end with the phase."""

    state: int
    held: bool
    steady: int
    at: int
    marks: Sequence[Callable[[], object]]


class _OnEveryStep:
    """What the short paths of the hooks read and write: slots of a base class come first, so these lie together."""

    __slots__ = ("key", "optimizer_steps", "thread", "waiting_since")


class StepTracker(_OnEveryStep):
    """State of the training thread.

    Attributes:
        thread: ident of the training thread; hooks on any other thread pass straight through.
        waiting_since: stamp of the request now in progress; negative when it is not a wait for training data, 0 when
            there is none. Also what tells an inner fetch (a dataset that reads another loader) from an outer one.
        key: id of the iterator for which the short path of the hook holds, 0 when it does not hold.
        recorder: told of every step boundary, off the short path; None while there is no snapshot to take.
        marks: ranges for the profilers that look on.
        device: the CUDA device of the training thread, as of the newest first batch; None for none.
        accelerator: the type of the asynchronous device in use; None for none.
        trained_on: the type of device that the parameters are on which an optimizer steps; None while not known.
        sources: where batches come from.
        gpu: the clock that times waits on the GPU, None where there is none.
        native_thread: the kernel's number of the training thread.
        garbage_ns: time garbage collection stopped the training thread.
        time_fetches: so many of the next fetches of this thread's own are to be timed on the CPU's clock too;
            ``timed_fetch_ns`` and ``timed_fetch_cpu_ns`` are the sums of those that were.
        freeing: follows a batch of workers until it is freed.
        inside: what this thread does itself while it asks for a batch: the sampler, collections.
        collecting: the garbage collector is at work on the training thread.
        requests_elsewhere: batches that other threads have requested.
        unseen_steps: steps before which no batch was requested on this thread: how long it waited for one is not known.
        overhead_ns: time the hooks took, from one call in `OVERHEAD_EVERY`.
    """

    __slots__ = (
        "_current_device",
        "_explicit",
        "_fetched",
        "_given",
        "_grad_enabled",
        "_held",
        "_iterator",
        "_iterator_alive",
        "_judged",
        "_loader",
        "_looked_at",
        "_lost_sight",
        "_members",
        "_open",
        "_optimizer",
        "_optimizer_steps_at_open",
        "_state",
        "_steady",
        "_unnoted",
        "accelerator",
        "collecting",
        "device",
        "errors",
        "freeing",
        "garbage_ns",
        "gpu",
        "inside",
        "last_error",
        "marks",
        "native_thread",
        "overhead_ns",
        "phases",
        "recorder",
        "requests_elsewhere",
        "ring",
        "sources",
        "time_fetches",
        "timed_fetch_cpu_ns",
        "timed_fetch_ns",
        "trained_on",
        "unseen_steps",
    )

    def __init__(self, ring: r.Ring) -> None:
        self.ring = ring
        self.thread = threading.get_ident()
        self.native_thread = threading.get_native_id()
        self.waiting_since = 0
        self.key = 0
        self.gpu: GpuClock | None = None
        self.recorder: Recorder | None = None
        self.marks = Marks()
        self.optimizer_steps = 0
        self.overhead_ns = 0
        self.garbage_ns = 0
        self.collecting = False
        self.time_fetches = 0
        self.timed_fetch_ns = 0
        self.timed_fetch_cpu_ns = 0
        self.requests_elsewhere = 0
        self.unseen_steps = 0
        self.freeing = Freeing(ring)
        self.inside = Inside()
        self.sources = Sources()
        self.errors = 0
        self.last_error: BaseException | None = None
        self.phases: deque[PhaseSpan] = deque(maxlen=_MAX_PHASES)
        self.device: int | None = None
        self.accelerator: str | None = None
        self.trained_on: str | None = None
        self._looked_at = 0  # id of the optimizer that said what is trained on
        self._current_device: Callable[[], int | None] = lambda: None
        self._grad_enabled: Callable[[], bool] = lambda: True  # until torch is there
        self._state = r.S_STARTUP
        self._held = False  # inside a checkpoint or an evaluation phase: batches do not change the state
        self._steady = 0  # the iterator of the ordinary batches, also where the GPU's clock keeps off the short path
        self._open = False  # a step is open
        self._optimizer_steps_at_open = 0
        self._unnoted = False  # the open step may have been opened on the short path, though that does not hold now
        self._judged = Judged()  # whether the newest batches are trained on
        self._members: set[int] = set()  # iterators that gave a batch to the open step
        self._loader = 0  # id of the loader whose iteration the steps follow
        self._iterator = 0  # id of the iterator that gave the newest batch, 0 when it is gone
        self._iterator_alive: weakref.ref[Any] | None = None
        self._explicit = False  # the user says step()
        self._fetched = False  # a batch was requested on this thread
        self._given = False  # one has come since the user's last step
        self._lost_sight = False  # the agent thread has found that the batches come another way now
        self._optimizer = 0  # id of the optimizer whose steps are the steps where no batch is requested

    def use_torch(self, grad_enabled: Callable[[], bool], current_device: Callable[[], int | None]) -> None:
        """Torch is there: ask it whether gradients are on, and which CUDA device (None for none) is current."""
        self._grad_enabled = grad_enabled
        self._current_device = current_device

    def gradients_on(self) -> bool:
        """Whether gradients are on, as far as torch is loaded."""
        return self._grad_enabled()

    @property
    def active(self) -> bool:
        """Whether the hooks are to do anything: not after ``stop()``, and not in a forked child."""
        return self.thread != _NO_THREAD

    @property
    def stepping(self) -> bool:
        """Whether the training thread is in a step: not starting up, evaluating or writing a checkpoint."""
        return self._state == r.S_COMPUTE

    @property
    def asking(self) -> bool:
        """Whether the training thread asks for training data, and it is not for the first batch of the run."""
        return self.waiting_since > 0 and self._fetched

    @property
    def loop_left(self) -> bool:
        """Whether what gave the newest batch is gone: a loop left with ``break``, after which no step is open."""
        return self._fetched and not self._explicit and not self._iterator

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes with whatever the hooks see of the training thread."""
        return self.ring.head, self.optimizer_steps, self.waiting_since

    @property
    def checkpointing(self) -> bool:
        """Whether a checkpoint is in progress on the training thread."""
        return self._held and self._state == r.S_CHECKPOINT

    # -- batches -----------------------------------------------------------------------------------------------

    def request(self, iterator: object) -> int:
        """A batch is about to be requested, and the short path does not hold. Returns the code of its span."""
        if self._held:
            return r.code(self._state, self._state)
        if not self._grad_enabled():
            self._enter_evaluation()
            return _EVALUATION
        if not self._explicit and self._judged.requested(iterator, self.optimizer_steps, self.ring.closed):
            self._enter_evaluation(own=id(iterator))
            return _EVALUATION
        if self._explicit:
            after = r.S_COMPUTE if self._open and self._state == r.S_COMPUTE else r.S_OTHER
            return r.code(r.S_DATA_WAIT, after, r.BATCH if self._open else r.OPENS | r.BATCH)
        if not self._open or id(iterator) in self._members or self._stepped_since_open():
            return r.STEP
        return _SAME_STEP

    def delivered(self, iterator: object, start: int, end: int, entry: int) -> None:
        """A batch has come whose span is not the ordinary one."""
        state = entry >> 3 & 7
        training = not self._held and state != r.S_EVALUATION
        likely = training and (self._explicit or self._judged.likely(self.optimizer_steps))
        source = self.sources.delivered(iterator, training=likely)
        self.ring.push(start, end, entry, source)
        self.waiting_since = 0
        if not training:
            return
        self._state = state
        self._fetched, self._given, self._unnoted, self.inside.at_edge = True, True, False, False
        self.device = self._current_device()
        if id(iterator) != self._iterator:
            self._follow(iterator)
        if self._explicit:
            self._open = True
            return
        alone = entry == r.STEP and self._members == {id(iterator)}  # the second batch in a row from this loader alone
        alone = alone and self._judged.settled(self.optimizer_steps)
        if entry == r.STEP:
            self._members = {id(iterator)}
            self._open, self._optimizer_steps_at_open = True, self.optimizer_steps
        else:
            self._members.add(id(iterator))
        self._settle(id(iterator) if alone else 0)

    def _settle(self, iterator: int) -> None:
        """The next batches are ordinary ones if this iterator (its id; 0 for none) gives them."""
        self._steady = iterator
        ordinary = self.gpu is None and self.recorder is None and not self.marks.nvtx and not self.inside.wanted
        self.key = iterator if ordinary else 0

    def failed(self, iterator: object, start: int, entry: int, error: BaseException) -> None:
        """The request raised: the end of an epoch, or an error that is the user's to see."""
        end = now_ns()
        self.waiting_since = 0
        if self._held:
            return
        during, ended = entry & 7, isinstance(error, StopIteration)
        if during == r.S_DATA_WAIT and self._fetched:
            self.inside.edge()
        self._judged.leave(self.optimizer_steps)
        loader = None if ended else self.sources.known(iterator)  # a batch that raised has its number too
        if during == r.S_EVALUATION:
            self._state = r.S_COMPUTE if self._open else r.S_OTHER
            self.ring.push(start, end, r.code(during, self._state), loader)
        elif self._explicit or (ended and entry == _SAME_STEP):
            self.ring.push(start, end, r.code(during, self._state), loader)
            self._members.discard(id(iterator))
        else:
            self.ring.push(start, end, r.code(during, r.S_OTHER, r.CLOSES if self._open else 0), loader)
            self._state, self._open = r.S_OTHER, False
            self._settle(0)
            self._members.clear()
            self.boundary()

    def iteration(self, loader: object) -> int:
        """``iter(loader)`` is about to be called. Returns the code of its span, in which workers are started."""
        if self._held:
            return r.code(self._state, self._state)
        self._judged.leave(self.optimizer_steps)
        if not self._grad_enabled() or (not self._explicit and self._judged.known_to_evaluate(loader)):
            self._enter_evaluation()
            return _EVALUATION
        flags = 0
        if self._fetched:
            self.inside.edge()
        if self._state == r.S_EVALUATION:  # an evaluation loop was left with break
            self._state = r.S_COMPUTE if self._open else r.S_OTHER
        if not self._explicit:
            if not self._open:
                self._loader = id(loader)
            elif self._loader == id(loader):  # the epoch was left with break
                flags = r.CLOSES
                self._open, self._state = False, r.S_OTHER
                self._members.clear()
        self._settle(0)
        return r.code(r.S_DATA_WAIT, self._state, flags)

    def leaving(self, iterator: object) -> int | None:
        """The workers of an iterator that was left are about to be stopped. Returns the code of that span, or None.

        None of one that had ended, whose workers are stopped already; and none in a garbage collection, which may come
        in the middle of any of these methods, and is timed as such.
        """
        if getattr(iterator, "_shutdown", False) or self.collecting:
            return None
        if self._held or self._state not in {r.S_COMPUTE, r.S_OTHER}:
            return None
        return r.code(r.S_DATA_WAIT, self._state, r.LEAVES)

    def iterated(self, start: int, end: int, entry: int, iterator: object | None) -> None:
        """An edge has passed: ``iter(loader)`` has returned; or raised, or workers were stopped (iterator None)."""
        if iterator is not None:
            self.sources.register(iterator)
        loader = self.sources.known(iterator)
        if loader is None:
            self.ring.push(start, end, entry)
        else:
            self.ring.push(start, end, entry | r.BEGINS, loader)
        self.waiting_since = 0

    def time_next_batch(self, waits: int = 1) -> None:
        """Have more than its wait timed of the next batch. Called on the agent thread.

        Where this thread fetches itself, the fetch on the CPU's clock: one of each loader of a step, for the next alone
        would mostly be of the one that follows the slowest. Where workers do, how long it takes to free it, and of the
        next ``waits`` batches what this thread does while it asks for them. That takes microseconds, so it is not done
        at every step.
        """
        source = self.sources.newest() if self.active else None
        if source is None:
            return
        if source in {ON_THREAD, WATCHED}:
            self.time_fetches = max(1, len(self._members))
        elif source.kind == "workers":
            self.freeing.wanted = True
            self.inside.wanted = waits
        if self.key:
            self._unnoted = True
            self.key = 0  # off the short path, for one batch

    def lose_sight(self) -> None:
        """The optimizer goes on stepping, and no batch is requested here any more. Called on the agent thread.

        From its next step on the optimizer's steps are the steps, until a batch is requested here again.
        """
        self._lost_sight = True
        self.key = 0  # off the short path, which would not tell of the optimizer

    def fetch_timed(self, wall_ns: int, cpu_ns: int) -> None:
        """A fetch on this thread took so long, and so much of it on the CPU."""
        self.time_fetches -= 1
        self.timed_fetch_ns += wall_ns
        self.timed_fetch_cpu_ns += cpu_ns

    def _follow(self, iterator: object) -> None:
        """Note when the iterator goes, without keeping it alive and without ever holding it on another thread."""
        key = self._iterator = id(iterator)

        def gone(reference: object) -> None:
            del reference
            if self._iterator == key:
                self._iterator = 0

        self._iterator_alive = weakref.ref(iterator, gone)

    def mark_request(self, iterator: object, entry: int) -> None:
        """Mark the request on the GPU's clock, where the span will be booked as waiting for data.

        An ordinary step's is thinned out; what is no ordinary step's (iterator None: an iteration begins) is not.
        """
        if self.gpu is None or entry & 7 != r.S_DATA_WAIT:
            return
        if entry == r.STEP and id(iterator) == self._steady:
            self.gpu.step_ended()
        else:
            self.gpu.edge()

    def _enter_evaluation(self, own: int = 0) -> None:
        """``own``: of the iterator that shows only now that it evaluates: a step that is its alone ends here."""
        if self._state == r.S_EVALUATION:
            return
        self.interrupt(EVALUATION)
        closes = self._open and self._members == {own}
        stamp = now_ns()
        self.ring.push(stamp, stamp, _EVALUATION | r.CLOSES if closes else _EVALUATION)
        self._state = r.S_EVALUATION
        self._settle(0)
        if closes:
            self._open = False
            self._members.clear()
            self.boundary()

    def _stepped_since_open(self) -> bool:
        # On the short path nobody has noted how many there were when the step opened. A loader that joins in the
        # middle of a step is then taken to add to it, once; from there on it is known.
        return not self.key and not self._unnoted and self.optimizer_steps > self._optimizer_steps_at_open

    # -- optimizer ---------------------------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: object) -> None:
        """An optimizer has stepped, and it matters: the short path does not hold.

        The hook has counted it already.
        """
        here = threading.get_ident()
        if here != self.thread:
            if self.thread == _NO_THREAD or self._fetched or self._optimizer:
                return
            # start() was called on another thread than the one that trains
            self.thread, self.native_thread = here, threading.get_native_id()
        if self.trained_on in {None, "cpu"} and id(optimizer) != self._looked_at:
            self._looked_at = id(optimizer)
            self.trained_on = _device_of(optimizer) or self.trained_on
        if self.gpu is not None:
            self._note_work(self.gpu)
        if self._held or self._explicit:
            return
        if self._lost_sight:
            self._lost_sight = self._fetched = self._open = False
            self._members.clear()
        if not self._fetched:
            self._optimizer = self._optimizer or id(optimizer)
            if self._optimizer == id(optimizer):
                stamp = now_ns()
                self.ring.push(stamp, stamp, _BOUNDARY)
                self.unseen_steps += 1
                self._state = r.S_COMPUTE
                self.boundary(opens=True)
        elif self._state == r.S_EVALUATION:  # an evaluation loop was left with break
            self._switch(r.S_COMPUTE if self._open else r.S_OTHER)

    def _note_work(self, clock: GpuClock) -> None:
        try:
            clock.worked()
        except Exception as error:
            self.without_gpu(error)

    def without_gpu(self, error: Exception) -> None:
        """The clock failed, and may fail at every step: the steps go on, without the GPU's part of their waits.

        Its events are not released: a device that fails is left alone.
        """
        if self.gpu is not None:
            self.gpu.failed = True
        self.gpu = None
        self.errors += 1
        self.last_error = without_frames(error)

    # -- spans the user or a patch names -----------------------------------------------------------------------

    def enter_phase(self, name: str) -> Before | None:
        """A phase begins. Returns what `exit_phase` needs, or None off the training thread."""
        if threading.get_ident() != self.thread:
            return None
        if name == EVALUATION:
            self.interrupt(EVALUATION)
        marks = self.marks.begin(name) if self.marks.makers else ()
        before = Before(self._state, self._held, self._steady, now_ns(), marks)
        if name in {EVALUATION, CHECKPOINT}:
            self._held = True
            self._settle(0)
            self._switch(r.S_EVALUATION if name == EVALUATION else r.S_CHECKPOINT, before.at)
        elif not self._held:
            self._settle(0)
            self._switch(r.S_OTHER, before.at)
        return before

    def exit_phase(self, name: str, before: Before | None, start: int) -> None:
        """The phase has ended; what was going on before goes on."""
        end = now_ns()
        category = name if name in {EVALUATION, CHECKPOINT} else OTHER
        if category == OTHER or before is None:  # the others show in the ring
            self.phases.append(PhaseSpan(name, category, start, (end - start) / 1e9))
        if before is None:
            return
        self.marks.end(before.marks)
        state, key, self._held = before.state, before.steady, before.held
        if category != OTHER or self._state == r.S_OTHER:
            if self._fetched and not self._open and state in {r.S_STARTUP, r.S_COMPUTE}:
                state, key = r.S_OTHER, 0  # the loop it was in has ended inside the phase
            self._settle(key)
            self._switch(state, end)

    def enter_step(self) -> None:
        """The user's step begins. A batch requested since the last one belongs to it."""
        if threading.get_ident() != self.thread or self._held:
            return
        stamp = now_ns()
        flags = 0 if self._open else r.OPENS
        self._explicit, self._open, self._fetched = True, True, True
        self._settle(0)
        self._state = r.S_COMPUTE
        self.ring.push(stamp, stamp, r.code(r.S_COMPUTE, r.S_COMPUTE, flags))
        self.boundary(opens=bool(flags))

    def exit_step(self) -> None:
        """The user's step has ended."""
        if threading.get_ident() != self.thread or self._held or not self._open:
            return
        stamp = now_ns()
        self.unseen_steps += not self._given
        self._open = self._given = False
        self._state = r.S_OTHER
        self.ring.push(stamp, stamp, r.code(r.S_OTHER, r.S_OTHER, r.CLOSES))
        self.boundary()

    def _switch(self, state: int, stamp: int | None = None) -> None:
        stamp = now_ns() if stamp is None else stamp
        self._state = state
        self.ring.push(stamp, stamp, r.code(state, state))

    # -- snapshots ---------------------------------------------------------------------------------------------

    def requested(self, entry: int) -> None:
        """A span with this code is about to begin: tell the recorder, before the wait begins."""
        if self.recorder is not None or self.marks.nvtx:
            self.boundary(opens=bool(entry & r.OPENS), closing=bool(entry & r.CLOSES) and self.ring.open)

    def boundary(self, *, opens: bool = False, closing: bool = False) -> None:
        """A step has ended, or begins now; ``closing``: one ends with the entry that is not in the ring yet."""
        ended = self.ring.closed + closing
        if self.marks.nvtx and (opens or not self.ring.open):
            self.marks.step(ended, opens=opens)
        if self.recorder is not None:
            recorder = self.recorder
            self._paused(lambda: recorder.boundary(ended, opens=opens))

    def interrupt(self, why: str) -> None:
        """Something that is no training begins, or the run ends."""
        if self.recorder is not None and threading.get_ident() == self.thread:
            recorder, ended = self.recorder, self.ring.closed
            self._paused(lambda: recorder.interrupt(ended, why))

    def wait_begins(self, iterator: object) -> Sequence[Callable[[], object]]:
        """A wait for a batch begins, and somebody looks on. Torch itself marks those for a DataLoader's in a trace."""
        if is_loader_iterator(iterator) and not self.marks.nvtx:
            return ()
        return self.marks.begin(f"enumerate(DataLoader)#{type(iterator).__name__}.__next__")

    def _paused(self, call: Callable[[], bool]) -> None:
        """Let the recorder work. Starting and stopping a profiler takes milliseconds that are no training."""
        start = now_ns()
        try:
            worked = call()
        except Exception as error:
            self.recorder, worked = None, True
            self.fault(error)
        end = now_ns()
        self.overhead_ns += end - start
        if worked:
            self.ring.push(start, end, r.code(r.S_OTHER, self._state))

    # -- life --------------------------------------------------------------------------------------------------

    def fault(self, error: BaseException) -> None:
        """Something of ours failed on the training thread: count it, keep it for the log, go on."""
        self.waiting_since = 0
        self.errors += 1
        self.last_error = without_frames(error)

    def detach(self) -> None:
        """Make every hook pass straight through: after ``stop()``, and in a forked child."""
        self.thread = _NO_THREAD
        self.waiting_since = 0
        self._settle(0)
        self.gpu = None
        self.recorder = None
        self.inside.wanted = 0
        self.freeing.forget()


def _device_of(optimizer: Any) -> str | None:
    """The type of device that an optimizer's parameters are on; None where it does not say."""
    try:
        return str(optimizer.param_groups[0]["params"][0].device.type)
    except Exception:
        return None
