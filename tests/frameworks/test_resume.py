"""Frameworks resume from a checkpoint: the position, the lost steps, the checkpoint, the restore and the replay."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from .test_frameworks import REQUIRED, SCRIPTS, environment

SAVED, LAST = 8, 16
AHEAD = 1
"""accelerate reads one batch ahead. It is not trained if the loop ends before the loader does."""


def run(*arguments: str, fails: bool = False) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment(), timeout=300)
    assert (done.returncode != 0) == fails, done.stderr[-4000:]
    return done.stdout


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("package", "arguments", "replays", "ahead"),
    [
        ("lightning", (), False, 0),
        ("transformers", (), False, AHEAD),
        ("transformers", ("stream",), True, 0),  # the batch that it reads ahead looks like the end of its replay
        ("accelerate", (), False, AHEAD),
        ("safetensors", (), True, 0),
    ],
    ids=["lightning", "transformers", "transformers, a stream", "accelerate", "safetensors"],
)
def test_a_framework_resumes_from_its_checkpoint(tmp_path, package, arguments, replays, ahead):
    if importlib.util.find_spec(package) is None:
        text = f"{package} is not installed: make test-frameworks installs it"
        pytest.fail(text) if REQUIRED else pytest.skip(text)
    run_dir, script = str(tmp_path / "run"), str(SCRIPTS / f"{package}_resume.py")
    command = ("-m", "telemetry", "run", "--run-dir", run_dir, script, str(tmp_path), *arguments)
    run(*command, fails=True)
    run(*command)
    report = json.loads(run("-m", "telemetry", "report", run_dir, "--json"))
    job = report["job"]
    assert [(each["end"], each["reason"]) for each in job["attempts"]] == [("failed", "ValueError"), ("finished", None)]
    first, second = job["attempts"]
    assert (second["resumed_from_step"], second["resumed_from"]) == (SAVED, "optimizer")
    assert second["steps"] == LAST - SAVED + ahead
    seconds = job["goodput"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(job["goodput"]["wall_seconds"], rel=0.01)
    assert seconds["checkpoint"] > 0
    assert seconds["restore"] > 0
    assert (seconds["replay"] > 0.1) == replays
    assert 0.04 < seconds["redone"] < 1
    assert first["lost_steps"] in {1, 2}, "the step that raises may count"
