"""Panels in the style of this project, built with Grafana's own builders, which know the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from grafana_foundation_sdk.builders import bargauge, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders import common as look
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.colours import BAD, FAIR, GOOD, NEUTRAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DATA_SOURCE: Final = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")

Steps: TypeAlias = "Sequence[tuple[float, str]]"
"""Thresholds as (value, colour): the colour holds from this value on. Below the first value it is green."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and the name of its series in the legend."""

    expr: str
    legend: str = ""


def targets(queries: Sequence[Query], *, instant: bool = False, table: bool = False) -> list[prometheus.Dataquery]:
    """The queries of a panel, lettered A, B, C."""
    found = []
    for letter, query in zip("ABCDEFGHIJKLMNOP", queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query.expr.strip()).legend_format(query.legend or "__auto")
        target = target.instant() if instant else target.range()
        target = target.format(PromQueryFormat.TABLE if table else PromQueryFormat.TIME_SERIES)
        found.append(target.datasource(DATA_SOURCE))
    return found


def thresholds(steps: Steps) -> build.ThresholdsConfig:
    """Absolute thresholds. The colour below the first threshold is good; without thresholds it is neutral."""
    base = dashboard.Threshold(value=None, color=GOOD if steps else NEUTRAL)
    above = [dashboard.Threshold(value=value, color=colour) for value, colour in steps]
    return build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps([base, *above])


def fair_bad(fair: float, bad: float) -> Steps:
    """Yellow from ``fair`` on, red from ``bad`` on."""
    return ((fair, FAIR), (bad, BAD))


def colour(fixed: str) -> list[dashboard.DynamicConfigValue]:
    """The properties of an override that gives a series its colour."""
    return [dashboard.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": fixed})]


def graph(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    top: float | None = None,
    steps: Steps = (),
    colours: Mapping[str, str] | None = None,
    decimals: int | None = None,
    no_value: str = "No data",
) -> timeseries.Panel:
    """Lines over time, or stacked areas. A third of the width.

    Args:
        title: title of the panel.
        description: what it means, and what to look at next.
        unit: Grafana's id of the unit.
        *queries: the queries that are drawn.
        stacked: whether to draw stacked areas.
        top: the highest possible value.
        steps: thresholds, drawn as dashed lines.
        colours: colours by name of the series.
        decimals: number of decimals.
        no_value: text that is shown without data.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATA_SOURCE)
        .targets(list(targets(queries)))
        .min(0)
        .no_value(no_value)
        .span_nulls(False)
        .show_points(common.VisibilityMode.NEVER)
        .line_width(0 if stacked else 1)
        .fill_opacity(70 if stacked else 0)
        .thresholds(thresholds(steps))
        .tooltip(look.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .legend(
            look.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .calcs([])
        )
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if steps:
        panel = panel.thresholds_style(look.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED))
    if stacked:
        panel = panel.stacking(look.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel = panel.max(top)
    for name, fixed in (colours or {}).items():
        panel = panel.override_by_name(name, colour(fixed))
    return panel.height(7).span(8)


def half(panel: timeseries.Panel) -> timeseries.Panel:
    """The same panel with half of the width, and with the means and the maxima of its series."""
    legend = (
        look.VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.RIGHT)
        .calcs(["mean", "max"])
    )
    return panel.legend(legend).height(8).span(12)


def bars(
    title: str, description: str, unit: str, query: Query, *, colours: Mapping[str, str], no_value: str
) -> bargauge.Panel:
    """One bar for each series with its current value, greatest first.

    Args:
        title: title of the panel.
        description: what it means, and what to look at next.
        unit: Grafana's id of the unit.
        query: an instant query.
        colours: colours by name of the series.
        no_value: text that is shown without data.
    """
    panel = (
        bargauge.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .decimals(2)
        .min(0)
        .datasource(DATA_SOURCE)
        .targets(list(targets([query], instant=True)))
        .no_value(no_value)
        .thresholds(thresholds(()))
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .show_unfilled(False)
        .reduce_options(look.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )
    for name, fixed in colours.items():
        panel = panel.override_by_name(name, colour(fixed))
    return panel.height(8).span(6)


def figure(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    steps: Steps = (),
    decimals: int | None = None,
    of_range: bool = False,
    no_value: str = "none",
) -> stat.Panel:
    """One number with its current value.

    Args:
        title: title of the panel.
        description: what it means, and what to look at next.
        unit: Grafana's id of the unit.
        query: the query.
        steps: thresholds of its colour.
        decimals: number of decimals.
        of_range: whether the value covers the whole time range. Then no graph is drawn behind it.
        no_value: text that is shown without data.
    """
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATA_SOURCE)
        .targets(list(targets([query], instant=of_range)))
        .no_value(no_value)
        .thresholds(thresholds(steps))
        .color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE if of_range else common.BigValueGraphMode.AREA)
        .reduce_options(look.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .text(look.VizTextDisplayOptions().value_size(32))
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    return panel.height(4).span(4)


def timeline(title: str, description: str, query: Query, states: Mapping[int, tuple[str, str]]) -> statetimeline.Panel:
    """The state of each series over time, in words.

    Args:
        title: title of the panel.
        description: what it means, and what to look at next.
        query: series whose values are numbers of states.
        states: text and colour by number.
    """
    mapping = dashboard.ValueMap(
        options={
            str(number): dashboard.ValueMappingResult(text=text, color=fixed, index=index)
            for index, (number, (text, fixed)) in enumerate(states.items())
        }
    )
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .unit("none")
        .datasource(DATA_SOURCE)
        .targets(list(targets([query])))
        .mappings([mapping])
        .color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        .thresholds(thresholds(()))
        .merge_values(True)
        .show_value(common.VisibilityMode.AUTO)
        .row_height(0.8)
        .line_width(0)
        .fill_opacity(80)
        .legend(look.VizLegendOptions().show_legend(False).display_mode(common.LegendDisplayMode.LIST).calcs([]))
        .tooltip(look.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
        .height(8)
        .span(24)
    )
