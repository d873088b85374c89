"""The composition root: builds the agent, runs its thread, ends it in bounded time."""

from __future__ import annotations

import atexit
import os
import platform
import random
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry._version import __version__
from telemetry.accounts import Accounts
from telemetry.attach.attachment import Attachment
from telemetry.attach.kept import keep
from telemetry.attach.ring import Ring
from telemetry.attach.steps import StepTracker
from telemetry.clock import NS, WallClock, now_ns
from telemetry.faults import Faults
from telemetry.files import StandardStreams
from telemetry.identity import identify, slug
from telemetry.judge import Judge
from telemetry.logbook import Logbook
from telemetry.membership import Membership
from telemetry.publish.board import Board
from telemetry.publish.discovery import TargetFile
from telemetry.publish.exposition import Families, Renderer
from telemetry.publish.node import NodeService
from telemetry.records import RunView
from telemetry.sampling import Sampler
from telemetry.signals import signals_blocked
from telemetry.snapshots import Snapshots
from telemetry.stderr import say

if TYPE_CHECKING:
    from telemetry.config import Config
    from telemetry.records import RankPace

_LEAD_SECONDS: Final = 1.0
"""How often, whatever the sampling interval, the ring is emptied, and a rank looks whether somebody serves: a dead one
is replaced in 3 s."""

_RANK_SECONDS: Final = 0.9
"""How long after one look at who else is there, and what torch.distributed says, to take the next: once a second."""

_PUBLISH_SECONDS: Final = 2.0
"""Two ticks that are not further apart publish the state once: that is 40 % of what a tick costs, and a scrape comes
once in many seconds."""

_FAMILIES_AT_A_TIME: Final = 6
"""Rendered in one go: 0.2 ms, after which the training thread gets its turn. A turn costs 20 us."""

_STOP_SECONDS: Final = 2.0
"""How long ``stop`` waits for the agent thread at most."""

_CALLBACK_SECONDS: Final = 1.0
"""How long the end of the run waits for the user's callback, which may have been called only now."""


