"""What the charts of the page show: labels, colours and figures. They do not say how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.report.attempts import unix
from telemetry.report.html import palette
from telemetry.report.html.recorder import AGENT, HOOKS, SAMPLES, STEP, THROUGHPUT_OF, TOKENS, WAIT
from telemetry.util.text import byte_size, duration, named, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from telemetry.report.html.recorder import Array, RunRecorder
    from telemetry.report.process_log import ProcessLog

Figures = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""Figures by time bin, or by rank. NaN: not measured."""

SECONDS: Final = "seconds"
RATIO: Final = "ratio"
BYTES: Final = "bytes"
WATTS: Final = "watts"
HERTZ: Final = "hertz"
CELSIUS: Final = "celsius"
COUNT: Final = "count"


@dataclass(frozen=True, slots=True)
class Curve:
    """One line, one area or one part of the bars. ``low`` and ``high``: a band around it, or None."""

    label: str
    colour: str
    values: Figures
    low: Figures | None = None
    high: Figures | None = None
    dash: str = "solid"

    @property
    def is_measured(self) -> bool:
        """Whether there is a figure at all."""
        return bool(np.isfinite(self.values).any())


@dataclass(frozen=True, slots=True)
class TimeChart:
    """Curves over time. ``stacked``: as areas, one on the other, that fill 0 to 1."""

    key: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    stacked: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class BarChart:
    """Stacked bars, one for each label. ``wide``: upright bars without gaps, for hundreds of ranks."""

    key: str
    title: str
    unit: str
    labels: tuple[str, ...]
    curves: tuple[Curve, ...]
    wide: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class HeatMetric:
    """One figure of all ranks over time: rows of figures, and the limits of the colours.

    A few figures may be above the upper limit, so that they do not take the contrast from the others.
    """

    key: str
    label: str
    unit: str
    cells: Figures
    low: float
    high: float

    @property
    def capped(self) -> bool:
        """Whether figures are above the upper limit of the colours."""
        return bool((self.cells > self.high * (1 + 1e-6)).any())


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Figures of ranks over time. One metric is shown at a time, the first at the start.

    Attributes:
        rows: a label for each row, which is a rank, or some ranks.
        bins_per_cell: how many time bins a cell is wide.
        outliers: sentences on ranks that differ from the others.
    """

    key: str
    title: str
    metrics: tuple[HeatMetric, ...]
    rows: tuple[str, ...]
    bins_per_cell: int = 1
    outliers: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened: at a time, or from one time to another. Unix time."""

    kind: str
    begin: float
    end: float | None
    text: str


@dataclass(frozen=True, slots=True)
class MarkChart:
    """All marks, a row for each kind."""

    key: str
    title: str
    marks: tuple[Mark, ...]
    kinds: tuple[str, ...]
    notes: tuple[str, ...] = ()


Chart = TimeChart | BarChart | HeatMap | MarkChart


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The bins that all charts over time share. ``begins``: Unix time of each."""

    begins: tuple[float, ...]
    width_seconds: float

    @property
    def middles_ms(self) -> Figures:
        """The middle of each bin, milliseconds of Unix time."""
        return (np.array(self.begins) + self.width_seconds / 2) * 1000.0


def shown(value: float | None, unit: str) -> str:
    """A figure with its unit; a dash if it was not measured."""
    if value is None or not np.isfinite(value):
        return "-"
    if unit == SECONDS:
        return duration(value)
    if unit == RATIO:
        return percent(value)
    if unit == BYTES:
        return byte_size(value)
    if unit == HERTZ:
        return f"{value / 1e6:.0f} MHz"
    return f"{value:.0f} {_SIGNS[unit]}" if unit in _SIGNS else f"{value:.1f}"


_SIGNS: Final = {WATTS: "W", CELSIUS: "°C"}


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A sampled figure that gets a curve: its name in the log, its label and colour."""

    name: str
    label: str
    colour: str
    dash: str = "solid"


@dataclass(frozen=True, slots=True)
class _SampledChart:
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


def sampled_charts(recorder: RunRecorder, rows: Sequence[int], wanted: Sequence[_SampledChart]) -> list[TimeChart]:
    """Charts of sampled figures. A curve, or a chart, that was not measured is left out."""
    charts = []
    for each in wanted:
        curves = [_sampled_curve(recorder, rows, curve) for curve in each.curves]
        measured = tuple(curve for curve in curves if curve.is_measured)
        if measured:
            charts.append(TimeChart(each.key, each.title, each.unit, measured, note=each.note))
    return charts


