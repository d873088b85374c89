"""Draws charts with Bokeh. The charts over time share their range and the line at the pointer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    DatetimeAxis,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.models.annotations import Span
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from telemetry.report.as_text import MAX_ROWS
from telemetry.report.html import palette
from telemetry.util.words import byte_size, duration, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from telemetry.report.html.over_time import Figures

_HEIGHT: Final = 210
_MARK_ROW: Final = 22
_BAR_ROW: Final = 26
_FEW_BARS: Final = 128
_MAX_TICKS: Final = 8
_LEFT: Final = 84
"""Width of the axis of figures in pixels: the same in all charts, so that equal times are aligned."""

_TIME: Final = "%F %T"
_SPREAD: Final = ("", "lowest", "mean", "highest", "last")
HEAT_COLOURS: Final = ", ".join((*Viridis256[::32], Viridis256[-1]))
"""The colours of the heat map as a CSS gradient."""

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


def shown(value: float, unit: str) -> str:
    """A figure with its unit; a dash if it was not measured."""
    if not np.isfinite(value):
        return "-"
    if unit in _TEXTS:
        return _TEXTS[unit](float(value))
    factor, sign = _SCALES.get(unit, (1.0, ""))
    return f"{value * factor:.0f} {sign}" if sign else f"{value:.1f}"


class _Scale(NamedTuple):
    """How an axis shows figures: multiplied, with a unit, and with so many digits after the point."""

    factor: float
    unit: str
    digits: int

    def field(self, name: str) -> str:
        """A column in a tooltip of Bokeh."""
        return f"{name}{{0.{'0' * self.digits}}} {self.unit}"


def _scale(unit: str, largest: float) -> _Scale:
    factor, sign = _SCALES.get(unit, (1.0, ""))
    if unit == SECONDS:
        factor, sign = (1e3, "ms") if largest < 1 else (1.0, "s")
    elif unit == BYTES:
        factor, sign = (1e-9, "GB") if largest >= 1e9 else (1e-6, "MB")
    digits = 3 - math.floor(math.log10(max(largest * factor, 1e-3)))
    return _Scale(factor, sign, max(0, digits))


# -- what a chart is made of -----------------------------------------------------------------------------------------


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
    def spread(self) -> tuple[float, float, float, float]:
        """Its lowest, mean, highest and last figure."""
        values = self.values[np.isfinite(self.values)]
        low, high = self.values if self.low is None else self.low, self.values if self.high is None else self.high
        return np.nanmin(low), values.mean(), np.nanmax(high), values[-1]


class Mark(NamedTuple):
    """An event or a period. ``begin`` and ``end``: Unix time."""

    kind: str
    begin: float
    end: float | None
    text: str


class HeatMetric(NamedTuple):
    """One figure of all ranks over time, and the limits of the colours. A few figures may be above the upper limit."""

    key: str
    label: str
    unit: str
    cells: Figures
    low: float
    high: float

    @property
    def limits(self) -> tuple[str, str]:
        """The limits as text."""
        more = bool((self.cells > self.high * (1 + 1e-6)).any())
        return shown(self.low, self.unit), shown(self.high, self.unit) + " or more" * more


@dataclass(frozen=True)
class Chart:
    """One chart of the page.

    Attributes:
        headings, figures: the main figures as texts, for people who cannot see the chart. ``more``: a note below.
        kind: how its legend is drawn: ``lines`` or ``bars``.
        metrics: of a heat map, which shows one at a time, the first at the start.
        outliers: sentences about ranks that differ from the others.
    """

    key: str
    title: str
    plot: figure
    headings: Sequence[str]
    figures: Sequence[Sequence[str]]
    note: str = ""
    more: str = ""
    kind: str = "lines"
    legend: Sequence[Curve] = ()
    metrics: Sequence[HeatMetric] = ()
    outliers: Sequence[str] = ()


# -- over time -----------------------------------------------------------------------------------------------------


class TimeAxis:
    """What the charts over time share. ``edges``: Unix time at which each bin begins, and the end of the last."""

    def __init__(self, edges: Figures) -> None:
        self._middles = (edges[:-1] + edges[1:]) * 500.0
        self._begin, end, self._width = (1e3 * float(each) for each in (edges[0], edges[-1], edges[1] - edges[0]))
        self._range = Range1d(
            name="time", start=self._begin, end=end, bounds=(self._begin, end), min_interval=2 * self._width
        )
        self._pointer = Span(dimension="height", line_color=palette.GREY, line_dash="dashed")

    def lines(  # noqa: PLR0917 - the texts and the figures of a chart
        self, key: str, title: str, unit: str, curves: Sequence[Curve], note: str = "", marks: Sequence[Mark] = ()
    ) -> list[Chart]:
        """Lines with their bands, and marks behind them. Only what was measured; empty if nothing was."""
        drawn = [curve for curve in curves if curve.is_measured]
        if not drawn:
            return []
        top = max(curve.spread[2] for curve in drawn)
        scale = _scale(unit, top)
        limit = max(top * scale.factor * 1.08, 1e-6)
        plot = self._plot(_HEIGHT, Range1d(start=0, end=limit), scale.unit)
        _overlay(plot, marks, limit)
        source = self._source(plot, drawn, scale, limit)
        for number, curve in enumerate(drawn):
            if curve.low is not None:
                plot.varea("x", f"l{number}", f"h{number}", color=curve.colour, alpha=0.18, source=source)
            plot.line("x", f"c{number}", color=curve.colour, line_width=2, line_dash=curve.dash, source=source)
            there = np.pad(np.isfinite(curve.values), 1)
            alone = there[1:-1] & ~there[:-2] & ~there[2:]  # no line goes through it
            if alone.any():
                plot.scatter(self._middles[alone], source.data[f"c{number}"][alone], color=curve.colour, size=4)
        figures = [[curve.label, *(shown(each, unit) for each in curve.spread)] for curve in drawn]
        return [Chart(key, title, plot, _SPREAD, figures, note, legend=drawn)]

    def shares(self, key: str, title: str, curves: Sequence[Curve], note: str) -> list[Chart]:
        """Shares that fill the space from 0 to 100 %; empty if they were not measured."""
        if not curves[0].is_measured:
            return []
        plot = self._plot(_HEIGHT, Range1d(start=0, end=100), "%")
        source = self._source(plot, curves, _scale(RATIO, 1.0), 100.0)
        names, colours = [f"c{number}" for number in range(len(curves))], [curve.colour for curve in curves]
        plot.vbar_stack(names, x="x", width=self._width, color=colours, line_width=1, source=source)
        figures = [[curve.label, *(shown(each, RATIO) for each in curve.spread)] for curve in curves]
        return [Chart(key, title, plot, _SPREAD, figures, note, legend=curves)]

    def marks(self, key: str, title: str, marks: Sequence[Mark], note: str) -> list[Chart]:
        """Events and periods, a row for each kind; empty without any."""
        kinds = [kind for kind in palette.MARKS if any(mark.kind == kind for mark in marks)]
        if not kinds:
            return []
        plot = self._plot(30 + _MARK_ROW * len(kinds), Range1d(start=len(kinds) - 0.5, end=-0.5), "")
        plot.yaxis.ticker = FixedTicker(ticks=[*range(len(kinds))])
        plot.yaxis.major_label_overrides = dict(enumerate(kinds))
        plot.ygrid.visible = False
        drawn: list[Any] = []
        figures = []
        for at, kind in enumerate(kinds):
            own = [mark for mark in marks if mark.kind == kind]
            ends = [max(mark.end or 0.0, mark.begin + self._width / 4e3) * 1e3 for mark in own]
            source = {"begin": [mark.begin * 1e3 for mark in own], "end": ends, "text": [mark.text for mark in own]}
            colour = palette.MARKS[kind]
            if own[0].end is None:
                marker = "diamond" if kind == "snapshot" else "inverted_triangle"
                drawn.append(plot.scatter("begin", at, 11, color=colour, marker=marker, source=source))
            else:
                drawn.append(plot.hbar(at, 0.6, "end", "begin", color=colour, alpha=0.75, source=source))
            figures.append([kind, str(len(own))])
        tips = [("", f"@begin{{{_TIME}}}"), ("", "@text")]
        plot.add_tools(_hover(drawn, tips, formatters={"@begin": "datetime"}, limit=4))
        legend = [Curve(kind, palette.MARKS[kind], np.array([])) for kind in kinds]
        return [Chart(key, title, plot, ("", "marks"), figures, note, kind="bars", legend=legend)]

    def heat_map(self, metrics: Sequence[HeatMetric], rows: Sequence[str]) -> figure:
        """Ranks over time in colours: an image for each metric, of which the page shows one. ``rows``: their labels."""
        height, columns = metrics[0].cells.shape
        plot = self._plot(60 + max(90, min(420, 14 * height)), Range1d(start=height, end=0), "rank")
        width = columns * self._width
        for metric in metrics:
            scale = _scale(metric.unit, metric.high)
            low, high = metric.low * scale.factor, max(metric.high, metric.low + 1e-12) * scale.factor
            image = plot.image(
                [_rounded(metric.cells * scale.factor)], self._begin, 0, width, height, name=metric.key,
                color_mapper=LinearColorMapper(palette=Viridis256, low=low, high=high, nan_color="rgba(0,0,0,0)"),
                visible=metric is metrics[0],
            )  # fmt: skip
            tips = [("", f"$x{{{_TIME}}}"), ("", scale.field("@image"))]
            plot.add_tools(_hover([image], tips, formatters={"$x": "datetime"}, attachment="right"))
        middles = np.arange(height) + 0.5
        ranks = plot.hbar("y", 1, self._begin + width, self._begin, alpha=0, source={"y": middles, "rank": rows})
        plot.add_tools(_hover([ranks], [("", "@rank")], attachment="left"))
        plot.ygrid.visible = False
        _label_some(plot.yaxis, middles, rows)
        return plot

    def _plot(self, height: int, y_range: Range1d, label: str) -> figure:
        plot = _plot(height, self._range, y_range, label)
        plot.below = [DatetimeAxis(minor_tick_line_color=None)]
        zoom = BoxZoomTool(dimensions="width")
        plot.add_tools(zoom, CrosshairTool(overlay=self._pointer))
        plot.toolbar.active_drag = zoom
        return plot

    def _source(self, plot: figure, curves: Sequence[Curve], scale: _Scale, limit: float) -> ColumnDataSource:
        """The figures of the curves. Where any was measured, the pointer shows all of them."""
        measured = np.any([np.isfinite(curve.values) for curve in curves], axis=0)
        source = _columns(curves, scale, {"x": self._middles, "top": _narrow(np.where(measured, limit, np.nan))})
        bins = plot.vbar("x", self._width, "top", alpha=0, source=source)
        tips = [("", f"@x{{{_TIME}}}"), *_tips(curves, scale)]
        plot.add_tools(_hover([bins], tips, mode="vline", formatters={"@x": "datetime"}))
        return source


def _plot(height: int, x_range: Range1d, y_range: Range1d, label: str) -> figure:
    plot = figure(
        height=height, sizing_mode="stretch_width", x_range=x_range, y_range=y_range, tools=[], toolbar_location=None,
        background_fill_color=None, border_fill_color=None, outline_line_color=None, min_border_left=_LEFT,
        min_border_right=12, lod_threshold=None,
    )  # fmt: skip
    plot.yaxis.axis_label = label or None
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    plot.xgrid.visible = False
    return plot


def _hover(renderers: Sequence[Any], tips: Sequence[tuple[str, str]], **options: Any) -> HoverTool:
    return HoverTool(renderers=list(renderers), tooltips=list(tips), point_policy="follow_mouse", **options)


def _tips(curves: Sequence[Curve], scale: _Scale) -> list[tuple[str, str]]:
    return [(curve.label, scale.field(f"@c{number}")) for number, curve in enumerate(curves)]


def _columns(curves: Sequence[Curve], scale: _Scale, more: Mapping[str, Any]) -> ColumnDataSource:
    columns = dict(more)
    for number, curve in enumerate(curves):
        for letter, values in (("c", curve.values), ("l", curve.low), ("h", curve.high)):
            if values is not None:
                columns[f"{letter}{number}"] = _narrow(values * scale.factor)
    return ColumnDataSource(columns)


def _narrow(values: Figures) -> npt.NDArray[np.float32]:
    return values.astype(np.float32)


def _rounded(values: Figures) -> npt.NDArray[np.float32]:
    """Single-precision figures, rounded to 14 significant bits: more than the page shows, and easier to compress."""
    bits = _narrow(values).view(np.uint32)
    rounded: npt.NDArray[np.uint32] = (bits + np.uint32(1 << 9)) & np.uint32(0xFFFFFC00)
    return rounded.view(np.float32)


def _overlay(plot: figure, marks: Sequence[Mark], top: float) -> None:
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


# -- bars ----------------------------------------------------------------------------------------------------------


def bars(  # noqa: PLR0917 - the texts and the figures of a chart
    key: str,
    title: str,
    unit: str,
    curves: Sequence[Curve],
    labels: Sequence[str],
    note: str = "",
    *,
    upright: bool = False,
) -> Chart:
    """Stacked bars: lying ones with numbers from 1 on, or upright ones without gaps, for hundreds of ranks."""
    top = 1.0 if unit == RATIO else float(np.sum([curve.values for curve in curves], axis=0).max())
    scale, places = _scale(unit, top), np.arange(len(labels), dtype=np.float64)
    limit = max(top * scale.factor, 1e-6)
    source = _columns(curves, scale, {"at": places, "label": labels})
    names, colours = [f"c{number}" for number in range(len(curves))], [curve.colour for curve in curves]
    tips = [("", "@label"), *_tips(curves, scale)]
    if upright:
        plot = _plot(_HEIGHT, Range1d(start=-0.5, end=len(labels) - 0.5), Range1d(start=0, end=limit), scale.unit)
        width, line = (0.92, 0) if len(labels) <= _FEW_BARS else (1.0, 1)
        plot.vbar_stack(names, x="at", width=width, color=colours, line_width=line, source=source)
        plot.add_tools(_hover([plot.vbar("at", 1, limit, alpha=0, source=source)], tips, mode="vline"))
        plot.xaxis.axis_label = "rank"
        _label_some(plot.xaxis, places, labels)
    else:
        rows = Range1d(start=len(labels) - 0.5, end=-0.5)
        plot = _plot(50 + _BAR_ROW * len(labels), Range1d(start=0, end=limit), rows, "")
        plot.hbar_stack(names, y="at", height=0.72, color=colours, line_width=0, source=source)
        plot.add_tools(_hover([plot.hbar("at", 1, limit, alpha=0, source=source)], tips, mode="hline"))
        plot.yaxis.ticker = FixedTicker(ticks=[*places])
        plot.yaxis.major_label_overrides = {at: str(int(at) + 1) if len(places) > 1 else "" for at in places}
        plot.xaxis.axis_label = scale.unit
        plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    figures = [
        [label, *(shown(curve.values[at], unit) for curve in curves)] for at, label in enumerate(labels[:MAX_ROWS])
    ]
    left, headings = len(labels) - len(figures), ["", *(curve.label for curve in curves)]
    return Chart(key, title, plot, headings, figures, note, f"{left} more" if left else "", "bars", curves)


def _label_some(axis: Any, places: Any, labels: Sequence[str]) -> None:
    """Label some places of an axis. A label is cut to its rank: the names of nodes can be any text."""
    some = range(0, len(labels), max(1, len(labels) // _MAX_TICKS))
    axis.ticker = FixedTicker(ticks=[float(places[at]) for at in some])
    axis.major_label_overrides = {float(places[at]): labels[at].partition(" (")[0].partition(" ")[2] for at in some}
