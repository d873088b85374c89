"""Controls the snapshots of one rank.

The agent thread decides, agrees with the other ranks and counts. The training thread records (`snapshot.capture`). A
thread of its own exports, because an export takes seconds and the agent thread must go on sampling meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.log.lines import ABSENT, SnapshotLine
from telemetry.model.records import FAILED, RECORDED, REFUSED, SKIPPED, SNAPSHOT_RESULTS
from telemetry.node.metrics import SnapshotsView
from telemetry.safety.files import caches_folders
from telemetry.seams.profilers import on_gpu
from telemetry.snapshot.budget import Budget
from telemetry.snapshot.capture import Capture
from telemetry.snapshot.export import Export, Outcome, sweep
from telemetry.snapshot.plan import CACHED_SECONDS, NOTICE_TICKS, REQUEST, Meeting, Plan, Request, first_step, new_id
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from telemetry.agent.event_log import EventLog
    from telemetry.agent.stall_monitor import StallMonitor
    from telemetry.config import Config
    from telemetry.model.records import Step
    from telemetry.node.board import Board
    from telemetry.node.peers import JobLink
    from telemetry.safety.errors import ErrorLog
    from telemetry.seams.profilers import ProfilerWatch
    from telemetry.seams.tracker import StepTracker
    from telemetry.snapshot.export import StoredTrace
    from telemetry.util.clock import WallClock
    from telemetry.util.identity import Identity

_PACE_STEPS: Final = 32
"""The pace is the median of this many steps."""

_END_SECONDS: Final = 1.0
"""The end of the run waits at most this time for the training thread to end a recording."""

_NO_KERNEL: Final = (
    "has no kernel of the GPU: another profiler or monitor may use its counters, or the container may lack the "
    "permission. Its host side is complete"
)


class Trigger:
    """When a stall is worth a snapshot, and when there are enough. It reads no clock."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stall_since: float | None = None
        self._fired = False
        self._last: float | None = None
        self._taken = 0

    def stalled(self, now: float, cause: str | None) -> bool:
        """Whether the open stall triggers a snapshot now. Called at each tick.

        A stall triggers one snapshot, after the settle time and if the cooldown is over. A stall caused by checkpoints
        triggers none, because a trace of steps does not show them.

        Args:
            now: monotonic seconds.
            cause: the cause of the open stall; None without one.
        """
        if cause is None or cause == "checkpoint":
            self._stall_since, self._fired = None, False
            return False
        if self._stall_since is None:
            self._stall_since = now
        # A rank that waits for a straggler waits longer: the straggler's own snapshot shows the reason.
        settle = self._config.snapshot_settle_seconds * (2 if cause == "straggler" else 1)
        cools = self._last is not None and now < self._last + self._config.snapshot_cooldown_seconds
        if self._fired or now < self._stall_since + settle or cools or self.enough() is not None:
            return False
        self._fired = True
        return True

    def enough(self) -> str | None:
        """Why there are no more snapshots in this run, in words; None if there may be more."""
        most = self._config.max_snapshots
        return f"this run has taken its max_snapshots = {most}" if self._taken >= most else None

    def took(self, now: float) -> None:
        """Count an agreed snapshot. It also shows the open stall, even if a person asked for it."""
        self._taken += 1
        self._fired = self._stall_since is not None
        self._last = now


