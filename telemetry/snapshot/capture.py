"""The profiler itself: prepared, started and stopped on the training thread, at step boundaries.

The one importer of `torch.profiler`. What was measured about it (torch 2.13, and pytorch#64795):

* Stopping it on another thread than the one that started it ends the process. So nobody else stops it: a recording
  whose training thread never comes back is never stopped.
* `_KinetoProfile` and not `torch.profiler.profile`: that one also starts an execution trace where a variable asks for
  it, which would be the script's.
* Saving a trace holds the interpreter from beginning to end, on whatever thread, and so does freeing it. So it is
  saved into memory, where no disk makes it longer, and the time is told.
* Kineto writes a line to stderr at each start and stop, unless its log level says otherwise. It reads the level once
  in a process, with the first profiler.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from telemetry.clock import NS, now_ns
from telemetry.records import FAILED, RECORDED, REFUSED, SKIPPED
from telemetry.snapshot.outcome import Outcome, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from telemetry.snapshot.plan import Plan

_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
_SILENT: Final = "99"

_IDLE, _ARMED, _PREPARED, _RECORDING = range(4)

_GIVE_WAY_SECONDS: Final = 60.0
"""How long a profiler of the user's on another thread waits at most for the training thread to end ours."""

_GIVEN_WAY: Final = "a profiler of the script's own began"
_CAPTURING: Final = "a CUDA graph is being captured"


class Hooks(Protocol):
    """The training thread's hooks, as far as a capture needs them."""

    recorder: Any
    key: int


