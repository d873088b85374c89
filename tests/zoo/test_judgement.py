"""The arithmetic of the zoo: judgement, goals, table and the published page."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.zoo.zoo_results import STARVED, more_workers, stall

from . import judgement, processes, score, table, traceml
from .judgement import Advised, Result
from .specimens import ALL, Specimen

CALM = Specimen("calm", "x", (), "")


def test_the_cause_of_the_verdict_comes_first():
    report = {
        "verdict": "Starved: rank 0 spent much. Cause: workers_cpu_bound; try less.",
        "stalls": [stall("gc_pause", lost=9), stall("workers_cpu_bound")],
    }
    result = judgement.judge(STARVED, report)
    assert result.named == "workers_cpu_bound"
    assert result.right
    assert result.others == ("gc_pause",)


def test_without_one_in_the_verdict_it_is_the_stall_that_cost_most():
    report = {"verdict": "Not starved.", "stalls": [stall("workers_cpu_bound"), stall("gc_pause", lost=9)]}
    assert judgement.judge(STARVED, report).named == "gc_pause"
    assert judgement.judge(STARVED, report).right is False


@pytest.mark.parametrize(
    ("verdict", "stalls", "accused"),
    [
        ("Healthy: no rank waits.", [], False),
        ("Starved: rank 0 spent 30 %.", [], True),
        ("Healthy: no rank waits.", [stall("unknown")], True),
    ],
)
def test_a_control_is_accused_by_a_stall_or_by_the_verdict(verdict, stalls, accused):
    report = {"verdict": verdict, "stalls": stalls, "changes": [], "ranks": [{"memory": None}]}
    assert judgement.judge(CALM, report).accused is accused


@pytest.mark.parametrize(
    ("alarm", "accused"),
    [
        ({"changes": [{"ratio": 1.2}]}, True),
        ({"ranks": [{"memory": None}, {"memory": {"exhausted_in_seconds": 600.0}}]}, True),
        ({"ranks": [{"memory": {"growth_bytes_per_hour": 1e6, "exhausted_in_seconds": None}}]}, False),
    ],
)
def test_a_control_is_accused_by_a_change_or_a_forecast(alarm, accused):
    calm = {"verdict": "Healthy: no rank waits.", "stalls": [], "changes": [], "ranks": [{"memory": None}]}
    assert judgement.judge(CALM, calm | alarm).accused is accused
    assert judgement.judge(STARVED, calm | alarm).accused is None


def test_a_straggler_is_right_when_a_peer_points_at_the_slow_rank():
    specimen = dataclasses.replace(STARVED, causes=("straggler",), slow_rank=1, ranks=2)
    peer = stall("straggler", rank=0, slow_rank="rank 1")
    assert judgement.judge(specimen, {"verdict": "Cause: straggler", "stalls": [peer]}).right
    itself = stall("straggler", rank=1, slow_rank="rank 1")
    assert judgement.judge(specimen, {"verdict": "Cause: straggler", "stalls": [itself]}).right is False
    elsewhere = stall("straggler", rank=0, slow_rank="rank 3")
    assert judgement.judge(specimen, {"verdict": "Cause: straggler", "stalls": [elsewhere]}).right is False


def waiting(rank, slow, node, reason):
    said = dict(straggler_rank=slow, straggler_node=node, straggler_reason=reason)
    return stall("straggler", rank=rank, **said)


JOB = dataclasses.replace(
    STARVED, causes=("straggler",), slow_rank=2, ranks=4, nodes=2, reason="takes longer", arguments=()
)


@pytest.mark.parametrize(
    ("stalls", "right"),
    [
        ([waiting(0, 2, "n2", "takes longer to compute a step")], True),
        ([waiting(0, 2, "n2", "takes longer"), waiting(3, 2, "n2", "takes longer")], True),
        ([waiting(0, 2, "n1", "takes longer")], False),
        ([waiting(0, 3, "n2", "takes longer")], False),
        ([waiting(0, 2, "n2", "waits for data")], False),
        ([waiting(0, 2, "n2", "takes longer"), waiting(3, 1, "n1", "takes longer")], False),
        ([waiting(2, 2, "n2", "takes longer")], False),
    ],
)
def test_in_a_job_each_waiting_rank_must_name_rank_node_and_reason(stalls, right):
    assert judgement.judge(JOB, {"verdict": "Cause: straggler", "stalls": stalls}).right is right


def test_each_rank_of_a_slow_node_may_be_named():
    slow = dataclasses.replace(JOB, whole_node=True)
    assert slow.slow_ranks == (2, 3)
    report = {"verdict": "Cause: straggler", "stalls": [waiting(0, 3, "n2", "takes longer")]}
    assert judgement.judge(slow, report).right


@pytest.mark.parametrize(
    ("kind", "suspects", "right"),
    [
        ("fetch", [(2, "n2")], True),
        ("compute", [(2, "n2")], False),
        ("fetch", [(2, "n1")], False),
        ("fetch", [(2, "n2"), (3, "n2")], False),
        (None, [], False),
    ],
)
def test_a_hang_is_right_with_its_kind_and_its_one_rank(kind, suspects, right):
    hung = dataclasses.replace(JOB, causes=(), hang="fetch")
    hang = kind and {"kind": kind, "suspects": [{"rank": rank, "node": node} for rank, node in suspects]}
    result = judgement.judge(hung, {"verdict": "Hung before its end", "stalls": [], "hang": hang})
    assert (result.right, result.accused, result.detected) == (right, None, kind is not None)
    assert hung.truth == "hang: fetch"


def test_the_first_advice_that_predicts_and_can_be_followed_is_followed():
    words = more_workers(None) | {"setting": None, "value": None}
    report = {
        "verdict": "Cause: workers_cpu_bound",
        "stalls": [stall("workers_cpu_bound", advice=[words, more_workers(1.5)])],
    }
    advised = judgement.advice_to_follow(STARVED, report)
    assert advised == Advised("workers_cpu_bound", "num_workers", "4", ("--num-workers", "4"), 1.5)


def test_an_advice_in_words_is_followed_where_the_specimen_says_how():
    words = more_workers(1.4) | {"setting": None, "value": None}
    report = {"verdict": "Cause: checkpoint", "stalls": [stall("checkpoint", advice=[words])]}
    assert judgement.advice_to_follow(STARVED, report) is None
    specimen = dataclasses.replace(STARVED, remedies={"checkpoint": ("--seldom",)})
    assert judgement.advice_to_follow(specimen, report).arguments == ("--seldom",)


def test_the_low_end_of_a_range_is_followed_too():
    report = {
        "verdict": "Cause: workers_cpu_bound",
        "stalls": [stall("workers_cpu_bound", advice=[more_workers(4.0) | {"predicted_low": 2.0}])],
    }
    assert judgement.advice_to_follow(STARVED, report).low == 2.0


@pytest.mark.parametrize(
    ("low", "realised", "off"),
    [(None, 2.0, 1.0), (2.0, 2.0, 0.0), (2.0, 3.0, 0.0), (2.0, 1.6, 0.25), (2.0, 5.0, 0.2), (None, 5.0, 0.2)],
)
def test_within_its_range_a_prediction_is_right(low, realised, off):
    advised = Advised("workers_io_bound", "num_workers", "4", (), 4.0, low)
    assert advised.off(realised) == pytest.approx(off)
    result = dataclasses.replace(run_of(STARVED, named="workers_cpu_bound"), advised=advised, realised=realised)
    assert goals_of(result, run_of(CALM, named=None))[3] is (off <= score.MAX_OFF)


# -- the goals -------------------------------------------------------------------------------------------------


def run_of(specimen, *, named, predicted=None, realised=None):
    report = {
        "verdict": f"Cause: {named}" if named else "Healthy", "stalls": [stall(named)] if named else [], "changes": [],
        "ranks": [],
    }  # fmt: skip
    advised = None if predicted is None else Advised(named, "num_workers", "4", (), predicted)
    return dataclasses.replace(judgement.judge(specimen, report), advised=advised, realised=realised)


def goals_of(*results):
    return [goal.met for goal in score.goals(score.scores([STARVED, CALM], results))]


def test_all_goals_are_reached():
    good = run_of(STARVED, named="workers_cpu_bound", predicted=1.5, realised=1.4)
    assert goals_of(good, good, run_of(CALM, named=None)) == [True] * 4


def test_each_goal_can_be_missed():
    good = run_of(STARVED, named="workers_cpu_bound")
    calm = run_of(CALM, named=None)
    assert goals_of(good, run_of(STARVED, named=None), calm) == [False, True, False, True]
    assert goals_of(good, run_of(CALM, named="unknown")) == [True, False, True, True]
    assert goals_of(*[good] * 18, run_of(STARVED, named="gc_pause"), calm) == [True, True, False, True]
    assert goals_of(*[good] * 19, run_of(STARVED, named="gc_pause"), calm) == [True, True, True, True]
    far = run_of(STARVED, named="workers_cpu_bound", predicted=2.0, realised=1.5)
    assert goals_of(far, calm) == [True, True, True, False]


def test_a_run_that_failed_counts_against_every_goal_it_could_have_met():
    good, calm = run_of(STARVED, named="workers_cpu_bound"), run_of(CALM, named=None)
    assert goals_of(good, Result("starved", error="ended with 1"), calm) == [False, True, False, True]
    assert goals_of(good, Result("calm", error="ended with 1")) == [True, False, True, True]
    worse = run_of(STARVED, named="workers_cpu_bound", predicted=2.0)
    assert goals_of(worse, calm) == [True, True, True, False]


def test_the_table_shows_every_specimen(tmp_path):
    results = [run_of(STARVED, named="workers_cpu_bound", predicted=1.5, realised=1.4), run_of(CALM, named=None)]
    shown, scored, reached = shown_of(results)
    assert "workers_cpu_bound" in shown
    assert "1.40 (7 % off)" in shown
    assert "INPUT-BOUND" in shown
    paths = table.write(tmp_path, "here", {}, "about", scored, reached, {})
    assert [path.name for path in paths] == ["zoo-here.json", "zoo-here.md"]


def shown_of(results):
    scored = score.scores([STARVED, CALM], results)
    reached = score.goals(scored)
    return table.text("about", scored, reached, {"starved": "INPUT-BOUND"}), scored, reached


def test_the_table_shows_of_how_many_runs_a_speed_up_is():
    calm, found = run_of(CALM, named=None), run_of(STARVED, named="workers_cpu_bound")
    once = run_of(STARVED, named="workers_cpu_bound", predicted=1.5, realised=1.4)
    assert "1.40 (7 % off, 1 run)" in shown_of([once, found, found, calm])[0]
    assert "1.40 (7 % off, 2 runs)" in shown_of([once, once, found, calm])[0]
    assert "failed" in shown_of([dataclasses.replace(once, realised=None), calm])[0]


# -- TraceML ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted({s.script for s in ALL}))
def test_traceml_is_put_into_every_script(script):
    source, shared = (traceml.rewritten((processes.SCRIPTS / f"{name}.py").read_text()) for name in (script, "common"))
    step = "with traceml_ai.trace_step("
    assert (source.count(step), "common.train" in source) in {(1, False), (0, True)}
    assert shared.count(step) == 1
    assert source.count("traceml_ai.init(mode='auto')") == 1
    compile(source, script, "exec")


@pytest.fixture(scope="module")
def page():
    return (Path(__file__).resolve().parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def published(page):
    (named,) = re.findall(r"benchmarks/results/(zoo-[\w-]+)\.md", page)
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    return json.loads((results / f"{named}.json").read_text(encoding="utf-8"))


def test_the_page_says_what_the_published_results_say(published, page):
    assert len(published["goals"]) == 4
    for goal in published["goals"]:
        assert f" {goal['reached']} |" in page, goal["name"]
    starving, healthy = (
        [s for s in published["specimens"] if bool(s["causes"]) is starves] for starves in (True, False)
    )
    said = " ".join(page.split())
    assert f"`INPUT-BOUND` for {_called('INPUT-BOUND', starving)} of the {len(starving)} that starve" in said
    assert f"`COMPUTE-BOUND` for the other {_called('COMPUTE-BOUND', starving)}:" in said
    assert f"`INPUT-BOUND` for {_called('INPUT-BOUND', healthy)} of the {len(healthy)} healthy" in said


def _called(status, specimens):
    return sum(specimen["rival"].startswith(f"{status}:") for specimen in specimens)
