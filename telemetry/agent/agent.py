"""The agent: its parts, its thread, its start and its bounded end."""

from __future__ import annotations

import atexit
import os
import platform
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Final

from telemetry._version import __version__
from telemetry.agent.attempt import FOLDER, AttemptLog
from telemetry.agent.end_line import end_lines, end_table, own_waits, with_peers
from telemetry.agent.evaluations import EvaluationMonitor
from telemetry.agent.event_log import EventLog
from telemetry.agent.job_hang import JobHang, OwnState
from telemetry.agent.line_monitor import LineMonitor
from telemetry.agent.run_so_far import RunSoFar
from telemetry.agent.stall_monitor import StallMonitor
from telemetry.agent.step_monitor import FindingLog, StepMonitor, gauges
from telemetry.agent.trial import TrialRun
from telemetry.config import TRIAL_VARIABLE
from telemetry.diagnosis.changes import ChangeDetector, GrowthDetector
from telemetry.diagnosis.endings import LOADER_TIMEOUT, RunEnd
from telemetry.diagnosis.memory_outlook import MemoryWatch
from telemetry.diagnosis.stalls import StallCounts
from telemetry.diagnosis.verdict import RunFacts, judge
from telemetry.loop.ledger import Accounting
from telemetry.loop.tick_pace import TickPace
from telemetry.loop.tick_totals import Overhead, TotalsBuilder
from telemetry.model.totals import Tick, Totals
from telemetry.node.board import Board, Membership
from telemetry.node.endpoint import NodeService
from telemetry.node.metrics import RunView
from telemetry.node.peers import JobLink
from telemetry.node.prometheus import TargetFile
from telemetry.safety.errors import ErrorLog, say
from telemetry.safety.files import StandardStreams
from telemetry.safety.threads import OwnThread, Wake
from telemetry.seams.attachment import Attachment
from telemetry.seams.patching import keep
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.sinks.output import FigureOutput
from telemetry.snapshot.control import SnapshotControl
from telemetry.sources.polling import CollectorPoller
from telemetry.sources.proc import planned_threads
from telemetry.sources.sampler import Sampler
from telemetry.util.clock import NS, WallClock, now_ns
from telemetry.util.identity import identify, job_labels, slug

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.agent.stuck_monitor import StuckRank
    from telemetry.config import Config
    from telemetry.diagnosis.findings import Finding
    from telemetry.model.records import RankPace, StepTrend

_LEAD_SECONDS: Final = 1.0
"""Time between two readings of the ring, and between two checks whether a rank serves the node. It does not depend on
the sampling interval. A dead serving rank is replaced in 3 s."""

_RANK_SECONDS: Final = 0.9
"""Minimum time between two readings of the node's ranks and of torch.distributed: about one a second."""

_STOP_SECONDS: Final = 2.0
"""``stop`` takes at most this long: for a tick in progress, the end of the log, and then the user's callback, the sinks
and the export of a snapshot."""

_GPU_ERROR_SECONDS: Final = 0.2
"""How long ``stop`` waits for the GPU's driver after a failure, whose cause may be an error of the GPU."""

_IMPORT_SECONDS: Final = 0.02
"""Seconds between two looks for torch in a script that has not imported it yet."""

_CLOSE_SECONDS: Final = 0.2
"""``stop`` keeps this part for closing files and leaving the board."""


