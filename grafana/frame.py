"""The common parts of the dashboards: names, variables, links between them, annotations."""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard

from grafana.panels import DATA_SOURCE

FLEET: Final = "telemetry-fleet"
RUN: Final = "telemetry-run"
NODE: Final = "telemetry-node"
"""The dashboards' ids. Their URLs contain them, so they never change."""

TAG: Final = "telemetry"

_KEPT: Final = "${datasource:queryparam}&${__url_time_range}"
TO_RUN: Final = f"/d/{RUN}?var-run=${{__data.fields.run}}&{_KEPT}"
TO_RANK: Final = f"/d/{RUN}?var-run=${{__data.fields.run}}&var-rank=${{__data.fields.rank}}&{_KEPT}"
TO_RANK_OF_RUN: Final = f"/d/{RUN}?var-run=${{run}}&var-rank=${{__data.fields.rank}}&{_KEPT}"
TO_NODE: Final = f"/d/{NODE}?var-node=${{__data.fields.node}}&{_KEPT}"

_SCHEMA_VERSION: Final = 39
"""The schema of Grafana 11.0. Newer versions migrate from it by themselves."""


def board(uid: str, title: str, description: str, *, hours: int, refresh: str = "30s") -> build.Dashboard:
    """An empty dashboard with its data source.

    Args:
        uid: one of the ids above.
        title: shown at the top, and in lists.
        description: its purpose.
        hours: the initial time range.
        refresh: how often it is refreshed.
    """
    source = build.DatasourceVariable("datasource").label("Data source").type("prometheus")
    links = [_link(other, text) for other, text in _OTHERS.items() if other != uid]
    return (
        build.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG, "generated"])
        .readonly()
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .time(f"now-{hours}h", "now")
        .refresh(refresh)
        .with_variable(source)
        .links(list(links))
        .annotations([])
    )


def built(builder: build.Dashboard) -> dashboard.Dashboard:
    """Build a dashboard."""
    made = builder.build()
    made.schema_version = _SCHEMA_VERSION
    for number, panel in enumerate(_all_panels(made), start=1):
        panel.id_val = number
    return made


def variable(name: str, label: str, query: str, description: str, *, several: bool = False) -> build.QueryVariable:
    """A variable whose values come from a query.

    Args:
        name: its name in queries.
        label: its name on the dashboard.
        query: ``label_values(…)``.
        description: shown on hover.
        several: whether several values, or all, can be chosen. Then all is the default.
    """
    made = (
        build.QueryVariable(name)
        .label(label)
        .description(description)
        .query(query)
        .datasource(DATA_SOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.NATURAL_ASC)
    )
    if several:
        made = made.multi(True).include_all(True).current(dashboard.VariableOption(text=["All"], value=["$__all"]))
    return made


class Marks(Builder[dashboard.AnnotationQuery]):
    """Marks in all graphs at times at which an expression has a value above 0.

    Args:
        name: name of the switch at the top of the dashboard.
        expr: the expression.
        title: title of each mark; ``{{label}}`` is a label's value.
        colour: colour of the marks.
    """

    def __init__(self, name: str, expr: str, title: str, colour: str) -> None:
        self._query = _PrometheusAnnotation(
            name=name, datasource=DATA_SOURCE, enable=True, icon_color=colour, expr=expr, title=title
        )

    def build(self) -> dashboard.AnnotationQuery:
        """The query."""
        return self._query


class _PrometheusAnnotation(dashboard.AnnotationQuery):
    """An annotation query with a title. The schema has no title, because each data source uses its own field for it."""

    def __init__(self, *, title: str, **query: Any) -> None:
        super().__init__(**query)
        self._title = title

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"titleFormat": self._title}


_OTHERS: Final = {FLEET: "Fleet", RUN: "Run", NODE: "Node"}


def _link(uid: str, text: str) -> build.DashboardLink:
    return (
        build.DashboardLink(text)
        .type(dashboard.DashboardLinkType.LINK)
        .url(f"/d/{uid}?${{datasource:queryparam}}")
        .icon("dashboard")
        .keep_time(True)
    )


def _all_panels(made: dashboard.Dashboard) -> list[dashboard.Panel | dashboard.RowPanel]:
    found: list[dashboard.Panel | dashboard.RowPanel] = []
    for panel in made.panels or []:
        found.append(panel)
        if isinstance(panel, dashboard.RowPanel):
            found.extend(panel.panels)
    return found
