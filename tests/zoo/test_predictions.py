"""Recorded evidence of the zoo still predicts the speed-ups that the published results have."""

import json
import statistics
from pathlib import Path

import pytest

from telemetry.diagnosis.causes import advise
from tests.zoo.test_replay import RECORDED, evidence_of

(RESULTS,) = (Path(__file__).parents[2] / "benchmarks" / "results").glob("zoo-*.json")
BOUND = 0.2
OF_ANOTHER_RANK = {"straggler-loader"}
"""Its evidence is that of the rank that waits. The published prediction is that of the slow rank."""


def published():
    """By specimen: the advice that was followed, one for each run with a prediction."""
    told = {}
    for specimen in json.loads(RESULTS.read_text())["specimens"]:
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
