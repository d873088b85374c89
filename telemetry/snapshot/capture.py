"""Records steps with torch's profiler: prepares, starts and stops it on the training thread, at step boundaries.

A session is stopped on the thread that has started it, and before the process exits: anything else would crash it (see
`seams.profilers`). If the training thread never reaches another boundary, it is stopped at the exit, or never.

When a profiler of the user's ("theirs") starts, ours ends first.
"""

from __future__ import annotations

import atexit
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from telemetry.model.records import FAILED, RECORDED, REFUSED, SKIPPED
from telemetry.safety.errors import let_pass
from telemetry.seams.device import stream_captures
from telemetry.seams.profilers import Session, collection_switch
from telemetry.snapshot.export import Outcome
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.config import Config
    from telemetry.seams.profilers import ProfilerWatch
    from telemetry.seams.tracker import StepTracker
    from telemetry.snapshot.export import Export
    from telemetry.util.identity import Identity

_GIVE_WAY_SECONDS: Final = 60.0
"""The longest that a profiler of the user's on another thread waits for the training thread to end ours. A training
thread that itself waits for that thread never does."""

_GIVEN_WAY: Final = "a profiler of the script's own began"
_CAPTURING: Final = "a CUDA graph is being captured"
_OFF_MAIN: Final = "the training does not run on the main thread; on any other, torch's profiler writes to stderr"


