"""The dashboards of grafana/: as generated, by rules of Grafana's linter, and against what there is to query."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from shipped_rules import (
    ALERTS,
    RANGE_FUNCTION,
    RECORDS,
    documented_metrics,
    expanded,
    graphs,
    must_have,
    names_read,
    queries,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "grafana" / "dashboards"
NAMES = ("fleet", "run", "node")
DASHBOARDS = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in NAMES}

OF_DCGM = {
    "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO",
    "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO",
    "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR",
}  # fmt: skip
"""What DCGM exporter calls them, before and since its version 4.9."""

UNITS = {
    "none", "string", "short", "percent", "percentunit", "bytes", "decbytes", "Bps", "watt", "celsius", "hertz",
    "ns", "µs", "ms", "s", "m", "h", "d", "dtdurations", "dateTimeAsIso", "dateTimeFromNow", "ops", "reqps", "bool",
}  # fmt: skip
"""The entries of the linter's list that these dashboards may need."""

each = pytest.mark.parametrize("name", NAMES)


# -- as generated, layout, links ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's SDK needs Python 3.11")
@each
def test_file_is_as_generated_and_small_enough_for_a_config_map(name):
    from grafana.generate import text

    assert (FOLDER / f"{name}.json").read_text() == text(name), "run python -m grafana.generate"
    assert os.path.getsize(FOLDER / f"{name}.json") < 500_000
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(NAMES)


@each
def test_panels_lie_side_by_side_and_have_titles_and_numbers_of_their_own(name):
    taken, section, seen = set(), None, set()
    for panel in DASHBOARDS[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        section = panel["title"] if panel["type"] == "row" else section
        assert not {(section, panel["title"], panel["type"]), panel["id"]} & seen, "a link goes by them"
        seen |= {(section, panel["title"], panel["type"]), panel["id"]}
    width = {y: sum(1 for x, row in taken if row == y) for _, y in taken}
    assert set(width.values()) == {24}, "a line with a gap"


def links():
    for name, dashboard in DASHBOARDS.items():
        for address in set(re.findall(r'"url": "([^"]*)"', json.dumps(dashboard))):
            yield name, address


def test_links_lead_to_a_dashboard_and_set_variables_that_it_has():
    there = {dashboard["uid"]: dashboard for dashboard in DASHBOARDS.values()}
    for name, address in links():
        uid, _, parameters = address.removeprefix("/d/").partition("?")
        assert uid in there, (name, address)
        known = {variable["name"] for variable in there[uid]["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", parameters)) <= known, (name, address)
        assert "${datasource:queryparam}" in parameters
        if "var-" in parameters:  # the links between the dashboards have a switch of their own for the time range
            assert "${__url_time_range}" in parameters
    addresses = "\n".join(address for name, address in links() if name == "fleet")
    for part in ("telemetry-run?var-run=", "&var-rank=", "telemetry-node?var-node="):
        assert part in addresses


# -- rules of grafana/dashboard-linter that concern Prometheus ---------------------------------------------------------


@each
def test_panels_and_variables_follow_the_rules_of_the_linter(name):
    dashboard = DASHBOARDS[name]
    assert not dashboard.get("editable")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "datasource":
            assert (variable["name"], variable["label"]) == ("datasource", "Data source")
        else:
            assert re.fullmatch(r"label_values\(.+\)", variable["query"])
            assert variable["refresh"] == 2, "it is asked for anew when the time range changes"
    for panel in graphs(dashboard):
        title, config = panel["title"], panel["fieldConfig"]
        assert panel["datasource"]["uid"] == "${datasource}", title
        assert len(panel["description"]) > 25, title
        assert panel["description"].endswith("."), title
        units = [p["value"] for o in config["overrides"] for p in o["properties"] if p["id"] == "unit"]
        assert {*units, config["defaults"]["unit"]} <= UNITS, title
        assert panel["targets"], title


@each
def test_queries_follow_the_rules_of_the_linter(name):
    exclusions = yaml.safe_load((FOLDER / ".lint").read_text())["exclusions"]
    counts = {entry["panel"] for entry in exclusions["target-counter-agg-rule"]["entries"]}
    for panel in graphs(DASHBOARDS[name]):
        for expression in (target["expr"] for target in panel["targets"]):
            assert "$" not in expanded(expression), "a variable that Grafana does not know"
            for function, duration in RANGE_FUNCTION.findall(expression):
                assert function not in {"rate", "irate"} or duration == "$__rate_interval", panel["title"]
            counters = re.findall(r"(?<!rate\()(?<!increase\()\b\w+_total\b", expression)
            assert not counters or panel["title"] in counts, f"{panel['title']}: {counters} are no rates"


# -- queries -----------------------------------------------------------------------------------------------------------


def seen_in_dashboards():
    """Every name that a dashboard reads, directly or through recorded series."""
    recorded = {rule["record"]: names_read(rule["expr"]) for rule in RECORDS}
    seen, waiting = set(), {n for d in DASHBOARDS.values() for _, query in queries(d) for n in names_read(query)}
    while waiting:
        seen |= waiting
        waiting = set().union(*(recorded.get(found, set()) for found in waiting)) - seen
    return seen


@each
def test_queries_read_what_there_is(name):
    there = documented_metrics() | {rule["record"] for rule in RECORDS}
    for where, query in queries(DASHBOARDS[name]):
        read = names_read(query)
        assert read, where
        assert read <= there, where


def test_dcgm_is_read_by_both_its_names():
    read = set().union(*(names_read(rule["expr"]) for rule in RECORDS))
    assert {found for found in read if found.startswith("DCGM")} == OF_DCGM


@pytest.mark.stack
@each
def test_promtool_parses_the_queries(name, tmp_path):
    rules = [
        {"record": f"query:{number}:{name}", "expr": expanded(query)}
        for number, (_, query) in enumerate(queries(DASHBOARDS[name]))
    ]
    path = tmp_path / "queries.rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(
        [must_have("promtool"), "check", "rules", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout + done.stderr


def test_every_metric_can_be_seen_somewhere():
    parts = re.compile(r"(?<=_seconds)_(bucket|sum|count)$")
    exported, shown = (
        {parts.sub("", found) for found in names} for names in (documented_metrics(), seen_in_dashboards())
    )
    assert exported - shown == {
        "training_loader_worker_busy_ratio",  # the sum of three that are
        "training_optimizer_steps_total",
        "training_process_threads",
        "training_cgroup_cpu_limit_cores",
    }


def test_the_person_who_is_paged_finds_the_figure_of_each_alert():
    shown = seen_in_dashboards()
    for rule in ALERTS:
        read = names_read(re.sub(r"'[^']*'", "", rule["expr"])) - {"up"}
        assert read & shown, rule["alert"]
