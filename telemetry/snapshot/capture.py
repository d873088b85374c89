"""A plan on the training thread: once its steps come, a profiler is prepared, started and stopped at their boundaries.

Nobody else stops it: a recording whose training thread never comes back is never stopped. Where a profiler of the
user's begins, ours is over before; see `attach.profilers`.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from telemetry.clock import NS, now_ns
from telemetry.records import FAILED, RECORDED, REFUSED, SKIPPED
from telemetry.snapshot.outcome import Outcome
from telemetry.snapshot.session import Session, capturing, gather_no_more, gather_no_more_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from telemetry.snapshot.plan import Plan

_IDLE, _ARMED, _PREPARED, _RECORDING = range(4)

_GIVE_WAY_SECONDS: Final = 60.0
"""How long a profiler of the user's on another thread waits at most for the training thread to end ours."""

_GIVEN_WAY: Final = "a profiler of the script's own began"
_CAPTURING: Final = "a CUDA graph is being captured"


class Profilers(Protocol):
    """What is known of the profilers of the process."""

    def theirs(self) -> str | None:
        """Why ours must not begin on the calling thread, None where it may."""

    def ours(self) -> AbstractContextManager[None]:
        """To begin and end ours in."""

    def at_work(self) -> bool:
        """Whether one of the user's is at work, on whatever thread."""


class Hooks(Protocol):
    """The training thread's hooks, as far as a capture needs them."""

    recorder: Any
    marks: Any
    key: int


