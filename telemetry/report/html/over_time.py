"""The figures of a run over time: what its processes have done, and what was sampled of them, by rank and time bin."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from telemetry.log.lines import GpuLine, HostLine, Line, PhaseLine, WindowLine, WorkersLine
from telemetry.log.process import Point, unix
from telemetry.model.records import CATEGORIES
from telemetry.report.attempt_list import log_interval
from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.log.process import ProcessLog

Figures = npt.NDArray[np.float64]
"""Figures by time bin, by rank, or by rank and time bin. NaN: not measured."""

SAMPLED: Final = {
    "gpu": (
        "utilization_ratio", "sm_active_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts",
        "sm_clock_hertz", "temperature_celsius", "throttled",
    ),
    "host": (
        "cpu_ratio", "memory_used_bytes", "memory_total_bytes", "process_resident_memory_bytes", "workers_bytes",
        "shared_memory_bytes", "cpu_pressure", "io_pressure", "memory_pressure",
    ),
    "workers": ("workers", "ready_batches", "cpu_ratio", "runnable_ratio", "blocked_ratio"),
}  # fmt: skip
"""The sampled figures that a chart shows, by event."""

STEP: Final = "step"
WAIT: Final = "wait"

_ADDED: Final = (*CATEGORIES, "steps", "samples", "tokens", "agent", "hooks")
"""The sums of `Point` that a chart shows."""

_MAX_CELLS: Final = 1 << 18
MAX_ROWS: Final = 256
_MAX_DRAWN_CELLS: Final = 40_000
"""Of the heat map: more rows would be too thin, more cells too many bytes."""

_MAX_BINS: Final = 512
_MIN_BINS: Final = 32
_WINDOWS_PER_BIN: Final = 4
_EARLIEST: Final = 9.4e8
_LATEST: Final = 4.1e9
"""Unix times of 1999 and 2099. A clock that was not set yet is in 1970."""

_BIN_INTERVALS: Final = 1.2
"""The smallest width of a bin in log intervals, so that no bin is empty; but a short run gets `_SHORT_BINS` bins."""

_SHORT_BINS: Final = 20


def ratio(above: Figures, below: Figures) -> Figures:
    """The quotient; NaN where ``below`` is not positive."""
    return np.where(below > 0, above / below, np.nan).astype(np.float64)


class RunRecorder:
    """Takes the samples and the durations of steps while `load` reads a folder. A long run does not need more memory.

    It has those of the newest run alone, as the processes that `load` returns.

    Bin ``i`` begins at ``i * width_seconds``, Unix time. If there are too many bins, neighbours are merged in pairs.

    Attributes:
        bins: from the first to the last that is used.
        phases: the evaluations and checkpoints of the rank that is read first.
        samples: by event and bin, the sums and the number of samples, by figure of `SAMPLED` and row.
        rows: the row of each rank.
        sketches: durations by `STEP` or `WAIT`, and bin.
    """

    def __init__(self) -> None:
        self.begin(1)

    def begin(self, ranks: int) -> None:
        """Begin to take lines. ``ranks``: number of ranks that have a log."""
        self._ranks, self._run, self._started = ranks, "", ""
        self._clear()

    def _clear(self) -> None:
        self.width_seconds, ranks = 1.0, self._ranks
        self.bins = range(0)
        self.phases: list[PhaseLine] = []
        fits = min(_MAX_BINS, _MAX_CELLS // ranks, _MAX_DRAWN_CELLS // min(ranks, MAX_ROWS))
        self._max_bins = max(_MIN_BINS, fits)
        self._max_rows = ranks + ranks // 8 + 1  # with some for processes that change their rank
        self.rows: dict[int, int] = {}
        self.samples: dict[tuple[str, int], npt.NDArray[np.float32]] = {}
        self.sketches: defaultdict[tuple[str, int], Sketch] = defaultdict(Sketch)
        self._newest: dict[int, float] = {}
        self._phases_of: int | None = None

    def take(self, line: Line, log: ProcessLog) -> None:
        """Take a line of a process that `load` has already added to its log."""
        if log.started > self._started:
            if log.run != self._run:
                self._clear()  # what was taken is of an older run
            self._run, self._started = log.run, log.started
        if log.run != self._run:
            return
        match line:
            case PhaseLine(category="evaluation" | "checkpoint"):
                self._phases_of = log.rank if self._phases_of is None else self._phases_of
                if log.rank == self._phases_of:
                    self.phases.append(line)
            case WindowLine():
                self._take_window(line, id(log))
            case GpuLine() | HostLine() | WorkersLine():
                self._take_sample(str(line.__struct_config__.tag), line, log.rank)

    def _take_window(self, line: WindowLine, process: int) -> None:
        time = _plausible(line.time)
        if time is None or 0 <= time - self._newest.get(process, 0.0) < self.width_seconds / _WINDOWS_PER_BIN:
            return  # there are enough in its bin
        self._newest[process], at = time, self._bin_of(time)
        self.sketches[STEP, at].merge(line.step_sketch.items(), (line.step_seconds or {}).get("max", 0.0))
        self.sketches[WAIT, at].merge(line.data_wait_sketch.items(), (line.data_wait_seconds or {}).get("max", 0.0))

    def _take_sample(self, event: str, line: Line, rank: int) -> None:
        time = _plausible(line.time)
        if time is None or (rank not in self.rows and len(self.rows) >= self._max_rows):
            return
        row = self.rows.setdefault(rank, len(self.rows))
        values = [_figure(line, name) for name in SAMPLED[event]]
        self._cells(event, self._bin_of(time))[:, :, row] += (
            [0.0 if value is None else value for value in values],
            [0.0 if value is None else 1.0 for value in values],
        )

    def _cells(self, event: str, at: int) -> npt.NDArray[np.float32]:
        if (event, at) not in self.samples:
            self.samples[event, at] = np.zeros((2, len(SAMPLED[event]), self._max_rows), np.float32)
        return self.samples[event, at]

    def _bin_of(self, time: float) -> int:
        """The bin of a Unix time. Bins are merged if there is no room for it."""
        while True:
            at = int(time // self.width_seconds)
            first, end = (min(at, self.bins.start), max(at + 1, self.bins.stop)) if self.bins else (at, at + 1)
            if end - first <= self._max_bins:
                self.bins = range(first, end)
                return at
            self._merge_pairs()

    def _merge_pairs(self) -> None:
        self.width_seconds *= 2
        self.bins = range(self.bins.start // 2, (self.bins.stop + 1) // 2)
        samples, self.samples = self.samples, {}
        for (event, at), cells in samples.items():
            self._cells(event, at // 2)[:] += cells
        sketches, self.sketches = self.sketches, defaultdict(Sketch)
        for (name, at), sketch in sketches.items():
            self.sketches[name, at // 2].merge(sketch.counts.items(), sketch.largest)

    def over_time(self, processes: Sequence[ProcessLog]) -> OverTime:
        """The figures of these processes."""
        begins = [(log, begin) for log in processes if (begin := _begin(log)) is not None]
        for log, begin in begins:
            self._bin_of(begin)
            self._bin_of(begin + log.totals.wall_seconds)
        for log in processes:
            if (newest := _plausible(log.last_time)) is not None:
                self._bin_of(newest)
        self.bins = self.bins or range(1)
        width = _BIN_INTERVALS * max(map(log_interval, processes))
        while self.width_seconds < width and len(self.bins) > 2 * _SHORT_BINS:
            self._merge_pairs()
        return OverTime(self, sorted({log.rank for log in processes}), begins)


def _plausible(text: str) -> float | None:
    """Unix time of a time in a log; None if it cannot be the time of a training."""
    time = unix(text)
    return time if time is not None and _EARLIEST < time < _LATEST else None


def _figure(line: Line, name: str) -> float | None:
    if isinstance(line, HostLine) and name.endswith("_pressure"):
        return line.pressure_ratio.get(name.removesuffix("_pressure"))
    value = getattr(line, name)
    return float(bool(value)) if isinstance(value, list) else value  # the reasons for reduced clocks


def _begin(log: ProcessLog) -> float | None:
    """Unix time at which the totals of a process begin, by the clock of the newest, should it have been stepped."""
    end = _plausible(log.totals.time)
    begin = 0.0 if end is None else end - log.totals.wall_seconds
    return begin if begin > _EARLIEST else None


class OverTime:
    """The figures of a run by rank and time bin.

    Attributes:
        edges: Unix time at which each bin begins, and the end of the last.
        ranks: the ranks, in the order of the rows of all arrays.
    """

    def __init__(self, recorder: RunRecorder, ranks: Sequence[int], begins: Sequence[tuple[ProcessLog, float]]) -> None:
        self.recorder, self.ranks = recorder, ranks
        self.width_seconds = recorder.width_seconds
        self.edges = np.array([*recorder.bins, recorder.bins.stop]) * self.width_seconds
        self._added = {name: np.zeros((len(ranks), len(recorder.bins))) for name in _ADDED}
        rows = {rank: row for row, rank in enumerate(ranks)}
        for log, begin in begins:
            points = [Point(), *log.progress.points, Point.at(log.totals)]
            times = begin + np.maximum.accumulate([point.wall_seconds for point in points])
            there = np.diff(np.interp(self.edges, times, times)) > 0
            for name, sums in self._added.items():
                values = np.interp(self.edges, times, [getattr(point, name) for point in points])
                sums[rows[log.rank]] += np.where(there, np.diff(values), 0.0)

    def added(self, name: str) -> Figures:
        """What a figure of `Point` grew by, by rank and bin."""
        return self._added[name]

    def total(self, *names: str) -> Figures:
        """What figures of `Point` grew by together, by bin, over all ranks."""
        return np.asarray(sum(self._added[name].sum(axis=0) for name in names))

    def sampled(self, name: str) -> Figures:
        """The means of a sampled figure, such as ``gpu.power_watts``, by rank and bin."""
        event, _, figure = name.partition(".")
        column, rows = SAMPLED[event].index(figure), self.recorder.rows
        known = [rank in rows for rank in self.ranks]
        own = np.array([rows[rank] for rank in self.ranks if rank in rows], np.intp)
        found = np.full((len(self.ranks), len(self.recorder.bins)), np.nan)
        for place, at in enumerate(self.recorder.bins):
            cells = self.recorder.samples.get((event, at))
            if cells is not None:
                found[known, place] = ratio(*cells[:, column, own])
        return found

    def percentiles(self, name: str, which: str) -> Figures:
        """A percentile of `STEP` or `WAIT` by bin, over all ranks."""
        sketches = (self.recorder.sketches.get((name, at)) for at in self.recorder.bins)
        found = [None if sketch is None else sketch.percentiles() for sketch in sketches]
        return np.array([np.nan if each is None else getattr(each, which) for each in found])
