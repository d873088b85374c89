"""The contents of the charts: labels, colours and figures, also as text. `drawing` draws them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.report.html import palette
from telemetry.report.html.recorder import AGENT, HOOKS, SAMPLES, STEP, STEPS, THROUGHPUT_OF, TOKENS, WAIT
from telemetry.report.process_log import unix
from telemetry.util.text import byte_size, duration, named, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from telemetry.report.contract import Rank, ReportValues
    from telemetry.report.html.recorder import Array, RunRecorder
    from telemetry.report.process_log import ProcessLog

Figures = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""Figures by time bin, or by rank. NaN: not measured."""

MAX_TABLE_ROWS: Final = 64

# -- units ---------------------------------------------------------------------------------------------------------

SECONDS: Final = "seconds"
RATIO: Final = "ratio"
BYTES: Final = "bytes"
WATTS: Final = "watts"
HERTZ: Final = "hertz"
CELSIUS: Final = "celsius"
COUNT: Final = "count"

_SCALES: Final = {RATIO: (100.0, "%"), HERTZ: (1e-6, "MHz"), WATTS: (1.0, "W"), CELSIUS: (1.0, "°C")}
_TEXTS: Final[Mapping[str, Callable[[float], str]]] = {SECONDS: duration, RATIO: percent, BYTES: byte_size}


def shown(value: float | None, unit: str) -> str:
    """A figure with its unit; a dash if it was not measured."""
    if value is None or not np.isfinite(value):
        return "-"
    if unit in _TEXTS:
        return _TEXTS[unit](value)
    factor, sign = scale_of(unit, value)
    return f"{value * factor:.0f} {sign}" if sign else f"{value:.1f}"


def scale_of(unit: str, largest: float) -> tuple[float, str]:
    """The factor by which an axis multiplies its figures, and the unit of the products."""
    if unit == SECONDS:
        return (1e3, "ms") if largest < 1 else (1.0, "s")
    if unit == BYTES:
        return (1e-9, "GB") if largest >= 1e9 else (1e-6, "MB")
    return _SCALES.get(unit, (1.0, ""))


# -- a chart -------------------------------------------------------------------------------------------------------


class TimeAxis(NamedTuple):
    """The bins of all charts over time. ``begins``: Unix time at which each bin begins."""

    begins: tuple[float, ...]
    width_seconds: float

    @property
    def middles_ms(self) -> Figures:
        """The middle of each bin in milliseconds of Unix time."""
        return (np.array(self.begins) + self.width_seconds / 2) * 1000.0


class Table(NamedTuple):
    """A table of texts. ``note``: a sentence about omitted rows."""

    title: str
    headings: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""


class Curve(NamedTuple):
    """A line, an area or a part of the bars. ``low`` and ``high``: a band around it, or None."""

    label: str
    colour: str
    values: Figures
    low: Figures | None = None
    high: Figures | None = None
    dash: str = "solid"

    @property
    def is_measured(self) -> bool:
        """Whether any figure was measured."""
        return bool(np.isfinite(self.values).any())

    @property
    def spread(self) -> list[float | None]:
        """Its lowest, mean, highest and last figure."""
        values = self.values[np.isfinite(self.values)]
        if not len(values):
            return [None] * 4
        low = self.values if self.low is None else self.low
        high = self.values if self.high is None else self.high
        return [float(np.nanmin(low)), float(values.mean()), float(np.nanmax(high)), float(values[-1])]


@dataclass(frozen=True)
class HeatMetric:
    """One figure of all ranks over time, and the limits of the colours.

    A few figures may be above the upper limit, so that they do not reduce the contrast of the others.
    """

    key: str
    label: str
    unit: str
    cells: Figures
    low: float
    high: float

    def read_out(self) -> dict[str, Any]:
        """What the page shows at the cursor."""
        factor, unit = scale_of(self.unit, self.high)
        more = bool((self.cells > self.high * (1 + 1e-6)).any())
        return {"low": self.low * factor, "high": self.high * factor, "more": more, "unit": unit, "label": self.label}


@dataclass(frozen=True)
class Mark:
    """An event or a period. ``begin`` and ``end``: Unix time."""

    kind: str
    begin: float
    end: float | None
    text: str


