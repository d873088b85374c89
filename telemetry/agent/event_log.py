"""Decides what is written into the log, and when."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any, Final

from telemetry._version import __version__
from telemetry.core.log_window import LogWindow
from telemetry.publish import log_fields
from telemetry.publish.jsonl import JsonLog
from telemetry.records import COMPUTE, DATA_WAIT, Totals
from telemetry.sources import proc

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.endpoint_address import EndpointAddress
    from telemetry.agent.restarts import AttemptLog
    from telemetry.agent.run_environment import RunEnvironment
    from telemetry.agent.stall_report import StallCounts
    from telemetry.agent.totals import CollectorPoller, TotalsBuilder
    from telemetry.agent.trends import MemoryWatch
    from telemetry.config import Config
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity

_ENOUGH: Final = 0.98
"""Share of its time after which a window is over. A tick that comes a moment too soon must not wait for another one: in
a calm loop that would be a tick more in each window."""

_FIRST_WINDOW_SECONDS: Final = 1.0
"""Length of the first window. Each window is twice as long as the one before, up to the log interval. So a young run
shows in the log early."""


class EventLog:
    """Turns the accounting and the samples of one rank into log lines.

    Args:
        run_dir: the run folder; the log goes into its ``logs``.
        builder: has the newest totals.
        attempt: the fields that tell of this attempt of the run.
        life: tells this agent's lines from those of other agents.
        environment: versions, cores, and the settings of the loader.
        address: the URL of the metrics.
        memory: how the memory of the run grows.
        stall_counts: the seconds lost in stalls.

    Attributes:
        newest_window: the newest window that was written; None before the first.
    """

    def __init__(
        self,
        run_dir: Path,
        identity: Identity,
        config: Config,
        *,
        accounting: Accounting,
        builder: TotalsBuilder,
        attempt: AttemptLog,
        life: str,
        environment: RunEnvironment,
        address: EndpointAddress,
        collectors: CollectorPoller,
        memory: MemoryWatch,
        stall_counts: StallCounts,
        errors: ErrorLog,
        wall: WallClock,
    ) -> None:
        self._identity = identity
        self._claimed_rank = identity.rank
        self._config = config
        self._accounting = accounting
        self._collectors = collectors
        self._memory = memory
        self._errors = errors
        self._wall = wall
        self._builder = builder
        self._attempt = attempt
        self._address = address
        self._stall_counts = stall_counts
        self.log = JsonLog(
            run_dir / "logs",
            identity,
            timestamp=wall.iso,
            step=accounting.count_steps,
            head=self.head_fields,
            max_bytes=config.log_max_bytes,
            max_files=config.log_max_files,
        )
        self._seconds = min(_FIRST_WINDOW_SECONDS, config.log_interval_seconds)
        self._life, self._began = life, False
        self._environment = environment
        self._before = Totals()  # the totals at the end of the last window
        self._children = 0
        self.newest_window: LogWindow | None = None

    def emit(self, event: str, values: dict[str, Any]) -> bool:
        """Write a line, and count it as an error if it cannot be written. Returns whether it is in the file."""
        try:
            if self.log.emit(event, values):
                return True
            self._errors.note("jsonl", self.log.file.last_error or "the log cannot be written")
        except Exception as error:
            self._errors.note("jsonl", error)
        return False

    def start(self) -> bool:
        """Write the first line of the run."""
        self._began = True
        return self.emit("run_start", self.head_fields())

    def adopt(self, identity: Identity, claimed_rank: int) -> None:
        """Go on under another rank: the rank of this process has become known or has changed. The log says so.

        Args:
            identity: the identity, with the rank that the process is shown under.
            claimed_rank: the rank that the process itself claims.
        """
        self._identity, self._claimed_rank = identity, claimed_rank
        with self._errors.contained("jsonl"):
            self.log.adopt(identity)
        if self._began:
            self.emit("run_start", self.head_fields() | {"continued": True})

    @property
    def child_processes(self) -> int:
        """The largest number of child processes of the script that may train."""
        return self._children

    @property
    def is_due(self) -> bool:
        """Whether a window's time is over, or a phase has ended. Errors wait for the next tick."""
        return self._window_is_over(self._accounting.ledger.wall_seconds) or self._accounting.phase_has_ended

    def _window_is_over(self, wall_seconds: float) -> bool:
        return wall_seconds - self._before.wall_seconds >= _ENOUGH * self._seconds

    def write_what_is_due(self) -> None:
        """Write phases and errors at once. Write a window, and the samples in it, when its time is over."""
        self.write_phases()
        self._children = max(self._children, proc.started())
        if self._window_is_over(self._builder.current().wall_seconds):
            self._seconds = min(2 * self._seconds, self._config.log_interval_seconds)
            self.window()
            for event, values in self._collectors.take_log_fields().items():
                self.emit(event, values)
        self.write_errors()

    def write_phases(self, *, last: bool = False) -> None:
        """The phases that have ended; ``last``: there is no later call."""
        spans = (*self._accounting.ledger.take_phases(), *self._accounting.take_named_phases())
        for fields in self._attempt.phase_lines(spans, last=last):
            self.emit("phase", fields)

    def window(self) -> None:
        """Write the window that ends now, with the totals of the run so far."""
        self._replace_removed_file()
        accounting, totals = self._accounting, self._builder.current()
        window, added = accounting.stats.take_window(), totals - self._before
        self.newest_window = LogWindow(added, window.step.percentiles(), window.wait.percentiles())
        exposed, loop = added.exposed_wait_seconds, added.ledger_seconds[DATA_WAIT] + added.ledger_seconds[COMPUTE]
        line = {
            "window_seconds": added.wall_seconds,
            "steps": window.steps,
            "optimizer_steps": added.optimizer_steps,
            "ledger_seconds": added.ledger_seconds,
            "exposed_wait_seconds": exposed,
            "exposed_wait_ratio": exposed / loop if exposed is not None and loop > 0 else None,
            "exposed_wait_source": None if accounting.no_batch_seen else accounting.exposed_source,
            "step_seconds": log_fields.percentiles(self.newest_window.step),
            "data_wait_seconds": log_fields.percentiles(self.newest_window.wait),
            "step_sketch": window.step.as_log_field(),
            "data_wait_sketch": window.wait.as_log_field(),
        }
        self.emit("window", log_fields.rounded(line) | self._totals() | self._environment.news())
        # After the line: if that line begins a new file, the file's head has the totals before it.
        accounting.stats.commit(window)
        self._before = totals

    def _replace_removed_file(self) -> None:
        """Begin a new file if another process has deleted or renamed the current one."""
        found = self.log.file.replace_if_removed()
        if found is None:
            return
        text, lost = found
        if lost:
            self._errors.note("jsonl", f"{text}; {lost} lines are lost", count=lost)
        else:
            self._errors.tell("jsonl", text)

    def head_fields(self) -> dict[str, Any]:
        """The first line of a log file. After a rotation it has the run so far, because old windows may be deleted."""
        head: dict[str, Any] = {
            "started": self._wall.iso(self._accounting.ledger.start_ns),
            "world_size": self._identity.world_size,
            "launcher": self._identity.launcher,
            "rank_source": self._identity.rank_source,
            "claimed_rank": self._claimed_rank,
            "life": self._life,
            **self._attempt.head_fields(),
            "telemetry_version": __version__,
            "python_version": platform.python_version(),
            "cpu_count": os.cpu_count(),
            "metrics_url": self._address.url,
            "settings": self._config.as_log_fields(),
            **self._environment.fields(),
        }
        stats = self._accounting.stats
        for name, sketch in (("step", stats.run_step), ("data_wait", stats.run_wait)):
            if sketch.total:
                head[f"{name}_sketch"] = sketch.as_log_field()
                head[f"{name}_max_seconds"] = log_fields.rounded(sketch.largest)
        return head

    def end_fields(self) -> dict[str, Any]:
        """The fields of the last line of the run."""
        return self._totals() | {
            **self._attempt.end.fields(),
            "errors_total": dict(self._errors.counts),
            "log_lines_dropped": self.log.file.dropped,
        }

    def write_errors(self) -> None:
        """Write the errors that are not in the log yet."""
        for line in self._errors.take_lines():
            self.emit("error", line)

    def close(self) -> None:
        """Close the file after the last line."""
        self.log.file.forget()

    def _totals(self) -> dict[str, Any]:
        """The totals of the run so far. They are in every window line, so the newest line alone shows the ledger."""
        totals, energy_of = self._builder.current(), self._builder.energy_sample
        fields = {
            "steps_total": totals.steps,
            "wall_seconds": totals.wall_seconds,
            "ledger_total_seconds": totals.ledger_seconds,
            "exposed_wait_total_seconds": totals.exposed_wait_seconds,
            "exposed_wait_absent": self._accounting.exposed_absent,
            "first_wait_seconds": totals.first_wait_seconds,
            "overhead_seconds": totals.overhead_seconds,
            "stall_lost_total_seconds": self._stall_counts.lost(),
            "dropped_steps_total": totals.dropped_steps,
            "child_processes": self._children,
            "unseen_steps_total": totals.unseen_steps,
            "samples_total": totals.samples,
            "tokens_total": totals.tokens,
            "gpu_energy_total_joules": totals.gpu_energy_joules,
            "gpu_uuid": energy_of.uuid if totals.gpu_energy_joules and energy_of is not None else None,
            "cpu_total_seconds": log_fields.cpu_seconds(totals),
        }
        memory = self._memory.log_field()
        if memory is not None:
            fields["memory"] = memory
        return {key: log_fields.rounded(value) for key, value in (fields | self._attempt.fields()).items()}