class Capture:
    """Carries out one plan at a time.

    The agent thread calls `arm`, `hold`, `end` and `drop`. The training thread calls `boundary` and `interrupt`. The
    thread that starts a profiler of the user's calls `give_way`.

    Attributes:
        when_over: called once, on the training thread, after a session that outlived the agent has ended.
    """

    def __init__(self, hooks: StepTracker, profilers: ProfilerWatch, config: Config, identity: Identity) -> None:
        self._hooks, self._profilers, self._identity = hooks, profilers, identity
        self._most_ns = int(config.snapshot_max_seconds * NS)
        self._export: Export | None = None  # has the plan and the budget, and gets the outcome
        self._session: Session | None = None  # once it is prepared
        self._recording = False
        self._range: Callable[[], None] | None = None
        self._range_step = self._thread = self._ended = self._started_ns = 0
        self._pauses: dict[str, float] = {}
        # Set while no session of ours exists. We clear it before we check for a profiler of the user's. Theirs is
        # registered before it checks this event. So when both start at once, at least one of the two sees the other.
        self._over = threading.Event()
        self._over.set()
        self._asked: str | None = None  # why the session must end at the next boundary
        self._lost = False  # whether theirs began although ours had not ended
        self.when_over: Callable[[], object] = lambda: None

    # -- the agent thread --------------------------------------------------------------------------------------

    def arm(self, export: Export) -> None:
        """Record the steps of its plan when they come, or fewer of them if its budget allows no more."""
        self._pauses, self._asked, self._lost = {}, None, False
        self._export = export
        self.hold()

    def hold(self) -> None:
        """Keep the training thread off its fast path, which does not call `boundary`.

        Called at every tick, because the training thread may return to its fast path at any moment.
        """
        if self._export is not None:
            self._hooks.recorder = self
            self._hooks.slow_path()

    def end(self, why: str, seconds: float) -> bool:
        """Ask the training thread to end our session at its next boundary; returns whether it did in ``seconds``."""
        self._asked = why
        return self._over.wait(seconds)

    def drop(self, why: str) -> None:
        """Skip a plan whose steps have not come when the run ends. A session is left alone."""
        if self._export is not None and self._session is None:
            self._finish(self._export, Outcome(SKIPPED, why))

    def after_fork_in_child(self) -> None:
        """Stop the child's copy of the session, which nobody will end, from collecting.

        No profiler sees this thread of the child any more. torch's switch for one session writes a warning.
        """
        if self._recording:
            collection_switch()(False)

    # -- the training thread -----------------------------------------------------------------------------------

    def boundary(self, ended: int, *, opens: bool) -> bool:
        """Advance the plan between two steps.

        Args:
            ended: number of steps that have ended.
            opens: whether the next step begins now.

        Returns:
            Whether the profiler was prepared, started or stopped, which takes longer than a hook may.
        """
        export, self._ended = self._export, ended
        if export is None:
            self._hooks.recorder = None
            return False
        if self._recording:
            return self._go_on(export, opens=opens)
        if self._asked:
            return self._end(export, REFUSED, self._asked)
        due = export.plan.first_step - (2 if self._session is None else 1)
        if ended > due:
            return self._end(export, SKIPPED, f"too late: this rank had begun step {due + 1} before it read the plan")
        if not opens or ended < due:
            return False
        if self._session is None:
            self._prepare(export)
        else:
            self._start(export, self._session)
        return True

    def interrupt(self, ended: int, why: str) -> bool:
        """Stop and keep the recording, because an evaluation begins or the run ends. Returns as `boundary`."""
        export, self._ended = self._export, ended
        if export is None or self._session is None:
            return False
        return self._end(export, SKIPPED, f"cut short by {why}")

    def _go_on(self, export: Export, *, opens: bool) -> bool:
        """Record another step if one is wanted and fits, else end the recording."""
        if self._ended >= self._range_step:  # the request that ends an epoch opens no step, so the range stays open
            self._leave_range()
        steps, most = self._ended - export.plan.first_step + 1, self._most_ns
        if steps >= export.plan.request.steps:
            return self._end(export, SKIPPED, None)
        why = f"cut short: {self._asked}" if self._asked else None
        if now_ns() - self._started_ns > most:
            why = f"cut short: it had taken more than {most / NS:g} s (snapshot_max_seconds)"
        if why is None and steps:
            why = export.budget.full(steps)
        if why is not None:
            return self._end(export, SKIPPED, why)
        if opens and self._range is None and self._session is not None:
            self._enter_range(self._session)
        return False

    def _prepare(self, export: Export) -> None:
        """Prepare the session one step ahead, because tracing a GPU has to warm up."""
        self._over.clear()
        refused = self._profilers.theirs() or (_CAPTURING if self._capturing() else None)
        if threading.current_thread() is not threading.main_thread():
            refused = _OFF_MAIN
        if refused is not None:
            self._finish(export, Outcome(REFUSED, refused))
            return
        with self._contained(export, "prepare"):
            self._thread = threading.get_native_id()
            session = self._session = Session(export.plan, self._identity)
            self._profilers.ours = session.profile
            atexit.register(self._exit)
            session.prepare()

    def _start(self, export: Export, session: Session) -> None:
        if self._capturing():
            self._end(export, REFUSED, _CAPTURING)
            return
        with self._contained(export, "start"):
            session.start()
            self._started_ns, self._recording = now_ns(), True
            export.budget.begin()
            self._hooks.profiler_ranges.makers += (session.begin_range,)
            self._enter_range(session)

    def _end(self, export: Export, result: str, why: str | None) -> bool:
        """End the plan, and keep a recording. ``result``: of a plan that has recorded no step.

        A session is not ended on another thread, and not while a CUDA graph is captured.

        Returns:
            Whether a session has ended.
        """
        session = self._session
        if session is None:
            self._finish(export, Outcome(result, why))
            return False
        if threading.get_native_id() != self._thread or self._capturing():
            return False
        outcome = None
        with self._contained(export, "stop"):
            outcome = self._stop(export, session, result, why)
        if outcome is not None:
            self._finish(export, outcome)
        return True

    def _stop(self, export: Export, session: Session, result: str, why: str | None) -> Outcome:
        ended_ns, first = now_ns(), export.plan.first_step
        self._leave_range()
        too_large = export.budget.too_large(self._ended - first + 1) if self._recording else None
        export.budget.end()
        if self._recording and too_large is None and not self._lost:
            session.stop()
            if self._ended < first:
                return Outcome(result, why)
            return Outcome(
                RECORDED,
                why,
                first_step=first,
                last_step=self._ended,
                started_ns=self._started_ns,
                ended_ns=ended_ns,
                trace=session,
            )
        if self._recording:
            session.drop()
        if self._lost:  # theirs has taken over Kineto's session, and another one would crash the process
            return Outcome(FAILED, f"{_GIVEN_WAY} while this thread reached no step boundary")
        session.cancel()
        return Outcome(result, why) if too_large is None else Outcome(REFUSED, too_large)

    def _finish(self, export: Export, outcome: Outcome) -> None:
        export.budget.end()
        self._export, self._recording = None, False
        self._hooks.recorder = None
        if self._session is not None:
            ours, ranges = self._session.begin_range, self._hooks.profiler_ranges
            ranges.makers = tuple(maker for maker in ranges.makers if maker != ours)
            atexit.unregister(self._exit)
            self._session = self._profilers.ours = None
        self._over.set()
        outcome.pauses = self._pauses
        export.submit(outcome)
        then, self.when_over = self.when_over, lambda: None
        then()

    def _capturing(self) -> bool:
        """Whether a CUDA graph is being captured, on any thread. Nothing may synchronise during a capture."""
        hooks, cuda = self._hooks, sys.modules["torch.cuda"]
        return hooks.captures.under_way or (cuda.is_initialized() and stream_captures(cuda, hooks.device))

    @contextmanager
    def _contained(self, export: Export, doing: str) -> Iterator[None]:
        """If something fails inside, stop our profiler and fail the plan. Exceptions of the script are raised again."""
        start = now_ns()
        try:
            yield
        except BaseException as error:
            self._range = None
            export.budget.end()
            if self._session is not None:
                self._session.abort()
            if self._export is not None:
                self._finish(export, Outcome(FAILED, f"{doing}: {type(error).__name__}: {error}"))
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
        export = self._export
        if self._over.is_set() or export is None:
            return
        if threading.get_native_id() == self._thread:
            self._end(export, REFUSED, f"cut short: {_GIVEN_WAY}" if self._recording else _GIVEN_WAY)
        elif not self.end(_GIVEN_WAY, _GIVE_WAY_SECONDS):
            self._lost = True
