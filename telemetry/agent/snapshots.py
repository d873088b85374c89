"""Controls the snapshots of one rank, and tells whether the steps stay slower after one.

The agent thread decides, agrees with the other ranks and counts. The training thread records (`snapshot.capture`). A
thread of its own exports, because an export takes seconds and the agent thread must go on sampling meanwhile.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

from msgspec import structs

from telemetry.log_lines import ABSENT, SnapshotLine
from telemetry.node.metrics import SnapshotsView
from telemetry.records import FAILED, RECORDED, REFUSED, SKIPPED, SLOWER, SNAPSHOT_RESULTS
from telemetry.snapshot import agree
from telemetry.snapshot.agree import Agreement, Plan, Request, Result, Trigger
from telemetry.snapshot.budget import Budget, BudgetWatch, on_gpu
from telemetry.snapshot.capture import Capture, Outcome
from telemetry.snapshot.store import StoredTrace, StoreError, TraceStore, WorkerFetches, trace_name
from telemetry.util.clock import NS, now_ns, unix_time
from telemetry.util.processes import slug
from telemetry.util.threads import OwnThread, Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.log import EventLog
    from telemetry.agent.stalls import StallMonitor
    from telemetry.config import Config
    from telemetry.hooks.profilers import ProfilerWatch
    from telemetry.hooks.tracker import StepTracker
    from telemetry.node.board import Board
    from telemetry.node.peers import JobLink
    from telemetry.records import StallRecord, Step
    from telemetry.snapshot.capture import RecordedTrace
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity

_WINDOW_STEPS: Final = 50
_WINDOW_SECONDS: Final = 2.0
"""Steps are compared in windows of at least this many steps and seconds: shorter windows are noise."""

_KEPT_STEPS: Final = 4096
_MIN_STEPS: Final = 10
"""With fewer steps before a snapshot no comparison is made."""

_PACE_STEPS: Final = 3
_PACES: Final = 5
"""The pace is the shortest of the last `_PACES` mean step times, each of at least `_PACE_STEPS` steps."""

_SETTLING_STEPS: Final = 3
_SLOW_WINDOWS: Final = 3
_SLOW_RATIO: Final = 1.10
"""A slowdown lasts if steps are slower by a tenth in this many windows in a row. On GPUs, steps were seen to stay 10 to
20 % slower after a profile (pytorch#144455)."""

_END_SECONDS: Final = 1.0
"""The end of the run waits at most this time for the training thread to end a recording."""

_NO_KERNEL: Final = (
    "has no kernel of the GPU: another profiler or monitor may use its counters, or the container may lack the "
    "permission. Its host side is complete"
)

_LONG_SECONDS: Final = 3600.0


class StepWatch:
    """Compares step times before and after a snapshot."""

    def __init__(self) -> None:
        self._recent = array("d")  # seconds of the newest steps; a list of numbers takes a MiB
        self._count = 0
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._from: int | None = None  # number of the first step after the snapshot
        self._before = 0.0
        self._window: list[float] = []
        self._window_seconds = 0.0
        self._slow = 0

    def add(self, seconds: Iterable[float]) -> str | None:
        """Add the seconds of steps that have ended. Returns once in words that they stayed slower after a snapshot."""
        found, added = None, [*seconds]
        self._recent.extend(added)
        for step in added:
            self._count += 1
            if self._from is not None and self._count >= self._from:
                found = self._after(step) or found
        if len(self._recent) > 2 * _KEPT_STEPS:
            del self._recent[:-_KEPT_STEPS]
        if len(added) >= _PACE_STEPS:
            self._paces.append(sum(added) / len(added))
        return found

    def compare(self, first: int, last: int) -> None:
        """Start a comparison: the profiler was on from step ``first`` to step ``last``, counted from 1."""
        before, total = [], 0.0
        for ago, seconds in enumerate(reversed(self._recent)):
            if self._count - ago < first:
                before.append(seconds)
                total += seconds
                if len(before) >= _WINDOW_STEPS and total >= _WINDOW_SECONDS:
                    break
        if len(before) >= _MIN_STEPS:
            self._before, self._window, self._window_seconds, self._slow = median(before), [], 0.0, 0
            self._from = last + 1 + _SETTLING_STEPS

    def _after(self, step: float) -> str | None:
        self._window.append(step)
        self._window_seconds += step
        if len(self._window) < _WINDOW_STEPS or self._window_seconds < _WINDOW_SECONDS:
            return None
        before, after, self._window, self._window_seconds = self._before, median(self._window), [], 0.0
        self._slow = self._slow + 1 if after > _SLOW_RATIO * before else 0
        if 0 < self._slow < _SLOW_WINDOWS:
            return None
        self._from = None
        if not self._slow:
            return None
        times = f"{1e3 * before:.2f} ms before, {1e3 * after:.2f} ms after"
        return f"steps stayed {100 * (after / before - 1):.0f} % slower after a snapshot ({times}); no more are taken"

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step at the fastest recent pace; None as long as there are too few steps."""
        newest = self._recent[-_PACE_STEPS:]
        return min([*self._paces, sum(newest) / len(newest)]) if len(newest) == _PACE_STEPS else None


# -- the export ----------------------------------------------------------------------------------------------------


class _Export:
    """A thread that watches the cost of recording one plan, waits for its outcome, and saves the trace.

    It is started before the recording, because Python 3.12 and later start no thread while the process exits.

    Attributes:
        outcome: outcome of the plan on the training thread; None before that.
        stored: the saved trace; ``error``: why there is none.
        finished: whether the trace was saved, or could not be.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, control: SnapshotControl, watch: BudgetWatch) -> None:
        self._control, self._watch = control, watch
        self._submitted = Wake()
        self.outcome: Outcome | None = None
        self.stored: StoredTrace | None = None
        self.error: str | None = None
        self.finished = False
        self.thread = OwnThread(self._main, name="telemetry-export")
        self.thread.start()

    def submit(self, outcome: Outcome | None) -> None:
        """Save an outcome that has a trace, and end the thread. Without an outcome it just ends. Called once."""
        self._watch.close()
        self.outcome = outcome
        self._submitted.set()

    def _main(self) -> None:
        self._watch.run()
        while not self._submitted.wait(_LONG_SECONDS):
            pass
        outcome = self.outcome
        if outcome is not None and outcome.trace is not None:
            try:
                self.stored = self._control.save(outcome, outcome.trace, self._watch.budget.trace_bytes)
            except (StoreError, OSError) as error:
                self.error = str(error)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
        self.finished = True