class Capture:
    """Takes one snapshot at a time.

    `arm`, `hold`, `take` and `drop` are the agent thread's, `boundary` and `interrupt` the training thread's, and
    `give_way` belongs to whoever starts a profiler.

    Args:
        hooks: of the training thread.
        theirs: why ours must not begin on the calling thread, None where it may.
        ours: to begin and end ours in.
        most_seconds: a recording is ended at the first boundary after so long.
        about: metadata of the traces: ``rank`` and ``world_size`` at least.
    """

    def __init__(
        self,
        hooks: Hooks,
        *,
        theirs: Callable[[], str | None],
        ours: Callable[[], AbstractContextManager[None]],
        most_seconds: float,
        about: dict[str, Any],
    ) -> None:
        self._hooks = hooks
        self._theirs = theirs
        self._ours = ours
        self._most_ns = int(most_seconds * NS)
        self._about = about
        self._plan: Plan | None = None
        self._state = _IDLE
        self._outcome: Outcome | None = None
        self._profiler: Any = None
        self._range: Any = None
        self._range_step = 0
        self._thread = 0
        self._ended = 0
        self._started_ns = 0
        self._pauses: dict[str, float] = {}
        # Set while no session of ours exists. Cleared before anybody looks whether theirs does; theirs is known before
        # it looks at this: so one of the two always sees the other.
        self._over = threading.Event()
        self._over.set()
        self._asked: str | None = None  # why the session is to end at the next boundary
        self._gate = threading.Lock()
        self._abandoned = False

    # -- the agent thread --------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is a plan that has not ended, or an outcome that nobody has taken."""
        return self._plan is not None or self._outcome is not None

    @property
    def abandoned(self) -> bool:
        """Whether a session of ours could not be ended. There will be no other one."""
        return self._abandoned

    def arm(self, plan: Plan) -> None:
        """Take the snapshot of a plan when its steps come."""
        self._pauses, self._asked = {}, None
        self._plan, self._state = plan, _ARMED
        self.hold()

    def hold(self) -> None:
        """Keep the training thread off its short path. Called again and again: it may be going back to it just now."""
        if self._plan is not None:
            self._hooks.recorder = self
            self._hooks.key = 0

    def after_fork_in_child(self) -> None:
        """The child has a copy of the session, which nobody will end: let it gather nothing."""
        if self._state == _RECORDING:
            kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)  # torch warns of it; there is no other thread yet whose words could get lost
            _collect_no_more()
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)

    def take(self) -> Outcome | None:
        """The outcome of the plan, once there is one."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def end(self, why: str, seconds: float) -> bool:
        """Have the training thread end our session when it comes by. Returns whether it has, after so long at most."""
        self._asked = why
        return self._over.wait(seconds)

    def drop(self, why: str) -> None:
        """The hooks are gone: a plan whose steps have not come is skipped. A session that goes on cannot be ended."""
        plan = self._plan
        if plan is not None:
            self._finish(Outcome(plan, SKIPPED, why), over=self._state == _ARMED)

    # -- the training thread -----------------------------------------------------------------------------------

    def boundary(self, ended: int, *, opens: bool) -> bool:
        """``ended`` steps have ended; with ``opens`` the next begins now. Returns whether ours took its time."""
        plan = self._plan
        if plan is None:
            self._hooks.recorder = None
            return False
        self._ended = ended
        if self._state == _RECORDING:
            return self._recording(plan, opens=opens)
        if self._asked:
            return self._cancel(plan, REFUSED, self._asked)
        if ended >= plan.first_step:
            return self._cancel(plan, SKIPPED, f"this rank was past step {plan.first_step} when it heard of it")
        return opens and ended >= plan.first_step - 2 and self._begin(plan)

    def interrupt(self, ended: int, why: str) -> bool:
        """Something that is no training begins, or the run ends: what is recorded is kept. Returns as `boundary`."""
        plan, self._ended = self._plan, ended
        if plan is None or self._state == _ARMED:
            return False
        if self._state == _RECORDING:
            return self._stop(plan, f"cut short by {why}")
        return self._cancel(plan, SKIPPED, f"{why} came before step {plan.first_step}")

    def _recording(self, plan: Plan, *, opens: bool) -> bool:
        if self._ended >= self._range_step:  # a request that ends an epoch opens no step: the next one goes on
            self._leave_range()
        if self._ended >= plan.last_step:
            return self._stop(plan, None)
        if self._asked:
            return self._stop(plan, f"cut short: {self._asked}")
        if now_ns() - self._started_ns > self._most_ns:
            return self._stop(plan, f"cut short: it had taken more than {self._most_ns / NS:g} s")
        if opens and self._range is None:
            self._enter_range()
        return False

    def _begin(self, plan: Plan) -> bool:
        if self._state == _ARMED:
            self._prepare(plan)
        if self._state == _PREPARED and self._ended == plan.first_step - 1:
            self._start(plan)
        return True

    def _prepare(self, plan: Plan) -> None:
        """A step ahead: on a GPU the tracing has to warm up."""
        self._over.clear()
        refused = self._theirs() or (_CAPTURING if _capturing() else None)
        if refused is not None:
            self._finish(Outcome(plan, REFUSED, refused))
            return
        with self._contained(plan, "prepare"):
            self._thread = threading.get_native_id()
            self._profiler = _profiler(plan, self._about)
            with self._ours(), _silent():
                _prepare(self._profiler)
            self._state = _PREPARED

    def _start(self, plan: Plan) -> None:
        if _capturing():
            self._cancel(plan, REFUSED, _CAPTURING)
            return
        with self._contained(plan, "start"):
            with self._ours():
                self._profiler.start_trace()
            self._started_ns, self._state = now_ns(), _RECORDING
            self._enter_range()

    def _stop(self, plan: Plan, why: str | None) -> bool:
        """End the recording. Returns whether it has ended."""
        return self._end(plan, "stop", lambda: self._stop_trace(plan, why))

    def _stop_trace(self, plan: Plan, why: str | None) -> Outcome:
        ended_ns, whole = now_ns(), self._ended >= plan.first_step
        self._leave_range()
        self._profiler.stop_trace()
        profiler, self._profiler = self._profiler, None
        self._pauses["stop"] = (now_ns() - ended_ns) / NS
        if not whole:
            return Outcome(plan, SKIPPED, why, pauses=self._pauses)
        return Outcome(
            plan,
            RECORDED,
            why,
            first_step=plan.first_step,
            last_step=self._ended,
            thread=self._thread,
            started_ns=self._started_ns,
            ended_ns=ended_ns,
            pauses=self._pauses,
            trace=Trace(profiler),
        )

    def _cancel(self, plan: Plan, result: str, why: str) -> bool:
        """End a plan that does not record. Returns whether that took its time."""
        if self._state == _PREPARED:
            return self._end(plan, "cancel", lambda: self._cancel_trace(plan, result, why))
        self._finish(Outcome(plan, result, why))
        return False

    def _cancel_trace(self, plan: Plan, result: str, why: str) -> Outcome:
        self._profiler.start_trace()  # to be ended: ending what is only prepared makes torch complain on stderr
        self._profiler.stop_trace()
        self._profiler = None
        return Outcome(plan, result, why)

    def _end(self, plan: Plan, doing: str, end: Callable[[], Outcome]) -> bool:
        """End our session. Returns whether it has: not on another thread, and not while a graph is captured."""
        if threading.get_native_id() != self._thread or _capturing() or not self._gate.acquire(blocking=False):
            return False
        try:
            if self._abandoned:  # theirs is on, or has been: ending ours now would end the process
                _collect_no_more()
                self._finish(Outcome(plan, FAILED, f"{_GIVEN_WAY} while this thread did not come by"), over=False)
                return False
            with self._contained(plan, doing):
                with self._ours():
                    outcome = end()
                self._finish(outcome)
        finally:
            self._gate.release()
        return True

    def _finish(self, outcome: Outcome, *, over: bool = True) -> None:
        self._state, self._plan = _IDLE, None
        self._outcome = outcome
        self._hooks.recorder = None
        if over:
            self._over.set()

    @contextmanager
    def _contained(self, plan: Plan, doing: str) -> Iterator[None]:
        """Whatever fails leaves no profiler of ours behind. Ctrl-C, which may come in between, goes on."""
        start = now_ns()
        try:
            yield
        except BaseException as error:
            self._leave_nothing()
            if self._plan is not None:
                self._finish(Outcome(plan, FAILED, f"{doing}: {type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise
        finally:
            self._pauses.setdefault(doing, (now_ns() - start) / NS)

    def _leave_nothing(self) -> None:
        profiler, self._profiler, self._range = self._profiler, None, None
        if profiler is not None and _enabled():
            try:
                with self._ours():
                    profiler.stop_trace()
            except Exception:
                pass  # nothing more can be done; the plan has failed and says why

    def _enter_range(self) -> None:
        """The range by which every reader of traces knows a step."""
        self._range_step = self._ended + 1
        name = f"ProfilerStep#{self._range_step}"
        self._range = sys.modules["torch.autograd.profiler"].record_function(name)
        self._range.__enter__()

    def _leave_range(self) -> None:
        range_, self._range = self._range, None
        if range_ is not None:
            range_.__exit__(None, None, None)

    # -- whoever starts a profiler -----------------------------------------------------------------------------

    def give_way(self) -> None:
        """A profiler of the user's begins on this thread. Returns when ours is over, or never will be."""
        if self._over.is_set():
            return
        plan = self._plan
        if threading.get_native_id() == self._thread:
            if plan is not None and self._state == _RECORDING:
                self._stop(plan, f"cut short: {_GIVEN_WAY}")
            elif plan is not None:
                self._cancel(plan, REFUSED, _GIVEN_WAY)
            return
        if not self.end(_GIVEN_WAY, _GIVE_WAY_SECONDS):
            with self._gate:
                self._abandoned = not self._over.is_set()


