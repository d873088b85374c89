"""The queries of the dashboards, and the values that Grafana substitutes for their variables."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from benchmarks.child import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DASHBOARDS: Final = ROOT / "grafana" / "dashboards"

_SPECIAL: Final = re.compile(r"[$^*{}\[\]'+?.()|]")
_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, an annotation or a variable.

    Attributes:
        dashboard: the dashboard's file, without its ending.
        panel: the panel's title, or ``annotation`` or ``variable``.
        ref: the query's letter in its panel, or the name of the annotation or variable.
        expression: PromQL with Grafana's variables in it. For a variable, Grafana's function.
        instant: whether it is evaluated only at the end of the time range.
    """

    dashboard: str
    panel: str
    ref: str
    expression: str
    instant: bool = False

    @property
    def key(self) -> str:
        """A readable name of the query."""
        return f"{self.dashboard} / {self.panel} / {self.ref}"


def load() -> dict[str, dict[str, Any]]:
    """The dashboards, by file name without its ending."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))}


def queries_of(name: str, dashboard: Mapping[str, Any]) -> Iterator[Query]:
    """The queries of its panels and annotations."""
    for panel in panels_of(dashboard):
        for target in panel.get("targets", []):
            instant = target.get("instant", False)
            kinds = [True] * instant + [False] * target.get("range", not instant)
            for kind in kinds:
                yield Query(name, panel["title"], target["refId"], target["expr"], kind)
    for annotation in dashboard.get("annotations", {}).get("list", []):
        if not annotation.get("builtIn"):
            yield Query(name, "annotation", annotation["name"], annotation.get("expr") or annotation["target"]["expr"])


def variables_of(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its variables that need a query, in order: a later one may use an earlier one."""
    return [variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"]


def chosen(variable: Mapping[str, Any], values: Sequence[str]) -> str:
    """The text substituted for a variable: several values become alternatives of a quoted regular expression."""
    if not (variable.get("multi") or variable.get("includeAll")):
        return values[0].replace("\\", "\\\\").replace('"', '\\"')
    escaped = [_SPECIAL.sub(lambda match: "\\\\" + match[0], value.replace("\\", "\\" * 4)) for value in values]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def times(range_seconds: int, interval_seconds: int, scrape_seconds: int) -> dict[str, str]:
    """The variables of the time range.

    Args:
        range_seconds: length of the time range.
        interval_seconds: distance of two points of a graph, at least the scrape interval.
        scrape_seconds: the data source's scrape interval.
    """
    return {
        "__rate_interval": f"{max(interval_seconds + scrape_seconds, 4 * scrape_seconds)}s",
        "__interval": f"{interval_seconds}s",
        "__interval_ms": str(interval_seconds * 1000),
        "__range": f"{range_seconds}s",
        "__range_s": str(range_seconds),
        "__range_ms": str(range_seconds * 1000),
    }


def substituted(expression: str, values: Mapping[str, str]) -> str:
    """An expression with all variables replaced.

    Raises:
        KeyError: a variable does not exist.
    """
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], expression)


def panels_of(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Its panels, including those of collapsed rows."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])
