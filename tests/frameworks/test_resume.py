"""Frameworks resume from a checkpoint: the position, the lost steps, the checkpoint, the restore and the replay."""

from __future__ import annotations

import pytest

from tests.faults.processes import report

from .test_frameworks import SCRIPTS, needs, start

SAVED, LAST = 8, 16


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("package", "arguments", "replays"),
    [
        ("lightning", (), False),
        ("transformers", (), False),
        ("transformers", ("stream",), True),
        ("accelerate", (), False),
        ("safetensors", (), True),
    ],
    ids=["lightning", "transformers", "transformers, a stream", "accelerate", "safetensors"],
)
def test_a_framework_resumes_from_its_checkpoint(tmp_path, package, arguments, replays):
    needs(package)
    run_dir, script = str(tmp_path / "run"), str(SCRIPTS / f"{package}_resume.py")
    command = ("-m", "telemetry", "run", "--run-dir", run_dir, script, str(tmp_path), *arguments)
    for status in (1, 0):
        done = start([*command])
        _, err = done.communicate(timeout=300)
        assert done.returncode == status, err[-4000:]
    job = report(tmp_path / "run")["job"]
    assert [(each["end"], each["reason"]) for each in job["attempts"]] == [("failed", "ValueError"), ("finished", None)]
    first, second = job["attempts"]
    assert (second["resumed_from_step"], second["resumed_from"]) == (SAVED, "optimizer")
    assert second["steps"] == LAST - SAVED
    seconds = job["goodput"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(job["goodput"]["wall_seconds"], rel=0.01)
    assert seconds["checkpoint"] > 0
    assert seconds["restore"] > 0
    assert (seconds["replay"] > 0.1) == replays
    assert 0.04 < seconds["redone"] < 1
    assert first["lost_steps"] in {1, 2}, "the step that raises may count"
