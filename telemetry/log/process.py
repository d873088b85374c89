"""The log of one process: its sums, stalls, hangs and checkpoints, line by line."""

from __future__ import annotations

import math
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import structs, to_builtins

from telemetry.diagnosis.findings import Finding, by_weight
from telemetry.log.lines import (
    ChangeLine,
    ErrorLine,
    FindingLine,
    GpuErrorLine,
    GpuLine,
    HangLine,
    HostLine,
    PhaseLine,
    RunEndLine,
    RunStartLine,
    SnapshotLine,
    StallCloseLine,
    StallLine,
    StallOpenLine,
    StepCodeLine,
    StragglerCodeLine,
    SurroundingsLine,
    TotalsLine,
    WindowLine,
)
from telemetry.model.records import CHECKPOINT, COMPUTE, DATA_WAIT, FindingKind, HotLine, StallRecord
from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.log.lines import Heartbeat, Line, Scalar

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
    if the kernel does not provide them, ``samples`` and ``tokens`` while they are not known. ``agent`` and ``hooks``:
    CPU seconds of the agent's thread, seconds of the hooks on the training thread.
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
    stuck_wait: float = 0.0
    stuck_compute: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    agent: float = 0.0
    hooks: float = 0.0

    @classmethod
    def at(cls, line: TotalsLine | PhaseLine, before: Point | None = None) -> Point:
        """The totals at a line. ``before``: has those that the line lacks."""
        if isinstance(line, PhaseLine):
            figures = line.loop_seconds or {}
        else:
            figures = line.ledger_total_seconds | (line.cpu_total_seconds or {}) | {
                "wall_seconds": line.wall_seconds,
                "samples": math.nan if line.samples_total is None else line.samples_total,
                "tokens": math.nan if line.tokens_total is None else line.tokens_total,
                "agent": line.overhead_seconds.get("agent", 0.0),
                "hooks": line.overhead_seconds.get("training", 0.0),
            }  # fmt: skip
        return (before or cls())._replace(
            steps=line.steps_total or 0,
            optimizer_steps=line.optimizer_steps_total or 0,
            stuck_wait=line.stuck_total_seconds.get(DATA_WAIT, 0.0),
            stuck_compute=line.stuck_total_seconds.get(COMPUTE, 0.0),
            **{name: value for name, value in figures.items() if name in cls._fields},
        )

    @property
    def loop_seconds(self) -> float:
        """Seconds in the training loop."""
        return self.data_wait + self.compute

    @property
    def waiting(self) -> float:
        """Seconds of data wait in which the process was not stuck."""
        return max(0.0, self.data_wait - self.stuck_wait)

    @property
    def computing(self) -> float:
        """Seconds of compute in which the process was not stuck."""
        return max(0.0, self.compute - self.stuck_compute)

    def since(self, before: Point) -> Point:
        """What was added since earlier totals."""
        return Point(*map(operator.sub, self, before))


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

    def add(self, totals: TotalsLine) -> None:
        """Add a window, unless its totals are smaller than the last: then the log is damaged."""
        self._seen += 1
        if self._seen % self._every:
            return
        before = Point(*self._values[-_WIDTH:])
        point = Point.at(totals, before)
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
        head: its ``run_start``; without one, what its first line has of it.
        empty: whether it has no line.
        totals: the newest line with the totals of the run so far (``window`` or ``run_end``).
        last_time: time of the newest line, ISO-8601.
        ended: whether there is a ``run_end``: the process ended by itself. ``end``: that line.
        step, wait: durations of steps and of data waits over the whole run, even if old files were rotated away.
        host: the newest samples of its machine and its memory.
        beat: its heartbeat; None without one, as after an end by itself.
        saves: newest checkpoints. ``saves_total``, ``save_seconds``: number and time of all that stopped the training,
            without the times in which they were stuck.
        progress: totals at the windows.
        oom_readings: first and last time of each value of the OOM killer's counter in the cgroup of the process.
        stalls, hangs, changes, snapshots, gpu_errors, errors: lines of these events, the oldest first.
            ``slow_steps``: the lines of code of its steps while other ranks waited for it. ``step_lines``: those of all
            its steps. ``findings``: the newest line of each kind.
        on_gpu: whether a GPU was read. ``damaged_lines``: number of lines that were skipped.
    """

    rank: int
    pid: int
    head: RunStartLine = RunStartLine()
    totals: TotalsLine = TotalsLine()
    last_time: str = ""
    ended: bool = False
    step: Sketch = field(default_factory=Sketch)
    wait: Sketch = field(default_factory=Sketch)
    stalls: list[StallLine] = field(default_factory=list)
    findings: dict[FindingKind, FindingLine] = field(default_factory=dict)
    hangs: list[HangLine] = field(default_factory=list)
    changes: list[ChangeLine] = field(default_factory=list)
    slow_steps: list[StragglerCodeLine] = field(default_factory=list)
    step_lines: list[HotLine] = field(default_factory=list)
    snapshots: list[SnapshotLine] = field(default_factory=list)
    gpu_errors: list[GpuErrorLine] = field(default_factory=list)
    errors: list[ErrorLine] = field(default_factory=list)
    end: RunEndLine = RunEndLine()
    host: HostLine = HostLine()
    beat: Heartbeat | None = None
    saves: deque[PhaseLine] = field(default_factory=lambda: deque(maxlen=_MAX_SAVES))
    saves_total: int = 0
    save_seconds: float = 0.0
    _stuck_in_saves: float = 0.0
    progress: Progress = field(default_factory=Progress)
    oom_readings: dict[int, tuple[str, str]] = field(default_factory=dict)
    environment: dict[str, Scalar] = field(default_factory=dict)
    loader: dict[str, Scalar] = field(default_factory=dict)
    on_gpu: bool = False
    damaged_lines: int = 0
    run: str = ""
    empty: bool = True

    @property
    def started(self) -> str:
        """The start of the process, ISO-8601, which sorts as text."""
        return self.head.started or self.head.time

    @property
    def ledger(self) -> dict[str, float]:
        """The newest seconds by category; empty before the first window."""
        return self.totals.ledger_total_seconds

    def add(self, line: Line) -> None:  # noqa: C901, PLR0912 - a case for each event
        """Add a line of this process."""
        if self.empty:
            self.head = RunStartLine(time=line.time, local_rank=line.local_rank, node=line.node)
            self.empty = False
        self.rank = self.rank if line.rank is None else line.rank
        self.run = line.run or self.run
        self.last_time = max(self.last_time, line.time)
        if isinstance(line, SurroundingsLine):
            self._add_surroundings(line)
        if isinstance(line, TotalsLine) and line.is_whole:
            self.totals = line
        match line:
            case RunStartLine():
                self._start(line)
            case WindowLine():
                self.step.merge(line.step_sketch.items(), (line.step_seconds or {}).get("max", 0.0))
                self.wait.merge(line.data_wait_sketch.items(), (line.data_wait_seconds or {}).get("max", 0.0))
                if line.is_whole:
                    self.progress.add(line)
            case RunEndLine():
                self.ended, self.end = True, line
            case HostLine():
                self.host = line
            case GpuLine():
                self.on_gpu = True
                self.environment |= {} if line.name is None else {"gpu": line.name}
            case PhaseLine():
                self._add_save(line)
            case StallLine():
                self.stalls.append(line)
            case FindingLine(kind=str(kind), text=str()):
                self.findings[kind] = line
            case StragglerCodeLine():
                self.slow_steps.append(line)
            case StepCodeLine():
                self.step_lines = line.lines
            case HangLine():
                self.hangs.append(line)
            case ChangeLine():
                self.changes.append(line)
            case SnapshotLine():
                self.snapshots.append(line)
            case GpuErrorLine():
                self.gpu_errors.append(line)
            case ErrorLine():
                self.errors.append(line)

    def _add_surroundings(self, line: SurroundingsLine) -> None:
        self.environment |= {name: value for name, value in line.environment.items() if value is not None}
        if line.loader is not None:
            self.loader = {name: value for name, value in line.loader.items() if value is not None}
        kills = line.oom_kills_total
        if kills is not None and line.time:
            self.oom_readings[kills] = self.oom_readings.get(kills, (line.time,))[0], line.time

    def _start(self, line: RunStartLine) -> None:
        if not self.head.started:
            self.head = line
        else:  # it continues in another file, or as another rank
            changed = {name: value for name in _RANK_FIELDS if (value := getattr(line, name)) is not None}
            self.head = structs.replace(self.head, **changed)
        if line.continued and line.step_sketch is not None:
            # The sums of all steps so far. Older files may be gone, or were not read in full.
            self.step, self.wait = Sketch(), Sketch()
            self.step.merge(line.step_sketch.items(), line.step_max_seconds)
            self.wait.merge((line.data_wait_sketch or {}).items(), line.data_wait_max_seconds)

    def _add_save(self, line: PhaseLine) -> None:
        if line.complete is None or line.optimizer_steps_total is None:
            return  # no checkpoint
        if line.loop_seconds is not None:  # it has stopped the training
            stuck, self._stuck_in_saves = self._stuck_in_saves, line.stuck_total_seconds.get(CHECKPOINT, 0.0)
            self.saves_total += 1
            self.save_seconds += max(0.0, line.seconds - (self._stuck_in_saves - stuck))
        self.saves.append(line)


def not_replaced(processes: Sequence[ProcessLog]) -> list[ProcessLog]:
    """The processes that no later process has replaced.

    A process is replaced if one of the same rank started after its newest line. It is also replaced if one of a job
    without that rank did, as after an elastic restart with fewer ranks.
    """
    newest: dict[int, str] = {}
    for process in processes:
        newest[process.rank] = max(newest.get(process.rank, ""), process.started)
    began = sorted((process.started, process.head.world_size or math.inf) for process in processes)
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
            kind=kind,
            share_ratio=line.share_ratio,
            text=line.text or "",
            lines=tuple(line.lines),
            advice=tuple(line.advice),
        )
        for process in processes
        for kind, line in process.findings.items()
    ]
    return sorted(found, key=by_weight)


# -- stalls --------------------------------------------------------------------------------------------------------


def stalls_of(process: ProcessLog) -> list[StallRecord]:
    """The stalls of a process, each merged from all its lines.

    If a stall was open for long, its first line may have been rotated away. A later line has most of its contents.
    """
    stalls: list[StallRecord] = []
    for line in process.stalls:
        newest, now = stalls[-1] if stalls else None, line.stall
        another = newest is None or (newest.closed is not None and newest.opened != now.opened)
        if isinstance(line, StallOpenLine) or (now.opened and another):
            newest = StallRecord(rank=process.rank, cause="unknown", opened=now.opened or line.time or None)
            stalls.append(newest)
        if newest is None or newest.closed is not None:
            continue
        for name in ("cause", "first_step", "last_step", "exposed_wait_ratio"):
            value = getattr(now, name)
            if value not in {None, ""}:
                setattr(newest, name, value)
        # The stacks of a stuck run are only in the line that opens its stall.
        newest.evidence |= now.evidence
        newest.advice = now.advice or newest.advice
        if isinstance(line, StallCloseLine):
            newest.closed = now.closed or line.time or None
    total = process.totals.stall_lost_total_seconds
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
        rank = stall.details.straggler_rank
        slow_steps = () if rank is None else slow.get(rank, ())
        after = [line for line in slow_steps if line.time >= str(stall.opened)]
        before_close = [line for line in after if not stall.closed or line.time <= stall.closed]
        for line in (before_close or after[:1])[-1:]:
            stall.evidence |= to_builtins(line.evidence)


def lost_by_cause(processes: Iterable[ProcessLog]) -> dict[str, float]:
    """Seconds that processes have lost in stalls, by cause; without causes that have cost nothing."""
    lost: dict[str, float] = {}
    for process in processes:
        total = process.totals.stall_lost_total_seconds
        for cause, seconds in (lost_of(stalls_of(process)) if total is None else total).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return {cause: seconds for cause, seconds in lost.items() if seconds > 0}


def lost_of(stalls: Iterable[StallRecord]) -> dict[str, float]:
    """Seconds that stalls have cost, by cause."""
    lost: dict[str, float] = {}
    for stall in stalls:
        for cause, seconds in stall.details.lost_seconds.items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return lost
