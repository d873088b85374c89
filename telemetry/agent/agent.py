"""The life of an agent: it starts, its thread ticks, and it stops in bounded time."""

from __future__ import annotations

import atexit
import functools
import os
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.agent.between_ticks import BetweenTicks
from telemetry.agent.job_link import JobLink
from telemetry.agent.parts import AgentParts
from telemetry.agent.start_line import absolute, say_start
from telemetry.attach.fork_keepalive import keep
from telemetry.attach.patches import Patches
from telemetry.config import TRIAL_VARIABLE
from telemetry.core.clock import NS, now_ns, sleep
from telemetry.core.errors import let_pass
from telemetry.core.filesystem import StandardStreams
from telemetry.core.own_threads import OwnThread
from telemetry.core.stderr import say
from telemetry.publish.board import Board
from telemetry.publish.discovery import TargetFile
from telemetry.publish.exposition import Exposition
from telemetry.publish.node import NodeService

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.agent.trial_run import TrialRun
    from telemetry.config import Config
    from telemetry.core.views import RunView

_LEAD_SECONDS: Final = 1.0
"""Time between two readings of the ring, and two checks whether a rank serves the node. It does not depend on the
sampling interval. A dead serving rank is replaced in 3 s."""

_RANK_SECONDS: Final = 0.9
"""Minimum time between two readings of the node's ranks and of torch.distributed: they are read about once a second."""

_PUBLISH_SECONDS: Final = 2.0
"""If two ticks are closer than this, only one of them publishes the state. Publishing is 40 % of the cost of a tick,
and Prometheus scrapes only once in many seconds."""

_FAMILIES_AT_A_TIME: Final = 24
"""Families that are rendered at a time, in 0.1 ms. Then the training thread gets its turn, which costs 20 us."""

_STOP_SECONDS: Final = 2.0
"""The most that ``stop`` takes: for a tick in progress, the end of the log, and then for what others still do: the
user's callback, which may have just been called, the sinks, and the export of a snapshot."""

_CLOSE_SECONDS: Final = 0.2
"""The part of it that is left for closing files and leaving the board."""


