"""The heat map of the ranks over time, and the ranks that differ from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from telemetry.model.records import COMPUTE, DATA_WAIT
from telemetry.report.html.drawing import CELSIUS, HERTZ, RATIO, SECONDS, WATTS, Chart, HeatMetric, shown
from telemetry.report.html.over_time import MAX_ROWS, ratio
from telemetry.util.words import named, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.report.html.drawing import TimeAxis
    from telemetry.report.html.over_time import Figures, OverTime

_COLOURED_RATIO: Final = 0.98
_FAR_ABOVE: Final = 2.0
"""The colours of the heat map end at the quantile `_COLOURED_RATIO` if the largest figure is so many times as large."""

_MIN_RANKS: Final = 3
_OUTLIER_DEVIATIONS: Final = 8.0
"""A rank is an outlier while it differs from the median by so many usual differences."""

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


def heat_map(axis: TimeAxis, figures: OverTime, nodes: Mapping[int, str]) -> list[Chart]:
    """Ranks over time; empty if nothing is known. The first metric is the one with the largest outlier."""
    ranks = figures.ranks
    found = [metric for metric in _metrics(figures) if np.isfinite(metric.cells).any()]
    if not found:
        return []
    found.sort(key=lambda metric: -_oddity(metric.cells))  # stable: without an outlier, the order stays
    size = -(-len(ranks) // MAX_ROWS)
    groups = [range(at, min(at + size, len(ranks))) for at in range(0, len(ranks), size)]
    note = "Each row is a rank. "
    if size > 1:
        note = f"Each row is {size} ranks, and shows the one that differs most from all ranks at that time. "
    metrics = [metric if size == 1 else _worst_of(metric, groups) for metric in found]
    members = [[ranks[at] for at in group] for group in groups]
    rows = [f"{named(own)} ({_places(own, nodes, ' …')})" for own in members]
    chart = Chart(
        "ranks",
        "Ranks over time",
        axis.heat_map(metrics, rows),
        ("", "lowest", "median", "highest", "most different"),
        [_spread_of(each, rows) for each in metrics],
        f"{note}Empty: not measured, or the rank was not there.",
        metrics=metrics,
        outliers=[text for metric in found if (text := _outlier(metric, ranks, nodes))],
    )
    return [chart]


def _spread_of(metric: HeatMetric, rows: Sequence[str]) -> list[str]:
    cells, median = metric.cells, np.nanmedian(metric.cells)
    filled = np.where(np.isfinite(cells), cells, median)
    odd = int(np.abs(filled.mean(axis=1) - np.median(filled)).argmax())
    spread = (np.nanmin(cells), median, np.nanmax(cells))
    return [metric.label, *(shown(value, metric.unit) for value in spread), rows[odd]]


def _places(ranks: Sequence[int], nodes: Mapping[int, str], more: str) -> str:
    places = sorted({nodes.get(rank, "?") for rank in ranks})
    return ", ".join(places[:2]) + (more if len(places) > 2 else "")


def _metrics(figures: OverTime) -> list[HeatMetric]:
    wait, compute, steps = (figures.added(name) for name in (DATA_WAIT, COMPUTE, "steps"))
    share = ratio(wait, wait + compute)
    pace = np.where(steps > 0.5, ratio(wait + compute, steps), np.nan)  # half a step: of a bin that it only touches
    metrics = [
        HeatMetric("wait", "Waiting for data, share of the training loop", RATIO, share, 0.0, _high(share, 0.05)),
        HeatMetric("step", "Mean step", SECONDS, pace, 0.0, _high(pace, 1e-6)),
    ]
    for name, label, unit in _SAMPLED:
        if name == "gpu.utilization_ratio" and np.isfinite(metrics[-1].cells).any():
            continue  # SM activity is there, which is more exact
        cells = figures.sampled(name)
        low = 0.0 if unit in {RATIO, WATTS} else float(np.nanmin(cells))
        metrics.append(HeatMetric(name, label, unit, cells, low, 1.0 if unit == RATIO else _high(cells, 1e-9)))
    return metrics


def _high(cells: Figures, minimum: float) -> float:
    """The upper limit of the colours: the largest figure, or a high quantile if that is far below it."""
    largest, usual = np.nanmax(cells), np.nanquantile(cells, _COLOURED_RATIO)
    high = usual if usual > minimum and largest > _FAR_ABOVE * usual else largest
    return float(np.fmax(high, minimum))


def _deviations(cells: Figures) -> Figures:
    """Distance of each figure from the median of all ranks at that time, in usual distances; 0 if not measured."""
    if len(cells) < _MIN_RANKS:
        return np.zeros(cells.shape)
    medians = np.nanmedian(cells, axis=0)
    every = np.abs(cells - medians)
    usual = np.fmax(1.4826 * np.nanmedian(every), np.fmax(0.02 * np.abs(medians), _MIN_DIFFERENCE))
    return np.asarray(np.nan_to_num(every / usual), dtype=np.float64)


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
    usual = float(np.nanmedian(np.nanmedian(metric.cells, axis=0)[times]))
    share = float(odd[rows].sum() / present[rows].sum())
    who = [ranks[at] for at in rows]
    return (
        f"{named(who).capitalize()} on {_places(who, nodes, ' and others')}, in {percent(share, 0)} of the time: "
        f"{metric.label} {shown(float(np.median(own)), metric.unit)}; the median of all ranks is then "
        f"{shown(usual, metric.unit)}."
    )


def _worst_of(metric: HeatMetric, groups: Sequence[Sequence[int]]) -> HeatMetric:
    """The metric with a row per group: at each time, the figure that is farthest from the median of all ranks."""
    median = np.nanmedian(metric.cells, axis=0)
    cells = np.full((len(groups), metric.cells.shape[1]), np.nan)
    for at, group in enumerate(groups):
        part = metric.cells[list(group)]
        off = np.where(np.isfinite(part), np.abs(part - median), -1.0)
        cells[at] = part[off.argmax(axis=0), np.arange(part.shape[1])]
    return metric._replace(cells=cells)