def not_measured(recorder: RunRecorder, rows: Sequence[int], wanted: Sequence[_SampledChart]) -> list[str]:
    """The names of the sampled figures of some charts that no rank has."""
    return [
        f"{each.title}: {curve.label}"
        for each in wanted
        for curve in each.curves
        if not recorder.grid.sums(f"{curve.name}#")[list(rows)].any()
    ]


def means(recorder: RunRecorder, rows: Sequence[int], name: str) -> Figures:
    """The mean of a sampled figure by rank and bin; NaN without a sample."""
    return _ratio(recorder.grid.sums(name)[list(rows)], recorder.grid.sums(f"{name}#")[list(rows)])


def ledger_shares(recorder: RunRecorder, rows: Sequence[int]) -> TimeChart:
    """How the time of all ranks was spent, as shares."""
    sums = {c: recorder.grid.sums(c)[list(rows)].sum(axis=0, dtype=np.float64) for c in palette.CATEGORIES}
    total = np.sum(list(sums.values()), axis=0)
    curves = tuple(
        Curve(c.replace("_", " "), colour, _ratio(sums[c], total)) for c, colour in palette.CATEGORIES.items()
    )
    return TimeChart(
        "ledger", "Ledger over time", RATIO, curves, stacked=True, note="The time of all ranks, by category."
    )


def step_percentiles(recorder: RunRecorder) -> list[TimeChart]:
    """Steps and waits of all ranks by percentile."""
    charts = []
    for name, title, colour in ((STEP, "Step", palette.GREEN), (WAIT, "Wait", palette.RED)):
        found = [None if sketch is None else sketch.percentiles() for sketch in recorder.grid.sketches(name)]
        curves = tuple(
            Curve(label, colour, np.array([np.nan if p is None else getattr(p, label) for p in found]), dash=dash)
            for label, dash in (("p50", "solid"), ("p95", "dashed"), ("p99", "dotted"))
        )
        if any(curve.is_measured for curve in curves):
            charts.append(TimeChart(f"{name}-percentiles", f"{title} duration", SECONDS, curves))
    return charts


def steps_per_second(recorder: RunRecorder, rows: Sequence[int]) -> TimeChart | None:
    """Steps per second of the training loop of the mean rank; None without a step."""
    steps = recorder.grid.sums("steps")[list(rows)].sum(axis=0, dtype=np.float64)
    loop = sum(recorder.grid.sums(c)[list(rows)].sum(axis=0, dtype=np.float64) for c in (DATA_WAIT, COMPUTE))
    curve = Curve("steps per second", palette.GREEN, _ratio(steps, loop))
    note = "Steps of the mean rank per second of its training loop."
    return TimeChart("pace", "Pace", COUNT, (curve,), note=note) if curve.is_measured else None


def throughput(recorder: RunRecorder, rows: Sequence[int]) -> list[TimeChart]:
    """Samples and tokens per second of the training loop, summed over the ranks. One that is not known is left out."""
    charts = []
    loop = np.sum([recorder.grid.sums(c)[list(rows)] for c in (DATA_WAIT, COMPUTE)], axis=0)
    for name, colour in ((SAMPLES, palette.GREEN), (TOKENS, palette.BLUE)):
        known = recorder.grid.sums(THROUGHPUT_OF[name])[list(rows)]
        rates = _ratio(recorder.grid.sums(name)[list(rows)], known)
        unknown = ((loop > 0) & (known <= 0)).any(axis=0) | (known <= 0).all(axis=0)
        curve = Curve(f"{name} per second", colour, np.where(unknown, np.nan, np.nansum(rates, axis=0)))
        note = "Per second of the training loop, summed over the ranks. Empty where a rank does not know it."
        if curve.is_measured:
            charts.append(TimeChart(f"{name}-rate", f"{name.capitalize()} per second", COUNT, (curve,), note=note))
    return charts


def agent_cost(recorder: RunRecorder, rows: Sequence[int]) -> TimeChart:
    """What the agent itself costs, as a share of the wall clock."""
    wall = np.sum([recorder.grid.sums(c)[list(rows)] for c in palette.CATEGORIES], axis=0).sum(axis=0)
    curves = tuple(
        Curve(label, colour, _ratio(recorder.grid.sums(name)[list(rows)].sum(axis=0, dtype=np.float64), wall))
        for name, label, colour in (
            (AGENT, "agent thread (CPU)", palette.BLUE),
            (HOOKS, "hooks on the training thread", palette.ORANGE),
        )
    )
    return TimeChart("agent-cost", "Cost of the agent", RATIO, curves, note="Share of the wall clock of the mean rank.")