class Agent(AgentParts):
    """The agent of one training process. `telemetry.start` makes it.

    Attributes:
        running: whether it was started and not stopped.
        trial: the trial of ``telemetry tune`` that this process is; None in any other run.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.running = False
        self.trial: TrialRun | None = None
        self._pid = os.getpid()
        self._streams = StandardStreams()
        self._exec = Patches()
        self._rank_due_ns = 0
        self._thread = OwnThread(self._main, name="telemetry-agent")
        self._between_ticks = BetweenTicks(
            config.interval_seconds, self._stall_monitor, self._thread_sampler, self._line_monitor.sampler, self.errors
        )
        self._ended = False
        self._deadline_ns = 0  # of `stop`
        self._published = False  # at the newest tick
        self._skipped = False

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach, publish the first state and start the agent thread. Nothing here can fail the training."""
        self.running = True
        if TRIAL_VARIABLE in os.environ:
            from telemetry.agent.trial_run import begin

            self.trial = begin(os.environ[TRIAL_VARIABLE], self)
        with self.errors.contained("descriptors"):
            self._streams.keep()
        if self.config.patch:
            with self.errors.contained("attach"):
                self.attachment.attach()
        with self.errors.contained("board"):
            board = Board(self.identity.run, str(self.run_dir), self.identity.node)
            if board.notice:
                self.errors.tell("board", board.notice)
            targets = TargetFile(
                absolute(self.config.targets_dir or self.run_dir / "targets"),
                board.path.name,
                self.identity.node,
            )
            self._node = NodeService(
                board,
                targets,
                host=self.config.host,
                port=self.config.port,
                node=self.identity.node,
                errors=self.errors,
            )
            self.overhead.node = self._address.node = self.snapshots.node = self._node
            self._job = self.overhead.job = JobLink(self.run_dir, self.identity.node, self._node, self.errors)
            board.sweep()
        self.figures.start(self.run_dir)
        self._settle_rank()
        with self.errors.contained("endpoint"):
            self._publish()
        shown = self.identity
        self._settle_rank()  # if two ranks start at the same moment, one of them sees the other by now
        with self.errors.contained("endpoint"):
            if self.identity != shown:
                self._publish()
            self._lead()
        with self.errors.contained("snapshot"):
            self.snapshots.start()
        logged = self.event_log.start()
        atexit.register(self._stop_at_exit)
        if self.config.patch:
            for name in ("execv", "execve"):  # which all of `os.exec*` call
                self._exec.replace(os, name, self._stopping_first)
        self._thread.start()
        if self.config.start_line and self.identity.local_rank == 0:
            self._say_start(logged=logged)

    def stop(self) -> None:
        """Undo every patch, write what is left, end the threads. Returns within a few seconds in any case."""
        if not self.running or os.getpid() != self._pid:
            return
        self._deadline_ns = now_ns() + int(_STOP_SECONDS * NS)
        self.running = False
        try:
            self._exec.undo()
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
        self._between_ticks.end()
        if self._thread.ident is None:  # the thread could not be started
            self._finish()
        elif get_ident() != self._thread.ident:
            self._thread.join((self._deadline_ns - now_ns()) / NS)
        if not self._thread.is_alive():
            self._streams.release()
            if self._end_line.text:
                say(self._end_line.text)
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.attempt.end.at_exit()
        try:
            self.stop()
        except BaseException:
            # Of a signal handler. The script has ended and catches nothing: Python would print it with our frames.
            self._end()

    def _stopping_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stop before this process executes another program: `atexit` is not called then."""

        @functools.wraps(original)
        def execute(*args: Any, **kwargs: Any) -> Any:
            try:
                # A forked child has a copy of this, with an agent that does not run. `os.execvp` tries many paths.
                if self.running and _can_execute(args[0] if args else kwargs.get("path")):
                    self.attempt.end.replaced = True
                    self.stop()
            except Exception as error:
                let_pass(error)  # it cannot be logged any more
            return original(*args, **kwargs)

        return execute

    def _detach_late(self) -> None:
        """Remove hooks that had to outlive `stop`. A method, so that the agent is still alive in a forked child."""
        self.attachment.detach()

    def after_fork_in_child(self) -> None:
        """Make this copy inert: no hook, thread, socket or log line. Takes no lock.

        The objects that it refers to are kept. A profiler session, for example, must not be ended by the child.
        """
        keep(self)
        if not self.running:
            self.attachment.after_fork_in_child()
            return
        self.running = False
        self._streams.release()
        self.attachment.after_fork_in_child()
        self.snapshots.after_fork_in_child()
        self.event_log.log.file.forget()
        self.figures.after_fork_in_child()
        self.attempt.after_fork_in_child()
        if self._node is not None:
            self._node.after_fork_in_child()
        if self._job is not None:
            self._job.after_fork_in_child()
        self._collectors.after_fork_in_child()

    @property
    def metrics_url(self) -> str | None:
        """The URL of this node's metrics; None without an endpoint."""
        return self._address.url

    # -- the agent thread --------------------------------------------------------------------------------------

    def _main(self) -> None:
        interval = self.config.interval_seconds
        next_tick = now_ns()
        while not self._ended:
            due = now_ns() >= next_tick
            with self.errors.contained("agent"):
                if due:
                    self._tick_or_skip()
                else:
                    self.accounting.update()  # empties the ring, which must not overflow between distant ticks
                self._lead()
            if due:  # after a suspended machine or a long stop, continue from now
                next_tick = max(next_tick + int(interval * NS), now_ns())
            stamp = min(next_tick, now_ns() + int(_LEAD_SECONDS * NS))
            self._between_ticks.wait_until(stamp, alone=self.identity.world_size < 2)
        self._finish()

    def _settle_rank(self) -> None:
        """Follow the rank of this process: series, log, stalls and snapshots continue under the current rank."""
        self._rank_due_ns = now_ns() + int(_RANK_SECONDS * NS)
        before, identity = self.identity, self._membership.look(self._node, steps=self.accounting.steps_total)
        if identity == before:
            return
        self.identity = identity
        self._exposition = Exposition(identity.run, identity.rank, identity.node)
        self._stall_monitor.adopt(identity.rank)
        self.snapshots.adopt(identity)
        with self.errors.contained("board"):
            if self._node is not None and before.rank != identity.rank:
                self._node.move(before.rank, identity.rank)
        self.event_log.adopt(identity, self._membership.claim.rank)
        self._published = False  # so that the next tick publishes

    def _tick_or_skip(self) -> None:
        self.accounting.update()
        with self.errors.contained("heartbeat"):
            self.attempt.tick()
        # A tick that did not publish is followed by one that does, and so is a skipped one.
        busy = self._stall_monitor.active_cause is not None or not self._published
        if not self._tick_pace.skips(busy=busy, wanted=self.event_log.is_due):
            self._tick()
            return
        self._skipped = True
        with self.errors.contained("snapshot"):  # the ranks rely on it in each interval
            self.snapshots.tick(None, self._stall_monitor.stall_fields)

    def _tick(self) -> None:
        with self.errors.contained("clock"):
            stepped = self._wall.resync()
            if stepped:
                self.errors.tell("clock", f"the wall clock was stepped by {stepped:.1f} s; timestamps follow it")
        if now_ns() >= self._rank_due_ns:
            self._settle_rank()
        self._keep_up()
        with self.errors.contained("collect"):
            self._collectors.poll(self._keep_up)
        with self.errors.contained("memory"):
            self._memory.tick()
        with self.errors.contained("diagnose"):
            self.tracker.batch_release.read()
            tick = self._builder.tick()
            if self.trial is not None:
                self.trial.tick(tick, self._node)
            self._stall_monitor.tick(tick, self.accounting, intervals=self._tick_pace.intervals)
            self._changes.tick(tick.totals)
            self.tracker.time_next_batch(self._stall_monitor.waits_to_time)
            self._follow_hang()
        with self.errors.contained("lines"):
            stalls = self._stall_monitor
            if self._line_monitor.tick(stalls.open_stall, holds_others_up=stalls.holds_others_up):
                stalls.log_lines()
        self._keep_up()
        with self.errors.contained("snapshot"):
            self.snapshots.tick(self._stall_monitor.active_cause, self._stall_monitor.stall_fields)
        self._keep_up()
        self.overhead.measure()
        rare = 2 * self.config.interval_seconds > _PUBLISH_SECONDS
        self._published, self._skipped = self._skipped or not self._published or rare, False
        if self._published:
            with self.errors.contained("attempts"):
                self._count_losses()
            with self.errors.contained("exposition"):
                self._publish()
        self._keep_up()
        with self.errors.contained("jsonl"):
            self.event_log.write_what_is_due()
        with self.errors.contained("sinks"):
            self.figures.write(self._view)

    def _keep_up(self) -> None:
        self.accounting.keep_up()
        self._between_ticks.turns.check()

    def _finish(self) -> None:
        """The end of the run: write the rest of the log, and remove this rank from the board."""
        logged = False
        with self.errors.contained("agent"):
            self.accounting.update()
        if self.trial is not None:
            with self.errors.contained("trial"):
                self.trial.script_ended(self._builder.tick())
        with self.errors.contained("agent"):
            self.accounting.close()
            self.attempt.end_replay()
        with self.errors.contained("snapshot"):
            self.snapshots.end()
        with self.errors.contained("jsonl"):
            self._stall_monitor.end(self._builder.update())
            self.event_log.write_phases(last=True)
            self.event_log.window()
        with self.errors.contained("sinks"):
            self.figures.write(self._view)
            self.figures.end()
        with self.errors.contained("lines"):
            self._line_monitor.close()
        with self.errors.contained("attempts"):
            self._leave_for_next_attempt()
        with self.errors.contained("jsonl"):
            self.event_log.write_errors()
            logged = self.event_log.emit("run_end", self.event_log.end_fields() | self._end_line.log_fields())
        with self.errors.contained("end_line"):
            self._end_line.make(self.identity, wanted=self.trial is None, logged=logged)
        self._wait_for_others()
        with self.errors.contained("jsonl"):
            self.event_log.write_errors()
            self.event_log.close()
            self.attempt.close()
        with self.errors.contained("collect"):
            self._collectors.close()
        with self.errors.contained("exposition"):
            self._publish()
        with self.errors.contained("job"):
            if self._job is not None:
                self._job.close(self._seconds_left())
        with self.errors.contained("board"):
            if self._node is not None:
                self._node.leave()

    def _wait_for_others(self) -> None:
        """Wait for what others still do, until the deadline of `stop`. The run's last line is written already."""
        with self.errors.contained("on_stall"):
            self._stall_monitor.wait_for_callback(self._seconds_left())
        with self.errors.contained("sinks"):
            self.figures.wait(self._seconds_left())
        with self.errors.contained("snapshot"):
            self.snapshots.wait(self._seconds_left())

    def _seconds_left(self) -> float:
        return max(0.0, (self._deadline_ns - now_ns()) / NS - _CLOSE_SECONDS)

    # -- publishing --------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        view = self._view()
        self.figures.update(view)
        if self._node is None:
            return
        own: list[tuple[bytes, bytes]] = []
        for number, family in enumerate(self._exposition.render(view), 1):
            own.append(family)
            if number % _FAMILIES_AT_A_TIME == 0:
                sleep(0)
        pace = self._stall_monitor.pace() if self.identity.world_size > 1 else None
        self._node.publish(self.identity.rank, own, self._exposition.render_node(view), pace=pace, ended=self._ended)

    def _view(self) -> RunView:
        return self._views.view(self._builder.current(), self.identity, ended=self._ended)

    def _say_start(self, *, logged: bool) -> None:
        trouble = self._node.trouble if self._node is not None else ""
        logs = f"logs in {self.run_dir / 'logs'}" if logged else f"no logs ({self.event_log.log.file.last_error})"
        if not say_start(self.identity, metrics_url=self.metrics_url, trouble=trouble, logs=logs + self.figures.said):
            self.errors.note("start_line", "stderr cannot be written")


def _can_execute(path: Any) -> bool:
    """Whether a file can be executed, as far as it can be told: it may be a descriptor."""
    try:
        return os.access(path, os.X_OK)
    except (TypeError, ValueError):
        return isinstance(path, int)
