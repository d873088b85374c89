"""Replays evidence recorded in runs of the zoo: after a change of the rules, the true causes must still be named, and the
speed-ups of the published results still be predicted."""

import json
import statistics
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from telemetry.diagnosis.causes import CAUSES, advise
from telemetry.diagnosis.costs import costs
from telemetry.diagnosis.evidence import Evidence
from telemetry.diagnosis.stragglers import straggler
from telemetry.model.records import LoaderTraits, RankPace

RECORDED = sorted((Path(__file__).parent / "evidence").glob("*.json"))


def evidence_of(logged):
    """Evidence from its log field, in which the parts are one flat object."""
    pace, *peers = msgspec.convert(logged.get("paces", [None]), list[RankPace | None])
    exposed = logged.get("exposed_seconds")
    own = pace or RankPace(0, logged["window_seconds"], logged["steps"], logged["compute_seconds"], exposed, 0.0)
    parts = {"pace": own, "peers": tuple(peers), "exposed_seconds": exposed}
    parts["earlier_paces"] = msgspec.convert(logged.get("earlier_paces", ()), tuple[RankPace, ...])
    parts["traits"] = msgspec.convert(logged, LoaderTraits)
    parts |= {f.name: logged[f.name] for f in structs.fields(Evidence) if f.name not in parts and f.name in logged}
    parts.setdefault("long_fetches", (parts.get("fetching_seconds", 0.0),))
    return Evidence(**parts)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_evidence_is_named_rightly(path):
    recorded = json.loads(path.read_text())
    lost = costs(evidence_of(recorded["evidence"]))
    assert max(lost, key=lost.get) in recorded["causes"], lost


OF_JOBS = [path for path in RECORDED if path.stem.startswith("job-")]


@pytest.mark.parametrize("path", OF_JOBS, ids=lambda path: path.stem)
def test_a_rank_of_a_job_still_names_rank_node_and_reason(path):
    logged = json.loads(path.read_text())["evidence"]
    evidence = evidence_of(logged)
    slow = straggler(evidence.pace, evidence.peers, evidence.earlier_paces)
    assert (slow.rank, slow.node) == (logged["straggler_rank"], logged["straggler_node"])
    assert slow.why == logged["straggler_reason"]


def test_there_is_evidence_of_every_cause_that_shows_without_a_gpu():
    causes = {cause for path in RECORDED for cause in json.loads(path.read_text())["causes"]}
    assert causes >= set(CAUSES) - {"host_bound", "gpu_throttled", "unknown"}


# -- the published predictions -----------------------------------------------------------------------------------------

BOUND = 0.2
OF_ANOTHER_RANK = {"straggler-loader"}
"""Its evidence is that of the rank that waits. The published prediction is that of the slow rank."""


def published():
    """By specimen: the advice that was followed, one for each run with a prediction."""
    (results,) = (Path(__file__).parents[2] / "benchmarks" / "results").glob("zoo-*.json")
    told = {}
    for specimen in json.loads(results.read_text())["specimens"]:
        advised = [run["advised"] for run in specimen["runs"] if (run["advised"] or {}).get("predicted")]
        if advised:
            told[specimen["name"]] = advised
    return told


PUBLISHED = published()
EVIDENCE = {path.stem: json.loads(path.read_text()) for path in RECORDED if path.stem in PUBLISHED}
REPLAYED = sorted(EVIDENCE.keys() - OF_ANOTHER_RANK)


def predicted(name, evidence):
    """The prediction for the kind of change that was followed. The evidence is of another run: its value may differ."""
    (cause,) = {advice["cause"] for advice in PUBLISHED[name]}
    (setting,) = {advice["setting"] for advice in PUBLISHED[name]}
    return next(a.predicted_speedup for a in advise(cause, evidence_of(evidence)) if a.setting == setting)


def middle(name):
    return statistics.median(advice["predicted"] for advice in PUBLISHED[name])


def test_every_published_prediction_has_evidence():
    assert EVIDENCE.keys() == PUBLISHED.keys()
    assert len(REPLAYED) > 35
    for name in OF_ANOTHER_RANK:
        assert EVIDENCE[name]["named"] not in {advice["cause"] for advice in PUBLISHED[name]}


@pytest.mark.parametrize("name", REPLAYED)
def test_recorded_evidence_predicts_the_published_speedup(name):
    assert predicted(name, EVIDENCE[name]["evidence"]) == pytest.approx(middle(name), rel=BOUND)


def test_large_batches_are_only_predicted_with_the_time_to_free_them():
    """Freeing a batch of graphs takes more than half of the compute. Without that time the prediction is half as high."""
    evidence = EVIDENCE["transfer-graphs"]["evidence"]
    unknown = {key: value for key, value in evidence.items() if key != "freeing_seconds"}
    assert predicted("transfer-graphs", unknown) < (1 - BOUND) * middle("transfer-graphs")
