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
)

NOT_YET: set[str] = set()
"""Metrics that rules read and that are not measured yet. Remove a name here when you add the metric."""

OF_PROMETHEUS = {"up"}


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


def names_in(expression):
    """What a PromQL expression reads: `training_*`, `telemetry_*` and recorded names; no label, no text in quotes.

    A pattern on ``__name__`` is spelled out.
    """
    patterns = re.findall(r"""__name__=~["']([^"']*)["']""", expression)
    spelled = [name for pattern in patterns for name in spell_out(pattern)]
    bare = re.sub(r"""(["'])(?:(?!\1).)*\1""", "", expression)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    return {*spelled, *re.findall(r"\b(?:up|\w+:\w+:\w+|(?:training|telemetry)_\w+)\b", bare)}


def spell_out(pattern):
    """``a_(b|c)_d`` is ``a_b_d`` and ``a_c_d``."""
    match = re.fullmatch(r"(\w*)\(([\w|]+)\)(\w*)", pattern)
    assert match, f"too clever a pattern for this test: {pattern}"
    return [f"{match[1]}{part}{match[3]}" for part in match[2].split("|")]


def test_names_are_found_in_expressions():
    expression = """
        sum by (run, training_label) (rate(training_steps_total{cause="training_text"}[5m]))
          * on (run) group_left (node) level:training_steps:rate5m{job!~".*telemetry_static"} and up == 0
        or {__name__=~'training_(a|b)_bytes'}
    """
    assert names_in(expression) == {
        "training_steps_total", "level:training_steps:rate5m", "up", "training_a_bytes", "training_b_bytes",
    }  # fmt: skip


def test_rules_read_what_there_is():
    recorded = {rule["record"] for rule in RECORDS}
    read = set()
    for rule in RULES:
        read |= names_in(rule["expr"])
        for text in rule.get("annotations", {}).values():  # a query in a template
            for query in re.findall(r'printf "([^"]*)"', text):
                read |= names_in(query.replace("%q", "''"))

    assert read - documented_metrics() - recorded - OF_PROMETHEUS == NOT_YET
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
