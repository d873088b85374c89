"""Kineto's lines on stderr at each start and stop appear for the script's own profilers and never for a snapshot."""

from __future__ import annotations

import re

import pytest

from faults.processes import environment, run_script

STAMP = re.compile(r":\d{4}-\d\d-\d\d [\d:]+ [\d:]+ ")

SOURCE = """
import os, sys, time, torch, telemetry
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset


def theirs(said):
    print(said, file=sys.stderr, flush=True)
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(3).sum()


ours = "ours" in sys.argv
agent = telemetry.start("run", start_line=False, interval_seconds=0.1) if ours else None
if "before" in sys.argv:
    theirs("before")
for _ in range(2 if ours else 0):
    recorded = agent.snapshots.counts["recorded"]
    while agent.snapshots.counts["recorded"] == recorded:
        telemetry.request_snapshot(steps=2)
        for (batch,) in DataLoader(TensorDataset(torch.ones(400, 4)), batch_size=4):
            torch.relu(batch).sum()
            time.sleep(0.002)
            if agent.snapshots.counts["recorded"] > recorded:
                break
theirs("after")
if ours:
    assert os.environ.get("KINETO_LOG_LEVEL") == (sys.argv[1] if sys.argv[1] != "unset" else None)
    telemetry.stop()
"""


def said(folder, *arguments: str) -> str:
    variables = {} if arguments[0] == "unset" else {"KINETO_LOG_LEVEL": arguments[0]}
    lines = STAMP.sub(" ", run_script(SOURCE, folder, *arguments, env=environment(**variables)).stderr).splitlines()
    return "\n".join(line for line in lines if "gpuGetDeviceCount" not in line)  # printed once if there is no GPU


@pytest.mark.parametrize("when", ["before", "first"])
def test_the_script_s_profilers_say_what_they_always_say(tmp_path, when):
    bare = said(tmp_path, "unset", when)
    if "profiler_start" not in bare:
        pytest.skip("this torch says nothing that could be silenced")
    assert said(tmp_path, "unset", when, "ours") == bare


def test_a_level_that_the_user_has_set_holds_for_ours_too(tmp_path):
    assert "profiler_start" not in said(tmp_path, "99", "before", "ours")
