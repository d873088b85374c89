"""The log of one process: its sums, stalls, hangs and checkpoints, line by line."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.diagnosis.findings import Finding, FindingKind, by_weight
from telemetry.log_lines import (
    ChangeLine,
    ErrorLine,
    FindingLine,
    HangLine,
    RunEndLine,
    SnapshotLine,
    StallLine,
    StragglerLines,
)
from telemetry.records import HotLine, StallRecord
from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MAX_POINTS: Final = 512
_MAX_SAVES: Final = 256


def unix(text: str) -> float | None:
    """Unix time of a time in a log; None if it is not a time."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


# -- the progress of a process -------------------------------------------------------------------------------------


class Point(NamedTuple):
    """Totals of a process since its start: wall clock, steps, the ledger's categories, and `cpu_total_seconds`.

    ``used``, ``others`` and ``known`` do not grow while they are not measured. ``thread`` and ``thread_delay`` are NaN
    if the kernel does not provide them.
    """

    wall_seconds: float = 0.0
    steps: float = 0.0
    optimizer_steps: float = 0.0
    startup: float = 0.0
    data_wait: float = 0.0
    compute: float = 0.0
    evaluation: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0
    used: float = 0.0
    others: float = 0.0
    known: float = 0.0
    thread: float = math.nan
    thread_delay: float = math.nan
    worker: float = 0.0
    worker_delay: float = 0.0

    @property
    def loop_seconds(self) -> float:
        """Seconds in the training loop."""
        return self.data_wait + self.compute


_WIDTH: Final = len(Point._fields)


def point_at(points: Sequence[Point], axis: str, value: float) -> Point:
    """The totals of a process when one of its figures had a value. They are interpolated between two points."""
    at = Point._fields.index(axis)
    keys = [*accumulate((point[at] for point in points), max)]  # a damaged log may go back
    after = min(bisect_left(keys, value), len(points) - 1)
    before = max(0, after - 1)
    span = keys[after] - keys[before]
    share = min(1.0, max(0.0, (value - keys[before]) / span)) if span > 0 else 1.0
    return Point(*(low + share * (high - low) for low, high in zip(points[before], points[after], strict=True)))


