"""The callbacks in their real frameworks: figures at the script's own interval, phases marked once."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.faults.processes import log_lines
from tests.frameworks.test_frameworks import SCRIPTS, needs, result, start

pytestmark = pytest.mark.frameworks

CASES = {
    "transformers": ("transformers", "callback_transformers", ""),
    "lightning": ("lightning", "callback_lightning", "new"),
    "pytorch_lightning": ("pytorch_lightning", "callback_lightning", "old"),
    "accelerate": ("accelerate", "callback_accelerate", ""),
}
EVERY, STEPS, EPOCHS, SAMPLES = 5, 80, 2, 320
SANITY = {"lightning": 1, "pytorch_lightning": 1}
"""Evaluations of two batches before the training: 0.16 s."""


def at_time(text: str) -> datetime:
    return datetime.fromisoformat(text.removesuffix("Z"))


@pytest.mark.parametrize("name", CASES)
def test_callback(tmp_path, name):
    package, script, argument = CASES[name]
    needs(package)
    command = [str(SCRIPTS / f"{script}.py"), argument]
    quick = {"TELEMETRY_LOG_INTERVAL_SECONDS": "0.2"}
    attached = start(["-m", "telemetry", "run", "--run-dir", str(tmp_path / "run"), *command], **quick)
    bare = start(command, **quick)
    seen, expected = result(attached), result(bare)
    assert seen["steps"] == expected["steps"] == STEPS
    with_figures = [row for row in seen["rows"] if "telemetry/steps_total" in row]
    assert not [key for row in expected["rows"] for key in row if key.startswith("telemetry/")]

    at = [row["step"] for row in with_figures]
    assert at == list(range(EVERY, STEPS + 1, EVERY))
    assert all(0 <= row["step"] - row["telemetry/steps_total"] < STEPS / 2 for row in with_figures)
    assert any(row["telemetry/steps_per_second"] > 0 for row in with_figures)
    assert all(0 <= row.get("telemetry/data_wait_ratio", 0) <= 1 for row in with_figures)
    own = [{k: v for k, v in row.items() if not k.startswith("telemetry/")} for row in seen["rows"]]
    assert [sorted(row) for row in own if row.keys() - {"step"}] == [
        sorted(row) for row in expected["rows"] if row.keys() - {"step"}
    ], "the rows of the script are the same"

    lines = log_lines(tmp_path / "run")
    (end,) = [line for line in lines if line["event"] == "run_end"]
    assert end["steps_total"] == STEPS, "no batch of an evaluation is taken for a step"
    assert end["samples_total"] == SAMPLES
    assert end.get("tokens_total") == seen["tokens"] == expected["tokens"]
    assert (end.get("tokens_total") or 0) > 0 or name == "accelerate"
    # After a checkpoint inside an evaluation Lightning goes on for a millisecond with gradients off.
    long = {"evaluation": 0.1, "checkpoint": 0.0}
    phases = [line["name"] for line in lines if line["event"] == "phase" and line["seconds"] > long[line["name"]]]
    assert phases.count("evaluation") == EPOCHS + SANITY.get(name, 0), phases
    saves = phases.count("checkpoint")
    assert saves == EPOCHS if name in {"transformers", "accelerate"} else saves >= EPOCHS, phases
    ledger = end["ledger_total_seconds"]
    assert sum(ledger.values()) == pytest.approx(end["wall_seconds"], rel=0.01)
    evaluations = sum(line["seconds"] for line in lines if line["event"] == "phase" and line["name"] == "evaluation")
    # Lightning's last one goes on until the end of the run, after its checkpoint.
    last = [line for line in lines if line["event"] == "phase"][-1]
    rest = (at_time(end["time"]) - at_time(last["started"])).total_seconds() - last["seconds"]
    assert evaluations - 0.1 <= ledger["evaluation"] <= evaluations + rest + 0.1
    assert not end["errors_total"].get("hooks")