TIME: Final = "time"
BARS: Final = "bars"
HEAT: Final = "heat"
MARKS: Final = "marks"
"""The kinds of charts: curves over time, stacked bars, ranks over time in colours, and events."""


@dataclass(frozen=True)
class Chart:
    """One chart of the page.

    Attributes:
        curves: of a chart over time, or of bars. ``stacked``: areas that fill the space from 0 to 1.
        rows: a label for each bar, each row of the heat map (one rank or several), or each kind of marks.
        upright: bars without gaps, for hundreds of ranks.
        metrics: of the heat map, which shows one at a time, the first at the start. ``bins_per_cell``: width of a cell.
        outliers: sentences about ranks that differ from the others.
    """

    key: str
    title: str
    kind: str = TIME
    unit: str = ""
    curves: tuple[Curve, ...] = ()
    rows: tuple[str, ...] = ()
    note: str = ""
    stacked: bool = False
    upright: bool = False
    metrics: tuple[HeatMetric, ...] = ()
    bins_per_cell: int = 1
    outliers: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()

    @property
    def legend(self) -> list[dict[str, str]]:
        """The legend for the template."""
        if self.kind == MARKS:
            return [{"field": "", "label": kind, "colour": palette.MARKS[kind], "dash": "solid"} for kind in self.rows]
        return [
            {"field": f"c{number}", "label": curve.label, "colour": curve.colour, "dash": curve.dash}
            for number, curve in enumerate(self.curves)
        ]

    def read_out(self) -> dict[str, Any]:
        """What the page shows at the cursor."""
        fields = [[each["field"], each["label"]] for each in self.legend]
        if self.kind == HEAT:
            metrics = {metric.key: metric.read_out() for metric in self.metrics}
            bins = self.metrics[0].cells.shape[1]
            return {"rows": self.rows, "metrics": metrics, "bins": bins, "per": self.bins_per_cell}
        if self.kind == MARKS:
            return {"marks": [asdict(mark) for mark in self.marks], "kinds": self.rows}
        return {"fields": fields} if self.kind == TIME else {"labels": self.rows, "fields": fields}

    def table(self) -> Table:
        """The main figures as text, for people who cannot see the chart."""
        headings: tuple[str, ...] = ("", "lowest", "mean", "highest", "last")
        if self.kind == HEAT:
            rows = [self._spread_of(metric) for metric in self.metrics]
            return Table(self.title, ("", "lowest", "median", "highest", "most different"), rows)
        if self.kind == MARKS:
            rows = [[kind, str(sum(mark.kind == kind for mark in self.marks))] for kind in self.rows]
            return Table(self.title, ("", "marks"), rows)
        if self.kind == TIME:
            rows = [[curve.label, *(shown(value, self.unit) for value in curve.spread)] for curve in self.curves]
            return Table(self.title, headings, rows)
        rows = [
            [label, *(shown(float(curve.values[at]), self.unit) for curve in self.curves)]
            for at, label in enumerate(self.rows[:MAX_TABLE_ROWS])
        ]
        left = len(self.rows) - len(rows)
        headings = ("", *(curve.label for curve in self.curves))
        return Table(self.title, headings, rows, f"{left} more" if left > 0 else "")

    def _spread_of(self, metric: HeatMetric) -> list[str]:
        cells, median = metric.cells, np.nanmedian(metric.cells)
        filled = np.where(np.isfinite(cells), cells, median)
        odd = int(np.abs(filled.mean(axis=1) - np.median(filled)).argmax())
        spread = (np.nanmin(cells), median, np.nanmax(cells))
        return [metric.label, *(shown(float(value), metric.unit) for value in spread), self.rows[odd]]


# -- sampled figures -----------------------------------------------------------------------------------------------


class _Sampled(NamedTuple):
    """The curve of a sampled figure. ``name``: the figure's name in the log."""

    name: str
    label: str
    colour: str
    dash: str = "solid"


class _SampledChart(NamedTuple):
    key: str
    title: str
    unit: str
    curves: Sequence[_Sampled]
    note: str = ""


_BAND: Final = "Line: mean over the ranks. Band: lowest to highest rank."