class Progress:
    """The totals of a process at its windows. If there are too many, every other one is dropped, which costs detail."""

    __slots__ = ("_every", "_seen", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._seen = 0
        self._every = 1

    def add(self, totals: dict[str, Any]) -> None:
        """Add a window, unless its totals are smaller than the last: then the log is damaged."""
        self._seen += 1
        if self._seen % self._every:
            return
        before = Point(*self._values[-_WIDTH:])
        told = totals["ledger_total_seconds"] | totals.get("cpu_total_seconds", {})
        point = before._replace(
            wall_seconds=totals["wall_seconds"],
            steps=totals["steps_total"],
            optimizer_steps=totals.get("optimizer_steps_total", 0),
            **{name: value for name, value in told.items() if name in Point._fields},
        )
        if any(new < old for new, old in zip(point, before, strict=True)):
            return
        self._values.extend(point)
        if len(self._values) > _MAX_POINTS * _WIDTH:
            kept = self.points[1::2]
            self._values, self._every = array("d", [value for point in kept for value in point]), 2 * self._every

    @property
    def points(self) -> list[Point]:
        """The totals, the oldest first."""
        return [Point(*self._values[at : at + _WIDTH]) for at in range(0, len(self._values), _WIDTH)]


class Save(NamedTuple):
    """A checkpoint, see `SavedCheckpoint`. ``point``: totals then; None if it was completed in the background."""

    optimizer_steps: int
    steps: int
    complete: bool
    holds_optimizer: bool
    point: Point | None
    started: str


# -- one process ---------------------------------------------------------------------------------------------------

_RANK_FIELDS: Final = ("local_rank", "world_size", "claimed_rank")
"""Fields of ``run_start`` that change when a process learns its rank."""


@dataclass
class ProcessLog:
    """The log of one process of a run.

    Here a process lasts from one start of the agent to its end: a program that starts the agent twice counts as two
    processes. Their log lines differ in the field ``life``.

    Attributes:
        rank: its last rank; a process may learn its rank after its first lines.
        head: its ``run_start``.
        totals: the newest line with the totals of the run so far (``window`` or ``run_end``).
        last_time: time of the newest line, ISO-8601.
        ended: whether there is a ``run_end``: the process ended by itself. ``end``: that line.
        step, wait: durations of steps and of data waits over the whole run, even if old files were rotated away.
        beat: totals of the heartbeat; empty without one, as after an end by itself.
        saves: newest checkpoints. ``saves_total``, ``save_seconds``: number and time of all that stopped the training.
        progress: totals at the windows.
        oom_readings: first and last time of each value of the OOM killer's counter in the cgroup of the process.
        stalls, hangs, changes, snapshots, errors: lines of these events, the oldest first. ``slow_steps``: the lines
            of code of its steps while other ranks waited for it. ``step_lines``: those of all its steps.
            ``findings``: the newest line of each kind.
        torn_lines: number of lines that could not be read.
        wrong_fields: number of fields that were left out because of a wrong type.
        skipped: names of logs that are not regular files and were not read; only in the newest process.
    """

    rank: int
    pid: int
    head: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    last_time: str = ""
    ended: bool = False
    step: Sketch = field(default_factory=Sketch)
    wait: Sketch = field(default_factory=Sketch)
    stalls: list[StallLine] = field(default_factory=list)
    findings: dict[FindingKind, FindingLine] = field(default_factory=dict)
    hangs: list[HangLine] = field(default_factory=list)
    changes: list[ChangeLine] = field(default_factory=list)
    slow_steps: list[StragglerLines] = field(default_factory=list)
    step_lines: list[HotLine] = field(default_factory=list)
    snapshots: list[SnapshotLine] = field(default_factory=list)
    errors: list[ErrorLine] = field(default_factory=list)
    end: RunEndLine = field(default_factory=RunEndLine)
    beat: dict[str, Any] = field(default_factory=dict)
    saves: deque[Save] = field(default_factory=lambda: deque(maxlen=_MAX_SAVES))
    saves_total: int = 0
    save_seconds: float = 0.0
    progress: Progress = field(default_factory=Progress)
    oom_readings: dict[int, tuple[str, str]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    torn_lines: int = 0
    wrong_fields: int = 0
    skipped: list[str] = field(default_factory=list)
    run: str = ""

    @property
    def started(self) -> str:
        """The start of the process, ISO-8601, which sorts as text."""
        started: str = self.head.get("started") or self.head.get("time") or ""
        return started

    @property
    def ledger(self) -> dict[str, float]:
        """The newest seconds by category; empty before the first window."""
        found: dict[str, float] = self.totals.get("ledger_total_seconds", {})
        return found

    def setting(self, name: str, default: float) -> float:
        """A setting of the run; the default if the log does not have it."""
        value: float = self.head.get("settings", {}).get(name, default)
        return value

    def take_sums(self, head: dict[str, Any]) -> None:
        """Replace the sums of the windows that were read by those of all windows before ``head``."""
        self.step, self.wait = Sketch(), Sketch()
        self.step.merge(head.get("step_sketch", {}).items(), head.get("step_max_seconds", 0.0))
        self.wait.merge(head.get("data_wait_sketch", {}).items(), head.get("data_wait_max_seconds", 0.0))


def take_line(line: Any, log: ProcessLog) -> None:  # noqa: C901, PLR0912 - a branch for each event
    """Add a checked line to the log of its process."""
    event, log.rank, log.run = line.get("event"), line.get("rank", log.rank), line.get("run", log.run)
    log.last_time = max(log.last_time, line.get("time", ""))
    log.head = log.head or {name: line.get(name) for name in ("local_rank", "node", "time")}
    log.environment |= {name: value for name, value in line.get("environment", {}).items() if value is not None}
    if "loader" in line:
        log.loader = {name: value for name, value in line["loader"].items() if value is not None}
    kills = line.get("oom_kills_total")
    if kills is not None and "time" in line:
        log.oom_readings[kills] = log.oom_readings.get(kills, (line["time"],))[0], line["time"]
    if event in {"window", "run_end"} and line.keys() >= {"ledger_total_seconds", "wall_seconds", "steps_total"}:
        log.totals = line
        if event == "window":
            log.progress.add(line)
    if event == "run_start":
        if "started" in log.head:  # it continues in another file, or as another rank
            log.head |= {name: line[name] for name in _RANK_FIELDS if name in line}
        else:
            log.head = line
            if line.get("continued"):  # earlier files are gone; this line has the sums of what was in them
                log.take_sums(line)
    elif event == "window":
        for sketch, name in ((log.step, "step"), (log.wait, "data_wait")):
            sketch.merge(line.get(f"{name}_sketch", {}).items(), line.get(f"{name}_seconds", {}).get("max", 0.0))
    elif event == "gpu" and "name" in line:
        log.environment["gpu"] = line["name"]
    elif event == "phase" and line.keys() >= {"complete", "optimizer_steps_total"}:  # other phases have no such fields
        _take_save(line, log)
    elif event == "run_end":
        log.ended, log.end = True, line
    elif event in {"stall_open", "stall_lines", "stall_close"}:
        log.stalls.append(line)
    elif event == "finding":
        if line.keys() >= {"kind", "text"}:
            log.findings[line["kind"]] = line
    elif event == "step_lines":
        log.step_lines = line.get("lines", [])
    else:
        kept: dict[str, list[Any]] = {
            "straggler_lines": log.slow_steps,
            "hang": log.hangs,
            "change": log.changes,
            "snapshot": log.snapshots,
            "error": log.errors,
        }
        kept.get(str(event), []).append(line)


def _take_save(line: dict[str, Any], log: ProcessLog) -> None:
    loop, done = line.get("loop_seconds"), (line["optimizer_steps_total"], line.get("steps_total", 0))
    point = None
    if loop is not None:
        point = Point(0.0, done[1], done[0], data_wait=loop.get("data_wait", 0.0), compute=loop.get("compute", 0.0))
        log.saves_total += 1
        log.save_seconds += line.get("seconds", 0.0)
    log.saves.append(Save(*done, line["complete"], line.get("holds_optimizer", True), point, line.get("started", "")))


def not_replaced(processes: Sequence[ProcessLog]) -> list[ProcessLog]:
    """The processes that no later process has replaced.

    A process is replaced if one of the same rank started after its newest line. It is also replaced if one of a job
    without that rank did, as after an elastic restart with fewer ranks.
    """
    newest: dict[int, str] = {}
    for process in processes:
        newest[process.rank] = max(newest.get(process.rank, ""), process.started)
    began = sorted((process.started, process.head.get("world_size") or math.inf) for process in processes)
    # For each start: the smallest world size of a process that started then or later.
    fewest = list(accumulate((world_size for _, world_size in reversed(began)), min))[::-1]

    def replaced(process: ProcessLog) -> bool:
        later = bisect_right(began, (process.last_time, math.inf))
        return newest[process.rank] > process.last_time or (later < len(began) and fewest[later] <= process.rank)

    return [process for process in processes if not replaced(process)]


def findings_of(processes: Iterable[ProcessLog]) -> list[Finding]:
    """The findings of processes, the most important first."""
    found = [
        Finding(
            rank=process.rank,
            kind=line["kind"],
            share_ratio=line.get("share_ratio"),
            text=line["text"],
            lines=tuple(line.get("lines", ())),
            advice=tuple(line.get("advice", ())),
        )
        for process in processes
        for line in process.findings.values()
    ]
    return sorted(found, key=by_weight)


# -- stalls --------------------------------------------------------------------------------------------------------


def stalls_of(process: ProcessLog) -> list[StallRecord]:
    """The stalls of a process, each merged from all its lines.

    If a stall was open for long, its first line may have been rotated away. A later line has most of its contents.
    """
    stalls: list[StallRecord] = []
    for line in process.stalls:
        event, newest = line.get("event"), stalls[-1] if stalls else None
        opened = line.get("opened")
        another = newest is None or (newest.closed is not None and newest.opened != opened)
        if event == "stall_open" or (opened and another):
            newest = StallRecord(rank=process.rank, cause="unknown", opened=opened or line.get("time"))
            stalls.append(newest)
        if newest is None or newest.closed is not None:
            continue
        for name in ("cause", "first_step", "last_step", "exposed_wait_ratio"):
            setattr(newest, name, line.get(name, getattr(newest, name)))
        # The stacks of a stuck run are only in the line that opens its stall.
        newest.evidence |= line.get("evidence", {})
        newest.advice = line.get("advice") or newest.advice
        if event == "stall_close":
            newest.closed = line.get("closed") or line.get("time")
    total = process.totals.get("stall_lost_total_seconds")
    if stalls and stalls[-1].closed is None and total is not None:
        # The lost time so far: the line of the stall lacks it, because it was written when the stall opened.
        before = lost_of(stalls[:-1])
        lost = {cause: round(seconds - before.get(cause, 0.0), 3) for cause, seconds in total.items()}
        stalls[-1].evidence["lost_seconds"] = {cause: seconds for cause, seconds in lost.items() if seconds > 0}
    return stalls


def take_lines_of_slow_ranks(stalls: Iterable[StallRecord], processes: Iterable[ProcessLog]) -> None:
    """Add the lines of the slow rank's steps to the stalls of ranks that waited for it.

    A rank that is held up spends its time in a collective, so its own lines do not show the cause.
    """
    slow = {process.rank: process.slow_steps for process in processes if process.slow_steps}
    for stall in stalls:
        told = () if stall.straggler_rank is None else slow.get(stall.straggler_rank, ())
        after = [line for line in told if str(line.get("time", "")) >= str(stall.opened)]
        before_close = [line for line in after if not stall.closed or str(line.get("time")) <= stall.closed]
        for line in (before_close or after[:1])[-1:]:
            lines, taken = line.get("evidence", {}), ("lines", "lines_of", "line_samples", "line_verdict")
            stall.evidence |= {name: lines[name] for name in taken if name in lines}


def lost_by_cause(processes: Iterable[ProcessLog]) -> dict[str, float]:
    """Seconds that processes have lost in stalls, by cause; without causes that have cost nothing."""
    lost: dict[str, float] = {}
    for process in processes:
        total: Mapping[str, float] | None = process.totals.get("stall_lost_total_seconds")
        for cause, seconds in (lost_of(stalls_of(process)) if total is None else total).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return {cause: seconds for cause, seconds in lost.items() if seconds > 0}


def lost_of(stalls: Iterable[StallRecord]) -> dict[str, float]:
    """Seconds that stalls have cost, by cause."""
    lost: dict[str, float] = {}
    for stall in stalls:
        for cause, seconds in stall.lost.items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return lost
