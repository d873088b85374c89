"""Carries out a plan on the training thread: prepares, starts and stops a profiler at step boundaries.

Only the training thread stops the profiler. If that thread never reaches another boundary, the recording is never
stopped. When a profiler of the user's ("theirs") starts, ours ends first; see `attach.profiler_watch`.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from telemetry.records import FAILED, RECORDED, REFUSED, SKIPPED
from telemetry.snapshot.session import Session, capturing, starts_beside_ours, stop_collecting, stop_collecting_in_child
from telemetry.snapshot.snapshot_outcome import SnapshotOutcome
from telemetry.util.clock import NS, now_ns
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.snapshot.budget import BudgetWatch
    from telemetry.snapshot.capture_interfaces import Hooks, Profilers
    from telemetry.snapshot.protocol import Plan

_IDLE, _ARMED, _PREPARED, _RECORDING = range(4)

_GIVE_WAY_SECONDS: Final = 60.0
"""The longest that a profiler of the user's on another thread waits for the training thread to end ours.

If this torch cannot start it beside ours, it waits until the training has ended.
"""

_TRIES_WHERE_THEIRS_WOULD_FAIL: Final = 5
"""Before torch 2.13 a profiler that starts beside ours raises in the script, so it waits longer."""

_GIVEN_WAY: Final = "a profiler of the script's own began"
_CAPTURING: Final = "a CUDA graph is being captured"

_SNAPSHOT: Final = "snapshot"
"""Why the hooks leave their fast path, in the words of `attach.fast_path`."""


class Capture:
    """Takes one snapshot at a time.

    The agent thread calls `arm`, `hold`, `take`, `end` and `drop`. The training thread calls `boundary` and
    `interrupt`. The thread that starts a profiler of the user's calls `give_way`.

    Args:
        hooks: those of the training thread.
        profilers: tells whether a profiler of the user's is on.
        max_seconds: a recording that takes longer is stopped at the next boundary.
        metadata: written into each trace; it has at least ``rank`` and ``world_size``.
        shapes: see `Session`.

    Attributes:
        metadata: as above; replaced as a whole if the rank becomes known later.
        when_over: called once, on the training thread, after a session that outlived the agent has ended.
    """

    def __init__(
        self, hooks: Hooks, *, profilers: Profilers, max_seconds: float, metadata: dict[str, Any], shapes: bool = False
    ) -> None:
        self._hooks, self._profilers, self._shapes = hooks, profilers, shapes
        self._most_ns = int(max_seconds * NS)
        self.metadata = metadata
        self._plan: Plan | None = None
        self._watch: BudgetWatch | None = None
        self._last_step = 0  # the last step that fits into the budget
        self._fewer: str | None = None  # why that is not the plan's last step
        self._state = _IDLE
        self._outcome: SnapshotOutcome | None = None
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
        self._abandoned = False

    # -- the agent thread --------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a plan is not finished yet, or its outcome has not been taken."""
        return self._plan is not None or self._outcome is not None

    @property
    def abandoned(self) -> bool:
        """Whether a session of ours could not be ended. Then no other is started."""
        return self._abandoned

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
            self._hooks.fast_path.disable(_SNAPSHOT)

    def after_fork_in_child(self) -> None:
        """The child has a copy of the session that nobody will end: stop it from collecting."""
        if self._watch is not None:
            self._watch.after_fork_in_child()
        if self._state == _RECORDING:
            stop_collecting_in_child()

    def take(self) -> SnapshotOutcome | None:
        """The outcome of the plan, returned once; None before that."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def end(self, why: str, seconds: float) -> bool:
        """Have the training thread end our session at its next boundary; returns whether it did within ``seconds``."""
        self._asked = why
        return self._over.wait(seconds)

    def drop(self, why: str) -> None:
        """The run has ended: skip a plan whose steps have not come. A session that is on is left alone."""
        plan = self._plan
        if plan is not None and self._state == _ARMED:
            self._finish(SnapshotOutcome(plan, SKIPPED, why))

    # -- the training thread -----------------------------------------------------------------------------------

    def boundary(self, ended: int, *, opens: bool) -> bool:
        """The training thread is between two steps.

        Args:
            ended: how many steps have ended.
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
            return self._cancel(plan, REFUSED, self._asked)
        counted = plan.first_step - 1  # the step whose operators are counted
        if ended > (counted if self._state == _PREPARED else counted - 1):
            return self._cancel(plan, SKIPPED, f"this rank had begun step {counted} before it read the plan")
        return opens and ended >= counted - 1 and self._begin(plan)

    def interrupt(self, ended: int, why: str) -> bool:
        """An evaluation begins, or the run ends: stop, and keep what is recorded. Returns as `boundary`."""
        plan, self._ended = self._plan, ended
        if plan is None or self._state == _ARMED:
            return False
        if self._state == _RECORDING:
            return self._stop(plan, f"cut short by {why}")
        return self._cancel(plan, SKIPPED, f"{why} came before step {plan.first_step}")

    def _recording(self, plan: Plan, *, opens: bool) -> bool:
        if self._ended >= self._range_step:  # the request that ends an epoch opens no step, so the range stays open
            self._leave_range()
        if self._ended >= self._last_step or (self._watch is not None and self._watch.exceeded()):
            return self._stop(plan, self._fewer)
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
        """Prepare the session one step ahead, because tracing a GPU has to warm up."""
        self._over.clear()
        refused = self._profilers.theirs() or (_CAPTURING if capturing() else None)
        if threading.current_thread() is not threading.main_thread():
            refused = "the training does not run on the main thread; on any other, torch's profiler writes to stderr"
        if refused is not None:
            self._finish(SnapshotOutcome(plan, REFUSED, refused))
            return
        with self._contained(plan, "prepare"):
            self._thread = threading.get_native_id()
            session = self._session = Session(plan, self.metadata, shapes=self._shapes)
            session.at_exit(self._exit)
            with self._profilers.ours():
                session.prepare()
            if self._watch is not None:
                self._watch.count()
            self._state = _PREPARED

    def _start(self, plan: Plan, session: Session) -> None:
        if capturing():
            self._cancel(plan, REFUSED, _CAPTURING)
            return
        watch, steps = self._watch, plan.last_step - plan.first_step + 1
        if watch is not None:
            operators, more = watch.end_count()
            why = watch.budget.why_more(operators, at_least=more)
            fit = 0 if more else min(steps, watch.budget.operators // max(1, operators))
            if fit == 0:
                self._cancel(plan, REFUSED, why)
                return
            self._fewer, steps = (None if fit == steps else f"cut short: {why}"), fit
        self._last_step = plan.first_step + steps - 1
        with self._contained(plan, "start"):
            with self._profilers.ours():
                session.start()
            self._started_ns, self._state = now_ns(), _RECORDING
            if watch is not None:
                watch.record()
            self._hooks.profiler_ranges.makers += (session.begin_range,)
            self._enter_range(session)

    def _stop(self, plan: Plan, why: str | None) -> bool:
        """Stop the recording. Returns whether it has stopped."""
        return self._end(plan, "stop", lambda session: self._stop_session(plan, session, why))

    def _stop_session(self, plan: Plan, session: Session, why: str | None) -> SnapshotOutcome:
        ended_ns, whole = now_ns(), self._ended >= plan.first_step
        self._leave_range()
        dropped = self._watch.exceeded() if self._watch is not None else None
        self._end_watch()
        if dropped is not None:
            session.discard()
            self._pauses["stop"] = (now_ns() - ended_ns) / NS
            return SnapshotOutcome(plan, REFUSED, dropped, pauses=self._pauses)
        trace = session.stop()
        self._pauses["stop"] = (now_ns() - ended_ns) / NS
        if not whole:
            return SnapshotOutcome(plan, SKIPPED, why, pauses=self._pauses)
        return SnapshotOutcome(
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
        """End a plan before it records. Returns as `boundary`."""
        if self._state == _PREPARED:
            return self._end(plan, "cancel", lambda session: self._cancel_session(plan, session, result, why))
        self._finish(SnapshotOutcome(plan, result, why))
        return False

    def _cancel_session(self, plan: Plan, session: Session, result: str, why: str) -> SnapshotOutcome:
        self._end_watch()
        session.cancel()
        return SnapshotOutcome(plan, result, why)

    def _end(self, plan: Plan, doing: str, end: Callable[[Session], SnapshotOutcome]) -> bool:
        """End our session, but not on another thread and not while a CUDA graph is captured. Returns whether it has."""
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
        """End our session after theirs has started without waiting any longer. Not while theirs is on: it crashes."""
        self._end_watch()
        if self._profilers.at_work():
            stop_collecting()
            return False
        with self._contained(plan, "end"):
            with self._profilers.ours():
                session.stop_after_theirs()
            self._finish(SnapshotOutcome(plan, FAILED, f"{_GIVEN_WAY} while this thread reached no step boundary"))
        return True

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()

    def _finish(self, outcome: SnapshotOutcome) -> None:
        self._end_watch()
        self._state, self._plan = _IDLE, None
        self._outcome = outcome
        self._hooks.recorder = None
        if self._session is not None:
            ours = self._session.begin_range
            self._hooks.profiler_ranges.makers = tuple(
                maker for maker in self._hooks.profiler_ranges.makers if maker != ours
            )
            self._session.not_at_exit()
            self._session = None
        self._over.set()
        then, self.when_over = self.when_over, lambda: None
        then()

    @contextmanager
    def _contained(self, plan: Plan, doing: str) -> Iterator[None]:
        """If something fails inside, stop our profiler and fail the plan. What is the script's is raised again."""
        start = now_ns()
        try:
            yield
        except BaseException as error:
            session, self._range = self._session, None
            self._end_watch()
            if session is not None:
                with self._profilers.ours():
                    session.abort()
            if self._plan is not None:
                self._finish(SnapshotOutcome(plan, FAILED, f"{doing}: {type(error).__name__}: {error}"))
            let_pass(error)
        finally:
            self._pauses.setdefault(doing, (now_ns() - start) / NS)

    def _exit(self) -> None:
        """The process exits while the session is on, because the agent was stopped on another thread."""
        try:
            self.interrupt(self._ended, "the end of the process")
        except Exception:
            pass  # the agent has ended: nobody can report it

    def _enter_range(self, session: Session) -> None:
        """Open the range by which all readers of traces recognise a step."""
        self._range_step = self._ended + 1
        self._range = session.begin_range(f"ProfilerStep#{self._range_step}")

    def _leave_range(self) -> None:
        end, self._range = self._range, None
        if end is not None:
            end()

    # -- the thread that starts a profiler of the user's -------------------------------------------------------

    def give_way(self) -> None:
        """A profiler of the user's starts on this thread. Returns when ours has ended, or the wait has timed out."""
        if self._over.is_set():
            return
        plan = self._plan
        if threading.get_native_id() == self._thread:
            if plan is not None and self._state == _RECORDING:
                self._stop(plan, f"cut short: {_GIVEN_WAY}")
            elif plan is not None:
                self._cancel(plan, REFUSED, _GIVEN_WAY)
            return
        # A training thread that itself waits for this one never ends ours. So there is a limit on every torch.
        tries = 1 if starts_beside_ours() else _TRIES_WHERE_THEIRS_WOULD_FAIL
        for _ in range(tries):
            if self.end(_GIVEN_WAY, _GIVE_WAY_SECONDS):
                return
            if not threading.main_thread().is_alive():
                break
        with self._gate:
            self._abandoned = not self._over.is_set()
