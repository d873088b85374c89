"""Gathers what the page shows over time, while the logs are read: sums by rank and time bin, and marks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION
from telemetry.report.attempts import unix
from telemetry.report.html.time_grid import TimeGrid
from telemetry.report.sample_names import GPU_NUMBERS, HOST_NUMBERS, WORKERS_NUMBERS
from telemetry.util.sketch import parse_counts

if TYPE_CHECKING:
    from telemetry.report.process_log import ProcessLog

STEP: Final = "step"
WAIT: Final = "wait"
STEPS: Final = "steps"
EXPOSED: Final = "exposed"
EXPOSED_OF: Final = "exposed_of"
"""The training loop's seconds for which exposed wait is known."""

SAMPLES: Final = "samples"
TOKENS: Final = "tokens"
THROUGHPUT_OF: Final = {SAMPLES: "samples_of", TOKENS: "tokens_of"}
"""The training loop's seconds for which samples or tokens are known."""

AGENT: Final = "agent"
HOOKS: Final = "hooks"

_SAMPLES: Final = {"gpu": GPU_NUMBERS, "host": HOST_NUMBERS, "workers": WORKERS_NUMBERS}
_MAX_CELLS: Final = 1 << 18
_MAX_BINS: Final = 512
_MIN_BINS: Final = 32
_MAX_ROWS: Final = 1 << 13
_MAX_PHASES: Final = 256
_WINDOWS_PER_BIN: Final = 4
_EARLIEST: Final = 9.4e8
_LATEST: Final = 4.1e9
"""Unix times of 1999 and 2099. A clock that was not set yet is in 1970."""


class Phase(NamedTuple):
    """An evaluation or a checkpoint. ``begin``: Unix time."""

    category: str
    name: str
    begin: float
    seconds: float


@dataclass(slots=True)
class _Newest:
    """The totals of a process at its newest window."""

    time: float
    wall: float
    sums: dict[str, float]
    exposed: float | None
    trained: dict[str, float]


