"""Makes every part of an agent and connects them."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from telemetry.agent.accounting import Accounting
from telemetry.agent.attempt_log import FOLDER, AttemptLog
from telemetry.agent.change_monitor import ChangeMonitor
from telemetry.agent.collector_poller import CollectorPoller
from telemetry.agent.end_line import EndLine
from telemetry.agent.endpoint_address import EndpointAddress
from telemetry.agent.event_log import EventLog
from telemetry.agent.figure_output import FigureOutput
from telemetry.agent.job_hang import HangSurroundings, JobHang
from telemetry.agent.line_monitor import LineMonitor
from telemetry.agent.memory_watch import MemoryWatch
from telemetry.agent.overhead import Overhead
from telemetry.agent.peer_paces import PeerPaces
from telemetry.agent.rank_membership import Membership
from telemetry.agent.rank_state import RankStateReader
from telemetry.agent.run_counts import RunCounts
from telemetry.agent.run_environment import RunEnvironment
from telemetry.agent.run_losses import RunLosses
from telemetry.agent.run_view import RunViewBuilder
from telemetry.agent.snapshot_control import SnapshotControl
from telemetry.agent.stall_monitor import StallMonitor
from telemetry.agent.stall_report import StallCounts
from telemetry.agent.start_line import absolute
from telemetry.agent.tick_pace import TickPace
from telemetry.agent.totals_builder import TotalsBuilder
from telemetry.agent.training_thread import TrainingThread
from telemetry.attach.attachment import Attachment
from telemetry.attach.ring import Ring
from telemetry.attach.step_tracker import StepTracker
from telemetry.collect.thread_sampler import ThreadSampler
from telemetry.core.clock import NS, WallClock, now_ns
from telemetry.core.errors import ErrorLog
from telemetry.core.identity import identify, slug
from telemetry.publish.exposition import Exposition

if TYPE_CHECKING:
    from telemetry.agent.job_link import JobLink
    from telemetry.config import Config
    from telemetry.core.hang_records import HangState
    from telemetry.core.spans import Step
    from telemetry.core.tick import RankPace
    from telemetry.publish.node import NodeService


class AgentParts:
    """All parts of an agent, made in order of their dependencies. Nothing runs yet.

    Attributes:
        run_dir: the run folder.
        identity: run, rank, node and so on.
        errors: the failures of the agent's own parts.
        tracker: state of the training thread. ``attachment``: places the hooks that update it.
        accounting: ledger, steps and exposed wait. ``overhead``: the cost of the agent.
        attempt: what the log tells of this attempt of the run.
        event_log: writes the log. ``figures``: the newest figures, and the sinks.
        snapshots: takes traces. ``job_hang``: why the whole job hangs.
    """

    def __init__(self, config: Config) -> None:
        start_ns = now_ns()
        self.config = config
        self.identity = identify(config.run, config.run_dir and absolute(config.run_dir), node=config.node)
        # An absolute path: the script may change its working folder, and a rotated log must not move.
        self.run_dir = absolute(config.run_dir or Path("telemetry-runs") / slug(self.identity.run))
        self.errors = ErrorLog()
        self._membership = Membership(self.identity, self.errors)
        self._wall = WallClock()

        self.tracker = StepTracker(Ring())
        self.attachment = Attachment(
            self.tracker,
            partial(self.errors.note, "attach"),
            gpu_events=config.gpu_events != "off",
            nvtx=config.nvtx,
        )
        self.accounting = Accounting(self.tracker, self.attachment, config, self.errors, start_ns)
        self._tick_pace = TickPace(config, self.accounting)
        self._node: NodeService | None = None  # set by `start`
        self._job: JobLink | None = None  # set by `start`
        self._exposition = Exposition(self.identity.run, self.identity.rank, self.identity.node)
        self._collectors = CollectorPoller(self.tracker, config.interval_seconds, self.errors)
        self._address = EndpointAddress(config, self.identity.node)
        self.overhead = Overhead(self.tracker, self._collectors)
        training = TrainingThread(self.tracker)
        self._thread_sampler = ThreadSampler(training.ident, training.is_computing, training.is_running)
        self._peer_paces = PeerPaces(self._paces_of_others)
        self._builder = TotalsBuilder(
            self.accounting,
            self.tracker,
            self._collectors,
            self._thread_sampler,
            self.overhead,
            peers=self._peer_paces.read,
        )
        stall_counts = StallCounts()
        life = secrets.token_hex(8)
        self.attempt = AttemptLog(
            self.run_dir,
            self.identity.pid,
            life,
            tracker=self.tracker,
            accounting=self.accounting,
            wall=self._wall,
            errors=self.errors,
        )
        self._memory = MemoryWatch(
            self._collectors.newest,
            lambda: self.accounting.steps_total > 0,
            self._workers_end_with_first_epoch,
        )
        self.event_log = EventLog(
            self.run_dir,
            self.identity,
            config,
            accounting=self.accounting,
            builder=self._builder,
            attempt=self.attempt,
            life=life,
            environment=RunEnvironment(self._builder.loader_settings, self.tracker.sources.newest_batch_size),
            address=self._address,
            collectors=self._collectors,
            memory=self._memory,
            stall_counts=stall_counts,
            errors=self.errors,
            wall=self._wall,
        )
        self._counts = RunCounts(self.run_dir / FOLDER, life, self.errors)
        self.figures = FigureOutput(
            config,
            self.event_log,
            self.errors,
            self._wall,
            lambda: self.identity,
            steps_before=lambda: self._counts.steps_before,
        )
        self.overhead.figures = self.figures
        self._line_monitor = LineMonitor(
            self.tracker,
            self.run_dir / "profiles",
            self.identity.pid,
            errors=self.errors,
            emit=self.event_log.emit,
            rank=lambda: self.identity.rank,
        )
        self._stall_monitor = StallMonitor(
            config,
            self.tracker,
            stall_counts,
            errors=self.errors,
            emit=self.figures.emit,
            timestamp=self._wall.iso,
            lines=self._line_monitor.findings,
            rank=self.identity.rank,
            node=self.identity.node,
        )
        self._rank_state = RankStateReader(self.tracker, self.accounting)
        self.job_hang = JobHang(
            self._state_in_hang,
            self.event_log.emit,
            lambda seconds: self._wall.iso(now_ns() - int(seconds * NS)),
            lambda: self._rank_state.recorder,
        )
        self.snapshots = SnapshotControl(
            config,
            self.identity,
            self.run_dir,
            tracker=self.tracker,
            profilers=self.attachment.profilers,
            errors=self.errors,
            wall=self._wall,
            accounting=self.accounting,
            event_log=self.event_log,
            ranks_elsewhere=self._ranks_elsewhere,
        )
        self._losses = RunLosses(self.run_dir / FOLDER, self.attempt, life, self.errors)
        self._changes = ChangeMonitor(
            self._collectors.newest,
            self.event_log.emit,
            lambda seconds: self._wall.iso(self.accounting.ledger.start_ns + int(seconds * NS)),
        )
        self._views = RunViewBuilder(
            accounting=self.accounting,
            collectors=self._collectors,
            memory=self._memory,
            stalls=self._stall_monitor,
            snapshots=self.snapshots,
            losses=self._losses,
            counts=self._counts,
            changes=self._changes,
            errors=self.errors,
            wall=self._wall,
            hang=self.job_hang.view,
            energy_gpu=lambda: self._builder.energy_sample,
            gpu_hour_price=config.gpu_hour_price,
        )
        self._end_line = EndLine(
            config,
            self.run_dir,
            accounting=self.accounting,
            builder=self._builder,
            stalls=self._stall_monitor,
            job_hang=self.job_hang,
            event_log=self.event_log,
            attempt=self.attempt,
            peers=self._peer_paces,
        )
        self.accounting.on_steps = self._on_steps

    def _count_losses(self) -> None:
        ledger, stalls = self.accounting.ledger, self._stall_monitor
        self._losses.tick(
            self.identity,
            ledger.seconds(),
            ledger.first_wait_ns / NS,
            has_batch=ledger.batches > 0,
            stuck_for_seconds=stalls.stuck_for_seconds,
            stuck_in=stalls.stuck_in,
        )
        self._counts.tick(self.identity, self._builder.current())

    def _leave_for_next_attempt(self) -> None:
        """This process ends by itself: write what the next attempt of the run begins with."""
        self._count_losses()
        self._losses.end(finished=self.attempt.end.finished)
        self._counts.end()

    def _on_steps(self, steps: list[Step]) -> None:
        self.snapshots.add_steps(steps)
        self.attempt.add_steps(steps)

    def _workers_end_with_first_epoch(self) -> bool:
        """Whether the workers are started anew in each epoch, and none has ended yet: they may give memory back."""
        source = self.tracker.sources.newest()
        anew = source is not None and source.settings.get("persistent_workers") is False
        return anew and self.accounting.ledger.epoch_boundaries < 1

    def _state_in_hang(self) -> HangState:
        stalls = self._stall_monitor
        return self._rank_state.read(self.identity, stalls.hang, stalls.fetch, stalls.still_seconds)

    def _follow_hang(self) -> None:
        """During a hang, share the state of this rank and find the cause. On a calm run this does nothing."""
        elsewhere = self._job.elsewhere if self._job is not None else ()
        hangs = self._stall_monitor.job_hangs or any(state.stuck for state in elsewhere)
        self.job_hang.tick(hangs=hangs, steps=self.accounting.steps_total, around=self._around_hang)
        if self._job is not None:
            self._job.local = self.job_hang.local

    def _around_hang(self) -> HangSurroundings:
        node, job = self._node, self._job
        return HangSurroundings(
            leads=node is not None and node.leads,
            board=node.hang_board if node is not None else None,
            elsewhere=job.elsewhere if job is not None else (),
            world_size=self.identity.world_size,
        )

    def _lead(self) -> None:
        if self._node is not None:
            with self.errors.contained("endpoint"):
                self._node.lead_if_vacant()
        if self._job is not None and self.identity.world_size > 1:
            with self.errors.contained("job"):
                self._job.tick(self.identity.world_size)

    def _ranks_elsewhere(self) -> bool:
        return self._job is not None and self._job.ranks_elsewhere(self.identity.world_size)

    def _paces_of_others(self) -> tuple[RankPace, ...]:
        if self._node is None or self.identity.world_size < 2:
            return ()
        elsewhere = self._job.paces() if self._job is not None else ()
        return (*self._node.paces(self.identity.rank), *elsewhere)