GPU: Final = (
    _SampledChart(
        "gpu-activity", "GPU activity", RATIO,
        (_Sampled("gpu.sm_active_ratio", "SM activity", palette.GREEN),
         _Sampled("gpu.utilization_ratio", "utilisation", palette.BLUE, "dashed")),
        f"Utilisation is the share of time in which any kernel ran; not efficiency. {_BAND}",
    ),
    _SampledChart(
        "gpu-memory", "GPU memory", BYTES,
        (_Sampled("gpu.memory_used_bytes", "used", palette.PURPLE),
         _Sampled("gpu.memory_total_bytes", "of the GPU", palette.GREY, "dashed")),
    ),
    _SampledChart("gpu-power", "GPU power", WATTS, (_Sampled("gpu.power_watts", "power", palette.ORANGE),)),
    _SampledChart("gpu-clock", "SM clock", HERTZ, (_Sampled("gpu.sm_clock_hertz", "SM clock", palette.LIGHT_BLUE),)),
    _SampledChart(
        "gpu-temperature", "GPU temperature", CELSIUS,
        (_Sampled("gpu.temperature_celsius", "temperature", palette.RED),),
    ),
    _SampledChart("gpu-throttled", "Reduced GPU clocks", RATIO,
                  (_Sampled("gpu.throttled", "samples with reduced clocks", palette.RED),)),
)  # fmt: skip

WORKERS: Final = (
    _SampledChart(
        "workers-state", "DataLoader workers", RATIO,
        (_Sampled("workers.cpu_ratio", "running", palette.GREEN),
         _Sampled("workers.blocked_ratio", "blocked", palette.RED),
         _Sampled("workers.runnable_ratio", "run-queue delay", palette.ORANGE, "dashed")),
        "Share of the wall clock of the mean worker. Blocked: waits for storage, the network or a lock. Run-queue "
        "delay: waits for a core.",
    ),
    _SampledChart(
        "workers-ready", "Ready batches", COUNT,
        (_Sampled("workers.ready_batches", "ready batches of a rank", palette.BLUE),
         _Sampled("workers.workers", "workers of a rank", palette.GREY, "dashed")),
    ),
)  # fmt: skip

HOST: Final = (
    _SampledChart(
        "host-memory", "Memory", BYTES,
        (_Sampled("host.memory_used_bytes", "used on the node", palette.PURPLE),
         _Sampled("host.memory_total_bytes", "of the node", palette.GREY, "dashed"),
         _Sampled("host.process_resident_memory_bytes", "training process", palette.GREEN),
         _Sampled("host.workers_bytes", "workers of a rank", palette.ORANGE),
         _Sampled("host.shared_memory_bytes", "shared memory (/dev/shm)", palette.LIGHT_BLUE)),
        _BAND,
    ),
    _SampledChart(
        "host-cpu", "CPU and pressure of the nodes", RATIO,
        (_Sampled("host.cpu_ratio", "CPU", palette.GREEN),
         _Sampled("host.cpu_pressure", "CPU pressure", palette.ORANGE, "dashed"),
         _Sampled("host.io_pressure", "I/O pressure", palette.RED, "dashed"),
         _Sampled("host.memory_pressure", "memory pressure", palette.PURPLE, "dashed")),
        "Pressure: share of time in which some task waited for it.",
    ),
)  # fmt: skip


