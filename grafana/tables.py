"""Tables: one row for each run, rank or GPU, one column for each query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from grafana_foundation_sdk.builders import common as look
from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.models import dashboard

from grafana.panels import DATA_SOURCE, Query, Steps, fair_bad, targets, thresholds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LETTERS: Final = "ABCDEFGHIJKLMNOP"
_NOTHING: Final = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """A query's value in each row.

    Args:
        name: heading.
        unit: Grafana's id of the unit.
        expr: an instant query. Its labels identify the row, so it must have no labels except the table's keys.
        steps: thresholds for the colour of the text, or of the bar.
        bar: draw a bar from 0 to this value.
        decimals: number of decimals.
        width: pixels.
    """

    name: str
    unit: str
    expr: str
    steps: Steps = ()
    bar: float | None = None
    decimals: int | None = None
    width: int = 130

    def properties(self) -> dict[str, Any]:
        """The properties of the field."""
        found: dict[str, Any] = {
            "unit": self.unit,
            "noValue": _NOTHING,
            "custom.width": self.width,
            "thresholds": thresholds(self.steps).build(),
        }
        if self.decimals is not None:
            found["decimals"] = self.decimals
        if self.bar is not None:
            found |= {"min": 0, "max": self.bar, "custom.cellOptions": {"type": "gauge", "mode": "basic"}}
        elif self.steps:
            found["custom.cellOptions"] = {"type": "color-text"}
        return found


def rows(
    title: str,
    description: str,
    *columns: Column,
    keys: Mapping[str, int],
    links: Mapping[str, str] | None = None,
    sort: Sequence[str],
    no_value: str = "No data",
) -> table.Panel:
    """A table, worst first.

    Args:
        title: title of the panel.
        description: what it means, and what to look at next.
        *columns: the values.
        keys: labels that are shown, with their widths in pixels, or 0 for the remaining width. The labels that all
            queries have identify the row.
        links: URLs by key.
        sort: the columns by which the rows are sorted, greatest first.
        no_value: text that is shown without rows.
    """
    order = [*keys, *(f"Value #{letter}" for letter, _ in zip(_LETTERS, columns, strict=False))]
    if len(columns) == 1:
        order[-1] = "Value"
    renamed = dict(zip(order[len(keys) :], (column.name for column in columns), strict=True))
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .unit("short")
        .datasource(DATA_SOURCE)
        .targets(list(targets([Query(column.expr) for column in columns], instant=True, table=True)))
        .no_value(no_value)
        .thresholds(thresholds(()))
        .show_header(True)
        .sort_by([look.TableSortByFieldState().display_name(column).desc(True) for column in sort])
        .transformations(_transformations(order, renamed))
    )
    for key, width in keys.items():
        properties: dict[str, Any] = {"unit": "string", "noValue": _NOTHING}
        if width:
            properties["custom.width"] = width
        if links and key in links:
            properties["links"] = [{"title": f"Open this {key}", "url": links[key], "targetBlank": False}]
        panel = panel.override_by_name(key, _override(properties))
    for column in columns:
        panel = panel.override_by_name(column.name, _override(column.properties()))
    return panel.height(9).span(24)


def _transformations(order: Sequence[str], renamed: Mapping[str, str]) -> list[dashboard.DataTransformerConfig]:
    keep = dashboard.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(order)}})
    arrange = dashboard.DataTransformerConfig(
        id_val="organize",
        options={
            "excludeByName": {},
            "indexByName": {name: index for index, name in enumerate(order)},
            "renameByName": dict(renamed),
        },
    )
    merge = dashboard.DataTransformerConfig(id_val="merge", options={})
    return [merge, keep, arrange]


def _override(properties: Mapping[str, Any]) -> list[dashboard.DynamicConfigValue]:
    return [dashboard.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]


# -- columns that several dashboards share -------------------------------------------------------------------------


def exposed_wait(expr: str, width: int) -> Column:
    """The exposed wait, as a share of the training loop."""
    return Column("exposed wait", "percentunit", expr, steps=fair_bad(0.1, 0.2), bar=1, width=width)


def lost_share(name: str, expr: str, width: int) -> Column:
    """The share of its time that a rank loses to stalls."""
    return Column(name, "percentunit", expr, steps=fair_bad(0.1, 0.2), bar=1, width=width)


def sm_activity(expr: str, width: int) -> Column:
    """How much of the GPU worked."""
    return Column("SM activity", "percentunit", expr, bar=1, width=width)


def steps_a_second(name: str, expr: str, width: int = 130) -> Column:
    """Steps per second."""
    return Column(name, "short", expr, decimals=2, width=width)
