"""Loaders and watched sources do the same under the agent as without it, and leave the same behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.faults.processes import HANG, ROOT, environment
from tests.loaders import torch_cases, watch_cases

GROUPS = {"torch_cases": torch_cases.CASES, "watch_cases": watch_cases.CASES}
BARE, ATTACHED = "1", "0"
"""The value of ``TELEMETRY_DISABLED``."""


@pytest.fixture(scope="module")
def observations(tmp_path_factory):
    """For each group: what the bare run observed, and what the run under the agent, at the same time."""
    folder, running, seen = tmp_path_factory.mktemp("groups"), {}, {}
    for key in [(group, disabled) for group in GROUPS for disabled in (BARE, ATTACHED)]:
        group, disabled = key
        results = folder / group / disabled / "results.json"
        results.parent.mkdir(parents=True)
        command = [sys.executable, "-W", "ignore", "-m", "tests.loaders.observe", group, str(results)]
        env = environment(TELEMETRY_DISABLED=disabled)
        running[key] = results, subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        for key, (results, process) in running.items():
            _, errors = process.communicate(timeout=2 * HANG)
            seen[key] = json.loads(results.read_text()) | {"stderr": errors, "status": process.returncode}
    finally:
        for _, process in running.values():
            process.kill()
            process.wait()
    return seen


@pytest.mark.parametrize("group,case", [(group, case) for group, cases in GROUPS.items() for case in cases])
def test_a_job_sees_the_same(observations, group, case):
    bare, attached = (observations[group, disabled]["cases"][case] for disabled in (BARE, ATTACHED))
    assert attached == bare


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_fails_inside_and_stop_leaves_nothing(observations, group):
    bare, attached = (observations[group, disabled] for disabled in (BARE, ATTACHED))
    assert attached["batches"] > 300 > bare["batches"] == 0, "with the agent, and without it"
    assert attached["last error"] is None
    assert attached["errors"] == 0
    for what in ("stopped", "stderr", "status"):
        assert attached[what] == bare[what]
    left = {name: case["descriptors left"] for name, case in bare["cases"].items()}
    assert left == dict.fromkeys(left, 0), "otherwise there would be nothing to compare"
