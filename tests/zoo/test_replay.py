"""Replays evidence recorded in runs of the zoo: after a change of the rules, the true causes must still be named."""

import dataclasses
import json
from pathlib import Path

import pytest

from telemetry.diagnosis.causes import costs
from telemetry.diagnosis.evidence import Evidence
from telemetry.diagnosis.stragglers import straggler
from telemetry.records import RankPace

RECORDED = sorted((Path(__file__).parent / "evidence").glob("*.json"))

PACE = {
    "compute": "compute_seconds", "exposed": "exposed_wait_seconds", "away": "away_seconds", "in_sync": "in_sync_samples",
    "still": "seconds_without_step", "still_in_sync": "waits_for_ranks", "gpu_busy": "gpu_busy_ratio",
    "core_wait": "core_wait_seconds", "cores_busy": "cores_busy_ratio",
}  # fmt: skip
"""Names of a pace's fields in the log and in `RankPace`."""


def paces_of(logged, field):
    return [RankPace(**{PACE.get(name, name): value for name, value in told.items()}) for told in logged.get(field, ())]


def evidence_of(logged):
    """Evidence from its log field. A value that is missing in the log was None, or 0 seconds."""
    values = {}
    for field in dataclasses.fields(Evidence):
        value = logged.get(field.name)
        values[field.name] = 0.0 if value is None and field.type in {"float", "int"} else value
    alone = RankPace(
        0, values["window_seconds"], values["steps"], values["compute_seconds"], values["exposed_seconds"], 0.0
    )
    pace, *peers = paces_of(logged, "paces") or [alone]
    values |= {"pace": pace, "peers": tuple(peers), "earlier_paces": tuple(paces_of(logged, "earlier_paces"))}
    values["long_fetches"] = tuple(logged.get("long_fetches", (values["fetching_seconds"],)))
    values["batches_per_step"] = logged.get("batches_per_step", 1.0)
    return Evidence(**values)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_evidence_is_named_rightly(path):
    recorded = json.loads(path.read_text())
    lost = costs(evidence_of(recorded["evidence"]))
    assert max(lost, key=lost.get) in recorded["causes"], lost


OF_JOBS = [path for path in RECORDED if path.stem.startswith("job-")]


@pytest.mark.parametrize("path", OF_JOBS, ids=lambda path: path.stem)
def test_a_rank_of_a_job_still_names_rank_node_and_reason(path):
    recorded = json.loads(path.read_text())
    logged, evidence = recorded["evidence"], evidence_of(recorded["evidence"])
    slow = straggler(evidence.pace, evidence.peers, evidence.earlier_paces)
    assert (slow.rank, slow.node) == (logged["straggler_rank"], logged["straggler_node"])
    assert slow.why == logged["straggler_reason"]


def test_there_is_evidence_of_every_cause_that_shows_without_a_gpu():
    causes = {cause for path in RECORDED for cause in json.loads(path.read_text())["causes"]}
    assert causes >= {
        "loader_on_training_thread", "workers_cpu_bound", "workers_io_bound", "workers_throttled", "worker_startup",
        "uneven_batches", "batch_transfer", "worker_stuck", "source_slow", "checkpoint", "gc_pause", "straggler",
    }  # fmt: skip
