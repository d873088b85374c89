"""The rules of grafana/dashboard-linter that concern Prometheus, under the linter's names.

Each rule yields its violations as ``(panel's title or None, text)``. One is stricter than the linter's: it recognises a
counter with any matchers. ``.lint`` is read as the linter reads it.
"""

import re

import yaml
from grafana_queries import RANGE_FUNCTION, expanded, graphs

VALID_UNITS = {
    "none", "string", "short", "percent", "percentunit", "bytes", "decbytes", "Bps", "watt", "celsius", "hertz",
    "ns", "µs", "ms", "s", "m", "h", "d", "dtdurations", "dateTimeAsIso", "dateTimeFromNow", "ops", "reqps", "bool",
}  # fmt: skip
"""The entries of the linter's list that these dashboards may need."""

QUERIED = {"stat", "singlestat", "graph", "table-old", "timeseries", "gauge", "table", "state-timeline", "bargauge"}
"""Types of panels that the rules check: the linter's own list, and all other types in these dashboards."""


def variables(dashboard, kind=None):
    return [v for v in dashboard["templating"]["list"] if kind in (None, v["type"])]


def template_datasource_rule(dashboard):
    sources = variables(dashboard, "datasource")
    if not sources:
        yield None, "no templated data source"
    for source in sources:
        if source["name"] not in {"datasource", "prometheus_datasource"}:
            yield None, f"the data source's variable is named {source['name']}"
        if source["label"] not in {"Data source", "Prometheus data source"}:
            yield None, f"the data source's variable is labelled {source['label']}"


def required_template(name):
    def rule(dashboard):
        for found in variables(dashboard, "query"):
            if found["name"] == name and found.get("multi") and found.get("allValue") == ".+":
                return
        yield None, f"no variable {name} of several values with .+ for all"

    return rule


def template_label_promql_rule(dashboard):
    for variable in variables(dashboard, "query"):
        query = variable["query"]["query"] if isinstance(variable["query"], dict) else variable["query"]
        if not re.fullmatch(r"(label_names|label_values|metrics|query_result)\(.+\)", query):
            yield None, f"variable {variable['name']}: {query}"


def template_on_time_change_reload_rule(dashboard):
    for variable in variables(dashboard, "query"):
        if variable["refresh"] != 2:
            yield None, f"variable {variable['name']} is not asked for anew when the time range changes"


def panel_datasource_rule(dashboard):
    names = {spelled for v in variables(dashboard, "datasource") for spelled in (f"${v['name']}", f"${{{v['name']}}}")}
    for panel in graphs(dashboard):
        if panel.get("datasource", {}).get("uid") not in names:
            yield panel["title"], "does not use the templated data source"


def panel_title_description_rule(dashboard):
    for panel in graphs(dashboard):
        if not panel.get("title") or not panel.get("description"):
            yield panel.get("title"), "has no title or no description"


def panel_units_rule(dashboard):
    for panel in graphs(dashboard):
        config = panel["fieldConfig"]
        units = [p["value"] for o in config["overrides"] for p in o["properties"] if p["id"] == "unit"]
        units.append(config["defaults"].get("unit"))
        for unit in units:
            if unit not in VALID_UNITS:
                yield panel["title"], f"unit {unit}"


def panel_no_targets_rule(dashboard):
    for panel in graphs(dashboard):
        if panel["type"] not in QUERIED:
            yield panel["title"], f"the rules here do not know panels of type {panel['type']}"
        if not panel.get("targets"):
            yield panel["title"], "has no targets"


def target_rate_interval_rule(dashboard):
    for panel, expr in targets(dashboard):
        for function, duration in RANGE_FUNCTION.findall(expr):
            if function in {"rate", "irate"} and duration != "$__rate_interval":
                yield panel["title"], f"{function} over [{duration}]"


def target_counter_agg_rule(dashboard):
    for panel, expr in targets(dashboard):
        for counter in re.findall(r"(?<!rate\()(?<!increase\()\b\w+_total\b", expr):
            yield panel["title"], f"{counter} is no rate"


def target_matcher(name):
    def rule(dashboard):
        for panel, expr in targets(dashboard):
            if f'{name}=~"${name}"' not in expr:
                yield panel["title"], f"a query without a matcher of {name}"

    return rule


def uneditable_dashboard(dashboard):
    if dashboard.get("editable"):
        yield None, "can be edited"


def targets(dashboard):
    for panel in graphs(dashboard):
        for target in panel["targets"]:
            yield panel, target["expr"]


def target_promql_rule(dashboard):
    """Checks that no variable is left. Another test checks the PromQL with promtool."""
    for panel, expr in targets(dashboard):
        try:
            filled = expanded(expr)
        except KeyError as unknown:
            yield panel["title"], f"{unknown} is no variable: {expr}"
        else:
            if not filled or "$" in filled:
                yield panel["title"], f"cannot be expanded: {expr}"


RULES = {
    "template-datasource-rule": template_datasource_rule,
    "template-job-rule": required_template("job"),
    "template-instance-rule": required_template("instance"),
    "template-label-promql-rule": template_label_promql_rule,
    "template-on-time-change-reload-rule": template_on_time_change_reload_rule,
    "panel-datasource-rule": panel_datasource_rule,
    "panel-title-description-rule": panel_title_description_rule,
    "panel-units-rule": panel_units_rule,
    "panel-no-targets-rule": panel_no_targets_rule,
    "target-promql-rule": target_promql_rule,
    "target-rate-interval-rule": target_rate_interval_rule,
    "target-job-rule": target_matcher("job"),
    "target-instance-rule": target_matcher("instance"),
    "target-counter-agg-rule": target_counter_agg_rule,
    "uneditable-dashboard": uneditable_dashboard,
}


class Exclusions:
    """A ``.lint`` file. Records which of its entries were needed."""

    def __init__(self, path):
        self.rules = yaml.safe_load(path.read_text())["exclusions"]
        self.unused = {
            (rule, entry.get("dashboard"), entry.get("panel"))
            for rule, content in self.rules.items()
            for entry in content.get("entries", [{}])
        }

    def cover(self, rule, dashboard, panel):
        for entry in self.rules.get(rule, {"entries": []}).get("entries", [{}]):
            if entry.get("dashboard", dashboard) == dashboard and entry.get("panel", panel) == panel:
                self.unused.discard((rule, entry.get("dashboard"), entry.get("panel")))
                return True
        return False