class Agent:
    """The agent of one training process. `telemetry.start` makes it.

    Attributes:
        run_dir: the run folder.
        identity: run, rank, node and so on. All parts share this record, which is kept up to date.
        errors: the failures of the agent's own parts.
        tracker: the state of the training thread. ``attachment`` places the hooks that update it.
        overhead: the cost of the agent.
        attempt: what the log and the heartbeat need about this attempt.
        figures: the newest figures, and the sinks.
        findings: what was found in the run beside its stalls.
        snapshots: takes traces.
        job_hang: finds out why the whole job hangs.
        running: whether the agent has started and not stopped.
        trial: the trial of ``telemetry tune`` in this process; None in any other run.
    """

    def __init__(self, config: Config) -> None:
        start_ns = now_ns()
        self.config = config
        self.identity = identity = identify(config.run, config.run_dir and absolute(config.run_dir), node=config.node)
        # Absolute: the script may change its working folder, and a rotated log must not move.
        self.run_dir = run_dir = absolute(config.run_dir or Path("telemetry-runs") / slug(identity.run))
        self.errors = errors = ErrorLog()
        self._wall = wall = WallClock()
        self._job_labels = job_labels()
        self._pid = os.getpid()
        self._streams = StandardStreams()

        # The node and the job.
        self._membership = Membership(identity, errors)
        self._node: NodeService | None = None
        self._job: JobLink | None = None
        with errors.contained("board"):
            self._node = self._node_service()
            self._job = JobLink(run_dir, identity.node, self._node.board, errors)
        self._board = None if self._node is None else self._node.board

        # What this rank does.
        self.tracker = tracker = StepTracker(Ring())
        attach_failed = partial(errors.note, "attach")
        self.attachment = Attachment(tracker, attach_failed, gpu_events=config.gpu_events != "off", nvtx=config.nvtx)
        self.accounting = accounting = Accounting(tracker, self.attachment, config, errors, start_ns)
        self._collectors = CollectorPoller(
            tracker,
            config.interval_seconds,
            errors,
            run_dir / f"gpu-memory-rank-{identity.rank}.{identity.pid}.pickle" if config.oom_snapshot else None,
        )
        self._wake = Wake()
        self._sampler = Sampler(tracker, self._wake.wait)
        self.attempt = AttemptLog(run_dir, identity.pid, tracker, accounting, wall=wall, errors=errors)
        self._run_so_far = RunSoFar(run_dir / FOLDER, self.attempt, identity, errors)
        self.figures = FigureOutput(config, identity, errors, wall)
        own_threads = (self._collectors, self._node, self._job, self.figures)
        self.overhead = Overhead(tracker, [part for part in own_threads if part is not None])
        self._builder = TotalsBuilder(accounting, tracker, self._collectors, self._sampler, self.overhead)
        self._memory = MemoryWatch()

        # What it reports.
        stall_counts = StallCounts()
        self.event_log = EventLog(
            run_dir, identity, config, accounting=accounting, builder=self._builder, attempt=self.attempt,
            node=self._node, collectors=self._collectors, memory=self._memory, stall_counts=stall_counts,
            errors=errors, wall=wall,
        )  # fmt: skip
        self.findings = FindingLog(self.event_log)
        self._step_monitor = StepMonitor(tracker, self._sampler, self.findings, self.event_log, accounting.stats)
        self._growth, self._changes = GrowthDetector(), ChangeDetector()
        self._evaluations = EvaluationMonitor(accounting.evaluations, self._sampler)
        self._line_monitor = LineMonitor(tracker, self._sampler, run_dir / "profiles", errors, self.event_log)
        self._stall_monitor = StallMonitor(
            config, tracker, stall_counts, errors=errors, event_log=self.event_log, wall=wall,
            lines=self._line_monitor, sinks=self.figures, findings=self.findings,
        )  # fmt: skip
        self.job_hang = JobHang(
            OwnState(identity, tracker, accounting, self._stall_monitor), self.event_log, wall, self._board, self._job
        )
        self.snapshots = SnapshotControl(
            config, identity, run_dir, tracker=tracker, profilers=self.attachment.profilers, errors=errors, wall=wall,
            event_log=self.event_log, job=self._job, board=self._board,
        )  # fmt: skip
        self.trial: TrialRun | None = None

        # Its thread.
        self._thread = OwnThread(self._main, name="telemetry-agent")
        self._tick_pace = TickPace(config, accounting)
        self._rank_due_ns = 0
        self.running = self._ended = False
        self._deadline_ns = 0  # for `stop`
        self._newest_tick = Tick()
        self._step_trend: StepTrend | None = None
        self._end_logged = False
        self._last_words: list[str] = []  # the run's last lines, once it has ended

    def _node_service(self) -> NodeService:
        config, identity = self.config, self.identity
        board = Board(identity.run, str(self.run_dir), identity.node)
        if board.notice:
            self.errors.tell("board", board.notice)
        folder = absolute(config.targets_dir or self.run_dir / "targets")
        targets = TargetFile(folder, board.path.name, identity.node)
        return NodeService(
            board, targets, run=identity.run, host=config.host, port=config.port, node=identity.node,
            errors=self.errors,
        )  # fmt: skip

    # -- life --------------------------------------------------------------------------------------------------

    def _do(self, *parts: tuple[str, Callable[[], object]]) -> None:
        """Do these parts in their order. One that fails is counted under its name, and the next one is done."""
        for name, part in parts:
            with self.errors.contained(name):
                part()

    def start(self) -> None:
        """Attach, publish the first state and start the agent thread. Nothing here can fail the training."""
        self.running = True
        if TRIAL_VARIABLE in os.environ:
            self.trial = TrialRun(os.environ[TRIAL_VARIABLE], self.identity, self.tracker, self.errors)
        self._do(
            ("descriptors", self._streams.keep),
            ("attach", self._attach),
            ("board", self._sweep_board),
            ("sinks", partial(self.figures.start, self.run_dir)),
            ("board", self._settle_rank),
            ("endpoint", self._publish),
            ("board", self._settle_rank_again),
            ("endpoint", self._lead),
            ("snapshot", self.snapshots.start),
        )
        logged = self.event_log.start()
        atexit.register(self._stop_at_exit)
        self._thread.start()
        if self.config.start_line and self.identity.local_rank == 0:
            self._say_start(logged=logged)

    def _attach(self) -> None:
        if self.config.patch:
            self.attachment.attach()

    def _sweep_board(self) -> None:
        if self._board is not None:
            self._board.sweep()

    def _settle_rank_again(self) -> None:
        """If two ranks start at the same moment, one of them sees the other here."""
        shown = self.identity.rank
        self._settle_rank()
        if self.identity.rank != shown:
            self._publish()

    def stop(self) -> None:
        """Undo every patch, write the rest, and end the threads. Always returns within a few seconds."""
        if not self.running or os.getpid() != self._pid:
            return
        self._deadline_ns = now_ns() + int(_STOP_SECONDS * NS)
        self.running = False
        try:
            over = True
            with self.errors.contained("snapshot"):
                over = self.snapshots.end_recording(self._detach_late)
            with self.errors.contained("attach"):
                for name in self.attachment.detach() if over else ():
                    self.errors.tell("attach", f"{name} was patched by others after us; ours stays below it, inert")
        finally:
            self._end()

    def _end(self) -> None:
        self._deadline_ns = self._deadline_ns or now_ns() + int(_STOP_SECONDS * NS)
        self._ended = True
        self._wake.set()
        if self._thread.ident is None:  # the thread could not be started
            self._finish()
        elif get_ident() != self._thread.ident:
            self._thread.join((self._deadline_ns - now_ns()) / NS)
        if not self._thread.is_alive():
            self._streams.release()
            if self._last_words:
                say(*self._last_words)
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.attempt.end.at_exit()
        try:
            self.stop()
        except BaseException:
            # A signal handler raised this. The script has ended and catches nothing: Python would print our frames.
            self._end()

    def _detach_late(self) -> None:
        """Remove hooks that outlive `stop`. This is a method, so that a forked child keeps the agent alive."""
        self.attachment.detach()

    def after_fork_in_child(self) -> None:
        """Make this copy inert: no hook, thread, socket or log line. Takes no lock.

        The objects of the copy stay alive, because the child must not end a profiler session, for example.
        """
        keep(self)
        if not self.running:
            self.attachment.after_fork_in_child()
            return
        self.running = False
        self._streams.release()
        self.attachment.after_fork_in_child()
        self.snapshots.after_fork_in_child()
        self.event_log.file.forget()
        self.figures.after_fork_in_child()
        self.attempt.forget()
        if self._node is not None:
            self._node.after_fork_in_child()

    @property
    def metrics_url(self) -> str | None:
        """The URL of this node's metrics; None without an endpoint."""
        return None if self._node is None else self._node.url

    # -- the agent thread --------------------------------------------------------------------------------------

    def _main(self) -> None:
        interval = self.config.interval_seconds
        next_tick = now_ns()
        while not self._ended:
            due = now_ns() >= next_tick
            self.attachment.look()
            with self.errors.contained("agent"):
                if due:
                    self._tick_or_skip()
                else:
                    self._account()  # empties the ring, which must not overflow between distant ticks
                self._lead()
            if due:  # after a suspended machine or a long stop, continue from now
                next_tick = max(next_tick + int(interval * NS), now_ns())
            self.accounting.turns.tick_ends()
            self._wait_until(min(next_tick, now_ns() + int(_LEAD_SECONDS * NS)))
        self._finish()

    def _wait_until(self, stamp: int) -> None:
        """Sleep until a stamp (monotonic ns), and take the samples that are due meanwhile."""
        if self._sampler.stall is not None:  # C calls that hold the GIL make ticks long: their code must be sampled
            stamp = max(stamp, now_ns() + int(self.config.interval_seconds / 2 * NS))
        if self.attachment.awaits_torch:
            stamp = min(stamp, now_ns() + int(_IMPORT_SECONDS * NS))
        turns = self.accounting.turns
        while not self._wake.is_set() and (left := (stamp - now_ns()) / NS) > 0:
            turns.begin(stamp)
            with self.errors.contained("lines"):
                self._sampler.wait(left)
        turns.check()
        turns.tick_begins()

    def _settle_rank(self) -> None:
        """Follow the rank of this process. Series, log, stalls and snapshots continue under the new rank."""
        self._rank_due_ns = now_ns() + int(_RANK_SECONDS * NS)
        if self._membership.look(self._board, steps=self.accounting.steps_total):
            self.event_log.rank_has_changed()

    def _tick_or_skip(self) -> None:
        self._account()
        self._do(
            ("heartbeat", lambda: self.attempt.tick(*self._stall_monitor.stuck_time)),
            ("jsonl", self.event_log.write_gpu_errors),  # at once: they may end the process
        )
        if not self._tick_pace.skips(busy=self._stall_monitor.active_cause is not None):
            self._tick()
            return
        self._do(
            ("snapshot", partial(self.snapshots.tick, None)),  # the other ranks need it in each interval
            ("diagnose", self._follow_young_run),
        )

    def _tick(self) -> None:
        """What the agent does in one tick. Between long parts it empties the ring, which must not overflow."""
        self._do(
            ("clock", self._follow_clock),
            ("board", self._follow_rank),
            ("agent", self._keep_up),
            ("collect", self._collect),
            ("memory", self._watch_memory),
            ("diagnose", self._diagnose),
            ("lines", self._find_lines),
            ("agent", self._keep_up),
            ("snapshot", partial(self.snapshots.tick, self._stall_monitor)),
            ("agent", self._keep_up),
            ("agent", self.overhead.measure),
            ("attempts", self._run_so_far.tick),
            ("exposition", self._publish),
            ("agent", self._keep_up),
            ("jsonl", self.event_log.write_what_is_due),
            ("sinks", self._write_figures),
        )

    def _follow_clock(self) -> None:
        stepped = self._wall.resync()
        if stepped:
            self.errors.tell("clock", f"the wall clock was stepped by {stepped:.1f} s; timestamps follow it")

    def _follow_rank(self) -> None:
        if now_ns() >= self._rank_due_ns:
            self._settle_rank()

    def _collect(self) -> None:
        for _ in self._collectors.poll():
            self._keep_up()

    def _watch_memory(self) -> None:
        if self.accounting.steps_total:
            newest = self._collectors.samples
            self._memory.tick(newest.memory, newest.gpu, newest.torch_memory)

    def _diagnose(self) -> None:
        """Judge what has passed since the last tick."""
        self._newest_tick = tick = self._builder.tick(self._paces_of_others())
        if self.trial is not None:
            self.trial.tick(tick, self._node)
        self._stall_monitor.tick(tick, self.accounting, intervals=self._tick_pace.intervals)
        self._follow_steps(tick.totals)
        self._tell(self._evaluations.tick(tick, self.accounting.ledger.evaluations))
        self.job_hang.tick()

    def _find_lines(self) -> None:
        """Find the lines of code in which the time is spent. The stall decides how closely the samples look."""
        stalls, wanted = self._stall_monitor, self._sampler.wanted
        wanted.waits, wanted.slow_rank = stalls.waits_matter, stalls.samples_closely
        wanted.ranks, wanted.gaps = self.identity.world_size > 1, self._step_monitor.wants_gaps
        if self._line_monitor.tick(stalls.open_stall, holds_others_up=stalls.holds_others_up):
            stalls.log_hot_lines()
        self._step_monitor.tick(self._newest_tick, self._collectors.samples, stalls.evidence)

    def _follow_steps(self, totals: Totals) -> None:
        figures = gauges(self._collectors.samples)
        if self._growth.tick(totals, figures):
            self._step_monitor.tell_growth(self._growth.growth, totals)
        change = self._changes.tick(totals, figures)
        if change is not None:
            at = self._wall.iso(self.accounting.ledger.start_ns + int(change.at.at_seconds * NS))
            self.event_log.write(change.line(at))

    def _follow_young_run(self) -> None:
        """In the first minutes steps can become twice as long within a few ticks, so that skipped ones count, too."""
        if self._growth.is_young:
            totals = self._builder.current()  # 0.2 ms, a fifth of what a skipped tick costs
            if self._growth.tick(totals, {}):
                self._step_monitor.tell_growth(self._growth.growth, totals)

    def _tell(self, finding: Finding | None) -> None:
        if finding is not None:
            self.findings.tell(finding)

    def _keep_up(self) -> None:
        self._account(keep_up=True)
        self.accounting.turns.check()

    def _account(self, *, keep_up: bool = False) -> None:
        """Count everything up to now. ``keep_up``: only if the last count was long ago."""
        self.accounting.follow_samples(self._sampler.loop)
        (self.accounting.keep_up if keep_up else self.accounting.update)()
        with self.errors.contained("ledger"):
            self.attachment.optimizer.read_new()
            steps = self.accounting.take_steps()
            self.snapshots.add_steps(steps)
            self.attempt.add_steps(steps)

    def _finish(self) -> None:
        """End the run: write the rest of the log, and remove this rank from the board."""
        self._do(
            ("agent", partial(self.tracker.settle, evaluates=True)),
            ("agent", self._account),
            ("trial", self._end_trial),
            ("agent", partial(self.attempt.settle_replay, ended=True)),
            ("agent", self.accounting.close),
            ("snapshot", self.snapshots.end),
            ("jsonl", self._log_last_window),
            ("attempts", self._run_so_far.tick),  # the figures begin where the attempt before has ended
            ("sinks", self._write_figures),
            ("sinks", self.figures.end),
            ("lines", self._line_monitor.close),
            ("lines", self._step_monitor.end),
            ("attempts", lambda: self._run_so_far.end(finished=not self.attempt.end.settled.failed)),
            ("diagnose", self._judge_trend),
            ("jsonl", self._log_end),
            ("end_line", self._find_last_words),
        )
        self._wait_for_others()
        self._do(
            ("jsonl", self._close_log),
            ("collect", self._collectors.close),
            ("exposition", self._publish),
            ("job", self._leave_job),
            ("board", self._leave_board),
        )
        self.accounting.turns.tick_ends()

    def _wait_for_others(self) -> None:
        """Wait for the callback, the sinks and the export until the deadline. The log is complete."""
        self._do(
            ("on_stall", lambda: self._stall_monitor.wait_for_callback(self._seconds_left())),
            ("sinks", lambda: self.figures.wait(self._seconds_left())),
            ("snapshot", lambda: self.snapshots.wait(self._seconds_left())),
        )

    def _end_trial(self) -> None:
        if self.trial is not None:
            self.trial.script_ended(self._builder.tick())

    def _log_last_window(self) -> None:
        """Close the stall that is open, tell what the whole run shows, and log what has changed."""
        totals, end = self._builder.end(), self.attempt.end.settled
        timed_out = end.failure == LOADER_TIMEOUT and self._stuck_at_end() is None
        self._stall_monitor.end(totals, timed_out=timed_out)
        self._step_monitor.tell_growth(self._growth.growth, totals)
        self._step_monitor.judge(totals, self._stall_monitor.evidence)
        self._tell(self._evaluations.judge(totals))
        self.findings.end()
        self.attempt.follow_stuck(*self._stall_monitor.stuck_time)
        self.event_log.write_phases(last=True)
        self.event_log.window()

    def _judge_trend(self) -> None:
        self._step_trend = self._growth.trend()

    def _log_end(self) -> None:
        # An exception follows the error of the GPU within milliseconds, so it may not have been read yet.
        failed = self.attempt.end.settled.failed
        self.event_log.write_gpu_errors(wait_seconds=_GPU_ERROR_SECONDS if failed else 0.0)
        self.event_log.write_errors()
        stuck = self._stuck_at_end()
        self._end_logged = self.event_log.end(None if stuck is None else round(stuck.seconds, 3), self._step_trend)

    def _stuck_at_end(self) -> StuckRank | None:
        """This rank, if it is stuck and no step has ended since."""
        ended = self._builder.current().steps - self.accounting.ledger.step_is_open
        return self._stall_monitor.stuck_at_end(ended)

    def _find_last_words(self) -> None:
        """Make rank 0's last lines. A run without a step has one only if the process ends, as it may stop early."""
        totals, identity, stalls = self._builder.current(), self.identity, self._stall_monitor
        form = self.config.end_line
        wanted = form != "off" and self.trial is None and identity.rank == 0
        if not wanted or not (totals.steps or totals.estimated_steps or self.attempt.end.process_ends):
            return
        waits = own_waits(totals, identity.rank, self.config.stall_enter_ratio, self.accounting.exposed_absent)
        tick, several = replace(self._newest_tick, totals=totals), identity.world_size > 1
        samples, host = self._collectors.samples, self.event_log.host
        shown = end_table(waits, tick, samples, host, several=several) if form == "table" else []
        end, stuck = self.attempt.end.settled, stalls.closed_stuck if self._stuck_at_end() is not None else None
        own = RunFacts(
            ranks=[waits],
            stalls=[] if stalls.costliest is None else [stalls.costliest],
            findings=self.findings.newest,
            world_size=identity.world_size,
            hang="" if stuck is None else self.job_hang.sentence,
            stuck=[] if stuck is None else [(stuck, True)],
            ended=True,
            broke_off=end.failed,
            end=RunEnd((identity.rank,), end, gpu_fault=self.event_log.gpu_fault) if end.failed else None,
            ledger={} if shown else totals.ledger_seconds,  # the table has it
            ledger_in_full=not shown,
            children=self.event_log.child_processes,
            step_lines={identity.rank: self._step_monitor.lines()},
        )
        peers = [] if self._job is None else [peer for peer in self._job.of_run if peer.rank != identity.rank]
        verdict = judge(with_peers(own, peers))
        run_dir = self.run_dir if self._end_logged else None
        self._last_words = end_lines(verdict, shown, run_dir, short=not shown)

    def _close_log(self) -> None:
        self.event_log.write_errors()
        self.event_log.file.forget()
        self.attempt.close()

    def _leave_job(self) -> None:
        if self._job is not None:
            self._job.close(self._seconds_left())

    def _leave_board(self) -> None:
        if self._node is not None:
            self._node.leave()

    def _seconds_left(self) -> float:
        return max(0.0, (self._deadline_ns - now_ns()) / NS - _CLOSE_SECONDS)

    # -- the other ranks ---------------------------------------------------------------------------------------

    def _lead(self) -> None:
        if self._node is not None:
            with self.errors.contained("endpoint"):
                self._node.lead_if_vacant()
        if self._job is not None and self.identity.world_size > 1:
            with self.errors.contained("job"):
                self._job.tick(self.identity.world_size)

    def _paces_of_others(self) -> tuple[RankPace, ...]:
        if self._job is None or self.identity.world_size < 2:
            return ()
        return self._job.paces(self.identity.rank)

    # -- publishing --------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        view = self._view()
        self.figures.update(view, self.event_log.newest_window)
        if self._node is None:
            return
        pace = self._stall_monitor.pace() if self.identity.world_size > 1 else None
        self._node.publish(self.identity.rank, view, pace=pace, hang=self.job_hang.state, ended=self._ended)

    def _write_figures(self) -> None:
        window = self.event_log.newest_window
        if window is not None and self.figures.are_due(window):
            self.figures.write(self._view(), window)
        self.figures.note_news()

    def _view(self) -> RunView:
        accounting, collectors, last = self.accounting, self._collectors, self.accounting.ledger.last_step_ns
        samples = collectors.samples
        gpus = {gpu.uuid: gpu for gpu in samples.gpus or ()}
        energies = {uuid: energy.view() for uuid, energy in self._builder.energies.items()}
        pairs = [(gpus.get(uuid), energies.get(uuid)) for uuid in {**gpus, **energies}]
        (gpu, energy), *others = pairs or [(None, None)]
        return RunView(
            info=self._info_labels(),
            started_unix_seconds=self._wall.unix_seconds(accounting.ledger.start_ns),
            ended=self._ended,
            totals=self._builder.current(),
            step_duration=accounting.stats.histogram(),
            wait_duration=accounting.stats.wait_histogram(),
            last_step_unix_seconds=None if last is None else self._wall.unix_seconds(last),
            errors=dict(self.errors.counts),
            stalls=self._stall_monitor.view(),
            hang=self.job_hang.verdict,
            snapshots=self.snapshots.view(),
            collectors=collectors.health(),
            gpu=gpu,
            energy=energy,
            other_gpus=tuple(others),
            host=samples.host,
            process=samples.process,
            workers=samples.workers,
            own_fetches=accounting.batches.own_fetches(),
            worker_fetches=collectors.worker_fetches(),
            pressure=samples.pressure,
            torch_memory=samples.torch_memory,
            memory=self._memory.view(),
            attempt=self._run_so_far.view(),
            steps_before=self._run_so_far.steps_before,
            samples_before=self._run_so_far.samples_before,
            tokens_before=self._run_so_far.tokens_before,
            step_change_ratio=self._changes.ratio,
            gpu_hour_price=self.config.gpu_hour_price,
        )

    def _info_labels(self) -> dict[str, str]:
        identity = self.identity
        return self._job_labels | {
            "node": identity.node,
            "local_rank": str(identity.local_rank),
            "world_size": str(identity.world_size),
            "launcher": identity.launcher,
            "telemetry_version": __version__,
            "python_version": platform.python_version(),
            "torch_version": str(getattr(sys.modules.get("torch"), "__version__", "")),
        }

    def _say_start(self, *, logged: bool) -> None:
        trouble = self._node.trouble if self._node is not None else ""
        where = f"metrics at {self.metrics_url}" if self.metrics_url else "no metrics endpoint"
        where += f" ({trouble})" if trouble and not self.metrics_url else ""
        logs = f"logs in {self.run_dir / 'logs'}" if logged else f"no logs ({self.event_log.file.last_error})"
        run, rank = self.identity.run, self.identity.rank
        with self.errors.contained("start_line"):
            too_many = planned_threads().too_many
            logs += f"; {too_many}" if too_many else ""
        if not say(f"telemetry: run {run}, rank {rank}: {where}, {logs}{self.figures.said}"):
            self.errors.note("start_line", "stderr cannot be written")


def absolute(folder: Path) -> Path:
    """Make a path absolute, because the script may change its working folder.

    Raises:
        OSError: the path is relative, and the working folder is gone.
    """
    try:
        return folder.absolute()
    except FileNotFoundError:
        text = f"the working folder has been removed, so there is no {folder}: set run_dir to an absolute path"
        raise OSError(text) from None
