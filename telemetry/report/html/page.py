"""Fills the template of the page. The template escapes all text, so names and log lines stay text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from telemetry.report.html import bokeh_charts, palette
from telemetry.report.html.chart_specs import BarChart, HeatMap, MarkChart, TimeAxis, TimeChart
from telemetry.report.html.page_sections import as_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.html.chart_specs import Chart
    from telemetry.report.html.overview import AdviceCard, Tile
    from telemetry.report.html.page_sections import PageSection, PageTable

_FOLDER: Final = Path(__file__).parent
_NO_MARKUP: Final = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)
"""No character is left that could end a script element."""


@dataclass(frozen=True, slots=True)
class PageHead:
    """What the page says above its charts.

    Attributes:
        run: its name.
        state: in one or two words; ``kind``: whether that is good, see `overview`.
        verdict: all of it.
        first, more: the advice that is shown at once, and the rest.
        facts: names and values on where and when it ran.
        notes: what is missing or damaged in the logs.
    """

    run: str
    state: str
    kind: str
    verdict: str
    first: list[AdviceCard]
    more: list[AdviceCard]
    tiles: list[Tile]
    facts: list[tuple[str, str]]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A chart as the template needs it."""

    key: str
    kind: str
    title: str
    note: str
    legend: list[dict[str, Any]]
    sentences: list[str]
    metrics: list[dict[str, Any]]
    table: PageTable


def page(head: PageHead, sections: Sequence[PageSection], axis: TimeAxis | None) -> str:
    """The whole page.

    Args:
        head: what it says first.
        sections: what follows.
        axis: of all charts over time; None without any.
    """
    marks = [
        mark for section in sections for chart in section.charts if isinstance(chart, MarkChart) for mark in chart.marks
    ]
    items: dict[str, Any] = {}
    shown = []
    for section in sections:
        for chart in section.charts:
            if axis is None and not isinstance(chart, BarChart):
                continue
            items[chart.key] = bokeh_charts.drawing(chart, axis or TimeAxis((0.0,), 1.0), marks) | _read_out(chart)
        shown.append((section, [_drawn(chart) for chart in section.charts if chart.key in items]))
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        head=head,
        sections=shown,
        width_ms=axis.width_seconds * 1e3 if axis else 0,
        heat_colours=bokeh_charts.heat_colours(),
        style=_own("page.css"),
        code=_own("page.js"),
        library=Markup(bokeh_charts.script().replace("</script", "<\\/script")),  # noqa: S704 - not of a log
        items=Markup(json.dumps(items, separators=(",", ":")).translate(_NO_MARKUP)),  # noqa: S704 - no markup is left
    )


def _own(name: str) -> Markup:
    return Markup((_FOLDER / name).read_text("utf-8"))  # noqa: S704 - a file of this package


def _drawn(chart: Chart) -> _Drawn:
    kind = {TimeChart: "time", BarChart: "bars", HeatMap: "heat", MarkChart: "marks"}[type(chart)]
    curves = chart.curves if isinstance(chart, (TimeChart, BarChart)) else ()
    legend = [
        {"field": f"c{number}", "label": curve.label, "colour": curve.colour, "dash": curve.dash}
        for number, curve in enumerate(curves)
    ]
    if isinstance(chart, MarkChart):
        legend = [{"field": "", "label": kind, "colour": palette.MARKS[kind], "dash": "solid"} for kind in chart.kinds]
    note = " ".join(chart.notes) if isinstance(chart, MarkChart) else chart.note
    metrics = [{"key": m.key, "label": m.label} for m in chart.metrics] if isinstance(chart, HeatMap) else []
    sentences = list(chart.outliers) if isinstance(chart, HeatMap) else []
    return _Drawn(chart.key, kind, chart.title, note, legend, sentences, metrics, as_table(chart))


def _read_out(chart: Chart) -> dict[str, Any]:
    """What the page needs besides the drawing, to say what is at the cursor."""
    if isinstance(chart, BarChart):
        return {"labels": chart.labels, "fields": [[f"c{n}", c.label] for n, c in enumerate(chart.curves)]}
    if isinstance(chart, TimeChart):
        return {"fields": [[f"c{n}", c.label] for n, c in enumerate(chart.curves)]}
    if isinstance(chart, MarkChart):
        return {"marks": [asdict(mark) for mark in chart.marks], "kinds": chart.kinds}
    scaled = [(metric, *bokeh_charts.scale_of(metric.unit, metric.high)) for metric in chart.metrics]
    metrics = {
        m.key: {"low": m.low * factor, "high": m.high * factor, "more": m.capped, "unit": unit, "label": m.label}
        for m, factor, unit in scaled
    }
    return {"rows": chart.rows, "metrics": metrics, "bins": chart.metrics[0].cells.shape[1], "per": chart.bins_per_cell}