def _profiler(plan: Plan, about: dict[str, Any]) -> Any:
    from torch.profiler import ProfilerActivity
    from torch.profiler.profiler import _KinetoProfile

    cuda: Any = sys.modules.get("torch.cuda")
    activities = [ProfilerActivity.CPU]
    if cuda is not None and cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    profiler = _KinetoProfile(activities=activities)
    if profiler._get_distributed_info() is None:  # what tells the ranks' traces apart, where no process group does
        ranks = {name: about[name] for name in ("rank", "world_size")}
        profiler.preset_metadata_json("distributedInfo", json.dumps({"backend": "none", **ranks}))
    steps = {"reason": plan.request.reason, "first_step": plan.first_step, "last_step": plan.last_step}
    profiler.preset_metadata_json("telemetry", json.dumps(about | steps))
    return profiler


def _prepare(profiler: Any) -> None:
    """What its ``prepare_trace`` does, which first imports the whole of Inductor (1.2 s on the training thread)."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    profiler.has_cudagraphs = bool(getattr(getattr(inductor, "triton", None), "cudagraphs", False))
    session = sys.modules["torch.autograd.profiler"].profile
    profiler.profiler = session(use_cpu=True, use_device=profiler.use_device, use_kineto=True)
    profiler.profiler._prepare_trace()


@contextmanager
def _silent() -> Iterator[None]:
    """In which kineto reads that it is to write nothing to stderr, unless the user has said what it is to write."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


def _capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream: nothing that synchronises may come now."""
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and cuda.is_initialized() and bool(cuda.is_current_stream_capturing())


def _enabled() -> bool:
    """Whether a profiler records on this thread."""
    autograd: Any = sys.modules.get("torch.autograd")
    return autograd is not None and bool(autograd._profiler_enabled())


def _collect_no_more() -> None:
    """A session that cannot be ended: let it at least gather nothing more on this thread, where torch can do that."""
    try:
        autograd: Any = sys.modules["torch.autograd"]
        autograd._toggle_collection_dynamic(False, {autograd.ProfilerActivity.CPU})
    except Exception:
        pass  # a torch that has no such switch
