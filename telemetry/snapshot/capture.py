"""Records steps with torch's profiler: prepares, starts and stops it on the training thread, at step boundaries.

This is the only file that imports `torch.profiler`. What was measured about it (torch 2.13, and pytorch#64795):

* Stopping a session on another thread than the one that started it crashes the process. So does an exit while a
  session is on, so one that is left is stopped at the exit. If the training thread never reaches another boundary, the
  recording is never stopped.
* If the first session of a process is not on the main thread, Kineto says so on stderr, whatever its log level.
* `_KinetoProfile` is used because `torch.profiler.profile` also starts an execution trace if an environment variable
  asks for one. That trace would belong to the script.
* `_KinetoProfile.prepare_trace` first imports all of Inductor, which takes 1.2 s. `Session.prepare` does the rest. In
  torch 2.4 `_KinetoProfile.start_trace` imports it.
* Before torch 2.13 (seen in 2.4 and 2.9), if Kineto is prepared and not started, every later profiler of the process
  fails: "Can't disable Kineto profiler when it's not running". So does one that starts on another thread than ours.
* Kineto writes two lines to stderr for each session. Only ``KINETO_LOG_LEVEL`` silences it. Kineto reads it once, with
  the first profiler, for the whole process. So only the user sets it: it would silence the script's profiler, too.

When a profiler of the user's ("theirs") starts, ours ends first; see `hooks.profilers`.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.hooks.device import stream_captures
from telemetry.records import FAILED, RECORDED, REFUSED, SKIPPED
from telemetry.snapshot.budget import drop_unexpanded
from telemetry.util.clock import NS, now_ns
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from telemetry.config import Config
    from telemetry.hooks.profilers import ProfilerWatch
    from telemetry.hooks.tracker import StepTracker
    from telemetry.snapshot.agree import Plan
    from telemetry.snapshot.budget import BudgetWatch
    from telemetry.util.processes import Identity

_PLAIN: Final = dict.fromkeys(range(32), " ") | {ord('"'): "'", ord("\\"): "/"}
"""Torch writes the names of ranges into its JSON unescaped (2.13): a quotation mark made the file unreadable."""

_GIVE_WAY_SECONDS: Final = 60.0
"""The longest that a profiler of the user's on another thread waits for the training thread to end ours. A training
thread that itself waits for that thread never does."""

_GIVEN_WAY: Final = "a profiler of the script's own began"
_CAPTURING: Final = "a CUDA graph is being captured"
_OFF_MAIN: Final = "the training does not run on the main thread; on any other, torch's profiler writes to stderr"


class RecordedTrace:
    """A recording that has ended: a ``_KinetoProfile`` with its events. It is saved at most once, and then freed."""

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler

    def save(self, path: Path) -> float:
        """Write it as a Chrome trace. Returns the seconds for which this held the GIL."""
        start = now_ns()
        self._profiler.export_chrome_trace(str(path))
        return (now_ns() - start) / NS

    def free(self) -> float:
        """Free the memory of the events. Returns the seconds for which this held the GIL."""
        start = now_ns()
        self._profiler = None
        return (now_ns() - start) / NS


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a plan on the training thread.

    Attributes:
        result: one of `SNAPSHOT_RESULTS`.
        why: the reason in words, if there is no recording or it was cut short.
        first_step, last_step: the steps that were recorded in full; None without a recording.
        started_ns, ended_ns: monotonic start and end of the recording.
        pauses: seconds that the training thread spent on ``prepare``, ``start`` and ``stop``.
        trace: the recording; None without one.
    """

    plan: Plan
    result: str
    why: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    started_ns: int = 0
    ended_ns: int = 0
    pauses: dict[str, float] = field(default_factory=dict)
    trace: RecordedTrace | None = None


