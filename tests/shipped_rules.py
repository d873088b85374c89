"""The rules of deploy/prometheus, the queries of dashboards, and what both read."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from benchmarks import grafana
from telemetry.node.metrics import metrics

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULE_FILES = [PROMETHEUS / f"telemetry.{name}.rules.yml" for name in ("recording", "alerts")]
RULE_TESTS = sorted(PROMETHEUS.glob("tests/*.test.yml"))


def load(path):
    return yaml.safe_load(path.read_text())


GROUPS = [group for path in RULE_FILES for group in load(path)["groups"]]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDS = [rule for rule in RULES if "record" in rule]


def must_have(command):
    path = shutil.which(command)
    if path is None:
        text = f"{command} is not installed (Debian's packages prometheus and prometheus-alertmanager have it)"
        pytest.fail(text) if os.environ.get("TELEMETRY_TEST_REQUIRE_STACK") == "1" else pytest.skip(text)
    return path


def documented_metrics():
    """Names of the table of metrics, with what a histogram is scraped as."""
    found = set()
    for _, metric in metrics():
        parts = ("_bucket", "_sum", "_count") if metric.type == "histogram" else ("",)
        found |= {metric.name + part for part in parts}
    return found


# -- queries -----------------------------------------------------------------------------------------------------------

VALUES = {
    "__rate_interval": "5m", "__interval": "1m", "__range": "6h", "__range_s": "21600",
    "run": "(a|b)", "rank": "(0|1)", "worst": "(0|1)", "node": "n",
}  # fmt: skip
"""The values that Grafana would substitute."""

RANGE_FUNCTION = re.compile(r"\b(\w+)\(\s*[\w:]+\s*(?:\{[^}]*\})?\s*\[([^\]:]+)\]")
"""Matches a function of a range vector, and the range."""

_WORDS = set("and or unless on ignoring group_left group_right by without bool offset inf".split())
_TEXT = r"""(["'])((?:(?!\1).)*)\1"""


def expanded(text):
    """The query with its variables substituted.

    Raises:
        KeyError: it has a variable that Grafana does not know.
    """
    return grafana.substituted(text, VALUES)


def graphs(dashboard):
    """Panels with graphs, including those of collapsed rows."""
    return (panel for panel in grafana.panels_of(dashboard) if panel["type"] != "row")


def queries(dashboard):
    """``(where, query)`` of panels, annotations and variables."""
    for query in grafana.queries_of("", dashboard):
        yield f"{query.panel} {query.ref}", query.expression
    for variable in grafana.variables_of(dashboard):
        yield f"variable {variable['name']}", re.fullmatch(r"label_values\((.*), \w+\)", variable["query"])[1]


def names_read(expression):
    """Every metric that an expression reads: all names except functions, keywords, labels and text."""
    patterns = [pattern for _, pattern in re.findall(f"__name__=~{_TEXT}", expression)]
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", re.sub(_TEXT, "", expression))
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    names = set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - _WORDS
    return names.union(*map(_spelled_out, patterns))


def _spelled_out(pattern):
    """``a_(b|c)_d|e`` is ``a_b_d``, ``a_c_d`` and ``e``."""
    names = set()
    for each in re.findall(r"(?:[^|()]|\([^)]*\))+", pattern):
        before, bracket, rest = each.partition("(")
        middle, _, after = rest.partition(")")
        names |= {f"{before}{part}{after}" for part in middle.split("|")} if bracket else {each}
    return names
