"""Reads the log files of a run. They may be damaged, of a killed process, still growing, or of a newer version."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.core.quantile_sketch import Sketch, parse_counts
from telemetry.report.line_selection import read_log
from telemetry.report.log_files import find_logs, newest_run
from telemetry.report.log_lines import heartbeat
from telemetry.report.pace_series import PaceSeries
from telemetry.report.progress_points import Point, ProgressPoints

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from telemetry.report.line_selection import LineObserver
    from telemetry.report.log_files import RotatedLog

_RANK_FIELDS: Final = ("local_rank", "world_size", "claimed_rank")
"""Fields of ``run_start`` that change when a process learns its rank."""


_MAX_SAVES: Final = 256

_MAX_READINGS: Final = 2
"""Of the logs: a second one if the newest run is in the middle of a file."""


class Save(NamedTuple):
    """A checkpoint that a process has written, see `SavedCheckpoint`. ``point``: how far it had come then, if known."""

    optimizer_steps: int
    steps: int
    seconds: float
    complete: bool
    holds_optimizer: bool
    background: bool
    point: Point | None


@dataclass
class ProcessLog:
    """What one process of a run has logged.

    Here a process lasts from one start of the agent to its end. A program that starts the agent twice counts as two
    processes. The field ``life`` of a log line distinguishes them.

    Attributes:
        rank: its last rank; a process may learn its rank after its first lines.
        head: its ``run_start``.
        totals: the newest line with the totals of the run so far (``window`` or ``run_end``).
        last_time: time of the newest line, ISO-8601.
        ended: whether there is a ``run_end``, which means that the process ended by itself.
        step, wait: durations of steps and of data waits, over the whole run, even if old files were rotated away.
        end: the fields of its ``run_end`` on how it ended.
        beat: the totals of its heartbeat; empty without one, as after an end by itself.
        saves: the newest checkpoints. ``saves_total``, ``save_seconds``: all that stopped the training.
        points: how far it had come at its windows and checkpoints. ``pace``: its totals at its windows.
        environment: versions, cores and its GPU's name. ``loader``: the newest settings of its DataLoader.
        oom_readings: the first and the last time of each value of the counter of its cgroup.
        stalls, hangs, changes, snapshots, errors: lines of these events, oldest first. ``slow_steps``: the lines of
            code of its steps while other ranks waited for it.
        torn_lines: how many lines could not be read.
        wrong_fields: how many fields were left out because of a wrong type.
        skipped: names of logs that are not regular files and were not read; only in the newest process.
        run: name of the run.
    """

    rank: int
    pid: int
    head: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    last_time: str = ""
    ended: bool = False
    step: Sketch = field(default_factory=Sketch)
    wait: Sketch = field(default_factory=Sketch)
    stalls: list[dict[str, Any]] = field(default_factory=list)
    hangs: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    slow_steps: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    beat: dict[str, Any] = field(default_factory=dict)
    saves: deque[Save] = field(default_factory=lambda: deque(maxlen=_MAX_SAVES))
    saves_total: int = 0
    save_seconds: float = 0.0
    points: ProgressPoints = field(default_factory=ProgressPoints)
    oom_readings: dict[int, tuple[str, str]] = field(default_factory=dict)
    pace: PaceSeries = field(default_factory=PaceSeries)
    environment: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    torn_lines: int = 0
    wrong_fields: int = 0
    skipped: list[str] = field(default_factory=list)
    run: str = ""

    @property
    def started(self) -> str:
        """When the process started, ISO-8601, which sorts as text."""
        started: str = self.head.get("started") or self.head.get("time") or ""
        return started

    def take_sums(self, head: dict[str, Any]) -> None:
        """Take the sums of all windows before a head, instead of those of the windows that were read."""
        self.step, self.wait = Sketch(), Sketch()
        _add(self.step, head.get("step_sketch"), head.get("step_max_seconds"))
        _add(self.wait, head.get("data_wait_sketch"), head.get("data_wait_max_seconds"))


def load(run_dir: Path, observer: LineObserver | None = None) -> list[ProcessLog]:
    """All processes of the newest run in a folder, by rank and then by start.

    Args:
        run_dir: the run folder.
        observer: sees every line of that run that is not skipped. With one, windows are skipped too, where a later line
            of the process has their sums.

    Raises:
        NoRunError: the folder does not exist, or has no log.
    """
    found = find_logs(run_dir)
    run, ranks = ("", 0) if observer is None else newest_run(found.logs)
    for _ in range(_MAX_READINGS):
        if observer is not None:
            observer.begin(ranks)
        processes = _read(found.logs, observer, run)
        newest = max(processes, key=lambda process: process.started)
        own = [process for process in processes if process.run == newest.run]
        there = len({process.rank for process in own})
        if observer is None or (newest.run == run and there <= ranks):
            break
        run, ranks = newest.run, there  # the heads of the files did not tell all
    take_heartbeats(run_dir / "attempts", own)
    newest.skipped = found.skipped
    return sorted(own, key=lambda process: (process.rank, process.started))


def _read(logs: Sequence[RotatedLog], observer: LineObserver | None, run: str) -> list[ProcessLog]:
    """All processes of some logs. ``run``: the one whose lines the observer is shown."""
    processes = ProcessLogs()
    for log in logs:
        file = processes.of_file(log.rank, log.pid)
        read_log(file, log.paths, observer, run)
        processes.leave_out_if_empty(file)
    return processes.all


class ProcessLogs:
    """Sorts log lines by process, whichever file they are in.

    Several processes write to one file if a container is restarted with the same pid, or if two nodes share the folder.
    A ``run_start`` that does not continue a log begins another process.

    Attributes:
        all: the processes so far.
    """

    def __init__(self) -> None:
        self.all: list[ProcessLog] = []
        self._by_id: dict[str, ProcessLog] = {}

    def of_file(self, rank: int, pid: int) -> LinesOfFile:
        """Takes the lines of one log, with those of the files that were rotated away from it."""
        unused = ProcessLog(rank, pid)
        self.all.append(unused)
        return LinesOfFile(self, unused)

    def leave_out_if_empty(self, file: LinesOfFile) -> None:
        """All lines of a file are there: it has no process of its own if they belong to processes of other files."""
        if file.by_node and not file.unused.head and not file.unused.torn_lines:
            self.all = [log for log in self.all if log is not file.unused]

    def log_of(self, line: dict[str, Any], log: ProcessLog | None, fresh: ProcessLog) -> ProcessLog:
        """The process of a ``run_start``. ``log``: that of the line before; ``fresh``: for the lines of a new one."""
        id_ = line.get("life")
        if id_ in self._by_id:
            return self._by_id[id_]
        if log is None or not line.get("continued"):
            log = fresh
            if all(each is not fresh for each in reversed(self.all)):
                self.all.append(fresh)
        if id_ is not None:
            self._by_id[id_] = log
        return log


class LinesOfFile:
    """The lines of one log, in the order in which they were written.

    Attributes:
        newest: the process of the newest line.
        by_node: the processes by node. ``unused``: the process of this file, before its first line.
    """

    def __init__(self, logs: ProcessLogs, unused: ProcessLog) -> None:
        self._logs = logs
        self.newest = self.unused = unused
        self.by_node: dict[str, ProcessLog] = {}

    def add(self, line: dict[str, Any] | None, wrong: int) -> None:
        """Add a line, as `log_lines.parsed` returns it."""
        if line is None:
            self.newest.torn_lines += 1
            return
        node = line.get("node")
        log = self.newest if node is None else self.by_node.get(node)  # a line without a node is damaged
        if log is None or line.get("event") == "run_start":
            fresh = ProcessLog(self.unused.rank, self.unused.pid) if self.by_node else self.unused
            log = self._logs.log_of(line, log, fresh)
        self.newest = log
        if node is not None:
            self.by_node[node] = log
        log.wrong_fields += wrong
        _take(line, log)


def _take(line: dict[str, Any], log: ProcessLog) -> None:
    event, log.rank = line.get("event"), line.get("rank", log.rank)
    _take_oom_kills(line, log)
    log.run = line.get("run", log.run)
    log.head = log.head or {name: line.get(name) for name in ("local_rank", "node", "time")}
    log.last_time = max(log.last_time, line.get("time", ""))
    _take_surroundings(line, log)
    if event == "run_start":
        if "started" in log.head:  # it continues in another file, or as another rank
            log.head |= {name: line[name] for name in _RANK_FIELDS if name in line}
        else:
            log.head = line
            if line.get("continued"):  # earlier files are gone; this line has the sums of what was in them
                log.take_sums(line)
    elif event == "window":
        if _take_totals(line, log):
            log.pace.add(line)
        for sketch, name in ((log.step, "step"), (log.wait, "data_wait")):
            _add(sketch, line.get(f"{name}_sketch"), line.get(f"{name}_seconds", {}).get("max"))
        if log.points.wants_next() and "ledger_total_seconds" in line:
            log.points.add(_point(line, line["ledger_total_seconds"]))
    elif event == "phase":
        _take_save(line, log)
    elif event == "run_end":
        _take_totals(line, log)
        log.ended = True
        log.end = {
            name: line[name] for name in ("exception", "exit_status", "lost_peer", "stuck_seconds") if name in line
        }
    else:
        kept = {
            "stall_open": log.stalls,
            "stall_lines": log.stalls,
            "stall_close": log.stalls,
            "straggler_lines": log.slow_steps,
            "hang": log.hangs,
            "change": log.changes,
            "snapshot": log.snapshots,
            "error": log.errors,
        }.get(str(event))
        if kept is not None:
            kept.append(line)


def _take_surroundings(line: dict[str, Any], log: ProcessLog) -> None:
    log.environment |= line.get("environment", {})
    log.loader = line.get("loader", log.loader)
    if line.get("event") == "gpu" and "name" in line:
        log.environment["gpu"] = line["name"]


def _take_oom_kills(line: dict[str, Any], log: ProcessLog) -> None:
    """Keep the first and the last time of each value of the counter."""
    kills = line.get("oom_kills_total")
    if kills is not None and "time" in line:
        log.oom_readings[kills] = log.oom_readings.get(kills, (line["time"],))[0], line["time"]


def _take_totals(line: dict[str, Any], log: ProcessLog) -> bool:
    """Keep the newest totals, which are those of the whole run. Returns False if the line is damaged."""
    sound = line.keys() >= {"ledger_total_seconds", "wall_seconds", "steps_total"}
    if sound:
        log.totals = line
    return sound


def _add(sketch: Sketch, counts: object, largest: float | None) -> None:
    sketch.merge(parse_counts(counts), largest or 0.0)


def _take_save(line: dict[str, Any], log: ProcessLog) -> None:
    """Keep a checkpoint that was written. Other phases, and those of older versions, have no such fields."""
    if "complete" not in line or "optimizer_steps_total" not in line:
        return
    loop = line.get("loop_seconds")
    point = None if loop is None else _point(line, loop)
    background = loop is None
    seconds = line.get("seconds", 0.0)
    log.saves.append(
        Save(
            line["optimizer_steps_total"],
            line.get("steps_total", 0),
            seconds,
            line["complete"],
            line.get("holds_optimizer", True),
            background,
            point,
        )
    )
    if not background:
        log.saves_total += 1
        log.save_seconds += seconds
    if point is not None:
        log.points.add(point)


def _point(line: dict[str, Any], loop: dict[str, float]) -> Point:
    return Point(
        line.get("optimizer_steps_total", 0),
        line.get("steps_total", 0),
        loop.get("data_wait", 0.0),
        loop.get("compute", 0.0),
    )


def take_heartbeats(folder: Path, processes: Iterable[ProcessLog]) -> None:
    """Give each process that did not end by itself its newest heartbeat.

    Args:
        folder: ``attempts`` in the run folder.
        processes: those that are to be looked at.
    """
    for process in processes:
        life = process.head.get("life")
        if process.ended or not life or not life.isalnum():
            continue
        beat = heartbeat(folder, life)
        if beat is not None:
            process.beat = beat