def _sampled_curve(recorder: RunRecorder, rows: Sequence[int], wanted: _Sampled) -> Curve:
    by_rank = means(recorder, rows, wanted.name)
    sums = recorder.grid.sums(wanted.name)[list(rows)].sum(axis=0, dtype=np.float64)
    mean = _ratio(sums, recorder.grid.sums(f"{wanted.name}#")[list(rows)].sum(axis=0, dtype=np.float64))
    low = high = None
    if len(rows) > 1:
        there = np.isfinite(by_rank)
        low = np.where(there.any(axis=0), np.where(there, by_rank, np.inf).min(axis=0), np.nan)
        high = np.where(there.any(axis=0), np.where(there, by_rank, -np.inf).max(axis=0), np.nan)
    return Curve(wanted.label, wanted.colour, mean, low, high, wanted.dash)


def _ratio(above: Figures | Array, below: Figures | Array) -> Figures:
    """A quotient; NaN where there is nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan).astype(np.float64)


_MAX_HEAT_ROWS: Final = 256
_MAX_HEAT_CELLS: Final = 40_000
_MAX_BARS: Final = 512
_COLOURED_RATIO: Final = 0.98
_FAR_ABOVE: Final = 2.0
"""The colours of the heat map end at this quantile, if the largest figure is more than so many times as large."""

_MIN_RANKS: Final = 3
_OUTLIER_DEVIATIONS: Final = 8.0
_MIN_OUTLIER_RATIO: Final = 0.10
"""A rank is odd while it differs from the median by so many times the usual difference, and by this share of it."""

_MIN_TIME_RATIO: Final = 0.05
_MAX_ODD_RATIO: Final = 0.25
"""Ranks are named that are odd for this share of the time, unless they are more than this share of all ranks."""

_MIN_DIFFERENCE: Final = 2e-3

_SAMPLED: Final = (
    ("gpu.sm_active_ratio", "GPU: SM activity", RATIO),
    ("gpu.utilization_ratio", "GPU: utilisation", RATIO),
    ("gpu.power_watts", "GPU: power", WATTS),
    ("gpu.sm_clock_hertz", "GPU: SM clock", HERTZ),
    ("gpu.temperature_celsius", "GPU: temperature", CELSIUS),
)


def heat_map(recorder: RunRecorder, ranks: Mapping[int, int], nodes: Mapping[int, str]) -> HeatMap | None:
    """Ranks over time. The first metric is the one in which a rank differs most from the others."""
    order = sorted(ranks)
    rows = [ranks[rank] for rank in order]
    found = [metric for metric in _metrics(recorder, rows) if np.isfinite(metric.cells).any()]
    if not found:
        return None
    found.sort(key=lambda metric: -_oddity(metric.cells))  # stable: without an outlier, the first stays the first
    grouped, labels = _grouped(order, nodes)
    said = [text for metric in found if (text := _outlier(metric, order, nodes))]
    many = len(grouped) < len(order)
    note = (
        f"Each row is {len(grouped[0])} ranks, and shows the one that differs most from all ranks at that time. "
        if many
        else "Each row is a rank. "
    ) + "Empty: not measured, or the rank was not there."
    size = max(1, -(-len(grouped) * found[0].cells.shape[1] // _MAX_HEAT_CELLS))
    shrunk = tuple(_thinned(_worst_of(metric, grouped), size) for metric in found)
    return HeatMap("ranks", "Ranks over time", shrunk, tuple(labels), size, tuple(said), note)


def ledger_by_rank(ranks: Sequence[dict[str, Any]]) -> BarChart:
    """The ledger of each rank, over all its processes. Many ranks are put together in groups of neighbours."""
    ledgers: dict[int, dict[str, float]] = {}
    for entry in ranks:
        own = ledgers.setdefault(entry["rank"], dict.fromkeys(palette.CATEGORIES, 0.0))
        for category, seconds in entry["ledger"].items():
            own[category] += seconds
    order = sorted(ledgers)
    size = -(-len(order) // _MAX_BARS)
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    totals = [max(sum(sum(ledgers[rank].values()) for rank in group), 1e-9) for group in groups]
    curves = tuple(
        Curve(
            category.replace("_", " "),
            colour,
            np.array(
                [
                    sum(ledgers[rank][category] for rank in group) / total
                    for group, total in zip(groups, totals, strict=True)
                ]
            ),
        )
        for category, colour in palette.CATEGORIES.items()
    )
    note = f"Each bar is {size} ranks." if size > 1 else ""
    labels = tuple(named(group) for group in groups)
    return BarChart("ledger-ranks", "Ledger by rank", RATIO, labels, curves, wide=True, note=note)


def _metrics(recorder: RunRecorder, rows: Sequence[int]) -> list[HeatMetric]:
    grid = recorder.grid
    wait, compute, steps = (grid.sums(name)[list(rows)].astype(np.float64) for name in (DATA_WAIT, COMPUTE, "steps"))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(wait + compute > 0, wait / (wait + compute), np.nan)
        pace = np.where(steps > 0.5, (wait + compute) / steps, np.nan)  # half a step: of a bin that it only touches
    metrics = [
        HeatMetric("wait", "Waiting for data, share of the training loop", RATIO, share, 0.0, _high(share, 0.05)),
        HeatMetric("step", "Mean step", SECONDS, pace, 0.0, _high(pace, 1e-6)),
    ]
    for name, label, unit in _SAMPLED:
        if name == "gpu.utilization_ratio" and np.isfinite(metrics[-1].cells).any():
            continue  # SM activity is there, which says more
        cells = means(recorder, rows, name)
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
    """The median of all ranks in each bin; NaN in a bin without figures."""
    medians = np.full(cells.shape[1], np.nan)
    there = np.isfinite(cells).any(axis=0)
    medians[there] = np.nanmedian(cells[:, there], axis=0)
    return medians


def _deviations(cells: Figures) -> Figures:
    """How far each figure is from the median of all ranks at that time, in usual differences; 0 where it is close."""
    if len(cells) < _MIN_RANKS:
        return np.zeros(cells.shape)
    medians = _medians(cells)
    off = np.abs(cells - medians)
    off[~np.isfinite(off) | (off < _MIN_OUTLIER_RATIO * np.abs(medians))] = 0.0
    every = np.abs(cells - medians)
    usual = 1.4826 * float(np.nanmedian(every)) if np.isfinite(every).any() else 0.0
    least = np.maximum(usual, np.maximum(0.02 * np.nan_to_num(np.abs(medians)), _MIN_DIFFERENCE))
    return np.asarray(off / least, dtype=np.float64)


def _oddity(cells: Figures) -> float:
    """How much the oddest rank differs, in at least a part of the time; 0 if none does."""
    worst = float(np.quantile(_deviations(cells), 1 - _MIN_TIME_RATIO, axis=1).max(initial=0.0))
    return worst if worst >= _OUTLIER_DEVIATIONS else 0.0


def _outlier(metric: HeatMetric, order: Sequence[int], nodes: Mapping[int, str]) -> str:
    """A sentence on the ranks that differ from the others; empty if none does, or if too many do."""
    odd = _deviations(metric.cells) >= _OUTLIER_DEVIATIONS
    present = np.maximum(1, np.isfinite(metric.cells).sum(axis=1))
    ranks = [at for at in range(len(order)) if odd[at].sum() / present[at] >= _MIN_TIME_RATIO]
    if not ranks or len(ranks) > max(1, _MAX_ODD_RATIO * len(order)):
        return ""
    own, times = metric.cells[ranks][odd[ranks]], odd[ranks].any(axis=0)
    usual = float(np.nanmedian(_medians(metric.cells)[times]))
    places = sorted({nodes.get(order[at], "?") for at in ranks})
    on = f" on {', '.join(places[:2])}{' and others' if len(places) > 2 else ''}"
    share = float(odd[ranks].sum() / present[ranks].sum())
    who = named([order[at] for at in ranks])
    return (
        f"{who[:1].upper()}{who[1:]}{on}, in {percent(share, 0)} of the time: {metric.label} "
        f"{shown(float(np.median(own)), metric.unit)}; the median of all ranks is then {shown(usual, metric.unit)}."
    )


def _grouped(order: Sequence[int], nodes: Mapping[int, str]) -> tuple[list[list[int]], list[str]]:
    """Rows of the map: indices of ranks, and a label for each."""
    size = -(-len(order) // _MAX_HEAT_ROWS)
    groups = [list(range(at, min(at + size, len(order)))) for at in range(0, len(order), size)]
    labels = []
    for group in groups:
        places = sorted({nodes.get(order[at], "?") for at in group})
        labels.append(
            f"{named([order[at] for at in group])} ({', '.join(places[:2])}{' …' if len(places) > 2 else ''})"
        )
    return groups, labels


def _worst_of(metric: HeatMetric, groups: Sequence[Sequence[int]]) -> HeatMetric:
    """The metric with a row for each group: at each time, the figure that is farthest from the median of all ranks."""
    if len(groups) == len(metric.cells):
        return metric
    median = _medians(metric.cells)
    cells = np.full((len(groups), metric.cells.shape[1]), np.nan)
    for at, group in enumerate(groups):
        part = metric.cells[list(group)]
        off = np.where(np.isfinite(part), np.abs(part - median), -1.0)
        cells[at] = part[off.argmax(axis=0), np.arange(part.shape[1])]
    return HeatMetric(metric.key, metric.label, metric.unit, cells, metric.low, metric.high)


def _thinned(metric: HeatMetric, size: int) -> HeatMetric:
    """The metric with fewer bins, means of ``size`` neighbours, so that the page does not get too large."""
    rows, bins = metric.cells.shape
    if size == 1:
        return metric
    padded = np.full((rows, -(-bins // size) * size), np.nan)
    padded[:, :bins] = metric.cells
    parts = padded.reshape(rows, -1, size)
    there = np.isfinite(parts)
    count = there.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        cells = np.where(count > 0, np.where(there, parts, 0.0).sum(axis=2) / count, np.nan)
    return HeatMetric(metric.key, metric.label, metric.unit, cells, metric.low, metric.high)


KINDS: Final = ("restart", "stall", "hang", "evaluation", "checkpoint", "snapshot", "change")
_MAX_OF_A_KIND: Final = 256


def mark_chart(
    summary: dict[str, Any], processes: Sequence[ProcessLog], recorder: RunRecorder, end: float
) -> MarkChart | None:
    """All marks; None without any."""
    found = [*_restarts(summary), *_stalls(summary, end), *_hang(summary, end), *_snapshots(processes)]
    found += _changes(summary)
    marks: list[Mark] = []
    notes: list[str] = []
    for kind in KINDS:
        own = [mark for mark in found if mark.kind == kind]
        if len(own) > _MAX_OF_A_KIND:
            own.sort(key=lambda mark: mark.begin - (mark.end or mark.begin))  # the longest
            notes.append(f"{_MAX_OF_A_KIND} of {len(own)} {kind} marks are shown.")
        marks += own[:_MAX_OF_A_KIND]
        for phase in recorder.phases.get(kind, ()):
            text = f"{phase.name}, {duration(phase.seconds)}"
            marks.append(Mark(kind, phase.begin, phase.begin + phase.seconds, text))
        seen = recorder.phases_seen.get(kind, 0)
        if seen > len(recorder.phases.get(kind, ())):
            notes.append(f"The newest {len(recorder.phases[kind])} of {seen} {kind}s are marked.")
    kinds = tuple(kind for kind in KINDS if any(mark.kind == kind for mark in marks))
    return MarkChart("marks", "Events", tuple(marks), kinds, tuple(notes)) if marks else None


def _restarts(summary: dict[str, Any]) -> Iterator[Mark]:
    before = None
    for attempt in summary["job"]["attempts"]:
        begin = unix(attempt["started"])
        if before is not None and begin is not None:
            text = f"attempt {attempt['attempt']} begins; attempt {before['attempt']} ended: {before['end']}"
            yield Mark("restart", begin, None, text)
        before = attempt


def _stalls(summary: dict[str, Any], end: float) -> Iterator[Mark]:
    for stall in summary["stalls"]:
        begin = unix(str(stall["opened"]))
        if begin is not None:
            closed = unix(str(stall["closed"])) if stall["closed"] else end
            open_still = "" if stall["closed"] else ", still open"
            text = f"rank {stall['rank']}: {stall['cause']}{open_still}"
            yield Mark("stall", begin, max(begin, closed or begin), text)


def _hang(summary: dict[str, Any], end: float) -> Iterator[Mark]:
    hang = summary["hang"]
    begin = unix(str(hang["since"])) if hang else None
    if begin is not None:
        yield Mark("hang", begin, max(begin, end), hang["verdict"])


def _snapshots(processes: Sequence[ProcessLog]) -> Iterator[Mark]:
    for process in processes:
        for line in process.snapshots:
            begin = unix(line.get("time", ""))
            if line.get("path") and begin is not None:
                steps = f"steps {line.get('first_step')} to {line.get('last_step')}"
                yield Mark("snapshot", begin, None, f"rank {process.rank}: {steps}")


def _changes(summary: dict[str, Any]) -> Iterator[Mark]:
    for change in summary["changes"]:
        begin = unix(change["at"])
        if begin is not None:
            word = "slower" if change["ratio"] > 1 else "faster"
            text = f"rank {change['rank']}: steps {percent(abs(change['ratio'] - 1), 0)} {word}"
            yield Mark("change", begin, None, text)
