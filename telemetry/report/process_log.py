"""What the log of one process says: its sums, stalls, hangs and checkpoints, taken in line by line."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.records import CATEGORIES
from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MAX_PROGRESS_POINTS: Final = 256
_POINT_FIELDS: Final = 4


class Point(NamedTuple):
    """Counted since the process started.

    Attributes:
        optimizer_steps, steps: so far.
        wait_seconds, compute_seconds: of its training loop so far.
    """

    optimizer_steps: float
    steps: float
    wait_seconds: float
    compute_seconds: float


class ProgressPoints:
    """Points in the order in which they were logged. When there are too many, every other one is dropped."""

    __slots__ = ("_every", "_seen", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._seen = 0
        self._every = 1

    def wants_next(self) -> bool:
        """Whether the next window is to be added: as often as those that were kept."""
        self._seen += 1
        return self._seen % self._every == 0

    def add(self, point: Point) -> None:
        """One more, which is the newest."""
        self._values.extend(point)
        if len(self._values) > _MAX_PROGRESS_POINTS * _POINT_FIELDS:
            kept = [self._at(index) for index in range(0, len(self), 2)]
            self._values, self._every = array("d"), 2 * self._every
            for each in kept:
                self._values.extend(each)

    def __len__(self) -> int:
        return len(self._values) // _POINT_FIELDS

    def at(self, axis: int, value: float, start: Point, end: Point) -> Point:
        """Where the process was when one of its figures had a value; between two points in a straight line.

        Args:
            axis: index of the figure in `Point`: 0 or 1.
            value: of that figure.
            start: the first point.
            end: the last point.
        """
        points = [start, *(self._at(index) for index in range(len(self))), end]
        keys = [point[axis] for point in points]
        for index in range(1, len(keys)):  # a damaged log may go back
            keys[index] = max(keys[index], keys[index - 1])
        after = min(bisect_left(keys, value), len(points) - 1)
        low, high = points[max(0, after - 1)], points[after]
        span = keys[after] - keys[max(0, after - 1)]
        share = min(1.0, max(0.0, (value - keys[max(0, after - 1)]) / span)) if span > 0 else 1.0
        return Point(*(a + (b - a) * share for a, b in zip(low, high, strict=True)))

    def _at(self, index: int) -> Point:
        return Point(*self._values[index * _POINT_FIELDS : (index + 1) * _POINT_FIELDS])


_MAX_PACE_POINTS: Final = 512
_LEDGER_END: Final = 2 + len(CATEGORIES)


class CpuSeconds(NamedTuple):
    """Counted since the process started, see `cpu_total_seconds` in `telemetry.records`.

    While the first three are not measured, they do not grow, ``known`` neither. NaN: the kernel does not tell.
    """

    used: float = 0.0
    others: float = 0.0
    known: float = 0.0
    thread: float = math.nan
    thread_delay: float = math.nan
    worker: float = 0.0
    worker_delay: float = 0.0


_CPU: Final = CpuSeconds._fields
_PACE_FIELDS: Final = _LEDGER_END + len(_CPU)


class PacePoint(NamedTuple):
    """Counted since the process started: the wall clock, the steps, and the ledger, in the order of `CATEGORIES`."""

    wall_seconds: float
    steps: float
    ledger: tuple[float, ...]
    cpu: CpuSeconds = CpuSeconds()


class PaceSeries:
    """Points in the order in which they were logged. When there are too many, every other one is dropped.

    The points are totals, so nothing is lost with a dropped one but detail.
    """

    __slots__ = ("_every", "_seen", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._seen = 0
        self._every = 1

    def add(self, totals: dict[str, Any]) -> None:
        """Add a window. Totals that go back are of a damaged log, and are left out."""
        self._seen += 1
        if self._seen % self._every:
            return
        ledger = totals["ledger_total_seconds"]
        cpu = CpuSeconds(*self._values[-len(_CPU) :])._asdict() | totals.get("cpu_total_seconds", {})
        point = (
            totals["wall_seconds"],
            totals["steps_total"],
            *(ledger.get(name, 0.0) for name in CATEGORIES),
            *(cpu[name] for name in _CPU),
        )
        if any(new < old for new, old in zip(point, self._values[-_PACE_FIELDS:], strict=False)):
            return
        self._values.extend(point)
        if len(self._values) > _MAX_PACE_POINTS * _PACE_FIELDS:
            kept = [
                self._values[at : at + _PACE_FIELDS] for at in range(_PACE_FIELDS, len(self._values), 2 * _PACE_FIELDS)
            ]
            self._values, self._every = array("d"), 2 * self._every
            for each in kept:
                self._values.extend(each)

    def points(self) -> Sequence[PacePoint]:
        """All points, oldest first."""
        values = self._values
        return [
            PacePoint(
                values[at],
                values[at + 1],
                tuple(values[at + 2 : at + _LEDGER_END]),
                CpuSeconds(*values[at + _LEDGER_END : at + _PACE_FIELDS]),
            )
            for at in range(0, len(values), _PACE_FIELDS)
        ]


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
        self.step.merge(head.get("step_sketch", {}).items(), head.get("step_max_seconds", 0.0))
        self.wait.merge(head.get("data_wait_sketch", {}).items(), head.get("data_wait_max_seconds", 0.0))


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
            sketch.merge(line.get(f"{name}_sketch", {}).items(), line.get(f"{name}_seconds", {}).get("max", 0.0))
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
    log.environment |= {name: value for name, value in line.get("environment", {}).items() if value is not None}
    if "loader" in line:
        log.loader = {name: value for name, value in line["loader"].items() if value is not None}
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


_MAX_NAMED: Final = 8


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


def duplicate_ranks(processes: Sequence[ProcessLog]) -> str:
    """A warning if several training processes have one rank at the same time, and what to do; otherwise empty."""
    by_rank: dict[int, list[ProcessLog]] = {}
    for process in processes:
        if process.totals.get("steps_total"):
            by_rank.setdefault(process.head.get("claimed_rank", process.rank), []).append(process)
    text = ""
    for rank, same in sorted(by_rank.items()):
        together = [one for one in same if any(_overlap(one, other) for other in same if other is not one)]
        if not together:
            continue
        named = [f"pid {one.pid} on {one.head.get('node')}{_shown_as(one, rank)}" for one in together[:_MAX_NAMED]]
        more = f" and {len(together) - _MAX_NAMED} more" if len(together) > _MAX_NAMED else ""
        text += (
            f" {len(together)} processes claim rank {rank} at the same time ({', '.join(named)}{more}); each is "
            "counted separately. Tell each process its rank: set RANK and WORLD_SIZE, or call "
            "torch.distributed.init_process_group. If they are separate jobs, give each its own run folder."
        )
    return text


def _shown_as(process: ProcessLog, claimed: int) -> str:
    return f", shown as rank {process.rank}" if process.rank != claimed else ""


def _overlap(one: ProcessLog, other: ProcessLog) -> bool:
    return one.started <= other.last_time and other.started <= one.last_time


def child_processes(processes: Sequence[ProcessLog]) -> int:
    """How many processes the run has started with multiprocessing, without DataLoader workers."""
    return sum(process.totals.get("child_processes", 0) for process in processes)


_LINE_FIELDS: Final = ("file", "line", "function", "calls", "share_ratio")


_MAX_LINES: Final = 10


_TAKEN: Final = ("lines", "lines_of", "line_samples", "line_verdict")


_ADVICE_FIELDS: Final = ("action", "setting", "value", "predicted_speedup", "predicted_low", "because")
"""All of them are in the report. A field that the log does not have is null."""


def with_whole_lines(evidence: dict[str, Any]) -> dict[str, Any]:
    """The evidence. A line of code whose place is damaged is left out. ``calls`` is null if it called no function."""
    if "lines" not in evidence:
        return evidence
    found = [
        dict.fromkeys(_LINE_FIELDS) | {k: v for k, v in line.items() if k in _LINE_FIELDS} for line in evidence["lines"]
    ]
    whole = [line for line in found if None not in {line["file"], line["line"], line["share_ratio"]}]
    return evidence | {"lines": whole[:_MAX_LINES]}


def lines_of_slow_ranks(stalls: list[dict[str, Any]], processes: Iterable[ProcessLog]) -> list[dict[str, Any]]:
    """The stalls. Those of ranks that waited for a slow rank get the lines of that rank's steps.

    A rank that is held up spends its time in a collective, so its own lines tell nothing.
    """
    slow = {process.rank: process.slow_steps for process in processes if process.slow_steps}
    for stall in stalls:
        told = slow.get(stall["evidence"].get("straggler_rank"), ())
        after = [line for line in told if str(line.get("time", "")) >= str(stall["opened"])]
        before_close = [line for line in after if not stall["closed"] or str(line.get("time")) <= stall["closed"]]
        for line in (before_close or after[:1])[-1:]:
            lines = with_whole_lines(line.get("evidence", {}))
            stall["evidence"] |= {name: lines[name] for name in _TAKEN if name in lines}
    return stalls


def stalls_of(process: ProcessLog) -> list[dict[str, Any]]:
    """The stalls of a process, each with what its later lines added.

    Of one that was open for long, the first line may be in a log that was rotated away. A later one tells most of it.
    """
    stalls: list[dict[str, Any]] = []
    for line in process.stalls:
        if line.get("event") == "stall_open" or (line.get("opened") and (not stalls or _is_older(stalls[-1], line))):
            stalls.append(_stall(process.rank, {"cause": "unknown"} | line))
        elif stalls and stalls[-1]["closed"] is None:
            said = {k: v for k, v in _stall(process.rank, line).items() if v not in (None, {}, [])}
            # The stacks of a stuck run are only in the line that opens its stall.
            evidence = stalls[-1]["evidence"] | said.get("evidence", {})
            stalls[-1] |= said | {"opened": stalls[-1]["opened"], "evidence": evidence}
        if stalls and stalls[-1]["closed"] is None and line.get("event") not in {"stall_open", "stall_lines"}:
            stalls[-1]["closed"] = line.get("closed") or line.get("time")
    if stalls and stalls[-1]["closed"] is None:
        stalls[-1]["evidence"] |= _lost_so_far(process, stalls[:-1])
    return stalls


def _is_older(stall: dict[str, Any], line: dict[str, Any]) -> bool:
    """Whether a stall was over before that of the line had begun."""
    return stall["closed"] is not None and stall["opened"] != line["opened"]


def _lost_so_far(process: ProcessLog, closed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the open stall has cost so far. Its own line does not tell, because it was written when the stall opened."""
    total = process.totals.get("stall_lost_total_seconds")
    if total is None:
        return {}
    told = [stall["evidence"].get("lost_seconds", {}) for stall in closed]
    before = {cause: sum(lost.get(cause, 0.0) for lost in told) for cause in total}
    lost = {cause: round(seconds - before[cause], 3) for cause, seconds in total.items()}
    return {"lost_seconds": {cause: seconds for cause, seconds in lost.items() if seconds > 0}}


