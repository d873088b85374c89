"""Lightning resumes from a checkpoint: the position, the lost steps, the checkpoint and the restore."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from .test_frameworks import REQUIRED, SCRIPTS, environment

SAVED, FAILS, LAST = 8, 10, 16


def run(*arguments: str, fails: bool = False) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment(), timeout=300)
    assert (done.returncode != 0) == fails, done.stderr[-4000:]
    return done.stdout


@pytest.mark.frameworks
def test_lightning_resumes_from_its_checkpoint(tmp_path):
    if importlib.util.find_spec("lightning") is None:
        text = "lightning is not installed: make test-frameworks installs it"
        pytest.fail(text) if REQUIRED else pytest.skip(text)
    run_dir = str(tmp_path / "run")
    command = ("-m", "telemetry", "run", "--run-dir", run_dir, str(SCRIPTS / "lightning_resume.py"), str(tmp_path))
    run(*command, fails=True)
    run(*command)
    report = json.loads(run("-m", "telemetry", "report", run_dir, "--json"))
    job = report["job"]
    assert [(each["end"], each["reason"]) for each in job["attempts"]] == [("failed", "ValueError"), ("finished", None)]
    first, second = job["attempts"]
    assert (second["resumed_from_step"], second["resumed_from"]) == (SAVED, "optimizer")
    assert second["steps"] == LAST - SAVED
    seconds = job["goodput"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(job["goodput"]["wall_seconds"], rel=0.01)
    assert seconds["checkpoint"] > 0
    assert seconds["restore"] > 0
    assert 0.04 < seconds["redone"] < 1
    assert first["lost_steps"] in {1, 2}, "the step that raises may count"
