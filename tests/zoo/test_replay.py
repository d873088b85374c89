"""Evidence recorded in runs of the zoo is named as it was true then: a change of the reasons cannot lose a cause unseen."""

import dataclasses
import json
from pathlib import Path

import pytest

from telemetry.diagnose.causes import costs
from telemetry.diagnose.evidence import Evidence
from telemetry.records import RankPace

RECORDED = sorted((Path(__file__).parent / "evidence").glob("*.json"))


def evidence_of(logged):
    """Evidence from its log field. What the log left out was None, or no seconds."""
    renamed = {"seconds": logged["window_seconds"], "own_fetch_cpu_share": logged.get("own_fetch_cpu_ratio")}
    for name in ("cpu", "runnable", "blocked"):
        renamed[f"{name}_share"] = logged.get(f"worker_{name}_ratio")
    values = {}
    for field in dataclasses.fields(Evidence):
        name = field.name
        value = renamed.get(name, logged.get(name, logged.get(f"{name}_seconds")))
        values[name] = 0.0 if value is None and field.type in {"float", "int"} else value
    alone = RankPace(0, values["seconds"], values["steps"], values["compute"], values["exposed"], 0.0)
    pace, *peers = [RankPace(**told) for told in logged.get("paces", ())] or [alone]
    known = {"pace": pace, "peers": tuple(peers), "settings": logged["settings"]}
    known["long_fetches"] = tuple(logged.get("long_fetches", (values["stuck_seconds"],)))
    return Evidence(**(values | known | {"batches_per_step": logged.get("batches_per_step", 1.0)}))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_evidence_is_named_rightly(path):
    recorded = json.loads(path.read_text())
    lost = costs(evidence_of(recorded["evidence"]))
    assert max(lost, key=lost.get) in recorded["causes"], lost


def test_there_is_evidence_of_every_cause_that_shows_without_a_gpu():
    causes = {cause for path in RECORDED for cause in json.loads(path.read_text())["causes"]}
    assert causes >= {
        "loader_on_training_thread", "workers_cpu_bound", "workers_io_bound", "workers_throttled", "worker_startup",
        "uneven_batches", "batch_transfer", "worker_stuck", "source_slow", "checkpoint", "gc_pause", "straggler",
    }  # fmt: skip
