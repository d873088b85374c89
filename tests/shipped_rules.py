"""The rules of deploy/prometheus, and helpers for the tests of rules and dashboards."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

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
    """Names in docs/METRICS.md, with what a histogram is scraped as."""
    found = set()
    for line in (ROOT / "docs" / "METRICS.md").read_text().splitlines():
        if row := re.match(r"\| `(\w+)` \| (\w+) \|", line):
            name, kind = row.groups()
            found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found
