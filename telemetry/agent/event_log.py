"""What the log of this process has, and when: its first and last line, windows, phases and errors."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import structs

from telemetry._version import __version__
from telemetry.diagnosis.endings import FAULT_SECONDS
from telemetry.log.file import LogFile, json_logger
from telemetry.log.lines import (
    ABSENT,
    ErrorLine,
    GpuErrorLine,
    HostLine,
    MemoryForecast,
    Resumption,
    WindowLine,
    fields_of,
)
from telemetry.model.records import CLEANED_UP
from telemetry.model.totals import LogWindow, Totals
from telemetry.sources import proc
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from telemetry.agent.attempt import AttemptLog
    from telemetry.config import Config
    from telemetry.diagnosis.memory_outlook import MemoryWatch
    from telemetry.diagnosis.stalls import StallCounts
    from telemetry.log.lines import Line, RunStartLine
    from telemetry.loop.ledger import Accounting
    from telemetry.loop.tick_totals import TotalsBuilder
    from telemetry.model.records import StepTrend
    from telemetry.node.endpoint import NodeService
    from telemetry.safety.errors import ErrorLog
    from telemetry.sources.polling import CollectorPoller
    from telemetry.util.clock import WallClock
    from telemetry.util.identity import Identity

_CPUINFO: Final = Path("/proc/cpuinfo")
_FIRST_CORE_BYTES: Final = 2048
"""The kernel writes this file core by core. The first core is enough, and a machine may have hundreds."""


def _cpu_model() -> str:
    """The name of the processor; empty if the kernel does not give one."""
    try:
        with _CPUINFO.open("rb") as file:
            text = file.read(_FIRST_CORE_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")


_ENOUGH: Final = 0.98
"""A window is over after this share of its length. Otherwise a tick that comes a moment too early would cost a calm
loop one more tick in each window."""

_FIRST_WINDOW_SECONDS: Final = 1.0
"""The first window's length. Each later one is twice as long, up to the log interval. So a young run shows early."""

_MAX_GPU_FAULTS: Final = 100