class Session:
    """One recording of the profiler. It is prepared, started and stopped once each, on one thread.

    Args:
        plan: the steps to record, and the reason.
        identity: identity of this rank, which is written into the trace.
    """

    def __init__(self, plan: Plan, identity: Identity) -> None:
        import torch
        from torch.profiler import ProfilerActivity
        from torch.profiler.profiler import _KinetoProfile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        if torch.xpu.is_initialized():
            activities.append(ProfilerActivity.XPU)
        self._autograd: Any = sys.modules["torch.autograd.profiler"]
        self._profiler = _KinetoProfile(activities=activities)
        self._start_imports_inductor = not hasattr(self._profiler, "has_cudagraphs")
        self._may_be_prepared = False  # and not started
        if self._profiler._get_distributed_info() is None:  # without a process group torch does not name the rank
            ranks = {"backend": "none", "rank": identity.rank, "world_size": identity.world_size}
            self._profiler.preset_metadata_json("distributedInfo", json.dumps(ranks))
        about = {"run": identity.run, "rank": identity.rank, "world_size": identity.world_size}
        about |= {"first_step": plan.first_step, "last_step": plan.last_step}
        about |= {"request": msgspec.to_builtins(plan.request)}
        self._profiler.preset_metadata_json("telemetry", json.dumps(about))

    def prepare(self) -> None:
        """Do the slow part of a start. It is slowest on a GPU, where tracing has to warm up."""
        inductor: Any = sys.modules.get("torch._inductor.config")
        profiler = self._profiler
        profiler.has_cudagraphs = bool(getattr(getattr(inductor, "triton", None), "cudagraphs", False))
        profiler.profiler = self._autograd.profile(use_cpu=True, use_device=profiler.use_device, use_kineto=True)
        profiler.profiler._parse_kineto_results = _parse_nothing
        self._may_be_prepared = True
        profiler.profiler._prepare_trace()

    def start(self) -> None:
        """Start the recording. The session must be prepared."""
        profiler = self._profiler
        if self._start_imports_inductor and "torch._inductor.config" not in sys.modules:
            profiler.profiler._start_trace()
            distributed = profiler._get_distributed_info()
            if distributed:
                profiler.add_metadata_json("distributedInfo", json.dumps(distributed))
            for name, value in profiler.preset_metadata.items():
                profiler.add_metadata_json(name, value)
        else:
            profiler.start_trace()
        self._may_be_prepared = False

    def stop(self) -> RecordedTrace:
        """Stop the recording. Must be called on the thread that started the session."""
        self._profiler.stop_trace()
        return RecordedTrace(self._profiler)

    def discard(self) -> None:
        """End the recording, and drop its data: a stop would first expand it, which takes time and memory.

        Kineto's part ends with another recording, which is empty. Must be called on the thread that started this one.
        """
        drop_unexpanded()
        self.cancel()

    def cancel(self) -> None:
        """End a session that is prepared and not started.

        It is started first: torch writes a complaint to stderr when a session is stopped that was never started.
        """
        self.start()
        self._profiler.stop_trace()

    def stop_after_theirs(self) -> None:
        """Stop after a profiler of the user's has ended Kineto's session.

        Without a session in Kineto, stopping crashes the process. So another one is prepared first.
        """
        self.prepare()
        self._profiler.stop_trace()

    def abort(self) -> None:
        """Stop after an error, if it records or is prepared. Raises nothing."""
        autograd: Any = sys.modules["torch.autograd"]
        try:
            if not autograd._profiler_enabled() and self._may_be_prepared:
                self._prepare_again()
                self.start()
            if autograd._profiler_enabled():
                self.discard()
        except Exception:
            pass  # nothing more can be done, and the snapshot has failed already

    def _prepare_again(self) -> None:
        """Prepare a session that may be prepared already. Without it, a start would crash the process."""
        try:
            self._profiler.profiler._prepare_trace()
        except RuntimeError as error:
            if "when it's not running" not in str(error):  # before torch 2.13 it is the sign of one that is prepared
                raise

    def begin_range(self, name: str) -> Callable[[], None]:
        """Begin a named range of the trace. Returns the function that ends it."""
        range_ = self._autograd.record_function(name.translate(_PLAIN))
        range_.__enter__()
        return lambda: range_.__exit__(None, None, None)


def _parse_nothing(_results: object) -> list[Any]:
    """Replace the function that makes a Python object of each event when older versions of torch stop a recording.

    Nothing reads these objects: the trace is saved without them. With them, a stop took 8 times as long (torch 2.4).
    """
    return []