class Sums:
    """The sums of the ranks that have a row. ``ranks``: these ranks, in the order of the rows of all arrays."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._grid = recorder.grid
        self.ranks = sorted(recorder.rows)
        self._rows = [recorder.rows[rank] for rank in self.ranks]

    def of(self, name: str) -> Array:
        """The sums by rank and bin."""
        return self._grid.sums(name)[self._rows]

    def all(self, name: str) -> Figures:
        """The sums by bin, over all ranks."""
        return np.asarray(self.of(name).sum(axis=0, dtype=np.float64))

    def means(self, name: str) -> Figures:
        """The mean of a sampled figure by rank and bin; NaN without a sample."""
        return _ratio(self.of(name), self.of(f"{name}#"))

    def percentiles(self, name: str, which: str) -> Figures:
        """A percentile over all ranks by bin; NaN without a value."""
        found = [None if sketch is None else sketch.percentiles() for sketch in self._grid.sketches(name)]
        return np.array([np.nan if each is None else getattr(each, which) for each in found])


def _ratio(above: Figures | Array, below: Figures | Array) -> Figures:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan).astype(np.float64)


def sampled_charts(sums: Sums, wanted: Sequence[_SampledChart]) -> tuple[list[Chart], list[str]]:
    """Charts of the sampled figures that were measured, and the names of the other figures."""
    charts: list[Chart] = []
    missing = []
    for each in wanted:
        curves = [_sampled_curve(sums, curve) for curve in each.curves]
        measured = tuple(curve for curve in curves if curve.is_measured)
        missing += [f"{each.title}: {curve.label}" for curve in curves if not curve.is_measured]
        if measured:
            charts.append(Chart(each.key, each.title, TIME, each.unit, measured, note=each.note))
    return charts, missing


def _sampled_curve(sums: Sums, wanted: _Sampled) -> Curve:
    mean = _ratio(sums.all(wanted.name), sums.all(f"{wanted.name}#"))
    low = high = None
    if len(sums.ranks) > 1:
        by_rank = sums.means(wanted.name)
        there = np.isfinite(by_rank)
        low = np.where(there.any(axis=0), np.where(there, by_rank, np.inf).min(axis=0), np.nan)
        high = np.where(there.any(axis=0), np.where(there, by_rank, -np.inf).max(axis=0), np.nan)
    return Curve(wanted.label, wanted.colour, mean, low, high, wanted.dash)


# -- the ledger, steps, throughput and cost over time ---------------------------------------------------------------


def ledger_shares(sums: Sums) -> Chart:
    """How the time of all ranks was spent, as shares."""
    spent = {c: sums.all(c) for c in palette.CATEGORIES}
    total = np.sum(list(spent.values()), axis=0)
    curves = tuple(
        Curve(c.replace("_", " "), colour, _ratio(spent[c], total)) for c, colour in palette.CATEGORIES.items()
    )
    note = "The time of all ranks, by category."
    return Chart("ledger", "Ledger over time", TIME, RATIO, curves, stacked=True, note=note)


def steps_over_time(sums: Sums) -> list[Chart]:
    """Percentiles of steps and waits of all ranks, and steps per second, if they are known."""
    found = [
        Chart(
            f"{name}-percentiles",
            f"{title} duration",
            TIME,
            SECONDS,
            tuple(
                Curve(label, colour, sums.percentiles(name, label), dash=dash)
                for label, dash in (("p50", "solid"), ("p95", "dashed"), ("p99", "dotted"))
            ),
        )
        for name, title, colour in ((STEP, "Step", palette.GREEN), (WAIT, "Wait", palette.RED))
    ]
    pace = Curve("steps per second", palette.GREEN, _ratio(sums.all(STEPS), sums.all(DATA_WAIT) + sums.all(COMPUTE)))
    note = "Steps of the mean rank per second of its training loop."
    found.append(Chart("pace", "Pace", TIME, COUNT, (pace,), note=note))
    return [chart for chart in found if any(curve.is_measured for curve in chart.curves)]


def throughput(sums: Sums) -> list[Chart]:
    """Samples and tokens per second of the training loop, summed over the ranks, if they are known."""
    charts: list[Chart] = []
    loop = sums.of(DATA_WAIT) + sums.of(COMPUTE)
    note = "Per second of the training loop, summed over the ranks. Empty where a rank does not know it."
    for name, colour in ((SAMPLES, palette.GREEN), (TOKENS, palette.BLUE)):
        known = sums.of(THROUGHPUT_OF[name])
        unknown = ((loop > 0) & (known <= 0)).any(axis=0) | (known <= 0).all(axis=0)
        rates = np.nansum(_ratio(sums.of(name), known), axis=0)
        curve = Curve(f"{name} per second", colour, np.where(unknown, np.nan, rates))
        if curve.is_measured:
            charts.append(Chart(f"{name}-rate", f"{name.capitalize()} per second", TIME, COUNT, (curve,), note=note))
    return charts


def agent_cost(sums: Sums) -> Chart:
    """The cost of the agent as a share of the wall clock."""
    wall = np.sum([sums.of(c) for c in palette.CATEGORIES], axis=0).sum(axis=0)
    curves = (
        Curve("agent thread (CPU)", palette.BLUE, _ratio(sums.all(AGENT), wall)),
        Curve("hooks on the training thread", palette.ORANGE, _ratio(sums.all(HOOKS), wall)),
    )
    note = "Share of the wall clock of the mean rank."
    return Chart("agent-cost", "Cost of the agent", TIME, RATIO, curves, note=note)


_MAX_BARS: Final = 512


def ledger_by_rank(ranks: Sequence[Rank]) -> Chart:
    """The ledger of each rank, over all its processes. If there are many ranks, a bar shows a group of neighbours."""
    ledgers: dict[int, dict[str, float]] = {}
    for entry in ranks:
        own = ledgers.setdefault(entry.rank, dict.fromkeys(palette.CATEGORIES, 0.0))
        for category, seconds in entry.ledger.items():
            own[category] += seconds
    order = sorted(ledgers)
    size = -(-len(order) // _MAX_BARS)
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    totals = np.array([max(sum(sum(ledgers[rank].values()) for rank in group), 1e-9) for group in groups])
    curves = []
    for category, colour in palette.CATEGORIES.items():
        spent = np.array([sum(ledgers[rank][category] for rank in group) for group in groups])
        curves.append(Curve(category.replace("_", " "), colour, spent / totals))
    note = f"Each bar is {size} ranks." if size > 1 else ""
    labels = tuple(named(group) for group in groups)
    return Chart("ledger-ranks", "Ledger by rank", BARS, RATIO, tuple(curves), labels, note, upright=True)


# -- ranks over time -----------------------------------------------------------------------------------------------

_MAX_HEAT_ROWS: Final = 256
_MAX_HEAT_CELLS: Final = 40_000
_COLOURED_RATIO: Final = 0.98
_FAR_ABOVE: Final = 2.0
"""The colours of the heat map end at the quantile `_COLOURED_RATIO` if the largest figure is so many times as large."""

_MIN_RANKS: Final = 3
_OUTLIER_DEVIATIONS: Final = 8.0
_MIN_OUTLIER_RATIO: Final = 0.10
"""A rank is an outlier while it differs from the median by so many usual differences, and by this share of it."""

_MIN_TIME_RATIO: Final = 0.05
_MAX_ODD_RATIO: Final = 0.25
"""A sentence names outliers of at least this share of the time, unless they are more than this share of all ranks."""

_MIN_DIFFERENCE: Final = 2e-3

_SAMPLED: Final = (
    ("gpu.sm_active_ratio", "GPU: SM activity", RATIO),
    ("gpu.utilization_ratio", "GPU: utilisation", RATIO),
    ("gpu.power_watts", "GPU: power", WATTS),
    ("gpu.sm_clock_hertz", "GPU: SM clock", HERTZ),
    ("gpu.temperature_celsius", "GPU: temperature", CELSIUS),
)


def heat_map(sums: Sums, nodes: Mapping[int, str]) -> Chart | None:
    """Ranks over time. The first metric is the one with the largest outlier."""
    ranks = sums.ranks
    found = [metric for metric in _metrics(sums) if np.isfinite(metric.cells).any()]
    if not found:
        return None
    found.sort(key=lambda metric: -_oddity(metric.cells))  # stable: without an outlier, the order stays
    size = -(-len(ranks) // _MAX_HEAT_ROWS)
    groups = [range(at, min(at + size, len(ranks))) for at in range(0, len(ranks), size)]
    note = "Each row is a rank. "
    if size > 1:
        note = f"Each row is {size} ranks, and shows the one that differs most from all ranks at that time. "
    bins = max(1, -(-len(groups) * found[0].cells.shape[1] // _MAX_HEAT_CELLS))
    of_rows = [[ranks[at] for at in group] for group in groups]
    return Chart(
        "ranks",
        "Ranks over time",
        HEAT,
        rows=tuple(f"{named(own)} ({_places(own, nodes, ' …')})" for own in of_rows),
        note=f"{note}Empty: not measured, or the rank was not there.",
        metrics=tuple(_thinned(metric if size == 1 else _worst_of(metric, groups), bins) for metric in found),
        bins_per_cell=bins,
        outliers=tuple(text for metric in found if (text := _outlier(metric, ranks, nodes))),
    )


def _places(ranks: Sequence[int], nodes: Mapping[int, str], more: str) -> str:
    places = sorted({nodes.get(rank, "?") for rank in ranks})
    return ", ".join(places[:2]) + (more if len(places) > 2 else "")


def _metrics(sums: Sums) -> list[HeatMetric]:
    wait, compute, steps = (sums.of(name).astype(np.float64) for name in (DATA_WAIT, COMPUTE, STEPS))
    share = _ratio(wait, wait + compute)
    pace = np.where(steps > 0.5, _ratio(wait + compute, steps), np.nan)  # half a step: of a bin that it only touches
    metrics = [
        HeatMetric("wait", "Waiting for data, share of the training loop", RATIO, share, 0.0, _high(share, 0.05)),
        HeatMetric("step", "Mean step", SECONDS, pace, 0.0, _high(pace, 1e-6)),
    ]
    for name, label, unit in _SAMPLED:
        if name == "gpu.utilization_ratio" and np.isfinite(metrics[-1].cells).any():
            continue  # SM activity is there, which is more exact
        cells = sums.means(name)
        low = 0.0 if unit in {RATIO, WATTS} or not np.isfinite(cells).any() else float(np.nanmin(cells))
        metrics.append(HeatMetric(name, label, unit, cells, low, 1.0 if unit == RATIO else _high(cells, 1e-9)))
    return metrics


def _high(cells: Figures, least: float) -> float:
    """The upper limit of the colours: the largest figure, or a high quantile if that is far below it."""
    measured = cells[np.isfinite(cells)]
    if not len(measured):
        return least
    largest, usual = float(measured.max()), float(np.quantile(measured, _COLOURED_RATIO))
    return usual if usual > least and largest > _FAR_ABOVE * usual else max(least, largest)


def _medians(cells: Figures) -> Figures:
    medians = np.full(cells.shape[1], np.nan)
    there = np.isfinite(cells).any(axis=0)
    medians[there] = np.nanmedian(cells[:, there], axis=0)
    return medians


def _deviations(cells: Figures) -> Figures:
    """Distance of each figure from the median of all ranks at that time, in usual distances; 0 where it is close."""
    if len(cells) < _MIN_RANKS:
        return np.zeros(cells.shape)
    medians = _medians(cells)
    every = np.abs(cells - medians)
    off = np.where(every >= _MIN_OUTLIER_RATIO * np.abs(medians), every, 0.0)  # NaN is not
    usual = 1.4826 * float(np.nanmedian(every)) if np.isfinite(every).any() else 0.0
    least = np.maximum(usual, np.maximum(0.02 * np.nan_to_num(np.abs(medians)), _MIN_DIFFERENCE))
    return np.asarray(off / least, dtype=np.float64)


def _oddity(cells: Figures) -> float:
    """The largest deviation of a rank in at least `_MIN_TIME_RATIO` of the time; 0 if no rank is an outlier."""
    worst = float(np.quantile(_deviations(cells), 1 - _MIN_TIME_RATIO, axis=1).max(initial=0.0))
    return worst if worst >= _OUTLIER_DEVIATIONS else 0.0


def _outlier(metric: HeatMetric, ranks: Sequence[int], nodes: Mapping[int, str]) -> str:
    """A sentence about the ranks that differ from the others; empty if none does, or if too many do."""
    odd = _deviations(metric.cells) >= _OUTLIER_DEVIATIONS
    present = np.maximum(1, np.isfinite(metric.cells).sum(axis=1))
    rows = [at for at in range(len(ranks)) if odd[at].sum() / present[at] >= _MIN_TIME_RATIO]
    if not rows or len(rows) > max(1, _MAX_ODD_RATIO * len(ranks)):
        return ""
    own, times = metric.cells[rows][odd[rows]], odd[rows].any(axis=0)
    usual = float(np.nanmedian(_medians(metric.cells)[times]))
    share = float(odd[rows].sum() / present[rows].sum())
    who = [ranks[at] for at in rows]
    return (
        f"{named(who).capitalize()} on {_places(who, nodes, ' and others')}, in {percent(share, 0)} of the time: "
        f"{metric.label} {shown(float(np.median(own)), metric.unit)}; the median of all ranks is then "
        f"{shown(usual, metric.unit)}."
    )


def _worst_of(metric: HeatMetric, groups: Sequence[Sequence[int]]) -> HeatMetric:
    """The metric with a row per group: at each time, the figure that is farthest from the median of all ranks."""
    median = _medians(metric.cells)
    cells = np.full((len(groups), metric.cells.shape[1]), np.nan)
    for at, group in enumerate(groups):
        part = metric.cells[list(group)]
        off = np.where(np.isfinite(part), np.abs(part - median), -1.0)
        cells[at] = part[off.argmax(axis=0), np.arange(part.shape[1])]
    return replace(metric, cells=cells)


def _thinned(metric: HeatMetric, size: int) -> HeatMetric:
    """The metric with the means of ``size`` neighbouring bins, so that the page does not get too large."""
    rows, bins = metric.cells.shape
    if size == 1:
        return metric
    padded = np.full((rows, -(-bins // size) * size), np.nan)
    padded[:, :bins] = metric.cells
    parts = padded.reshape(rows, -1, size)
    there = np.isfinite(parts)
    return replace(metric, cells=_ratio(np.where(there, parts, 0.0).sum(axis=2), there.sum(axis=2)))


# -- marks ---------------------------------------------------------------------------------------------------------

_KINDS: Final = ("restart", "stall", "hang", "evaluation", "checkpoint", "snapshot", "change")
_MAX_OF_A_KIND: Final = 256


def mark_chart(
    values: ReportValues, processes: Sequence[ProcessLog], recorder: RunRecorder, end: float
) -> Chart | None:
    """All marks; None without any. ``end``: Unix time of the newest line."""
    found = [*_marks(values, processes, end)]
    marks: list[Mark] = []
    notes: list[str] = []
    for kind in _KINDS:
        own = [mark for mark in found if mark.kind == kind]
        if len(own) > _MAX_OF_A_KIND:
            own.sort(key=lambda mark: mark.begin - (mark.end or mark.begin))  # the longest
            notes.append(f"{_MAX_OF_A_KIND} of {len(own)} {kind} marks are shown.")
        marks += own[:_MAX_OF_A_KIND]
        phases = recorder.phases.get(kind, ())
        marks += [Mark(kind, p.begin, p.begin + p.seconds, f"{p.name}, {duration(p.seconds)}") for p in phases]
        if recorder.phases_seen.get(kind, 0) > len(phases):
            notes.append(f"The newest {len(phases)} of {recorder.phases_seen[kind]} {kind}s are marked.")
    kinds = tuple(kind for kind in _KINDS if any(mark.kind == kind for mark in marks))
    return Chart("marks", "Events", MARKS, rows=kinds, note=" ".join(notes), marks=tuple(marks)) if marks else None


def _marks(values: ReportValues, processes: Sequence[ProcessLog], end: float) -> Iterator[Mark]:
    before = None
    for attempt in values.job.attempts:
        begin = unix(attempt.started)
        if before is not None and begin is not None:
            text = f"attempt {attempt.attempt} begins; attempt {before.attempt} ended: {before.end}"
            yield Mark("restart", begin, None, text)
        before = attempt
    for stall in values.stalls:
        begin, closed = unix(stall.opened or ""), unix(stall.closed) if stall.closed else end
        if begin is not None:
            text = f"rank {stall.rank}: {stall.cause}{'' if stall.closed else ', still open'}"
            yield Mark("stall", begin, max(begin, closed or begin), text)
    since = unix(values.hang.since or "") if values.hang else None
    if values.hang is not None and since is not None:
        yield Mark("hang", since, max(since, end), values.hang.verdict)
    for process in processes:
        for line in process.snapshots:
            begin = unix(line.time)
            if line.path and begin is not None:
                steps = f"steps {line.first_step} to {line.last_step}"
                yield Mark("snapshot", begin, None, f"rank {process.rank}: {steps}")
    for change in values.changes:
        begin = unix(change.at)
        if begin is not None:
            word = "slower" if change.ratio > 1 else "faster"
            yield Mark("change", begin, None, f"rank {change.rank}: steps {percent(abs(change.ratio - 1), 0)} {word}")
