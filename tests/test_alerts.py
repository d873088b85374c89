"""The rules of deploy/prometheus: by Prometheus's own tools, and against the metrics, the runbook and their tests."""

import os
import re
import shutil
import subprocess

import pytest
import yaml
from shipped_rules import (
    ALERTS,
    DEPLOY,
    GROUPS,
    PROMETHEUS,
    RECORDS,
    ROOT,
    RULE_FILES,
    RULE_TESTS,
    RULES,
    documented_metrics,
    load,
    must_have,
    names_read,
)


def succeeds(command, *arguments):
    # promtool's memory is small, and more than a third of its CPU time would go into garbage collections.
    done = subprocess.run(
        [must_have(command), *map(str, arguments)],
        env=os.environ | {"GOGC": "800"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# -- Prometheus's own tools ----------------------------------------------------------------------------------------------


@pytest.mark.stack
@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.name)
def test_promtool_checks_the_rules(path):
    succeeds("promtool", "check", "rules", path)


@pytest.mark.stack
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.name)
def test_promtool_tests_the_rules(path):
    succeeds("promtool", "test", "rules", path)


@pytest.mark.stack
@pytest.mark.parametrize("store", ["", "victoriametrics", "mimir"])
def test_promtool_checks_the_configuration(store, tmp_path):
    text = (PROMETHEUS / "prometheus.yml").read_text()
    if store:  # as the header of the file says
        text += (PROMETHEUS / f"remote-write.{store}.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text)
    for path in RULE_FILES:
        shutil.copy(path, tmp_path)

    succeeds("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert ("remote_write" in yaml.safe_load(text)) is bool(store)


@pytest.mark.stack
def test_amtool_checks_the_configuration():
    succeeds("amtool", "check-config", DEPLOY / "alertmanager" / "alertmanager.yml")


# -- rules, their tests and their documents ------------------------------------------------------------------------------


def test_rules_read_what_there_is():
    recorded = {rule["record"] for rule in RECORDS}
    read = set()
    for rule in RULES:
        read |= names_read(rule["expr"])
        for text in rule.get("annotations", {}).values():  # a query in a template
            for query in re.findall(r'printf "([^"]*)"', text):
                read |= names_read(query.replace("%q", "''"))

    assert {name for name in read - documented_metrics() - recorded if not name.startswith("DCGM")} <= {"up"}
    assert read >= {"training_loader_workers_memory_bytes", "instance_run_rank:training_run_info:last"}


def test_recorded_names_say_level_metric_operations():
    for rule in RECORDS:
        assert re.fullmatch(
            r"(run|instance_run)(_\w+)?:(training|telemetry)_\w+:[a-z0-9_]+|uuid:dcgm_\w+:[a-z]+", rule["record"]
        )
    names = [rule["record"] for rule in RECORDS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_alert_says_where_why_and_what_next(rule):
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "cause", "runbook_url"}
    assert "$labels.run" in rule["annotations"]["summary"]
    description = rule["annotations"]["description"]
    for part in ("$labels.run", "$labels.node", "Cause: ", "Next: "):
        assert part in description
    assert re.search(r"\brank", description, re.IGNORECASE)
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_every_alert_has_its_section_and_every_section_its_alert():
    parts = re.split(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))

    assert sorted(sections) == sorted({rule["alert"] for rule in ALERTS})
    for text in sections.values():
        assert re.findall(r"^\*\*(.*?)\.\*\*", text, re.MULTILINE) == [
            "What it means", "What to look at", "What to do",
        ]  # fmt: skip


def test_every_alert_is_tested_to_fire_and_to_be_silent():
    fired, silent = set(), set()
    for path in RULE_TESTS:
        for test in load(path)["tests"]:
            for case in test.get("alert_rule_test", []):
                name = case["alertname"]
                (fired if case["exp_alerts"] else silent).add(name)
    alerts = {rule["alert"] for rule in ALERTS}
    assert fired == alerts
    assert silent == alerts


def test_rule_tests_evaluate_the_groups_in_their_order():
    """promtool takes them in any order if it is not told."""
    for path in RULE_TESTS:
        assert load(path)["group_eval_order"] == [group["name"] for group in GROUPS], path.name
