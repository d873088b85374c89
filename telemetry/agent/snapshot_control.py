"""Controls the snapshots of one rank. The training thread records them; another thread exports them."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.views import SnapshotsView
from telemetry.publish.board import board_root
from telemetry.publish.log_fields import rounded
from telemetry.records import FAILED, RECORDED, REFUSED, SKIPPED, SLOWER, SNAPSHOT_RESULTS
from telemetry.snapshot import protocol as p
from telemetry.snapshot.budget import Budget, BudgetWatch, on_gpu
from telemetry.snapshot.capture import Capture
from telemetry.snapshot.export_owner import LocalProcesses
from telemetry.snapshot.export_thread import ExportThread
from telemetry.snapshot.leftovers import start_sweep
from telemetry.snapshot.manifest import add_to_manifest
from telemetry.snapshot.private_folder import close_in_child, open_folder
from telemetry.snapshot.rendezvous import Position, Rendezvous
from telemetry.snapshot.request_files import new_id
from telemetry.snapshot.snapshot_outcome import SnapshotOutcome
from telemetry.snapshot.store import StoredTrace, StoreError, TraceStore, sweep, trace_name
from telemetry.snapshot.trigger import SnapshotLimits, StepWatch, Trigger
from telemetry.snapshot.worker_tracks import as_events, fetches
from telemetry.util.clock import NS, now_ns, unix_ns, unix_time
from telemetry.util.files import caches_folders
from telemetry.util.processes import pid_namespace, slug, start_ticks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.event_log import EventLog
    from telemetry.config import Config
    from telemetry.hooks.profilers import ProfilerWatch
    from telemetry.hooks.tracker import StepTracker
    from telemetry.publish.node import NodeService
    from telemetry.records import Step
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity

_END_SECONDS: Final = 1.0
"""How long the end of the run waits for a trace that is being exported, and for one that is being recorded."""


@dataclass(frozen=True, slots=True)
class _KeptSnapshot:
    """The result of exporting a recording. If both fields are set, the trace exists but its manifest does not."""

    outcome: SnapshotOutcome
    stored: StoredTrace | None
    error: str | None


class SnapshotControl:
    """Built by the agent. `tick` is called on the agent thread.

    Args:
        accounting: knows how many steps have ended.
        event_log: gets a line for each snapshot. The manifest names the log file.
        ranks_elsewhere: whether the job has ranks on other nodes.

    Attributes:
        node: knows how many ranks of the node may record at the same time. Set by the agent; None without a board.
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
        ranks_elsewhere: Callable[[], bool],
    ) -> None:
        self._config = config
        self._identity = identity
        self._run_dir = run_dir
        self._folder = run_dir / "snapshots"
        self._tracker = tracker
        self._errors = errors
        self._wall = wall
        self._accounting = accounting
        self._event_log = event_log
        self.node: NodeService | None = None
        self.counts = dict.fromkeys(SNAPSHOT_RESULTS, 0)
        self._asked: deque[tuple[int | None, int]] = deque(maxlen=16)
        self._trigger = Trigger(
            SnapshotLimits(config.snapshot_settle_seconds, config.snapshot_cooldown_seconds, config.max_snapshots)
        )
        self._watch = StepWatch()
        self._rendezvous = Rendezvous(
            self._folder,
            rank=identity.rank,
            world_size=identity.world_size,
            tick_seconds=config.interval_seconds,
            refuses=lambda request: self._trigger.refuses(now_ns() / NS, request.kind),
            far=lambda: ranks_elsewhere() and caches_folders(self._folder),
        )
        self._capture = Capture(
            tracker,
            profilers=profilers,
            max_seconds=config.snapshot_max_seconds,
            metadata={"run": identity.run, "rank": identity.rank, "world_size": identity.world_size},
            shapes=config.snapshot_shapes,
        )
        profilers.before_theirs = self._capture.give_way
        processes = LocalProcesses(slug(identity.node), pid_namespace(), start_ticks)
        self._store = TraceStore(
            self._folder,
            board_root(),
            owner=processes.owner_name(os.getpid()),
            max_bytes=config.snapshot_max_bytes,
            budget_bytes=config.snapshot_disk_bytes,
            is_gone=processes.is_gone,
        )
        self._export: ExportThread | None = None
        self._keeping = False
        self._kept: _KeptSnapshot | None = None
        self._usable = False

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the folder, and remove what ended processes have left: there, in other runs' folders and in /dev/shm.

        Raises:
            OSError: a folder cannot be used. If it is the run's own, there will be no snapshots.
        """
        try:
            if self._config.max_snapshots:
                with open_folder(self._folder, make=True):
                    self._usable = True
        finally:
            sweep((self._folder, self._store.shared), self._store.is_gone)
            start_sweep(board_root(), self._store.is_gone, self._errors)

    def adopt(self, identity: Identity) -> None:
        """Use another rank: the rank of this process has become known or has changed. Called on the agent thread."""
        self._identity = identity
        self._rendezvous.adopt(identity.rank, identity.world_size)
        self._capture.metadata = self._capture.metadata | {"rank": identity.rank, "world_size": identity.world_size}

    def request(self, rank: int | None, steps: int | None) -> bool:
        """Request a snapshot from this process. Can be called on any thread; the next tick handles it."""
        if self._usable:
            self._asked.append((rank, steps or self._config.snapshot_steps))
        return self._usable

    def end_recording(self, detach: Callable[[], object]) -> bool:
        """Keep what is recorded when the run ends. Called while the hooks are still in place.

        Returns:
            Whether no profiler session is left. If one is left, the training thread has not reached a step boundary
            in time. It ends the session when it does, and then calls ``detach``.
        """
        if threading.get_ident() == self._tracker.thread:
            self._tracker.boundaries.interrupt("the end of the run")
            return True
        self._capture.when_over = detach
        if not self._capture.end("the end of the run", _END_SECONDS):
            return False
        self._capture.when_over = lambda: None
        return True

    def end(self) -> None:
        """The last tick, after the hooks are removed. An export may go on."""
        self._capture.drop("the run ended before the step")
        self._settle_outcome()
        if self._export is not None and not self._keeping:
            self._export.submit(None)

    def wait(self, seconds: float) -> None:
        """Wait for an export that goes on, at most this many seconds, and log its outcome."""
        if self._export is not None:
            self._export.join(seconds)
        self._settle_kept()

    def after_fork_in_child(self) -> None:
        """Stop a recording that was copied by a fork, so that it does not grow. Takes no lock."""
        self._usable = False
        close_in_child()
        self._capture.after_fork_in_child()

    def view(self) -> SnapshotsView:
        """Snapshots so far, for the endpoint."""
        return SnapshotsView(dict(self.counts), SLOWER if self._trigger.off is not None else None)

    # -- the agent thread --------------------------------------------------------------------------------------

    def add_steps(self, steps: Iterable[Step]) -> None:
        """Count steps that have closed."""
        found = self._watch.add(step.seconds for step in steps)
        if found is not None and found.slower:
            slower = f"{100 * (found.after / found.before - 1):.0f} % slower"
            times = f"{1e3 * found.before:.2f} ms before, {1e3 * found.after:.2f} ms after"
            self._trigger.off = f"steps stayed {slower} after a snapshot ({times}); no more are taken"
            self._errors.tell("snapshot", self._trigger.off)

    def tick(self, cause: str | None, stall_fields: Callable[[], dict[str, Any] | None]) -> None:
        """Take part in the rendezvous, and handle what has been recorded.

        Args:
            cause: the cause of the open stall; None without one.
            stall_fields: the fields of the open stall, as in the log.
        """
        if not self._usable:
            return
        self._settle_kept()
        self._settle_outcome()
        now = now_ns() / NS
        if self._config.snapshot_on_stall == "off" or (self._config.snapshot_on_stall == "auto" and on_gpu()):
            cause = None
        if self._trigger.stalled(now, cause) and cause is not None:
            self._ask(p.STALL, cause, None, self._config.snapshot_steps, stall_fields())
        while self._asked:
            rank, steps = self._asked.popleft()
            self._ask(p.API, p.REQUEST, rank, steps, None)
        plan = self._rendezvous.poll(self._position)
        if plan is not None:
            self._heard(plan, now)
        self._capture.hold()

    def _ask(self, kind: str, reason: str, rank: int | None, steps: int, stall: dict[str, Any] | None) -> None:
        who = f"rank {self._identity.rank}, pid {os.getpid()}"
        self._rendezvous.ask(p.Request(new_id(unix_time()), kind, reason, rank, steps, who, stall))

    def _position(self) -> Position | None:
        """How far this rank is; None while it takes a snapshot, or before its step duration is known."""
        busy = self._capture.busy or self._keeping
        pace = self._watch.step_seconds
        return None if busy or pace is None else Position(self._accounting.steps_total, pace)

    def _heard(self, plan: p.Plan, now: float) -> None:
        if plan.refused is not None:
            self._conclude(SnapshotOutcome(plan, REFUSED, plan.refused))
        elif self._capture.busy or self._keeping:
            self._conclude(SnapshotOutcome(plan, SKIPPED, "another snapshot is in progress"))
        elif self._capture.abandoned:
            self._conclude(SnapshotOutcome(plan, REFUSED, "a recording could not be ended; there will be no other one"))
        else:
            try:
                watch = BudgetWatch(self._budget())
                self._export = ExportThread(self._keep, watch)
            except RuntimeError as error:
                self._conclude(SnapshotOutcome(plan, REFUSED, f"there is no thread to save it: {error}"))
                return
            self._trigger.took(now)
            self._capture.arm(plan, watch)

    def _budget(self) -> Budget:
        config = self._config
        return Budget.now(
            config.snapshot_memory_bytes,
            config.snapshot_pause_seconds,
            ranks=max(1, self.node.live_ranks()) if self.node is not None else 1,
            shapes=config.snapshot_shapes,
        )

    # -- what was recorded -------------------------------------------------------------------------------------

    def _settle_outcome(self) -> None:
        export = self._export
        outcome = None if export is None or self._keeping else self._capture.take()
        if export is None or outcome is None:
            return
        if outcome.pauses:
            self._watch.compare(outcome.plan.first_step - 1, outcome.last_step or outcome.plan.last_step)
        self._keeping = outcome.trace is not None
        export.submit(outcome if self._keeping else None)
        if not self._keeping:
            self._export = None
            self._conclude(outcome)

    def _keep(self, outcome: SnapshotOutcome) -> None:
        """Export a recording on the export thread. It takes seconds, which would stop the sampling."""
        assert outcome.trace is not None  # noqa: S101 - there is one to keep
        identity, plan = self._identity, outcome.plan
        name = trace_name(identity.rank, slug(identity.node), identity.pid, plan.stamp_ms)
        stored, error = None, None
        try:
            stored = self._store.publish(outcome.trace, plan.folder, name, extra_events=self._fetches(outcome))
            add_to_manifest(self._folder, plan, self._part(outcome, stored))
        except (StoreError, OSError) as failure:
            error = str(failure)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        self._kept = _KeptSnapshot(outcome, stored, error)

    def _fetches(self, outcome: SnapshotOutcome) -> Callable[[int], bytes]:
        """The workers' fetches during the recording. Read now, because workers keep only their newest fetches."""
        blocks = [loader.block for loader in self._tracker.sources.live() if loader.block is not None]
        counters = [worker for block in blocks for worker in block.read()]
        found = fetches(counters, outcome.started_ns, outcome.ended_ns, unix_ns() - now_ns())
        return lambda zero_ns: as_events(found, zero_ns)

    def _part(self, outcome: SnapshotOutcome, stored: StoredTrace) -> dict[str, Any]:
        identity = self._identity
        return {
            "rank": identity.rank,
            "local_rank": identity.local_rank,
            "node": identity.node,
            "pid": identity.pid,
            "tid": outcome.thread,
            "file": stored.name,
            "size_bytes": stored.size,
            "trace_bytes": stored.raw_bytes,
            "trace_zero_unix_seconds": None if stored.zero_ns is None else stored.zero_ns / NS,
            "first_step": outcome.first_step,
            "last_step": outcome.last_step,
            "why": outcome.why,
            "started": self._wall.iso(outcome.started_ns),
            "ended": self._wall.iso(outcome.ended_ns),
            "log": f"../../../logs/{self._event_log.log.file.path.name}",
            "pause_seconds": rounded(outcome.pauses),
            "held_seconds": rounded(stored.held),
        }

    def _settle_kept(self) -> None:
        kept = self._kept
        if kept is None:
            return
        self._kept, self._export, self._keeping = None, None, False
        self._conclude(kept.outcome, kept.stored, kept.error)

    def _conclude(self, outcome: SnapshotOutcome, stored: StoredTrace | None = None, error: str | None = None) -> None:
        """Count the outcome, log it, and report it to the other ranks."""
        plan = outcome.plan
        result = FAILED if error is not None and stored is None else outcome.result
        why = error or outcome.why
        path = None if stored is None else f"snapshots/{plan.folder}/{stored.name}"
        self.counts[result] += 1
        line: dict[str, Any] = {
            "result": result,
            "why": why,
            "id": plan.request.id,
            "reason": plan.request.reason,
            "asked_by": plan.request.asked_by,
            "first_step": outcome.first_step if result == RECORDED else None,
            "last_step": outcome.last_step if result == RECORDED else None,
            "path": path,
            "pause_seconds": rounded(outcome.pauses),
        }
        if stored is not None:
            line |= {
                "started": self._wall.iso(outcome.started_ns),
                "ended": self._wall.iso(outcome.ended_ns),
                "size_bytes": stored.size,
                "trace_bytes": stored.raw_bytes,
                "held_seconds": rounded(stored.held),
            }
        self._event_log.emit("snapshot", line)
        result_of = p.Result(self._identity.rank, result, why, path, outcome.first_step, outcome.last_step)
        self._rendezvous.report(plan, result_of)