class EventLog:
    """Decides which log lines a rank writes, and when, and makes them from its accounting and samples.

    Attributes:
        identity: this process. Its rank may become known later.
        file: the log's file, in the folder ``logs`` of the run folder.
        child_processes: the largest number of child processes seen so far that may train.
        newest_window: the newest window in the log; None before the first. ``host``: the newest line of that event.
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
        node: NodeService | None,
        collectors: CollectorPoller,
        memory: MemoryWatch,
        stall_counts: StallCounts,
        errors: ErrorLog,
        wall: WallClock,
    ) -> None:
        self.identity = identity
        self._config = config
        self._accounting = accounting
        self._collectors = collectors
        self._memory = memory
        self._errors = errors
        self._wall = wall
        self._builder = builder
        self._attempt = attempt
        self._node = node
        self._stall_counts = stall_counts
        self._folder = run_dir / "logs"
        self._logger = json_logger()
        self.file = LogFile(self._path, config.log_max_bytes, config.log_max_files, self._head_line)
        self._seconds = min(_FIRST_WINDOW_SECONDS, config.log_interval_seconds)
        self._began = False
        self._environment = {
            "script": Path(sys.argv[0]).name if sys.argv else "",
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        }
        self._surroundings: dict[str, Any] = {}  # as the log has them
        self._before = Totals()  # the totals at the end of the last window
        self.child_processes = 0
        self.newest_window: LogWindow | None = None
        self.host = HostLine()
        self._gpu_faults: deque[tuple[int, GpuErrorLine]] = deque(maxlen=_MAX_GPU_FAULTS)

    # -- lines ---------------------------------------------------------------------------------------------------

    def emit(self, event: str, values: Mapping[str, Any]) -> bool:
        """Write a line, and count an error if that fails. Returns whether the file has it."""
        try:
            if self.file.write(self._line(event, values)):
                return True
            self._errors.note("jsonl", self.file.last_error or "the log cannot be written")
        except Exception as error:
            self._errors.note("jsonl", error)
        return False

    def write(self, line: Line) -> bool:
        """Write a record, as `emit` does."""
        return self.emit(str(line.__struct_config__.tag), fields_of(line))

    def _line(self, event: str, values: Mapping[str, Any]) -> bytes:
        me, now = self.identity, self._wall.iso()
        fields = {"time": now, "tid": threading.get_native_id(), "step": self._accounting.steps_total}
        fields |= _rounded(values)
        fields |= {"run": me.run, "rank": me.rank, "local_rank": me.local_rank, "node": me.node, "pid": me.pid}
        line: bytes = self._logger.msg(event, **fields)
        return line + b"\n"

    def _head_line(self) -> bytes:
        return self._line("run_start", fields_of(structs.replace(self.head(), continued=True)))

    @property
    def _path(self) -> Path:
        return self._folder / f"rank-{self.identity.rank}.{self.identity.pid}.jsonl"

    # -- when they are due ---------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Write the first line of the run."""
        self._began = True
        return self.write(self.head())

    def rank_has_changed(self) -> None:
        """Continue under another rank, after this process has learned or changed its rank, and log that."""
        with self._errors.contained("jsonl"):
            self.file.move(self._path)
        if self._began:
            self.write(structs.replace(self.head(), continued=True))

    def _window_is_over(self, wall_seconds: float) -> bool:
        return wall_seconds - self._before.wall_seconds >= _ENOUGH * self._seconds

    def write_what_is_due(self) -> None:
        """Write phases and errors, and the window with its samples once it is over."""
        self.write_phases()
        self.child_processes = max(self.child_processes, proc.started())
        if self._window_is_over(self._builder.current().wall_seconds):
            self._seconds = min(2 * self._seconds, self._config.log_interval_seconds)
            self.window()
            for event, values in self._collectors.take_log_fields():
                self.emit(event, values)
                if event == "host":
                    self.host = msgspec.convert(values, HostLine)
        self.write_errors()

    def write_phases(self, *, last: bool = False) -> None:
        """Write the phases that have ended. ``last``: this is the last call."""
        for line in self._attempt.phases.lines(self._accounting.take_phases(), self._attempt.stuck.seconds, last=last):
            self.write(line)

    def write_gpu_errors(self, *, wait_seconds: float = 0.0) -> None:
        """Write the errors of the GPU, and the allocations on it that failed, which the log does not have yet.

        ``wait_seconds``: as in `CollectorPoller`.
        """
        for line in self._collectors.take_gpu_errors(wait_seconds=wait_seconds):
            self.write(line)
            if line.xid != CLEANED_UP:
                fault = structs.replace(line, rank=self.identity.rank, node=self.identity.node)
                self._gpu_faults.append((now_ns(), fault))
        for failed in self._collectors.take_failed_allocations():
            self.write(structs.replace(failed, memory=self._memory_growth()))

    @property
    def gpu_fault(self) -> GpuErrorLine | None:
        """The first error of the GPU in the last minute; None without one."""
        begin = now_ns() - int(FAULT_SECONDS * NS)
        return next((fault for at_ns, fault in self._gpu_faults if at_ns >= begin), None)

    def write_errors(self) -> None:
        """Write the errors that the log does not have yet."""
        for source, message, errors_total in self._errors.take_notes():
            self.write(ErrorLine(source=source, message=message, errors_total=errors_total))

    # -- what they have ------------------------------------------------------------------------------------------

    def window(self) -> None:
        """Write the window that ends now, with the totals of the run so far."""
        self._replace_removed_file()
        accounting, totals = self._accounting, self._builder.current()
        (step, wait), added = accounting.stats.take_window(), totals - self._before
        self.newest_window = window = LogWindow(added, step.percentiles(), wait.percentiles())
        exposed, loop = added.exposed_wait_seconds, added.all_loop_seconds
        self.write(
            WindowLine(
                window_seconds=added.wall_seconds,
                steps=step.total,
                optimizer_steps=added.optimizer_steps,
                ledger_seconds=added.ledger_seconds,
                exposed_wait_seconds=exposed,
                exposed_wait_ratio=exposed / loop if exposed is not None and loop > 0 else None,
                exposed_wait_source=None if accounting.no_batch_seen else accounting.exposed_source,
                step_seconds=None if window.step is None else asdict(window.step),
                data_wait_seconds=None if window.wait is None or accounting.no_batch_seen else asdict(window.wait),
                step_sketch=step.as_log_field(),
                data_wait_sketch=wait.as_log_field(),
                **self._totals(),
                **self._news(),
            )
        )
        # After the line: if it begins a new file, the head of that file has the totals before it.
        accounting.stats.commit(step, wait)
        self._before = totals

    def _replace_removed_file(self) -> None:
        """Begin a new file if another process has deleted, renamed or emptied this one."""
        found = self.file.replace_if_removed()
        if found is None:
            return
        text, lost = found
        if lost:
            self._errors.note("jsonl", f"{text}; {lost} lines are lost", count=lost)
        else:
            self._errors.tell("jsonl", text)

    def head(self) -> RunStartLine:
        """The first line of a log file. A later file repeats the run so far, because old windows may be deleted."""
        step, wait, kills = self._accounting.stats.run_step, self._accounting.stats.run_wait, self._attempt.oom.count()
        self._surroundings = self._known_surroundings()
        return structs.replace(
            self._attempt.head(),
            started=self._wall.iso(self._accounting.ledger.start_ns),
            world_size=self.identity.world_size,
            launcher=self.identity.launcher,
            rank_source=self.identity.rank_source,
            claimed_rank=self.identity.claimed_rank,
            telemetry_version=__version__,
            python_version=platform.python_version(),
            cpu_count=os.cpu_count(),
            metrics_url=None if self._node is None else self._node.url,
            step_sketch=step.as_log_field() if step.total else ABSENT,
            step_max_seconds=step.largest if step.total else ABSENT,
            data_wait_sketch=wait.as_log_field() if wait.total else ABSENT,
            data_wait_max_seconds=wait.largest if wait.total else ABSENT,
            settings=self._config.as_log_fields(),
            continued=ABSENT,
            oom_kills_total=ABSENT if kills is None else kills,
            **{"loader": ABSENT} | self._surroundings,
        )

    def _known_surroundings(self) -> dict[str, Any]:
        version = getattr(sys.modules.get("torch"), "version", None)
        torch = {"torch_version": getattr(version, "__version__", None), "cuda_version": getattr(version, "cuda", None)}
        known = self._environment | torch
        fields: dict[str, Any] = {"environment": {name: value for name, value in known.items() if value}}
        if loader := self._builder.loader_settings():
            fields["loader"] = loader
        return fields

    def _news(self) -> dict[str, Any]:
        """What has changed in the surroundings. What has not is absent."""
        before, self._surroundings = self._surroundings, self._known_surroundings()
        changed = {name: value for name, value in self._surroundings.items() if before.get(name) != value}
        return {"environment": ABSENT, "loader": ABSENT} | changed

    def end(self, stuck_for_seconds: float | None, step_trend: StepTrend | None) -> bool:
        """Write the last line of the run.

        Args:
            stuck_for_seconds: how long it has been stuck; None if it is not.
            step_trend: the trend of a short run.
        """
        return self.write(
            structs.replace(
                self._attempt.end.settled,
                stuck_for_seconds=ABSENT if stuck_for_seconds is None else stuck_for_seconds,
                step_trend=ABSENT if step_trend is None else step_trend,
                errors_total=dict(self._errors.counts),
                log_lines_dropped=self.file.dropped,
                environment=ABSENT,
                loader=ABSENT,
                **self._totals(),
            )
        )

    def _memory_growth(self) -> Any:
        memory = self._memory.line_field()
        return ABSENT if memory == MemoryForecast() else memory

    def _totals(self) -> dict[str, Any]:
        """The fields of a `TotalsLine`. Every window has them, so the newest line alone shows the ledger."""
        totals = self._builder.current()
        counted = [uuid for uuid, energy in self._builder.energies.items() if energy.joules is not None]
        kills, resumption = self._attempt.oom.count(), self._attempt.resumption()
        epochs = self._accounting.epochs()
        return {
            "steps_total": totals.steps,
            "estimated_steps_total": ABSENT if totals.estimated_steps is None else totals.estimated_steps,
            "wall_seconds": totals.wall_seconds,
            "ledger_total_seconds": totals.ledger_seconds,
            "exposed_wait_total_seconds": totals.exposed_wait_seconds,
            "exposed_wait_absent": self._accounting.exposed_absent,
            "first_wait_seconds": totals.first_wait_seconds,
            "overhead_seconds": totals.overhead_seconds,
            "stall_lost_total_seconds": self._stall_counts.lost(),
            "stuck_total_seconds": self._attempt.stuck.seconds or ABSENT,
            "dropped_steps_total": totals.dropped_steps,
            "child_processes": self.child_processes,
            "unseen_steps_total": totals.unseen_steps,
            "samples_total": totals.samples,
            "tokens_total": totals.tokens,
            "epochs": ABSENT if epochs is None else epochs,
            "compute_total_seconds": ABSENT if totals.compute_parts is None else totals.compute_parts,
            "gpu_energy_total_joules": totals.gpu_energy_joules,
            "gpu_uuid": " ".join(counted) or None,
            "cpu_total_seconds": _cpu_seconds(totals),
            "memory": self._memory_growth(),
            "optimizer_steps_total": totals.optimizer_steps,
            "oom_kills_total": ABSENT if kills is None else kills,
            "resumption": ABSENT if resumption == Resumption() else resumption,
        }


def _rounded(value: Any) -> Any:
    """Round floats to microseconds. More digits are noise, and would make the log of a long run larger."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [*map(_rounded, value)] if isinstance(value, (list, tuple)) else value


def _cpu_seconds(totals: Totals) -> dict[str, float] | None:
    cpu, workers = totals.sampled.cpu, totals.sampled.workers
    if cpu.other_cores.known is None or cpu.used_cores.known is None:
        return None
    told = {"used": cpu.used_cores.known, "others": cpu.other_cores.known, "known": cpu.other_cores.seconds}
    if totals.run_queue_delay_seconds is not None and totals.thread_cpu_seconds is not None:
        told |= {"thread": totals.thread_cpu_seconds, "thread_delay": totals.run_queue_delay_seconds}
    if workers.cpu_seconds > 0:  # the kernel separates running from run-queue delay
        told |= {"worker": workers.cpu_seconds, "worker_delay": workers.runnable_seconds}
    return told
