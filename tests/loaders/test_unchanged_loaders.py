"""Loaders and watched sources do the same under the agent as without it, and leave the same behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.faults.processes import HANG, ROOT, environment
from tests.loaders import torch_cases, watch_cases

GROUPS = {"torch_cases": torch_cases.CASES, "watch_cases": watch_cases.CASES}


@pytest.fixture(scope="module")
def observations(tmp_path_factory):
    """For each group: what the bare run observed, and what the run under the agent."""
    running = {}
    for group in GROUPS:
        for disabled in ("1", "0"):
            results = tmp_path_factory.mktemp(group) / "results.json"
            running[group, disabled] = (
                results,
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "tests.loaders.observe", group, str(results)],
                    cwd=ROOT,
                    env=environment(TELEMETRY_DISABLED=disabled),
                    stderr=subprocess.PIPE,
                    text=True,
                ),
            )
    seen = {}
    for key, (results, process) in running.items():
        try:
            _, errors = process.communicate(timeout=2 * HANG)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        seen[key] = json.loads(results.read_text()) | {"stderr": errors, "status": process.returncode}
    return seen


@pytest.mark.parametrize("group,case", [(group, case) for group, cases in GROUPS.items() for case in cases])
def test_a_job_sees_the_same(observations, group, case):
    bare, attached = (observations[group, disabled]["cases"][case] for disabled in ("1", "0"))
    assert attached == bare


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_fails_inside_and_stop_leaves_nothing(observations, group):
    bare, attached = (observations[group, disabled] for disabled in ("1", "0"))
    assert attached["batches"] > 1000 > bare["batches"] == 0, "with the agent, and without it"
    assert attached["last error"] is None
    assert attached["errors"] == 0
    for what in ("stopped", "stderr", "status"):
        assert attached[what] == bare[what]


@pytest.mark.parametrize("group", GROUPS)
def test_the_bare_run_leaves_nothing_behind_either(observations, group):
    """Otherwise there would be nothing to compare."""
    left = {name: case["descriptors left"] for name, case in observations[group, "1"]["cases"].items()}
    assert left == dict.fromkeys(left, 0)
