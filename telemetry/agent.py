"""The composition root: builds the agent, runs its thread, ends it in bounded time."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry._version import __version__
from telemetry.attach.attachment import Attachment
from telemetry.attach.ring import BATCH, CLOSES, OPENS, Ring
from telemetry.attach.steps import StepTracker
from telemetry.clock import NS, WallClock, now_ns
from telemetry.collect.torch_memory import cuda
from telemetry.diagnose.ledger import Ledger
from telemetry.diagnose.stats import ExposedWait, StepStats
from telemetry.faults import Faults
from telemetry.identity import identify, slug
from telemetry.judge import Judge
from telemetry.publish import fields
from telemetry.publish.board import Board
from telemetry.publish.discovery import TargetFile
from telemetry.publish.exposition import Families, render
from telemetry.publish.jsonl import JsonLog
from telemetry.publish.node import NodeService
from telemetry.records import CATEGORIES, DATA_WAIT, RunView
from telemetry.sampling import Sampler
from telemetry.signals import signals_blocked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from telemetry.config import Config
    from telemetry.diagnose.ledger import Span

_CHUNK: Final = 256
"""Spans folded in one go: about 0.4 ms, after which the training thread gets its turn."""

_LEAD_SECONDS: Final = 1.0
"""How often a rank looks whether somebody serves, whatever the sampling interval: a dead one is replaced in 3 s."""

_STOP_SECONDS: Final = 2.0
"""How long ``stop`` waits for the agent thread at most."""

_FIRST_WINDOW_SECONDS: Final = 1.0
"""The first window of a run; each following one is twice as long, up to the log interval, so that young runs show."""


_SHORTEST_PHASE_SECONDS: Final = 0.001
"""Shorter ones are in the ledger, but no line of the log."""


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
        self.identity = identify(config.run, config.run_dir)
        # Absolute: the script may change its folder, and a rotated log must not follow it.
        self.run_dir = (config.run_dir or Path("telemetry-runs") / slug(self.identity.run)).absolute()
        self.running = False
        self.faults = Faults()
        self._wall = WallClock()
        self._pid = os.getpid()

        self.tracker = StepTracker(Ring())
        self.attachment = Attachment(
            self.tracker,
            lambda error: self.faults.note("attach", error),
            gpu_events=config.gpu_events != "off",
        )
        self._ledger = Ledger(self._start_ns)
        self._stats = StepStats(config.step_buckets)
        self._exposed = ExposedWait()
        self._exposed_source: str | None = "host"
        self._dropped_seen = [0] * len(CATEGORIES)
        self._hook_errors_seen = 0

        self._families = Families(self.identity.run, self.identity.rank)
        self._log = JsonLog(
            self.run_dir / "logs",
            self.identity,
            timestamp=self._wall.iso,
            step=lambda: self._stats.steps,
            head=self._head_fields,
            max_bytes=config.log_max_bytes,
            max_files=config.log_max_files,
        )
        self._sampler = Sampler(self.tracker, config.interval_seconds, self.faults)
        self._judge = Judge(config, self.tracker, self._sampler, self._emit, self._wall.iso)
        self._node: NodeService | None = None
        self._thread = threading.Thread(target=self._main, name="telemetry-agent", daemon=True)
        self._wake = threading.Event()
        self._ended = False
        self._agent_cpu_seconds = 0.0
        self._window_started_ns = self._start_ns
        self._window_seconds = min(_FIRST_WINDOW_SECONDS, config.log_interval_seconds)
        self._window_before: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._window_exposed_before: float | None = 0.0
        self._window_optimizer_before = 0

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach, publish the first state and start the agent thread. Nothing here can fail the training."""
        self.running = True
        if self.config.patch:
            with self.faults.contained("attach"):
                self.attachment.attach()
        with self.faults.contained("board"):
            board = Board(self.identity.run, str(self.run_dir))
            targets = TargetFile(
                (self.config.targets_dir or self.run_dir / "targets").absolute(),
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
        with self.faults.contained("endpoint"):
            self._publish()
            self._lead()
        logged = self._emit("run_start", self._head_fields() | {"settings": self.config.as_log_fields()})
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
        with self.faults.contained("attach"):
            for name in self.attachment.detach():
                self.faults.tell("attach", f"{name} was patched by others after us; ours stays below it, inert")
        self._ended = True
        self._wake.set()
        if self._thread.ident is None:  # it could not be started
            self._finish()
        elif threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)
        atexit.unregister(self.stop)

    def after_fork_in_child(self) -> None:
        """Make this copy inert: no hook, no thread, no socket, no line. Takes no lock."""
        self.running = False
        self.attachment.after_fork_in_child()
        self._log.file.forget()
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
                self._lead()
            if due:  # after a suspended machine or a long stop, go on from now
                next_tick = max(next_tick + int(interval * NS), now_ns())
            self._wake.wait(max(0.0, min((next_tick - now_ns()) / NS, _LEAD_SECONDS)))
        self._finish()

    def _tick(self) -> None:
        with self.faults.contained("clock"):
            stepped = self._wall.resync()
            if stepped:
                self.faults.tell("clock", f"the wall clock was stepped by {stepped:.1f} s; timestamps follow it")
        self._account()
        with self.faults.contained("collect"):
            self._sampler.poll()
        with self.faults.contained("diagnose"):
            self._judge.tick(self._ledger, self._exposed.seconds, self._stats)
        self._agent_cpu_seconds = time.thread_time()
        with self.faults.contained("exposition"):
            self._publish()
        self._log_what_is_due()

    def _finish(self) -> None:
        """The last things: what is left goes to the log, and this rank leaves the board."""
        with self.faults.contained("agent"):
            self._account()
        # A step left with ``break`` was a step; when it ended nobody knows, so it is in no distribution.
        self._stats.steps += self._ledger.step_is_open
        with self.faults.contained("jsonl"):
            self._judge.end(self._stats.steps)
            self._log_window(self._ledger.at_ns)
        with self.faults.contained("jsonl"):
            self._emit("run_end", self._end_fields())
        with self.faults.contained("collect"):
            self._sampler.close()
        with self.faults.contained("exposition"):
            self._publish()
        with self.faults.contained("board"):
            if self._node is not None:
                self._node.leave()

    def _account(self) -> None:
        """Bring the ledger, the steps and the exposed wait up to now."""
        tracker, ring = self.tracker, self.tracker.ring
        with self.faults.contained("ledger"):
            # Before the ring is emptied: a request seen in progress here is either still so, or its span is there.
            waiting_since, head = tracker.waiting_since, ring.head
            while taken := ring.drain(_CHUNK, head):
                self._ledger.fold(_spans(taken))
                self._stats.add(self._ledger.take_steps())
                time.sleep(0)
            self._ledger.advance(now_ns(), waiting_since)
            dropped = list(ring.dropped_ns)
            if dropped != self._dropped_seen:
                self._ledger.rebook(now - seen for now, seen in zip(dropped, self._dropped_seen, strict=True))
                self._dropped_seen = dropped
            self._account_exposed()
        if tracker.errors != self._hook_errors_seen:
            new, self._hook_errors_seen = tracker.errors - self._hook_errors_seen, tracker.errors
            self.faults.note("hook", tracker.last_error or "unknown", count=new)

    def _account_exposed(self) -> None:
        waited = self._ledger.ns[DATA_WAIT] / NS
        if cuda() is None:
            self._exposed.host(waited)
            return
        self.attachment.watch_gpu()
        clock = self.tracker.gpu
        if clock is None:
            self._exposed_source = None
            self._exposed.absent(waited)
        else:
            self._exposed_source = "cuda_events"
            (sampled, sampled_wait), (edge, edge_wait) = clock.sampled_ns, clock.edge_ns
            self._exposed.gpu(waited, (sampled / NS, sampled_wait / NS), (edge / NS, edge_wait / NS))

    # -- publishing --------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        if self._node is not None:
            with self.faults.contained("endpoint"):
                self._node.lead_if_vacant()

    def _publish(self) -> None:
        if self._node is None:
            return
        rendered = []
        for family in self._families.of(self._view()):
            rendered.append(render(family))
            time.sleep(0)  # a family takes some 50 us; the training thread may have the interpreter in between
        self._node.publish(self.identity.rank, rendered, ended=self._ended)

    def _view(self) -> RunView:
        sampler, last = self._sampler, self._ledger.last_step_ns
        return RunView(
            info=self._info_labels(),
            ended=self._ended,
            steps=self._stats.steps + self.tracker.ring.dropped,
            step_duration=self._stats.histogram(),
            ledger_seconds=self._ledger.seconds(),
            exposed_wait_seconds=self._exposed.seconds,
            last_step_unix_seconds=None if last is None else self._wall.unix_seconds(last),
            optimizer_steps=self.tracker.optimizer_steps,
            overhead_seconds=self._overhead(),
            dropped_steps=self.tracker.ring.dropped,
            errors=dict(self.faults.counts),
            stalls=self._judge.view(),
            collectors=sampler.health(),
            gpu=sampler.newest("nvml"),
            host=sampler.newest("host"),
            process=sampler.newest("process"),
            workers=sampler.newest("workers"),
            pressure=sampler.newest("pressure"),
            torch_memory=sampler.newest("torch_memory"),
        )

    def _overhead(self) -> dict[str, float]:
        served = self._node.endpoint.cpu_seconds if self._node is not None and self._node.endpoint is not None else 0.0
        return {
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

    # -- the log -----------------------------------------------------------------------------------------------

    def _log_what_is_due(self) -> None:
        with self.faults.contained("jsonl"):
            for span in (*self._ledger.take_phases(), *self._take_named_phases()):
                if span.seconds >= _SHORTEST_PHASE_SECONDS:
                    self._emit("phase", fields.phase(span, self._wall.iso(span.start_ns)))
            now = self._ledger.at_ns
            if now - self._window_started_ns >= self._window_seconds * NS:
                self._window_seconds = min(2 * self._window_seconds, self.config.log_interval_seconds)
                self._log_window(now)
                for event, values in self._sampler.take_log_fields().items():
                    self._emit(event, values)
            for line in self.faults.take_lines():
                self._emit("error", line)

    def _take_named_phases(self) -> Iterator[Any]:
        while self.tracker.phases:
            yield self.tracker.phases.popleft()

    def _log_window(self, now: int) -> None:
        ledger, window = self._ledger.seconds(), self._stats.take_window()
        spent = {category: ledger[category] - self._window_before[category] for category in CATEGORIES}
        exposed, before = self._exposed.seconds, self._window_exposed_before
        in_window = None if exposed is None or before is None else exposed - before
        loop = spent["data_wait"] + spent["compute"]
        optimizer = self.tracker.optimizer_steps
        line = {
            "window_seconds": (now - self._window_started_ns) / NS,
            "steps": window.steps,
            "optimizer_steps": optimizer - self._window_optimizer_before,
            "ledger_seconds": spent,
            "exposed_wait_seconds": in_window,
            "exposed_wait_ratio": in_window / loop if in_window is not None and loop > 0 else None,
            "exposed_wait_source": self._exposed_source,
            "step_seconds": fields.percentiles(window.step.percentiles()),
            "data_wait_seconds": fields.percentiles(window.wait.percentiles()),
            "step_sketch": window.step.as_log_field(),
            "data_wait_sketch": window.wait.as_log_field(),
        }
        self._emit("window", fields.rounded(line) | self._totals())
        self._stats.commit(window)  # after the line: should it begin a new file, that file's head has what came before
        self._window_started_ns, self._window_before = now, ledger
        self._window_exposed_before, self._window_optimizer_before = exposed, optimizer

    def _totals(self) -> dict[str, Any]:
        """The run so far: in every window line, so that the newest line alone tells where the time went."""
        totals = {
            "steps_total": self._stats.steps + self.tracker.ring.dropped,
            "wall_seconds": self._ledger.wall_seconds,
            "ledger_total_seconds": self._ledger.seconds(),
            "exposed_wait_total_seconds": self._exposed.seconds,
            "overhead_seconds": self._overhead(),
            "dropped_steps_total": self.tracker.ring.dropped,
        }
        return {key: fields.rounded(value) for key, value in totals.items()}

    def _head_fields(self) -> dict[str, Any]:
        """What a log file begins with; after a rotation also the run so far, whose windows may be gone by then."""
        head: dict[str, Any] = {
            "started": self._wall.iso(self._start_ns),
            "world_size": self.identity.world_size,
            "launcher": self.identity.launcher,
            "telemetry_version": __version__,
            "python_version": platform.python_version(),
            "cpu_count": os.cpu_count(),
            "metrics_url": self.metrics_url,
        }
        for name, sketch in (("step", self._stats.run_step), ("data_wait", self._stats.run_wait)):
            if sketch.total:
                head[f"{name}_sketch"] = sketch.as_log_field()
                head[f"{name}_max_seconds"] = fields.rounded(sketch.largest)
        return head

    def _end_fields(self) -> dict[str, Any]:
        return self._totals() | {
            "errors_total": dict(self.faults.counts),
            "log_lines_dropped": self._log.file.dropped,
        }

    def _emit(self, event: str, values: dict[str, Any]) -> bool:
        """Write a line; what cannot be written is counted."""
        try:
            if self._log.emit(event, values):
                return True
            self.faults.note("jsonl", self._log.file.last_error or "the log cannot be written")
        except Exception as error:
            self.faults.note("jsonl", error)
        return False

    def _say_start(self, *, logged: bool) -> None:
        logs = f"logs in {self.run_dir / 'logs'}" if logged else f"no logs ({self._log.file.last_error})"
        metrics = self.metrics_url
        where = f"metrics at {metrics}" if metrics else "no metrics endpoint"
        text = f"telemetry: run {self.identity.run}, rank {self.identity.rank}: {where}, {logs}"
        try:
            sys.stderr.write("".join(c if c.isprintable() else "?" for c in text) + "\n")
        except Exception:
            self.faults.note("start_line", "stderr cannot be written")


def _spans(entries: Iterable[tuple[int, int, int]]) -> Iterator[Span]:
    """Ring entries in the words of the ledger."""
    for start, end, code in entries:
        flags = bool(code & CLOSES), bool(code & OPENS), bool(code & BATCH)
        yield (start, end, CATEGORIES[code & 7], CATEGORIES[code >> 3 & 7], *flags)
