"""Collects the figures of the page while the logs are read: sums by rank and time bin, and marks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from telemetry.log_lines import GpuLine, HostLine, Line, PhaseLine, RunStartLine, TotalsLine, WindowLine, WorkersLine
from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION
from telemetry.report.process_log import unix
from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from telemetry.report.process_log import ProcessLog

_FIRST_WIDTH_SECONDS: Final = 1.0

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
"""Figures by row, or by row and bin."""


class TimeGrid:
    """Sums by name, row and time bin, and sketches by name and bin, over all rows.

    Bin ``i`` begins at ``i * width_seconds``, Unix time. If there are too many bins, neighbours are merged in pairs.

    Args:
        rows: number of rows.
        bins: largest number of bins. A run that is longer than ``bins`` seconds uses at least half of them.
    """

    def __init__(self, rows: int, bins: int) -> None:
        self.rows, self.bins = rows, bins
        self.width_seconds = _FIRST_WIDTH_SECONDS
        self._range: range = range(0)
        self._sums: dict[str, dict[int, Array]] = {}
        self._sketches: dict[str, dict[int, Sketch]] = {}

    @property
    def used(self) -> int:
        """Number of bins from the first to the last that is used."""
        return len(self._range)

    def begins(self) -> list[float]:
        """Unix time at which each used bin begins."""
        return [index * self.width_seconds for index in self._range]

    def bin_of(self, time: float) -> int:
        """The bin of a Unix time. Bins are merged if there is no room for it."""
        while True:
            index = int(time // self.width_seconds)
            first, end = index, index + 1
            if self._range:
                first, end = min(first, self._range.start), max(end, self._range.stop)
            if end - first <= self.bins:
                self._range = range(first, end)
                return index
            self._merge_pairs()

    def widen(self, seconds: float, least: int) -> None:
        """Merge bins until each has this width, as long as more than ``least`` remain."""
        while self.width_seconds < seconds and self.used > 2 * least:
            self._merge_pairs()

    def add(self, name: str, row: int, index: int, value: float) -> None:
        """Add a value to the sum in a bin."""
        self._array(name, index)[row] += np.float32(value)

    def spread(self, row: int, begin: float, end: float, amounts: dict[str, float]) -> None:
        """Add amounts that are spread evenly between two Unix times."""
        self.bin_of(begin)
        last = self.bin_of(end)
        first = self.bin_of(begin)  # the end may have merged the bins
        shares = np.diff(np.clip(np.arange(first, last + 2) * self.width_seconds, begin, end)) / (end - begin)
        for index, share in enumerate(shares.tolist(), first):
            for name, amount in amounts.items():
                if amount:
                    self.add(name, row, index, amount * share)

    def sketch(self, name: str, index: int) -> Sketch:
        """The sketch of a bin."""
        return self._sketches.setdefault(name, {}).setdefault(index, Sketch())

    def sums(self, name: str) -> Array:
        """The sums by row and bin; zeros without any."""
        found = np.zeros((self.rows, self.used), np.float32)
        for index, array in self._sums.get(name, {}).items():
            found[:, index - self._range.start] = array
        return found

    def sketches(self, name: str) -> list[Sketch | None]:
        """The sketch of each bin; None for a bin without values."""
        return [self._sketches.get(name, {}).get(index) for index in self._range]

    def _array(self, name: str, index: int) -> Array:
        arrays = self._sums.setdefault(name, {})
        array = arrays.get(index)
        if array is None:
            array = arrays[index] = np.zeros(self.rows, np.float32)
        return array

    def _merge_pairs(self) -> None:
        self.width_seconds *= 2
        self._range = range(self._range.start // 2, (self._range.stop + 1) // 2)
        before, self._sums = self._sums, {}
        for name, arrays in before.items():
            for index, array in arrays.items():
                self._array(name, index // 2)[:] += array
        sketches, self._sketches = self._sketches, {}
        for name, of_bins in sketches.items():
            for index, sketch in of_bins.items():
                self.sketch(name, index // 2).merge(sketch.counts.items(), sketch.largest)


STEP: Final = "step"
WAIT: Final = "wait"
STEPS: Final = "steps"
SAMPLES: Final = "samples"
TOKENS: Final = "tokens"
THROUGHPUT_OF: Final = {SAMPLES: "samples_of", TOKENS: "tokens_of"}
"""The seconds of the training loop for which samples or tokens are known."""

AGENT: Final = "agent"
HOOKS: Final = "hooks"

_READINGS: Final[dict[type[Line], tuple[str, tuple[str, ...]]]] = {
    GpuLine: ("gpu", (
        "utilization_ratio", "sm_active_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts",
        "sm_clock_hertz", "temperature_celsius",
    )),
    HostLine: ("host", (
        "cpu_ratio", "memory_used_bytes", "memory_total_bytes", "process_resident_memory_bytes", "workers_bytes",
        "shared_memory_bytes",
    )),
    WorkersLine: ("workers", ("workers", "ready_batches", "cpu_ratio", "runnable_ratio", "blocked_ratio")),
}  # fmt: skip
"""The event, and its sampled figures that a chart shows."""

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


class _Newest(NamedTuple):
    """The totals of a process at its newest window. ``trained``: samples and tokens, if they are known."""

    time: float
    wall: float
    sums: dict[str, float]
    trained: dict[str, float]


class RunRecorder:
    """Takes the lines while `load` reads them. Its memory does not depend on the length of the run.

    Attributes:
        grid: the sums. A sample ``x`` has two: the sum of its values, ``event.x``, and their number, ``event.x#``.
        phases: the newest evaluations and checkpoints of the rank that is read first. ``phases_seen``: how many it had.
        ranks_left_out: ranks without a row, because there are too many.
        cut: whether the first lines of a log are missing.
    """

    def __init__(self) -> None:
        self.begin(1)

    def begin(self, ranks: int) -> None:
        """Start with the number of ranks that have a log. A second call drops all that was taken."""
        rows = max(1, min(_MAX_ROWS, ranks + ranks // 8 + 1))  # with some for processes that change their rank
        self.grid = TimeGrid(rows, max(_MIN_BINS, min(_MAX_BINS, _MAX_CELLS // rows)))
        self.phases: dict[str, deque[Phase]] = {}
        self.phases_seen: dict[str, int] = {}
        self.rows: dict[int, int] = {}
        self.ranks_left_out = 0
        self.cut = False
        self._newest: dict[int, _Newest] = {}
        self._left_out: dict[int, tuple[TotalsLine, int, float]] = {}
        self._phases_of: int | None = None

    def spacing_seconds(self) -> float:
        """The longest time between two windows, or two samples, that the charts need."""
        return self.grid.width_seconds / _WINDOWS_PER_BIN

    def take(self, line: Line, log: ProcessLog) -> None:
        """Take a line of a process that `load` has already added to its log."""
        if isinstance(line, PhaseLine):
            self._take_phase(line, log)
        elif isinstance(line, RunStartLine):
            self.cut |= log.head is line and line.continued
        elif isinstance(line, (TotalsLine, GpuLine, HostLine, WorkersLine)):
            time, row = unix(line.time), self._row_of(log.rank)
            if time is None or row is None or not _EARLIEST < time < _LATEST:
                return
            if not isinstance(line, TotalsLine):
                self._take_reading(line, row, time)
            elif line.is_whole:
                newest = self._newest.get(id(log))
                early = newest is not None and 0 <= time - newest.time < self.spacing_seconds()
                if early and isinstance(line, WindowLine):
                    self._left_out[id(log)] = line, row, time  # a later line has its sums, too
                else:
                    self._add_window(line, id(log), row, time)

    def finish(self) -> None:
        """Add the newest window of each process if it was left out."""
        for process, (line, row, time) in list(self._left_out.items()):
            self._add_window(line, process, row, time)

    def _row_of(self, rank: int) -> int | None:
        row = self.rows.get(rank)
        if row is None:
            if len(self.rows) >= self.grid.rows:
                self.ranks_left_out += 1
                return None
            row = self.rows[rank] = len(self.rows)
        return row

    def _add_window(self, line: TotalsLine, process: int, row: int, time: float) -> None:
        newest = self._newest.get(process)
        self._left_out.pop(process, None)
        ledger, cost = line.ledger_total_seconds, line.overhead_seconds
        sums = {category: ledger.get(category, 0.0) for category in CATEGORIES}
        sums |= {STEPS: line.steps_total or 0, AGENT: cost.get("agent", 0.0), HOOKS: cost.get("training", 0.0)}
        counts = {SAMPLES: line.samples_total, TOKENS: line.tokens_total}
        trained = {name: float(count) for name, count in counts.items() if count is not None}
        now = self._newest[process] = _Newest(time, line.wall_seconds, sums, trained)
        before = newest or _Newest(time - now.wall, 0.0, dict.fromkeys(sums, 0.0), dict.fromkeys(trained, 0.0))
        added = {name: value - before.sums[name] for name, value in sums.items()}
        begin = time - (now.wall - before.wall)  # the clock may have been stepped since
        if begin >= time or begin < _EARLIEST or min(added.values()) < -1e-3:
            return  # no progress, or damaged
        for name, count in trained.items():
            more = count - before.trained.get(name, count + 1)
            if more >= 0:
                added |= {name: more, THROUGHPUT_OF[name]: added[DATA_WAIT] + added[COMPUTE]}
        self.grid.spread(row, begin, time, added)
        if isinstance(line, WindowLine):
            index = self.grid.bin_of(time)
            for name, counted, seconds in (
                (STEP, line.step_sketch, line.step_seconds),
                (WAIT, line.data_wait_sketch, line.data_wait_seconds),
            ):
                if counted:
                    self.grid.sketch(name, index).merge(counted.items(), (seconds or {}).get("max", 0.0))

    def _take_reading(self, line: GpuLine | HostLine | WorkersLine, row: int, time: float) -> None:
        index, (event, names) = self.grid.bin_of(time), _READINGS[type(line)]
        values = {name: value for name in names if (value := getattr(line, name)) is not None}
        if isinstance(line, HostLine):
            values |= {f"{resource}_pressure": ratio for resource, ratio in line.pressure_ratio.items()
                       if resource in {"cpu", "io", "memory"}}  # fmt: skip
        if isinstance(line, GpuLine) and line.throttled is not None:
            values["throttled"] = float(bool(line.throttled))
        for name, value in values.items():
            self.grid.add(f"{event}.{name}", row, index, value)
            self.grid.add(f"{event}.{name}#", row, index, 1.0)

    def _take_phase(self, line: PhaseLine, log: ProcessLog) -> None:
        category, begin = line.category, unix(line.started)
        if self._phases_of is None:
            self._phases_of = log.rank
        if category not in {EVALUATION, CHECKPOINT} or begin is None or log.rank != self._phases_of:
            return
        kept = self.phases.setdefault(category, deque(maxlen=_MAX_PHASES))
        kept.append(Phase(category, line.name or category, begin, line.seconds))
        self.phases_seen[category] = self.phases_seen.get(category, 0) + 1