COUNTED_AHEAD: Final = 2
"""The operators of the step so many before the first recorded one are counted. In between, nothing collects.

A range that a script has entered under torch's old profiler, which counts, and leaves under the new one, which records,
crashes the process (torch 2.13). An optimizer's hook runs in such a range, and a profiler of the script's that waits
keeps one open over each step.
"""

_IDLE, _ARMED, _COUNTING, _PREPARED, _RECORDING = range(5)


class Capture:
    """Carries out one plan at a time.

    The agent thread calls `arm`, `hold`, `take`, `end` and `drop`. The training thread calls `boundary` and
    `interrupt`. The thread that starts a profiler of the user's calls `give_way`.

    Attributes:
        when_over: called once, on the training thread, after a session that outlived the agent has ended.
        abandoned: whether a session of ours could not be ended. Then no other is started.
    """

    def __init__(self, hooks: StepTracker, profilers: ProfilerWatch, config: Config, identity: Identity) -> None:
        self._hooks, self._profilers = hooks, profilers
        self._most_ns = int(config.snapshot_max_seconds * NS)
        self._identity = identity
        self._plan: Plan | None = None
        self._watch: BudgetWatch  # for the plan
        self._last_step = 0  # the last step that fits into the budget
        self._fewer: str | None = None  # why that is not the plan's last step
        self._state = _IDLE
        self._outcome: Outcome | None = None
        self._session: Session | None = None
        self._range: Callable[[], None] | None = None
        self._range_step = self._thread = self._ended = self._started_ns = 0
        self._pauses: dict[str, float] = {}
        # Set while no session of ours exists. We clear it before we check for a profiler of the user's. Theirs is
        # registered before it checks this event. So when both start at once, at least one of the two sees the other.
        self._over = threading.Event()
        self._over.set()
        self._asked: str | None = None  # why the session must end at the next boundary
        self._gate = threading.Lock()
        self.when_over: Callable[[], object] = lambda: None
        self.abandoned = False

    # -- the agent thread --------------------------------------------------------------------------------------

    def arm(self, plan: Plan, watch: BudgetWatch) -> None:
        """Record the steps of a plan when they come, or fewer of them if the budget allows no more."""
        self._pauses, self._asked, self._watch = {}, None, watch
        self._plan, self._state = plan, _ARMED
        self.hold()

    def hold(self) -> None:
        """Keep the training thread off its fast path, which does not call `boundary`.

        Called at every tick, because the training thread may return to its fast path at any moment.
        """
        if self._plan is not None:
            self._hooks.recorder = self
            self._hooks.slow_path()

    def after_fork_in_child(self) -> None:
        """Stop the child's copy of the session, which nobody will end, from collecting.

        No profiler sees this thread of the child any more. torch's switch for one session writes a warning.
        """
        if self._plan is not None:
            self._watch.after_fork_in_child()
        if self._state == _RECORDING:
            sys.modules["torch._C"]._autograd._enable_record_function(False)

    def take(self) -> Outcome | None:
        """The outcome of the plan, returned once; None before that."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def end(self, why: str, seconds: float) -> bool:
        """Ask the training thread to end our session at its next boundary; returns whether it did in ``seconds``."""
        self._asked = why
        return self._over.wait(seconds)

    def drop(self, why: str) -> None:
        """Skip a plan whose steps have not come when the run ends. A running session is left alone."""
        plan = self._plan
        if plan is not None and self._state == _ARMED:
            self._finish(Outcome(plan, SKIPPED, why))

    # -- the training thread -----------------------------------------------------------------------------------

    def boundary(self, ended: int, *, opens: bool) -> bool:
        """Advance the plan between two steps.

        Args:
            ended: number of steps that have ended.
            opens: whether the next step begins now.

        Returns:
            Whether the profiler was prepared, started or stopped, which takes longer than a hook may.
        """
        plan = self._plan
        if plan is None:
            self._hooks.recorder = None
            return False
        self._ended = ended
        if self._state == _RECORDING:
            return self._recording(plan, opens=opens)
        if self._asked:
            return self._end(plan, self._asked, result=REFUSED)
        counted = plan.first_step - COUNTED_AHEAD  # the step whose operators are counted
        due = {_ARMED: counted - 1, _COUNTING: counted}.get(self._state, plan.first_step - 1)
        if ended > due:
            return self._end(plan, f"this rank had begun step {counted} before it read the plan")
        return opens and ended == due and self._begin(plan)

    def interrupt(self, ended: int, why: str) -> bool:
        """Stop and keep the recording, because an evaluation begins or the run ends. Returns as `boundary`."""
        plan, self._ended = self._plan, ended
        if plan is None or self._state == _ARMED:
            return False
        if self._state == _RECORDING:
            return self._end(plan, f"cut short by {why}")
        return self._end(plan, f"{why} came before step {plan.first_step}")

    def _recording(self, plan: Plan, *, opens: bool) -> bool:
        if self._ended >= self._range_step:  # the request that ends an epoch opens no step, so the range stays open
            self._leave_range()
        if self._ended >= self._last_step or self._watch.exceeded():
            return self._end(plan, self._fewer)
        if self._asked:
            return self._end(plan, f"cut short: {self._asked}")
        if now_ns() - self._started_ns > self._most_ns:
            return self._end(plan, f"cut short: it had taken more than {self._most_ns / NS:g} s")
        if opens and self._range is None and self._session is not None:
            self._enter_range(self._session)
        return False

    def _begin(self, plan: Plan) -> bool:
        if self._state == _ARMED:
            self._prepare(plan)
        elif self._state == _COUNTING:
            self._fit(plan)
        elif self._session is not None:
            self._start(plan, self._session)
        return True

    def _prepare(self, plan: Plan) -> None:
        """Prepare the session ahead, because tracing a GPU has to warm up, and count the operators of a step."""
        self._over.clear()
        refused = self._profilers.theirs() or (_CAPTURING if self._capturing() else None)
        if threading.current_thread() is not threading.main_thread():
            refused = _OFF_MAIN
        if refused is not None:
            self._finish(Outcome(plan, REFUSED, refused))
            return
        with self._contained(plan, "prepare"):
            self._thread = threading.get_native_id()
            session = self._session = Session(plan, self._identity)
            atexit.register(self._exit)
            with self._profilers.ours():
                session.prepare()
            self._watch.count()
            self._state = _COUNTING

    def _fit(self, plan: Plan) -> None:
        """End the count: record as many of the plan's steps as fit into the budget."""
        steps, budget = plan.last_step - plan.first_step + 1, self._watch.budget
        operators, more = self._watch.end_count()
        why = f"a step has {'at least ' if more else ''}{operators} operators, and {budget.too_many}"
        fit = 0 if more else min(steps, budget.operators // max(1, operators))
        if fit == 0:
            self._end(plan, why, result=REFUSED)
            return
        self._fewer = None if fit == steps else f"cut short: {why}"
        self._last_step = plan.first_step + fit - 1
        self._state = _PREPARED

    def _start(self, plan: Plan, session: Session) -> None:
        if self._capturing():
            self._end(plan, _CAPTURING, result=REFUSED)
            return
        with self._contained(plan, "start"):
            with self._profilers.ours():
                session.start()
            self._started_ns, self._state = now_ns(), _RECORDING
            self._watch.record()
            self._hooks.profiler_ranges.makers += (session.begin_range,)
            self._enter_range(session)

    def _end(self, plan: Plan, why: str | None, *, result: str = SKIPPED) -> bool:
        """End the plan: keep the recording, or cancel it with this ``result`` if it has not begun.

        A session is not ended on another thread, and not while a CUDA graph is captured.

        Returns:
            Whether a session has ended.
        """
        if self._state == _ARMED:
            self._finish(Outcome(plan, result, why))
            return False
        session = self._session
        if session is None or threading.get_native_id() != self._thread or self._capturing():
            return False
        if not self._gate.acquire(blocking=False):
            return False
        try:
            if self.abandoned:
                return self._end_abandoned(plan, session)
            recording = self._state == _RECORDING
            with self._contained(plan, "stop" if recording else "cancel"):
                with self._profilers.ours():
                    if recording:
                        outcome = self._stop(plan, session, why)
                    else:
                        self._watch.end()
                        session.cancel()
                        outcome = Outcome(plan, result, why)
                self._finish(outcome)
        finally:
            self._gate.release()
        return True

    def _stop(self, plan: Plan, session: Session, why: str | None) -> Outcome:
        ended_ns, whole = now_ns(), self._ended >= plan.first_step
        self._leave_range()
        dropped = self._watch.exceeded()
        self._watch.end()
        if dropped is not None:
            session.discard()
            self._pauses["stop"] = (now_ns() - ended_ns) / NS
            return Outcome(plan, REFUSED, dropped, pauses=self._pauses)
        trace = session.stop()
        self._pauses["stop"] = (now_ns() - ended_ns) / NS
        if not whole:
            return Outcome(plan, SKIPPED, why, pauses=self._pauses)
        return Outcome(
            plan,
            RECORDED,
            why,
            first_step=plan.first_step,
            last_step=self._ended,
            started_ns=self._started_ns,
            ended_ns=ended_ns,
            pauses=self._pauses,
            trace=trace,
        )

    def _end_abandoned(self, plan: Plan, session: Session) -> bool:
        """End our session after the user's has started without waiting any longer. While theirs is on, that crashes."""
        self._watch.end()
        if self._profilers.at_work():
            try:  # stop it from collecting on this thread
                autograd: Any = sys.modules["torch.autograd"]
                autograd._toggle_collection_dynamic(False, {autograd.ProfilerActivity.CPU})
            except Exception as error:
                let_pass(error)  # else it is a torch that has no such switch
            return False
        with self._contained(plan, "end"):
            with self._profilers.ours():
                session.stop_after_theirs()
            self._finish(Outcome(plan, FAILED, f"{_GIVEN_WAY} while this thread reached no step boundary"))
        return True

    def _finish(self, outcome: Outcome) -> None:
        self._watch.end()
        self._state, self._plan = _IDLE, None
        self._outcome = outcome
        self._hooks.recorder = None
        if self._session is not None:
            ours, ranges = self._session.begin_range, self._hooks.profiler_ranges
            ranges.makers = tuple(maker for maker in ranges.makers if maker != ours)
            atexit.unregister(self._exit)
            self._session = None
        self._over.set()
        then, self.when_over = self.when_over, lambda: None
        then()

    def _capturing(self) -> bool:
        """Whether a CUDA graph is being captured, on any thread. Nothing may synchronise during a capture."""
        hooks, cuda = self._hooks, sys.modules["torch.cuda"]
        return hooks.captures.under_way or (cuda.is_initialized() and stream_captures(cuda, hooks.device))

    @contextmanager
    def _contained(self, plan: Plan, doing: str) -> Iterator[None]:
        """If something fails inside, stop our profiler and fail the plan. Exceptions of the script are raised again."""
        start = now_ns()
        try:
            yield
        except BaseException as error:
            session, self._range = self._session, None
            self._watch.end()
            if session is not None:
                with self._profilers.ours():
                    session.abort()
            if self._plan is not None:
                self._finish(Outcome(plan, FAILED, f"{doing}: {type(error).__name__}: {error}"))
            let_pass(error)
        finally:
            self._pauses.setdefault(doing, (now_ns() - start) / NS)

    def _exit(self) -> None:
        """Interrupt the session at the exit of the process, because the agent was stopped on another thread."""
        try:
            self.interrupt(self._ended, "the end of the process")
        except Exception:
            pass  # the agent has ended, so nothing can report it

    def _enter_range(self, session: Session) -> None:
        """Open the range that marks a step for all readers of traces."""
        self._range_step = self._ended + 1
        self._range = session.begin_range(f"ProfilerStep#{self._range_step}")

    def _leave_range(self) -> None:
        end, self._range = self._range, None
        if end is not None:
            end()

    # -- the thread that starts a profiler of the user's -------------------------------------------------------

    def give_way(self) -> None:
        """Wait until ours has ended, or a time has passed: a profiler of the user's starts on this thread."""
        if self._over.is_set():
            return
        plan = self._plan
        if threading.get_native_id() == self._thread:
            if plan is not None:
                recording = self._state == _RECORDING
                self._end(plan, f"cut short: {_GIVEN_WAY}" if recording else _GIVEN_WAY, result=REFUSED)
            return
        if not self.end(_GIVEN_WAY, _GIVE_WAY_SECONDS):
            with self._gate:
                self.abandoned = not self._over.is_set()
