"""The dashboards of grafana/: as generated, by Grafana's schema and its linter's rules, and against what there is to query."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from dashboard_lint import RULES, Exclusions
from grafana_queries import expanded, graphs, names_read, queries
from shipped_rules import ALERTS, RECORDS, documented_metrics, must_have

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

needs_sdk = pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's SDK needs Python 3.11")
each = pytest.mark.parametrize("name", NAMES)


def test_these_are_all():
    assert sorted(path.name for path in FOLDER.glob("*.json")) == sorted(f"{name}.json" for name in NAMES)


# -- as generated --------------------------------------------------------------------------------------------------------


@needs_sdk
@each
def test_file_is_as_generated(name):
    from grafana.generate import text

    assert (FOLDER / f"{name}.json").read_text() == text(name), "run python -m grafana.generate"


@needs_sdk
@each
def test_file_is_of_grafanas_schema(name):
    from grafana_schema import problems

    assert list(problems(DASHBOARDS[name])) == []


@needs_sdk
def test_schema_knows_a_dashboard_from_what_is_none():
    from grafana_schema import problems

    def rank_given(change):
        content = json.loads(json.dumps(DASHBOARDS["fleet"]))
        change(content, content["panels"][1])
        return list(problems(content))

    assert rank_given(lambda dashboard, panel: None) == []
    assert rank_given(lambda dashboard, panel: panel.update(discription="x"))
    assert rank_given(lambda dashboard, panel: panel.update(title=3))
    assert rank_given(lambda dashboard, panel: panel["targets"][0].update(instant="yes"))
    assert rank_given(lambda dashboard, panel: panel["options"].update(graphMode="aria"))
    assert rank_given(lambda dashboard, panel: panel["fieldConfig"]["defaults"]["thresholds"].update(mode="absolut"))
    assert rank_given(lambda dashboard, panel: dashboard["templating"]["list"][1].update(refresh=7))
    assert rank_given(lambda dashboard, panel: panel["gridPos"].update(w=3.5))


def test_nothing_else_needs_the_sdk():
    """A development dependency: neither the package nor what deploys it may ask for it."""
    users = [
        path
        for folder in ("telemetry", "deploy", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(from|import) grafana", path.read_text(), re.MULTILINE)
    ]
    assert users == []
    assert sys.version_info < (3, 11) or find_spec("grafana_foundation_sdk")


# -- layout, links, rules of the linter ----------------------------------------------------------------------------------


@each
def test_panels_lie_side_by_side(name):
    taken = set()
    for panel in DASHBOARDS[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    width = {y: sum(1 for x, row in taken if row == y) for _, y in taken}
    assert set(width.values()) == {24}, "a line with a gap"


@each
def test_panels_have_titles_of_their_own(name):
    """A link, and an exclusion in .lint, go by them; rows may repeat what another row has."""
    section, seen = None, set()
    for panel in DASHBOARDS[name]["panels"]:
        if panel["type"] == "row":
            section = panel["title"]
            continue
        assert (section, panel["title"]) not in seen
        seen.add((section, panel["title"]))
    ids = [panel["id"] for panel in DASHBOARDS[name]["panels"]]
    assert len(ids) == len(set(ids))


@each
def test_descriptions_say_more_than_the_title(name):
    for panel in graphs(DASHBOARDS[name]):
        assert len(panel["description"]) > 25, panel["title"]
        assert panel["description"].endswith("."), panel["title"]


def links():
    for name, dashboard in DASHBOARDS.items():
        for address in set(re.findall(r'"url": "([^"]*)"', json.dumps(dashboard))):
            yield name, address


@pytest.mark.parametrize(("name", "address"), sorted(links()))
def test_links_lead_to_a_dashboard_and_set_variables_that_it_has(name, address):
    there = {dashboard["uid"]: dashboard for dashboard in DASHBOARDS.values()}
    uid, _, parameters = address.removeprefix("/d/").partition("?")
    assert uid in there
    known = {variable["name"] for variable in there[uid]["templating"]["list"]}
    assert set(re.findall(r"var-(\w+)=", parameters)) <= known
    assert "${datasource:queryparam}" in parameters
    if "var-" in parameters:  # the links between the dashboards have a switch of their own for the time range
        assert "${__url_time_range}" in parameters


def test_fleet_leads_to_a_run_a_rank_and_a_node():
    addresses = "\n".join(address for name, address in links() if name == "fleet")
    for part in ("telemetry-run?var-run=", "&var-rank=", "telemetry-node?var-node="):
        assert part in addresses


def test_rules_of_the_linter():
    exclusions = Exclusions(FOLDER / ".lint")
    violations = [
        (rule, dashboard["title"], panel, text)
        for dashboard in DASHBOARDS.values()
        for rule, check in RULES.items()
        for panel, text in check(dashboard)
        if not exclusions.cover(rule, dashboard["title"], panel)
    ]
    assert violations == []
    assert exclusions.unused == set(), "nothing violates these rules any more"
    assert all(content["reason"] for content in exclusions.rules.values())
    assert exclusions.rules.keys() <= RULES.keys()


# -- queries -------------------------------------------------------------------------------------------------------------


def test_names_are_found_in_queries():
    expression = """
        sum by (run) (rate(training_steps_total{run="$run", rank=~"$rank"}[$__rate_interval])) / 60
          and on (run) topk(3, a:b:c @ end()) or vector(0) unless bool_x > bool 1e3
    """
    assert names_read(expression) == {"training_steps_total", "a:b:c", "bool_x", "1e3"} - {"1e3"}


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
    """Directly, or through a recorded series."""
    recorded = {rule["record"]: names_read(rule["expr"]) for rule in RECORDS}
    seen, waiting = set(), {n for d in DASHBOARDS.values() for _, query in queries(d) for n in names_read(query)}
    while waiting:
        seen |= waiting
        waiting = set().union(*(recorded.get(found, set()) for found in waiting)) - seen
    exported = {re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", found) for found in documented_metrics()}
    shown = {re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", found) for found in seen}
    assert exported - shown == {
        "training_loader_worker_busy_ratio",  # the sum of three that are
        "training_optimizer_steps_total",
        "training_process_threads",
        "training_cgroup_cpu_limit_cores",
    }


def test_alerts_have_their_figure_in_a_dashboard():
    """Each alert's figure is in a dashboard, so that the person who is paged finds it."""
    shown = {found for d in DASHBOARDS.values() for _, query in queries(d) for found in names_read(query)}
    recorded = {rule["record"]: names_read(rule["expr"]) for rule in RECORDS}
    for _ in range(3):
        shown |= set().union(*(recorded.get(found, set()) for found in shown))
    for rule in ALERTS:
        read = names_read(re.sub(r"'[^']*'", "", rule["expr"])) - {"up"}
        assert read & shown, rule["alert"]


def test_files_are_small_enough_to_be_deployed():
    """A ConfigMap has at most 1 MiB, and Grafana's sidecar reads each whole."""
    for name in NAMES:
        assert os.path.getsize(FOLDER / f"{name}.json") < 500_000
