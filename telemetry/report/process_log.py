"""What the log of one process says: its sums, stalls, hangs and checkpoints, taken in line by line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from telemetry.report.pace_series import PaceSeries
from telemetry.report.progress_points import Point, ProgressPoints
from telemetry.util.sketch import Sketch, parse_counts

_RANK_FIELDS: Final = ("local_rank", "world_size", "claimed_rank")
"""Fields of ``run_start`` that change when a process learns its rank."""

_MAX_SAVES: Final = 256


class Save(NamedTuple):
    """A checkpoint that a process has written, see `SavedCheckpoint`.

    Attributes:
        point: how far it had come then, if known. ``started``: when it began, ISO-8601; empty if not known.
    """

    optimizer_steps: int
    steps: int
    seconds: float
    complete: bool
    holds_optimizer: bool
    background: bool
    point: Point | None
    started: str


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


def take_line(line: dict[str, Any], log: ProcessLog) -> None:
    """Take a checked line of a process into its log."""
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
            name: line[name]
            for name in ("exception", "exit_status", "lost_peer", "replaced", "stuck_for_seconds")
            if name in line
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
            line.get("started", ""),
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