class RunRecorder:
    """A `LineObserver`. Its memory does not depend on the length of the run.

    Attributes:
        grid: the sums. A sample ``x`` has two: the sum of its values, ``event.x``, and their number, ``event.x#``.
        phases: the newest evaluations and checkpoints of the rank that is read first. ``phases_seen``: all of them.
        rows: the row of each run and rank.
        ranks_left_out: ranks without a row, because there are too many.
        cut: a log began before its first line that is left.
    """

    def __init__(self) -> None:
        self.begin(1)

    def begin(self, ranks: int) -> None:
        """See `LineObserver`."""
        rows = _rows_for(ranks)
        self.grid = TimeGrid(rows, max(_MIN_BINS, min(_MAX_BINS, _MAX_CELLS // rows)))
        self.phases: dict[str, deque[Phase]] = {}
        self.phases_seen: dict[str, int] = {}
        self.rows: dict[tuple[str, int], int] = {}
        self.ranks_left_out = 0
        self.cut = False
        self._newest: dict[int, _Newest] = {}
        self._left_out: dict[int, tuple[dict[str, Any], int, float]] = {}
        self._phases_of: int | None = None

    def part(self, ranks: int) -> RunRecorder:
        """See `LineObserver`."""
        part = RunRecorder()
        part.grid = TimeGrid(_rows_for(ranks), self.grid.bins)  # as many bins, so that it needs as many windows
        return part

    def add(self, part: RunRecorder) -> None:
        """See `LineObserver`."""
        part.finish()
        rows = {theirs: self._row_of(*key) for key, theirs in part.rows.items()}
        self.grid.add_grid(part.grid, {theirs: own for theirs, own in rows.items() if own is not None})
        self.ranks_left_out += part.ranks_left_out
        self.cut |= part.cut
        self._add_phases(part)

    def _add_phases(self, part: RunRecorder) -> None:
        """Of two parts, the phases of the lower rank are kept: the logs are read by rank."""
        if part._phases_of is None:
            return
        if self._phases_of is None or part._phases_of < self._phases_of:
            self.phases, self.phases_seen, self._phases_of = part.phases, part.phases_seen, part._phases_of
        elif part._phases_of == self._phases_of:  # of two attempts
            for category, phases in part.phases.items():
                both = sorted([*self.phases.get(category, ()), *phases], key=attrgetter("begin"))
                self.phases[category] = deque(both, maxlen=_MAX_PHASES)
                self.phases_seen[category] = self.phases_seen.get(category, 0) + part.phases_seen[category]

    def spacing_seconds(self) -> float:
        """See `LineObserver`."""
        return self.grid.width_seconds / _WINDOWS_PER_BIN

    def take(self, line: dict[str, Any], log: ProcessLog) -> None:
        """See `LineObserver`."""
        event = line.get("event")
        if event == "phase":
            self._take_phase(line, log)
            return
        if event not in _SAMPLES and event not in {"window", "run_end"}:
            self.cut |= event == "run_start" and log.head is line and bool(line.get("continued"))
            return
        time, row = unix(line.get("time", "")), self._row_of(log.run, log.rank)
        if time is None or row is None or not _EARLIEST < time < _LATEST:
            return
        if event in _SAMPLES:
            self._take_sample(str(event), line, row, time)
        else:
            self._take_window(line, log, row, time)

    def _row_of(self, run: str, rank: int) -> int | None:
        key = run, rank
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= self.grid.rows:
                self.ranks_left_out += 1
                return None
            row = self.rows[key] = len(self.rows)
        return row

    def _take_window(self, line: dict[str, Any], log: ProcessLog, row: int, time: float) -> None:
        if not line.keys() >= {"ledger_total_seconds", "wall_seconds", "steps_total"}:
            return
        newest = self._newest.get(id(log))
        if newest is not None and line["event"] == "window" and 0 <= time - newest.time < self.spacing_seconds():
            self._left_out[id(log)] = line, row, time  # a later line has its sums, too
            return
        self._add_window(line, id(log), row, time)

    def finish(self) -> None:
        """Take the newest window of each process, if it was left out."""
        for process, (line, row, time) in list(self._left_out.items()):
            self._add_window(line, process, row, time)

    def _add_window(self, line: dict[str, Any], process: int, row: int, time: float) -> None:
        newest = self._newest.get(process)
        self._left_out.pop(process, None)
        ledger, cost = line["ledger_total_seconds"], line.get("overhead_seconds", {})
        sums = {category: ledger.get(category, 0.0) for category in CATEGORIES}
        sums |= {STEPS: line["steps_total"], AGENT: cost.get("agent", 0.0), HOOKS: cost.get("training", 0.0)}
        trained = {name: count for name in THROUGHPUT_OF if (count := line.get(f"{name}_total")) is not None}
        now = _Newest(time, line["wall_seconds"], sums, line.get("exposed_wait_total_seconds"), trained)
        before = newest or _Newest(time - now.wall, 0.0, dict.fromkeys(sums, 0.0), 0.0, dict.fromkeys(trained, 0.0))
        self._newest[process] = now
        added = {name: value - before.sums[name] for name, value in sums.items()}
        begin = time - (now.wall - before.wall)  # the clock may have been stepped since
        if begin >= time or begin < _EARLIEST or min(added.values()) < -1e-3:
            return  # nothing new, or damaged
        if now.exposed is not None and before.exposed is not None:
            added |= {EXPOSED: now.exposed - before.exposed, EXPOSED_OF: added[DATA_WAIT] + added[COMPUTE]}
        for name, count in trained.items():
            more = count - before.trained.get(name, count + 1)
            if more >= 0:
                added |= {name: more, THROUGHPUT_OF[name]: added[DATA_WAIT] + added[COMPUTE]}
        self.grid.spread(row, begin, time, added)
        index = self.grid.index_of(time)
        for name, field in ((STEP, "step"), (WAIT, "data_wait")):
            counts = parse_counts(line.get(f"{field}_sketch"))
            if counts:
                largest = line.get(f"{field}_seconds", {}).get("max", 0.0)
                self.grid.sketch(name, index).merge(counts, largest)

    def _take_sample(self, event: str, line: dict[str, Any], row: int, time: float) -> None:
        index = self.grid.index_of(time)
        values = {name: line[name] for name in _SAMPLES[event] if name in line}
        values |= {f"{resource}_pressure": ratio for resource, ratio in line.get("pressure_ratio", {}).items()
                   if resource in {"cpu", "io", "memory"}}  # fmt: skip
        if "throttled" in line:
            values["throttled"] = float(bool(line["throttled"]))
        for name, value in values.items():
            self.grid.add(f"{event}.{name}", row, index, value)
            self.grid.add(f"{event}.{name}#", row, index, 1.0)

    def _take_phase(self, line: dict[str, Any], log: ProcessLog) -> None:
        category, begin = line.get("category", ""), unix(line.get("started", ""))
        if self._phases_of is None:
            self._phases_of = log.rank
        if category not in {EVALUATION, CHECKPOINT} or begin is None or log.rank != self._phases_of:
            return
        kept = self.phases.setdefault(category, deque(maxlen=_MAX_PHASES))
        kept.append(Phase(category, line.get("name", category), begin, line.get("seconds", 0.0)))
        self.phases_seen[category] = self.phases_seen.get(category, 0) + 1


def _rows_for(ranks: int) -> int:
    return max(1, min(_MAX_ROWS, ranks + ranks // 8 + 1))  # some, for processes that change their rank