def _stall(rank: int, line: dict[str, Any]) -> dict[str, Any]:
    names = ("cause", "opened", "first_step", "last_step", "exposed_wait_ratio")
    stall: dict[str, Any] = {"rank": rank} | {name: line.get(name) for name in names}
    stall["closed"] = None
    stall["opened"] = line.get("opened") or line.get("time")
    stall["evidence"] = with_whole_lines(line.get("evidence", {}))
    stall["advice"] = [{name: each.get(name) for name in _ADVICE_FIELDS} for each in line.get("advice", [])]
    return stall


def lost_by_cause(processes: Iterable[ProcessLog]) -> dict[str, float]:
    """Seconds that some processes have lost in stalls, by cause; without causes that have cost nothing."""
    lost: dict[str, float] = {}
    for process in processes:
        for cause, seconds in _lost_by(process).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return {cause: seconds for cause, seconds in lost.items() if seconds > 0}


def _lost_by(process: ProcessLog) -> Mapping[str, float]:
    """Of one process; from the stalls that are left in its log if its totals do not tell."""
    total: Mapping[str, float] | None = process.totals.get("stall_lost_total_seconds")
    if total is not None:
        return total
    return lost_of(stalls_of(process))


def lost_of(stalls: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that some stalls have cost, by cause."""
    lost: dict[str, float] = {}
    for stall in stalls:
        for cause, seconds in stall["evidence"].get("lost_seconds", {}).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return lost