class Agent:
    """The agent of one training process. `telemetry.start` makes it.

    Attributes:
        run_dir: the run folder.
        identity: run, rank, node and so on.
        running: whether it has been started and not stopped.
    """

    def __init__(self, config: Config) -> None:
        self._start_ns = now_ns()
        self.config = config
        self.identity = identify(config.run, config.run_dir and _absolute(config.run_dir))
        # Absolute: the script may change its folder, and a rotated log must not follow it.
        self.run_dir = _absolute(config.run_dir or Path("telemetry-runs") / slug(self.identity.run))
        self.running = False
        self.faults = Faults()
        self._membership = Membership(self.identity, self.faults)
        self._rank_due_ns = 0
        self._wall = WallClock()
        self._pid = os.getpid()
        self._streams = StandardStreams()

        self.tracker = StepTracker(Ring())
        self.attachment = Attachment(
            self.tracker,
            lambda error: self.faults.note("attach", error),
            gpu_events=config.gpu_events != "off",
            nvtx=config.nvtx,
        )
        self.accounts = Accounts(self.tracker, self.attachment, config, self.faults, self._start_ns)
        self._families = Families(self.identity.run, self.identity.rank)
        self._renderer = Renderer()
        self._sampler = Sampler(self.tracker, config.interval_seconds, self.faults)
        self.logbook = Logbook(
            self.run_dir,
            self.identity,
            config,
            accounts=self.accounts,
            sampler=self._sampler,
            faults=self.faults,
            wall=self._wall,
            status=self._status,
            lost=self._lost_in_stalls,
        )
        self._judge = Judge(
            config,
            self.tracker,
            self._sampler,
            faults=self.faults,
            emit=self.logbook.emit,
            timestamp=self._wall.iso,
            rank=self.identity.rank,
            peers=self._paces_of_others,
        )
        self.snapshots = Snapshots(
            config,
            self.identity,
            self.run_dir,
            tracker=self.tracker,
            profilers=self.attachment.profilers,
            faults=self.faults,
            wall=self._wall,
            emit=self.logbook.emit,
            steps=lambda: self.accounts.steps_total,
            log_name=lambda: self.logbook.log.file.path.name,
        )
        self.accounts.on_steps = self.snapshots.add_steps
        self._node: NodeService | None = None
        self._random = random.Random()  # noqa: S311 - of our own: the training's must give what it gives without us
        self._thread = threading.Thread(target=self._main, name="telemetry-agent", daemon=True)
        self._wake = threading.Event()
        self._ended = False
        self._agent_cpu_seconds = 0.0
        self._publish_this_time = False

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach, publish the first state and start the agent thread. Nothing here can fail the training."""
        self.running = True
        with self.faults.contained("descriptors"):
            self._streams.keep()
        if self.config.patch:
            with self.faults.contained("attach"):
                self.attachment.attach()
        with self.faults.contained("board"):
            board = Board(self.identity.run, str(self.run_dir), self.identity.node)
            targets = TargetFile(
                _absolute(self.config.targets_dir or self.run_dir / "targets"),
                board.path.name,
                self.identity.node,
            )
            self._node = NodeService(
                board,
                targets,
                host=self.config.host,
                port=self.config.port,
                node=self.identity.node,
                notice=lambda text: self.faults.tell("endpoint", text),
            )
            board.sweep()
        self._settle_rank()
        with self.faults.contained("endpoint"):
            self._publish()
        shown = self.identity
        self._settle_rank()  # of two that start at the same moment one sees the other by now
        with self.faults.contained("endpoint"):
            if self.identity != shown:
                self._publish()
            self._lead()
        with self.faults.contained("snapshot"):
            self.snapshots.start()
        logged = self.logbook.start()
        atexit.register(self.stop)
        with signals_blocked():
            self._thread.start()
        if self.config.start_line and self.identity.local_rank == 0:
            self._say_start(logged=logged)

    def stop(self) -> None:
        """Undo every patch, write what is left, end the threads. Returns within a few seconds, whatever happens."""
        if not self.running or os.getpid() != self._pid:
            return
        self.running = False
        over = True
        with self.faults.contained("snapshot"):
            over = self.snapshots.end_recording(self._detach_late)
        with self.faults.contained("attach"):
            for name in self.attachment.detach() if over else ():
                self.faults.tell("attach", f"{name} was patched by others after us; ours stays below it, inert")
        self._ended = True
        self._wake.set()
        if self._thread.ident is None:  # it could not be started
            self._finish()
        elif threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)
        if not self._thread.is_alive():
            self._streams.release()
        atexit.unregister(self.stop)

    def _detach_late(self) -> None:
        """The hooks had to outlive `stop`. Of the agent, so that it is still there for a child forked meanwhile."""
        self.attachment.detach()

    def after_fork_in_child(self) -> None:
        """Make this copy inert: no hook, no thread, no socket, no line. Takes no lock.

        What it refers to is kept: a session of the profiler, say, is not the child's to end.
        """
        keep(self)
        if not self.running:
            self.attachment.after_fork_in_child()
            return
        self.running = False
        self._streams.release()
        self.attachment.after_fork_in_child()
        self.snapshots.after_fork_in_child()
        self.logbook.log.file.forget()
        if self._node is not None:
            self._node.after_fork_in_child()
        self._sampler.after_fork_in_child()

    @property
    def metrics_url(self) -> str | None:
        """Where this node's metrics are, or None."""
        port = self._node.port if self._node is not None and self.config.port is not None else None
        if port is None:
            return None
        host = self.config.host
        shown = self.identity.node if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host  # noqa: S104
        return f"http://{shown}:{port}/metrics"

    # -- the agent thread --------------------------------------------------------------------------------------

    def _main(self) -> None:
        interval = self.config.interval_seconds
        next_tick = now_ns()
        while not self._ended:
            due = now_ns() >= next_tick
            with self.faults.contained("agent"):
                if due:
                    self._tick()
                else:
                    self.accounts.update()  # however far apart the ticks are, the ring holds so many steps and no more
                self._lead()
            if due:  # after a suspended machine or a long stop, go on from now
                next_tick = max(next_tick + int(interval * NS), now_ns())
            self._wait_until(min(next_tick, now_ns() + int(_LEAD_SECONDS * NS)))
        self._finish()

    def _wait_until(self, stamp: int) -> None:
        """Sleep; in a job of several ranks, look up now and then to see where the training thread is."""
        alone = self.identity.world_size < 2
        while not self._ended and (left := (stamp - now_ns()) / NS) > 0:
            # Not evenly: the steps of the training may come as evenly.
            apart = self._judge.look_seconds * (0.5 + self._random.random())
            self._wake.wait(left if alone else min(left, apart))
            if not alone:
                with self.faults.contained("diagnose"):
                    self._judge.look()

    def _settle_rank(self) -> None:
        """Follow the rank of this process: series, log, stalls and snapshots go on under the one it has now."""
        self._rank_due_ns = now_ns() + int(_RANK_SECONDS * NS)
        before, identity = self.identity, self._membership.look(self._node, steps=self.accounts.steps_total)
        if identity == before:
            return
        self.identity = identity
        self._families = Families(identity.run, identity.rank)
        self._judge.adopt(identity.rank)
        self.snapshots.adopt(identity)
        with self.faults.contained("board"):
            if self._node is not None and before.rank != identity.rank:
                self._node.move(before.rank, identity.rank)
        self.logbook.adopt(identity, self._membership.claim.rank)
        self._publish_this_time = False  # so that the next tick does

    def _lost_in_stalls(self) -> dict[str, float]:
        return self._judge.lost()

    def _paces_of_others(self) -> tuple[RankPace, ...]:
        if self._node is None or self.identity.world_size < 2:
            return ()
        return self._node.paces(self.identity.rank)

    def _tick(self) -> None:
        with self.faults.contained("clock"):
            stepped = self._wall.resync()
            if stepped:
                self.faults.tell("clock", f"the wall clock was stepped by {stepped:.1f} s; timestamps follow it")
        if now_ns() >= self._rank_due_ns:
            self._settle_rank()
        self.accounts.update()
        with self.faults.contained("collect"):
            self._sampler.poll(self.accounts.keep_up)
        with self.faults.contained("diagnose"):
            self._judge.tick(self.accounts)
        self.accounts.keep_up()
        with self.faults.contained("snapshot"):
            self.snapshots.tick(self._judge.view().active, self._judge.stall_fields)
        self.accounts.keep_up()
        self._agent_cpu_seconds = time.thread_time()
        self._publish_this_time = not self._publish_this_time or 2 * self.config.interval_seconds > _PUBLISH_SECONDS
        if self._publish_this_time:
            with self.faults.contained("exposition"):
                self._publish()
        self.accounts.keep_up()
        with self.faults.contained("jsonl"):
            self.logbook.write_what_is_due()

    def _finish(self) -> None:
        """The last things: what is left goes to the log, and this rank leaves the board."""
        with self.faults.contained("agent"):
            self.accounts.update()
        self.accounts.close()
        with self.faults.contained("snapshot"):
            self.snapshots.finish()
        with self.faults.contained("jsonl"):
            self._judge.end(self.accounts.steps_total)
            self.logbook.window(self.accounts.ledger.at_ns)
        with self.faults.contained("on_stall"):
            self._judge.wait_for_callback(_CALLBACK_SECONDS)
        with self.faults.contained("jsonl"):
            self.logbook.write_errors()
        with self.faults.contained("jsonl"):
            self.logbook.emit("run_end", self.logbook.end_fields())
        with self.faults.contained("jsonl"):
            self.logbook.close()
        with self.faults.contained("collect"):
            self._sampler.close()
        with self.faults.contained("exposition"):
            self._publish()
        with self.faults.contained("board"):
            if self._node is not None:
                self._node.leave()

    # -- publishing --------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        if self._node is not None:
            with self.faults.contained("endpoint"):
                self._node.lead_if_vacant()

    def _publish(self) -> None:
        if self._node is None:
            return
        rendered = []
        for number, family in enumerate(self._families.of(self._view()), 1):
            rendered.append(self._renderer.render(family))
            if number % _FAMILIES_AT_A_TIME == 0:
                time.sleep(0)
        pace = self._judge.pace() if self.identity.world_size > 1 else None
        self._node.publish(self.identity.rank, rendered, pace=pace, ended=self._ended)

    def _view(self) -> RunView:
        accounts, sampler, last = self.accounts, self._sampler, self.accounts.ledger.last_step_ns
        return RunView(
            info=self._info_labels(),
            ended=self._ended,
            steps=accounts.steps_total,
            step_duration=accounts.stats.histogram(),
            wait_duration=accounts.stats.wait_histogram(),
            ledger_seconds=accounts.ledger.seconds(),
            exposed_wait_seconds=accounts.exposed_seconds,
            last_step_unix_seconds=None if last is None else self._wall.unix_seconds(last),
            optimizer_steps=self.tracker.optimizer_steps,
            overhead_seconds=self._status()[1],
            dropped_steps=accounts.dropped_steps,
            errors=dict(self.faults.counts),
            stalls=self._judge.view(),
            snapshots=self.snapshots.view(),
            collectors=sampler.health(),
            gpu=sampler.newest("nvml"),
            host=sampler.newest("host"),
            process=sampler.newest("process"),
            workers=sampler.newest("workers"),
            own_fetches=accounts.own_fetches(),
            worker_fetches=sampler.worker_fetches(),
            pressure=sampler.newest("pressure"),
            torch_memory=sampler.newest("torch_memory"),
        )

    def _status(self) -> tuple[str | None, dict[str, float]]:
        """Where the metrics are, and what the agent itself has cost: seconds by thread."""
        served = self._node.cpu_seconds if self._node is not None else 0.0
        return self.metrics_url, {
            "training": self.tracker.overhead_ns / NS,
            "agent": self._agent_cpu_seconds + self._sampler.cpu_seconds + served,
        }

    def _info_labels(self) -> dict[str, str]:
        torch = sys.modules.get("torch")
        return {
            "node": self.identity.node,
            "local_rank": str(self.identity.local_rank),
            "world_size": str(self.identity.world_size),
            "launcher": self.identity.launcher,
            "telemetry_version": __version__,
            "python_version": platform.python_version(),
            "torch_version": str(getattr(torch, "__version__", "")),
        }

    def _say_start(self, *, logged: bool) -> None:
        logs = f"logs in {self.run_dir / 'logs'}" if logged else f"no logs ({self.logbook.log.file.last_error})"
        metrics = self.metrics_url
        trouble = self._node.trouble if self._node is not None else ""
        where = f"metrics at {metrics}" if metrics else "no metrics endpoint" + f" ({trouble})" * bool(trouble)
        text = f"telemetry: run {self.identity.run}, rank {self.identity.rank}: {where}, {logs}"
        if not say(text):
            self.faults.note("start_line", "stderr cannot be written")


def _absolute(folder: Path) -> Path:
    """The folder, wherever the script changes to.

    Raises:
        OSError: it is relative, and there is no working folder.
    """
    try:
        return folder.absolute()
    except FileNotFoundError:
        text = f"the working folder has been removed, so there is no {folder}: set run_dir to an absolute path"
        raise OSError(text) from None
