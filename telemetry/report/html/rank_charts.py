"""The charts by rank: the heat map over time, and the ledger of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from telemetry.core.rank_ranges import named
from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.report.html import palette
from telemetry.report.html.chart_specs import (
    CELSIUS,
    HERTZ,
    RATIO,
    SECONDS,
    WATTS,
    BarChart,
    Curve,
    HeatMap,
    HeatMetric,
    shown,
)
from telemetry.report.html.time_charts import means
from telemetry.util.text import percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.report.html.chart_specs import Figures
    from telemetry.report.html.run_recorder import RunRecorder

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
    """Ranks over time. The first metric is the one in which a rank differs most from the others.

    Args:
        recorder: has the sums.
        ranks: the row of each rank.
        nodes: the node of each rank.
    """
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