class SnapshotControl:
    """Controls the snapshots of one rank. The agent calls `tick` on its thread.

    Args:
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
        event_log: EventLog,
        job: JobLink | None,
        board: Board | None,
    ) -> None:
        self._config, self._identity, self._tracker = config, identity, tracker
        self._errors, self._wall, self._event_log = errors, wall, event_log
        self._job, self._board = job, board
        self._folder = run_dir / "snapshots"
        self.counts = dict.fromkeys(SNAPSHOT_RESULTS, 0)
        self._recent: deque[float] = deque(maxlen=_PACE_STEPS)  # seconds of the newest steps
        self._wanted: deque[Request] = deque(maxlen=16)  # by this rank
        self._trigger = Trigger(config)
        self._meeting: Meeting | None = None  # None if the folder cannot be used, and in a forked child
        self._capture = Capture(tracker, profilers, config, identity)
        profilers.before_theirs = self._capture.give_way
        self._export: Export | None = None  # from a plan until its outcome is counted

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
            self._meeting = Meeting(self._folder)
        sweep(self._folder)

    def request(self, rank: int | None, steps: int | None) -> bool:
        """Request a snapshot from this process. Can be called on any thread; the next tick handles it."""
        if self._meeting is None:
            return False
        self._wanted.append(Request(new_id(), REQUEST, rank, steps or self._config.snapshot_steps, self._me()))
        return True

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
            self._export.abandon()

    def wait(self, seconds: float) -> None:
        """Wait for a running export, at most this many seconds, and log its outcome."""
        if self._export is not None:
            self._export.thread.join(seconds)
            self._settle()

    def after_fork_in_child(self) -> None:
        """Stop a recording that was copied by a fork, so that it does not grow. Takes no lock."""
        self._meeting = None
        self._capture.after_fork_in_child()

    def view(self) -> SnapshotsView:
        """Snapshots so far, for the endpoint."""
        return SnapshotsView(dict(self.counts))

    # -- the agent thread --------------------------------------------------------------------------------------

    def add_steps(self, steps: Sequence[Step]) -> None:
        """Take the pace from steps that have closed."""
        self._recent.extend(step.seconds for step in steps[-_PACE_STEPS:])

    def tick(self, stalls: StallMonitor | None) -> None:
        """Agree with the other ranks, and handle recordings. ``stalls``: None if the tick is skipped."""
        if self._meeting is None:
            return
        self._settle()
        now, cause = now_ns() / NS, None if stalls is None else stalls.active_cause
        if self._config.snapshot_on_stall == "off" or (self._config.snapshot_on_stall == "auto" and on_gpu()):
            cause = None
        if self._trigger.stalled(now, cause) and cause is not None and stalls is not None:
            steps, stall = self._config.snapshot_steps, stalls.open_record()
            self._wanted.append(Request(new_id(), cause, None, steps, self._me(), stall))
        plan = self._meeting.next_plan()
        if plan is None and self._export is None and self._recent:
            plan = self._decide(self._meeting)
        if plan is not None:
            self._follow(plan, now)
        self._capture.hold()

    def _me(self) -> str:
        return f"rank {self._identity.rank}, pid {self._identity.pid}"

    def _decide(self, meeting: Meeting) -> Plan | None:
        """Make a plan of the oldest request, if there is one."""
        request = meeting.next_request() or (self._wanted[0] if self._wanted else None)
        if request is None:
            return None
        first = first_step(self._tracker.ring.closed, median(self._recent), self._notice_seconds())
        return meeting.decide(request, first)

    def _notice_seconds(self) -> float:
        """Within what time all ranks know of a plan."""
        far = self._job is not None and self._job.ranks_elsewhere(self._identity.world_size)
        late = CACHED_SECONDS if far and caches_folders(self._folder) else 0.0
        return max(NOTICE_TICKS * self._config.interval_seconds, late)

    def _follow(self, plan: Plan, now: float) -> None:
        request = plan.request
        for _ in range(len(self._wanted)):  # those that it serves, too, are done
            wanted = self._wanted.popleft()
            if request.rank not in {None, wanted.rank}:
                self._wanted.append(wanted)
        if not request.wants(self._identity.rank):
            return
        if self._export is not None:
            self._log(request, Outcome(SKIPPED, "another snapshot is in progress"))
            return
        enough = self._trigger.enough()
        if enough is not None:
            self._log(request, Outcome(REFUSED, enough))
            return
        ranks = self._board.live_ranks() if self._board is not None else 1
        budget = Budget(self._config, max(1, ranks))
        self._export = Export(
            plan,
            budget,
            snapshots=self._folder,
            config=self._config,
            identity=self._identity,
            loaders=self._tracker.loaders,
        )
        self._trigger.took(now)
        self._capture.arm(self._export)

    def _settle(self) -> None:
        """Count and log a snapshot that is finished."""
        export = self._export
        if export is not None and export.outcome is not None and export.finished:
            self._export = None
            self._log(export.plan.request, export.outcome, export.stored, export.error)

    def _log(
        self, request: Request, outcome: Outcome, stored: StoredTrace | None = None, error: str | None = None
    ) -> None:
        """Count an outcome, and log it: a person may wait for the line. ``error``: why its trace was not saved."""
        result = outcome.result if error is None else FAILED
        self.counts[result] += 1
        line = SnapshotLine(
            result=result,
            why=error or outcome.why,
            id=request.id,
            reason=request.reason,
            asked_by=request.asked_by,
            first_step=outcome.first_step if result == RECORDED else None,
            last_step=outcome.last_step if result == RECORDED else None,
            breakdown=ABSENT,
            pause_seconds=outcome.pauses,
            started=ABSENT,
            ended=ABSENT,
            size_bytes=ABSENT,
            trace_bytes=ABSENT,
            held_seconds=ABSENT,
        )
        if stored is not None:
            line = msgspec.structs.replace(
                line,
                path=stored.path,
                started=self._wall.iso(outcome.started_ns),
                ended=self._wall.iso(outcome.ended_ns),
                size_bytes=stored.size_bytes,
                trace_bytes=stored.trace_bytes,
                held_seconds=stored.held_seconds,
            )
            if on_gpu() and not stored.kernels:
                self._errors.tell("snapshot", f"{stored.path} {_NO_KERNEL}")
        self._event_log.write(line)
