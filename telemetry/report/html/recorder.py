"""Gathers what the page shows over time, while the logs are read: sums by rank and time bin, and marks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION
from telemetry.report.attempts import unix
from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from telemetry.report.process_log import ProcessLog

_FIRST_WIDTH_SECONDS: Final = 1.0

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
"""Figures by row and bin."""


class TimeGrid:
    """Named arrays of sums, of the same rows and bins, and sketches by bin over all rows.

    Bin ``i`` begins at ``(first + i) * width_seconds``, Unix time. If a time does not fit, bins are merged in pairs.

    Args:
        rows: how many.
        bins: the most bins. At least half of them are used by a run that is longer than ``bins`` seconds.

    Attributes:
        width_seconds: of a bin.
        used: how many bins have been used, counted from the first.
    """

    def __init__(self, rows: int, bins: int) -> None:
        self.rows, self.bins = rows, bins
        self.width_seconds = _FIRST_WIDTH_SECONDS
        self.used = 0
        self._first = 0
        self._arrays: dict[str, Array] = {}
        self._sketches: dict[str, list[Sketch | None]] = {}

    def index_of(self, time: float) -> int:
        """The bin of a Unix time. Bins are moved or merged to make room for it."""
        index = int(time // self.width_seconds) - self._first
        while not 0 <= index < self.bins:
            if not self.used:
                self._first += index
            elif index < 0 and self.used - index <= self.bins:
                self._move(-index)
            else:
                self._merge_pairs()
            index = int(time // self.width_seconds) - self._first
        self.used = max(self.used, index + 1)
        return index

    def widen(self, seconds: float, least: int) -> None:
        """Merge bins until each is so wide, as long as there remain more than ``least``."""
        while self.width_seconds < seconds and self.used > 2 * least:
            self._merge_pairs()

    def add(self, name: str, row: int, index: int, value: float) -> None:
        """Add to one sum."""
        self._array(name)[row, index] += value

    def spread(self, row: int, begin: float, end: float, amounts: dict[str, float]) -> None:
        """Add amounts that were spent evenly between two Unix times."""
        self.index_of(begin)
        last = self.index_of(end)
        first = self.index_of(begin)  # the end may have widened or moved the bins
        edges = (np.arange(first, last + 2) + self._first) * self.width_seconds
        shares = np.diff(np.clip(edges, begin, end)) / (end - begin)
        for name, amount in amounts.items():
            if amount:
                self._array(name)[row, first : last + 1] += (amount * shares).astype(np.float32)

    def sketch(self, name: str, index: int) -> Sketch:
        """The sketch of a bin."""
        sketches = self._sketches.setdefault(name, [None] * self.bins)
        found = sketches[index]
        if found is None:
            found = sketches[index] = Sketch()
        return found

    def add_grid(self, other: TimeGrid, rows: Mapping[int, int]) -> None:
        """Add the sums and sketches of another grid, whose bins may become wider by this.

        Args:
            other: a grid of any width and number of bins. Its bins may become wider, too.
            rows: its rows that are added, each with the row of this grid.
        """
        if not other.used:
            return
        begins = other.begins()
        for time in (begins[0], begins[-1]):
            self.index_of(time)
        while self.width_seconds < other.width_seconds:
            self._merge_pairs()
        while other.width_seconds < self.width_seconds:
            other._merge_pairs()
        at = other._first - self._first
        theirs, own = [*rows.keys()], [*rows.values()]
        for name in other._arrays:
            self._array(name)[own, at : at + other.used] += other.sums(name)[theirs]
        for name in other._sketches:
            for index, sketch in enumerate(other.sketches(name)):
                if sketch is not None:
                    self.sketch(name, at + index).merge(sketch.counts.items(), sketch.largest)

    def sums(self, name: str) -> Array:
        """The sums of all rows in the used bins; zeros without any."""
        array = self._arrays.get(name)
        return np.zeros((self.rows, self.used), np.float32) if array is None else array[:, : self.used]

    def sketches(self, name: str) -> list[Sketch | None]:
        """The sketches of the used bins, None for a bin without values."""
        return self._sketches.get(name, [None] * self.used)[: self.used]

    def begins(self) -> list[float]:
        """Where each used bin begins, Unix time."""
        return [(self._first + index) * self.width_seconds for index in range(self.used)]

    def _array(self, name: str) -> Array:
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = np.zeros((self.rows, self.bins), np.float32)
        return array

    def _move(self, by: int) -> None:
        """Make room for earlier bins."""
        for name, array in self._arrays.items():
            moved = np.zeros_like(array)
            moved[:, by:] = array[:, : self.bins - by]
            self._arrays[name] = moved
        for name, sketches in self._sketches.items():
            self._sketches[name] = ([None] * by + sketches)[: self.bins]
        self._first -= by
        self.used += by

    def _merge_pairs(self) -> None:
        odd = self._first % 2
        for name, array in self._arrays.items():
            merged = np.zeros_like(array)
            for offset in (0, 1):  # the first and the second of each pair
                half = array[:, max(0, offset - odd) :: 2] if offset >= odd else array[:, 2 - odd :: 2]
                at = 0 if offset >= odd else 1
                merged[:, at : at + half.shape[1]] += half
            self._arrays[name] = merged
        for name, sketches in self._sketches.items():
            pairs: list[Sketch | None] = [None] * self.bins
            for index, sketch in enumerate(sketches):
                at = (index + odd) // 2
                kept = pairs[at] if at < self.bins else None
                if sketch is not None and kept is not None:
                    kept.merge(sketch.counts.items(), sketch.largest)
                elif sketch is not None:
                    pairs[at] = sketch
            self._sketches[name] = pairs
        self.used = (self.used + odd + 1) // 2
        self._first //= 2
        self.width_seconds *= 2


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

_SAMPLES: Final = {
    "gpu": (
        "utilization_ratio", "sm_active_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts",
        "sm_clock_hertz", "temperature_celsius",
    ),
    "host": (
        "cpu_ratio", "memory_used_bytes", "memory_total_bytes", "process_resident_memory_bytes", "workers_bytes",
        "shared_memory_bytes",
    ),
    "workers": ("workers", "ready_batches", "cpu_ratio", "runnable_ratio", "blocked_ratio"),
}  # fmt: skip
"""The figures of the samples that are in a chart."""

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
    """Sees the lines while `load` reads them. Its memory does not depend on the length of the run.

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
        """Called before the first line, with the number of ranks that have a log. If called again, all begins anew."""
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
        """A recorder of the logs of so many ranks, for another process. It is pickled before and after its lines."""
        part = RunRecorder()
        part.grid = TimeGrid(_rows_for(ranks), self.grid.bins)  # as many bins, so that it needs as many windows
        return part

    def add(self, part: RunRecorder) -> None:
        """Take all that a part has seen. The part is not used any more after that."""
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
        """Time between two windows, or two samples, that it needs to see."""
        return self.grid.width_seconds / _WINDOWS_PER_BIN

    def take(self, line: dict[str, Any], log: ProcessLog) -> None:
        """Take a line of a process, which `load` has taken in already."""
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
            counts = line.get(f"{field}_sketch", {}).items()
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
