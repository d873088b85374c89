"""Draws the charts with Bokeh. Only this file imports it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import bokeh
import numpy as np
from bokeh.embed import json_item
from bokeh.models import BoxZoomTool, ColumnDataSource, FixedTicker, LinearColorMapper, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from telemetry.report.html import charts, palette

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.html.charts import Chart, Figures, Mark, TimeAxis

_HEIGHT: Final = 210
_MARK_ROW: Final = 22
_BAR_ROW: Final = 26
_MAX_TICKS: Final = 8
_LEFT: Final = 84
"""Width of the axis of figures in pixels: the same in all charts, so that equal times are aligned."""


def script() -> str:
    """The code of Bokeh, which the page contains."""
    return (Path(bokeh.__file__).parent / "server/static/js/bokeh.min.js").read_text("utf-8")


def heat_colours() -> str:
    """The colours of the heat map as a CSS gradient."""
    return ", ".join((*Viridis256[::32], Viridis256[-1]))


def drawing(chart: Chart, axis: TimeAxis, marks: Sequence[Mark]) -> dict[str, Any]:
    """A chart as the object that the page gives to Bokeh, and the unit of its figures."""
    unit, factor = "", 1.0
    if chart.kind == charts.TIME:
        plot, unit, factor = _time_chart(chart, axis, marks)
    elif chart.kind == charts.BARS:
        plot, unit, factor = _bars(chart)
    else:
        plot = _heat_map(chart, axis) if chart.kind == charts.HEAT else _marks(chart, axis)
    return {"item": json_item(plot), "unit": unit, "factor": factor}


def _plot(height: int, x_range: Range1d, y_range: Any, label: str) -> Any:
    plot = figure(
        height=height, sizing_mode="stretch_width", x_range=x_range, y_range=y_range, tools=[], toolbar_location=None,
        background_fill_color=None, border_fill_color=None, outline_line_color=None, min_border_left=_LEFT,
        min_border_right=12, x_axis_type="linear", lod_threshold=None,
    )  # fmt: skip
    zoom = BoxZoomTool(dimensions="width")
    plot.add_tools(zoom)
    plot.toolbar.active_drag = zoom
    plot.yaxis.axis_label = label
    plot.yaxis.axis_label_text_font_style = "normal"
    plot.yaxis.minor_tick_line_color = plot.xaxis.minor_tick_line_color = None
    plot.xgrid.visible = False
    plot.add_layout(Span(dimension="height", name="cursor", visible=False, line_color=palette.GREY, line_dash="dashed"))
    return plot


def _over_time(height: int, axis: TimeAxis, y_range: Any, label: str) -> Any:
    from bokeh.models import DatetimeAxis

    begin, end = axis.begins[0] * 1e3, (axis.begins[-1] + axis.width_seconds) * 1e3
    plot = _plot(
        height,
        Range1d(start=begin, end=end, bounds=(begin, end), min_interval=2e3 * axis.width_seconds),
        y_range,
        label,
    )
    plot.below = [DatetimeAxis(minor_tick_line_color=None)]
    plot.tags = ["time"]
    return plot


def _top(values: Sequence[Figures | None]) -> float:
    tops = [float(np.nanmax(each)) for each in values if each is not None and np.isfinite(each).any()]
    return max(tops, default=0.0)


def _narrow(values: Figures, factor: float) -> Any:
    return (values * factor).astype(np.float32)


def _time_chart(chart: Chart, axis: TimeAxis, marks: Sequence[Mark]) -> tuple[Any, str, float]:
    top = 1.0 if chart.stacked else _top([each for curve in chart.curves for each in (curve.values, curve.high)])
    factor, unit = charts.scale_of(chart.unit, top)
    limit = top * factor if chart.stacked else max(top * factor * 1.08, 1e-6)
    plot = _over_time(_HEIGHT, axis, Range1d(start=0, end=limit), unit)
    data: dict[str, Any] = {"x": axis.middles_ms}
    for number, curve in enumerate(chart.curves):
        data[f"c{number}"] = _narrow(curve.values, factor)
        if curve.low is not None and curve.high is not None:
            data |= {f"l{number}": _narrow(curve.low, factor), f"h{number}": _narrow(curve.high, factor)}
    source = ColumnDataSource(data)
    if chart.stacked:
        names = [f"c{number}" for number in range(len(chart.curves))]
        colours = [curve.colour for curve in chart.curves]
        width = 1e3 * axis.width_seconds
        plot.vbar_stack(names, x="x", width=width, color=colours, line_width=1, source=source)
        return plot, unit, factor
    if chart.unit == charts.SECONDS:
        _overlay(plot, marks, limit)
    for number, curve in enumerate(chart.curves):
        if f"l{number}" in data:
            plot.varea("x", f"l{number}", f"h{number}", color=curve.colour, alpha=0.18, source=source)
        plot.line("x", f"c{number}", color=curve.colour, line_width=2, line_dash=curve.dash, source=source)
        alone = _alone(curve.values)
        if alone.any():
            plot.scatter(data["x"][alone], data[f"c{number}"][alone], color=curve.colour, size=4)
    return plot, unit, factor


def _alone(values: Figures) -> Any:
    """Whether a figure has no neighbour before and none after it: no line goes through it."""
    there = np.concatenate(([False], np.isfinite(values), [False]))
    return there[1:-1] & ~there[:-2] & ~there[2:]


def _overlay(plot: Any, marks: Sequence[Mark], top: float) -> None:
    """Mark stalls, hangs and phases behind the curves."""
    for kind in ("stall", "hang", "evaluation", "checkpoint"):
        own = [mark for mark in marks if mark.kind == kind and mark.end is not None]
        if own:
            begins, ends = [mark.begin * 1e3 for mark in own], [(mark.end or 0.0) * 1e3 for mark in own]
            plot.quad(left=begins, right=ends, bottom=0, top=top, color=palette.MARKS[kind], alpha=0.10, line_width=0)
    for kind, dash in (("restart", "solid"), ("change", "dashed"), ("snapshot", "dotted")):
        times = [mark.begin * 1e3 for mark in marks if mark.kind == kind]
        if times:
            plot.segment(times, 0, times, top, color=palette.MARKS[kind], line_dash=dash, line_width=1.5)


def _marks(chart: Chart, axis: TimeAxis) -> Any:
    rows = list(reversed(chart.rows))
    plot = _over_time(30 + _MARK_ROW * len(rows), axis, Range1d(start=-0.5, end=len(rows) - 0.5), "")
    plot.yaxis.ticker = FixedTicker(ticks=list(range(len(rows))))
    plot.yaxis.major_label_overrides = dict(enumerate(rows))
    plot.yaxis.axis_label = None
    plot.ygrid.visible = False
    least = axis.width_seconds * 1e3 / 4
    for at, kind in enumerate(rows):
        own = [mark for mark in chart.marks if mark.kind == kind]
        spans = [(mark.begin * 1e3, mark.end * 1e3) for mark in own if mark.end is not None]
        points = [mark.begin * 1e3 for mark in own if mark.end is None]
        colour = palette.MARKS[kind]
        if spans:
            plot.hbar(at, 0.6, [max(e, b + least) for b, e in spans], [b for b, _ in spans], color=colour, alpha=0.75)
        if points:
            plot.scatter(
                points, at, size=11, color=colour, marker="diamond" if kind == "snapshot" else "inverted_triangle"
            )
    return plot


def _bars(chart: Chart) -> tuple[Any, str, float]:
    names = [f"c{number}" for number in range(len(chart.curves))]
    colours = [curve.colour for curve in chart.curves]
    top = 1.0 if chart.unit == charts.RATIO else _top([np.sum([curve.values for curve in chart.curves], axis=0)])
    factor, unit = charts.scale_of(chart.unit, top)
    places = np.arange(len(chart.rows), dtype=np.float64)
    source = ColumnDataSource(
        {"x": places, **{n: _narrow(c.values, factor) for n, c in zip(names, chart.curves, strict=True)}}
    )
    along, across = Range1d(start=-0.5, end=len(chart.rows) - 0.5), Range1d(start=0, end=max(top * factor, 1e-6))
    if chart.upright:
        plot = _plot(_HEIGHT, along, across, unit)
        thick = 0.92 if len(chart.rows) <= 128 else 1.0
        plot.vbar_stack(names, x="x", width=thick, color=colours, line_width=1 if thick == 1.0 else 0, source=source)
        _label_some(plot.xaxis, chart.rows)
        plot.tags = ["bars"]
        return plot, unit, factor
    plot = _plot(50 + _BAR_ROW * len(chart.rows), across, Range1d(start=len(chart.rows) - 0.5, end=-0.5), "")
    plot.hbar_stack(names, y="x", height=0.72, color=colours, line_width=0, source=source)
    plot.yaxis.ticker = FixedTicker(ticks=[int(at) for at in places])
    plot.yaxis.major_label_overrides = {int(at): str(int(at) + 1) if len(places) > 1 else "" for at in places}
    plot.yaxis.axis_label = None
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xaxis.axis_label = unit
    plot.xaxis.axis_label_text_font_style = "normal"
    plot.tags = ["rows"]
    return plot, unit, factor


def _heat_map(chart: Chart, axis: TimeAxis) -> Any:
    rows, bins = chart.metrics[0].cells.shape
    height = 60 + max(90, min(420, 14 * rows))
    plot = _over_time(height, axis, Range1d(start=0, end=rows), "")
    begin = axis.begins[0] * 1e3
    width = bins * chart.bins_per_cell * axis.width_seconds * 1e3
    clear = "rgba(0,0,0,0)"
    for number, metric in enumerate(chart.metrics):
        factor, _ = charts.scale_of(metric.unit, metric.high)
        low, high = metric.low * factor, max(metric.high, metric.low + 1e-12) * factor
        colours = LinearColorMapper(palette=Viridis256, low=low, high=high, nan_color=clear)
        image = plot.image(
            [_rounded(_narrow(metric.cells[::-1], factor))], x=begin, y=0, dw=width, dh=rows, color_mapper=colours
        )
        image.name, image.visible = metric.key, number == 0
    plot.ygrid.visible = False
    _label_some(plot.yaxis, chart.rows, from_top=True)
    plot.tags = ["time", "heat"]
    return plot


def _rounded(values: Any) -> Any:
    """Single-precision figures, rounded to 14 significant bits: more than the page shows, and easier to compress."""
    bits = values.copy().view(np.uint32)
    return ((bits + np.uint32(1 << 9)) & np.uint32(0xFFFFFC00)).view(np.float32)


def _label_some(axis: Any, labels: Sequence[str], *, from_top: bool = False) -> None:
    """Label some places of an axis. A label is cut to its rank: the names of nodes can be any text."""
    step = max(1, len(labels) // _MAX_TICKS)
    places = {(len(labels) - at - 0.5 if from_top else at): labels[at] for at in range(0, len(labels), step)}
    axis.ticker = FixedTicker(ticks=list(places))
    axis.major_label_overrides = {at: label.partition(" (")[0].partition(" ")[2] for at, label in places.items()}
    axis.axis_label = "rank"
    axis.axis_label_text_font_style = "normal"
