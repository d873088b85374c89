"""Helpers for tests with a running agent: its metrics, its log, and waiting for a condition."""

from __future__ import annotations

import json
import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def wait_for(condition, seconds: float = 20.0):
    """Poll until a condition is true. Returns what it returned."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("the condition was not true in time")


def scrape(agent) -> dict:
    """The samples of the agent's endpoint, by name and the values of all labels except run and rank, or run and node."""
    with urllib.request.urlopen(agent.metrics_url, timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            whose = {"run", "rank"} if "rank" in sample.labels else {"run", "node"}
            rest = tuple(v for k, v in sorted(sample.labels.items()) if k not in whose)
            assert whose <= set(sample.labels)
            key = (sample.name, *rest)
            assert key not in found
            found[key] = sample.value
    return found


def log_lines(agent) -> list[dict]:
    """The lines of the agent's only log file."""
    (path,) = (agent.run_dir / "logs").iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]