class Capture:
    """Takes one snapshot at a time.

    `arm`, `hold`, `take` and `drop` are the agent thread's, `boundary` and `interrupt` the training thread's, and
    `give_way` belongs to whoever starts a profiler.

    Args:
        hooks: of the training thread.
        profilers: knows those of the user.
        most_seconds: a recording is ended at the first boundary after so long.
        about: metadata of the traces: ``rank`` and ``world_size`` at least.

    Attributes:
        about: as above; replaced whole when the rank becomes known later.
        when_over: called once, on the training thread, after a session that outlived the agent.
    """

    def __init__(
        self,
        hooks: Hooks,
        *,
        profilers: Profilers,
        most_seconds: float,
        about: dict[str, Any],
    ) -> None:
        self._hooks = hooks
        self._profilers = profilers
        self._most_ns = int(most_seconds * NS)
        self.about = about
        self._plan: Plan | None = None
        self._state = _IDLE
        self._outcome: Outcome | None = None
        self._session: Session | None = None
        self._range: Callable[[], None] | None = None
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
        self.when_over: Callable[[], object] = lambda: None
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
            gather_no_more_in_child()

    def take(self) -> Outcome | None:
        """The outcome of the plan, once there is one."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def end(self, why: str, seconds: float) -> bool:
        """Have the training thread end our session when it comes by. Returns whether it has, after so long at most."""
        self._asked = why
        return self._over.wait(seconds)

    def drop(self, why: str) -> None:
        """The run has ended: a plan whose steps have not come is skipped. A session that is on is not touched."""
        plan = self._plan
        if plan is not None and self._state == _ARMED:
            self._finish(Outcome(plan, SKIPPED, why))

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
        if opens and self._range is None and self._session is not None:
            self._enter_range(self._session)
        return False

    def _begin(self, plan: Plan) -> bool:
        if self._state == _ARMED:
            self._prepare(plan)
        if self._session is not None and self._state == _PREPARED and self._ended == plan.first_step - 1:
            self._start(plan, self._session)
        return True

    def _prepare(self, plan: Plan) -> None:
        """A step ahead: on a GPU the tracing has to warm up."""
        self._over.clear()
        refused = self._profilers.theirs() or (_CAPTURING if capturing() else None)
        if threading.current_thread() is not threading.main_thread():
            refused = "the training is not on the main thread, where torch's profiler would write to stderr"
        if refused is not None:
            self._finish(Outcome(plan, REFUSED, refused))
            return
        with self._contained(plan, "prepare"):
            self._thread = threading.get_native_id()
            session = self._session = Session(plan, self.about)
            session.at_exit(self._exit)
            with self._profilers.ours():
                session.prepare()
            self._state = _PREPARED

    def _start(self, plan: Plan, session: Session) -> None:
        if capturing():
            self._cancel(plan, REFUSED, _CAPTURING)
            return
        with self._contained(plan, "start"):
            with self._profilers.ours():
                session.start()
            self._started_ns, self._state = now_ns(), _RECORDING
            self._hooks.marks.makers += (session.begin_range,)
            self._enter_range(session)

    def _stop(self, plan: Plan, why: str | None) -> bool:
        """End the recording. Returns whether it has ended."""
        return self._end(plan, "stop", lambda session: self._stop_session(plan, session, why))

    def _stop_session(self, plan: Plan, session: Session, why: str | None) -> Outcome:
        ended_ns, whole = now_ns(), self._ended >= plan.first_step
        self._leave_range()
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
            thread=self._thread,
            started_ns=self._started_ns,
            ended_ns=ended_ns,
            pauses=self._pauses,
            trace=trace,
        )

    def _cancel(self, plan: Plan, result: str, why: str) -> bool:
        """End a plan that does not record. Returns whether that took its time."""
        if self._state == _PREPARED:
            return self._end(plan, "cancel", lambda session: self._cancel_session(plan, session, result, why))
        self._finish(Outcome(plan, result, why))
        return False

    @staticmethod
    def _cancel_session(plan: Plan, session: Session, result: str, why: str) -> Outcome:
        session.cancel()
        return Outcome(plan, result, why)

    def _end(self, plan: Plan, doing: str, end: Callable[[Session], Outcome]) -> bool:
        """End our session. Returns whether it has: not on another thread, and not while a graph is captured."""
        session = self._session
        if session is None or threading.get_native_id() != self._thread or capturing():
            return False
        if not self._gate.acquire(blocking=False):
            return False
        try:
            if self._abandoned:
                return self._end_abandoned(plan, session)
            with self._contained(plan, doing):
                with self._profilers.ours():
                    outcome = end(session)
                self._finish(outcome)
        finally:
            self._gate.release()
        return True

    def _end_abandoned(self, plan: Plan, session: Session) -> bool:
        """Theirs has begun while this thread did not come by. While it is on, ending ours would end the process."""
        if self._profilers.at_work():
            gather_no_more()
            return False
        with self._contained(plan, "end"):
            with self._profilers.ours():
                session.stop_after_theirs()
            self._finish(Outcome(plan, FAILED, f"{_GIVEN_WAY} while this thread did not come by"))
        return True

    def _finish(self, outcome: Outcome) -> None:
        self._state, self._plan = _IDLE, None
        self._outcome = outcome
        self._hooks.recorder = None
        if self._session is not None:
            ours = self._session.begin_range
            self._hooks.marks.makers = tuple(maker for maker in self._hooks.marks.makers if maker != ours)
            self._session.over()
            self._session = None
        self._over.set()
        then, self.when_over = self.when_over, lambda: None
        then()

    @contextmanager
    def _contained(self, plan: Plan, doing: str) -> Iterator[None]:
        """Whatever fails leaves no profiler of ours behind. Ctrl-C, which may come in between, goes on."""
        start = now_ns()
        try:
            yield
        except BaseException as error:
            session, self._range = self._session, None
            if session is not None:
                with self._profilers.ours():
                    session.give_up()
            if self._plan is not None:
                self._finish(Outcome(plan, FAILED, f"{doing}: {type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise
        finally:
            self._pauses.setdefault(doing, (now_ns() - start) / NS)

    def _exit(self) -> None:
        """The interpreter exits, and the agent has not ended the session: it was stopped on another thread."""
        try:
            self.interrupt(self._ended, "the end of the process")
        except Exception:
            pass  # there is nobody left to tell

    def _enter_range(self, session: Session) -> None:
        """The range by which every reader of traces knows a step."""
        self._range_step = self._ended + 1
        self._range = session.begin_range(f"ProfilerStep#{self._range_step}")

    def _leave_range(self) -> None:
        end, self._range = self._range, None
        if end is not None:
            end()

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
