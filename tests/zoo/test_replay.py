"""Replays evidence recorded in runs of the zoo: after a change of the rules, the true causes must still be named."""

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from telemetry.diagnosis.costs import costs
from telemetry.diagnosis.evidence import Evidence
from telemetry.diagnosis.stragglers import straggler
from telemetry.records import RankPace

RECORDED = sorted((Path(__file__).parent / "evidence").glob("*.json"))


def evidence_of(logged):
    """Evidence from its log field, in which the parts are one flat object."""
    pace, *peers = msgspec.convert(logged.get("paces", [None]), list[RankPace | None])
    exposed = logged.get("exposed_seconds")
    own = pace or RankPace(0, logged["window_seconds"], logged["steps"], logged["compute_seconds"], exposed, 0.0)
    parts = {"pace": own, "peers": tuple(peers), "exposed_seconds": exposed}
    parts["earlier_paces"] = msgspec.convert(logged.get("earlier_paces", ()), tuple[RankPace, ...])
    for field in structs.fields(Evidence):
        if field.name in parts:
            continue
        if isinstance(field.default, msgspec.Struct):
            parts[field.name] = msgspec.convert(logged, field.type)
        elif field.name in logged:
            parts[field.name] = logged[field.name]
    if "long_fetches" not in logged:
        parts["fetches"] = structs.replace(parts["fetches"], long_seconds=(parts["fetches"].in_progress_seconds,))
    return Evidence(**parts)


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