# -- one rank ------------------------------------------------------------------------------------------------------


class SnapshotControl:
    """Controls the snapshots of one rank. The agent calls `tick` on its thread.

    Args:
        accounting: has the number of steps that have ended.
        event_log: gets a line for each snapshot.
        job: knows whether the job has ranks on other nodes; None without a board.
        board: has the number of ranks on the node that may record at the same time; None without one.

    Attributes:
        counts: snapshots so far, by result.
    """

    def __init__(
        self,
        config: Config,
        identity: Identity,
        run_dir: Path,
        *,
        tracker: StepTracker,
        profilers: ProfilerWatch,
        errors: ErrorLog,
        wall: WallClock,
        accounting: Accounting,
        event_log: EventLog,
        job: JobLink | None,
        board: Board | None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._folder = run_dir / "snapshots"
        self._tracker = tracker
        self._errors = errors
        self._wall = wall
        self._accounting = accounting
        self._event_log = event_log
        self._board = board
        self.counts = dict.fromkeys(SNAPSHOT_RESULTS, 0)
        self._asked: deque[tuple[int | None, int]] = deque(maxlen=16)
        self._trigger = Trigger(config)
        self._watch = StepWatch()
        self._agreement = Agreement(self._folder, identity, config.interval_seconds, self._trigger, job)
        self._capture = Capture(tracker, profilers, config, identity)
        profilers.before_theirs = self._capture.give_way
        self._store = TraceStore(self._folder, slug(identity.node), config)
        self._export: _Export | None = None  # from a plan until its outcome is counted
        self._usable = False

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the folder, and remove the remains of ended processes of this run.

        Raises:
            OSError: the folder cannot be used. There will be no snapshots.
        """
        if self._config.max_snapshots:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(0o700, exist_ok=True)
            if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(f"{self._folder} may not be written")
            self._usable = True
        self._store.sweep()

    def request(self, rank: int | None, steps: int | None) -> bool:
        """Request a snapshot from this process. Can be called on any thread; the next tick handles it."""
        if self._usable:
            self._asked.append((rank, steps or self._config.snapshot_steps))
        return self._usable

    def end_recording(self, detach: Callable[[], object]) -> bool:
        """Keep the recording when the run ends. Called while the hooks are still in place.

        Returns:
            Whether no profiler session is left. If one is left, the training thread has not reached a step boundary
            in time. It ends the session when it does, and then calls ``detach``.
        """
        if threading.get_ident() == self._tracker.thread:
            self._tracker.interrupt("the end of the run")
            return True
        self._capture.when_over = detach
        if not self._capture.end("the end of the run", _END_SECONDS):
            return False
        self._capture.when_over = lambda: None
        return True

    def end(self) -> None:
        """Do the last tick, after the hooks are removed. An export may go on."""
        self._capture.drop("the run ended before the step")
        self._settle()
        if self._export is not None and self._export.outcome is None:
            self._export.submit(None)

    def wait(self, seconds: float) -> None:
        """Wait for a running export, at most this many seconds, and log its outcome."""
        if self._export is not None:
            self._export.thread.join(seconds)
            if self._export.outcome is not None:
                self._settle()

    def after_fork_in_child(self) -> None:
        """Stop a recording that was copied by a fork, so that it does not grow. Takes no lock."""
        self._usable = False
        self._capture.after_fork_in_child()

    def view(self) -> SnapshotsView:
        """Snapshots so far, for the endpoint."""
        return SnapshotsView(dict(self.counts), SLOWER if self._trigger.off is not None else None)

    # -- the agent thread --------------------------------------------------------------------------------------

    def add_steps(self, steps: Iterable[Step]) -> None:
        """Count steps that have closed."""
        slower = self._watch.add(step.seconds for step in steps)
        if slower is not None:
            self._trigger.off = slower
            self._errors.tell("snapshot", slower)

    def tick(self, stalls: StallMonitor | None) -> None:
        """Agree with the other ranks, and handle recordings. ``stalls``: None if the tick is skipped."""
        if not self._usable:
            return
        self._settle()
        now, cause = now_ns() / NS, None if stalls is None else stalls.active_cause
        if self._config.snapshot_on_stall == "off" or (self._config.snapshot_on_stall == "auto" and on_gpu()):
            cause = None
        if self._trigger.stalled(now, cause) and cause is not None and stalls is not None:
            self._ask("stall", cause, None, self._config.snapshot_steps, stalls.open_record())
        while self._asked:
            rank, steps = self._asked.popleft()
            self._ask("api", agree.REQUEST, rank, steps, None)
        pace = self._watch.step_seconds if self._export is None else None
        plan = self._agreement.poll(self._accounting.steps_total, pace)
        if plan is not None:
            self._follow(plan, now)
        self._capture.hold()

    def _ask(
        self, kind: Literal["stall", "api"], reason: str, rank: int | None, steps: int, stall: StallRecord | None
    ) -> None:
        who = f"rank {self._identity.rank}, pid {os.getpid()}"
        self._agreement.ask(Request(agree.new_id(unix_time()), kind, reason, rank, steps, who, stall))

    def _follow(self, plan: Plan, now: float) -> None:
        if plan.refused is not None:
            self._conclude(Outcome(plan, REFUSED, plan.refused))
        elif self._export is not None:
            self._conclude(Outcome(plan, SKIPPED, "another snapshot is in progress"))
        elif self._capture.abandoned:
            self._conclude(Outcome(plan, REFUSED, "a recording could not be ended; there will be no other one"))
        else:
            ranks = max(1, self._board.live_ranks()) if self._board is not None else 1
            watch = BudgetWatch(Budget.now(self._config, ranks))
            try:
                self._export = _Export(self, watch)
            except RuntimeError as error:
                self._conclude(Outcome(plan, REFUSED, f"there is no thread to save it: {error}"))
                return
            self._trigger.took(now)
            self._capture.arm(plan, watch)

    def _settle(self) -> None:
        """Pass finished recordings to the export, and count saved traces."""
        export = self._export
        if export is None:
            return
        if export.outcome is None:
            outcome = self._capture.take()
            if outcome is None:
                return
            if outcome.pauses:
                self._watch.compare(outcome.plan.first_step - 1, outcome.last_step or outcome.plan.last_step)
            export.submit(outcome)
        outcome = export.outcome
        if outcome is not None and (outcome.trace is None or export.finished):
            self._export = None
            self._conclude(outcome, export.stored, export.error)

    def _conclude(self, outcome: Outcome, stored: StoredTrace | None = None, error: str | None = None) -> None:
        """Count the outcome, log it, and report it to the other ranks. ``error``: see `_Export`."""
        plan, identity = outcome.plan, self._identity
        path = None if stored is None else f"snapshots/{plan.folder}/{stored.name}"
        result = Result(
            identity.rank,
            FAILED if error is not None else outcome.result,
            error or outcome.why,
            path,
            outcome.first_step,
            outcome.last_step,
        )
        self.counts[result.result] += 1
        recorded = result.result == RECORDED
        line = SnapshotLine(
            result=result.result,
            why=result.why,
            id=plan.request.id,
            reason=plan.request.reason,
            asked_by=plan.request.asked_by,
            first_step=result.first_step if recorded else None,
            last_step=result.last_step if recorded else None,
            path=path,
            pause_seconds=outcome.pauses,
            **dict.fromkeys(("breakdown", "started", "ended", "size_bytes", "trace_bytes", "held_seconds"), ABSENT),
        )
        if stored is not None:
            line = structs.replace(
                line,
                started=self._wall.iso(outcome.started_ns),
                ended=self._wall.iso(outcome.ended_ns),
                size_bytes=stored.size,
                trace_bytes=stored.raw_bytes,
                held_seconds=stored.held,
            )
            if on_gpu() and not stored.kernels:
                self._errors.tell("snapshot", f"{path} {_NO_KERNEL}")
        self._event_log.write(line)
        self._agreement.report(plan, result)

    # -- the export thread -------------------------------------------------------------------------------------

    def save(self, outcome: Outcome, trace: RecordedTrace, most_bytes: int) -> StoredTrace:
        """Save a trace, with the fetches of the workers during the recording. Raises as `TraceStore.publish`."""
        identity, plan = self._identity, outcome.plan
        # Read now, because workers keep only their newest fetches.
        blocks = [loader.block for loader in self._tracker.loaders.live() if loader.block is not None]
        workers = [worker for block in blocks for worker in block.read()]
        name = trace_name(identity.rank, slug(identity.node), identity.pid, plan.stamp_ms)
        fetches = WorkerFetches(workers, outcome.started_ns, outcome.ended_ns)
        return self._store.publish(trace, plan, name, most_bytes=most_bytes, fetches=fetches)
