"""Specimens under the real agent, how their reports are judged, and what the published results say.

The specimens that are run are chosen so that their causes are the same on a busy machine. Only causes are asserted, never
speeds. A loader without workers always fetches on the training thread, and its waits (10 ms a sample against 20 ms of
compute a batch) are for a server that uses almost no CPU. Checkpoints and steps run on the same core, so load makes both
slower. The healthy specimen has its batches in memory, so it only waits for a copy.
"""

import dataclasses
import json
import re
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import pytest

from telemetry.diagnosis.causes import CAUSES
from tests.campaign import RESULTS, ROOT, Journal, Load, RunError

from . import judgement, runner, traceml
from .__main__ import result_of
from .judgement import Advised, Result
from .specimens import ALL, CONTROLS, STALLS, Specimen, chosen

QUICK = {"TELEMETRY_STALL_WINDOW_SECONDS": "4"}


def quick(name):
    (specimen,) = (s for s in ALL if s.name == name)
    return dataclasses.replace(specimen, seconds=6.0)


@pytest.mark.parametrize("name", ["main-store", "checkpoint-phase"])
def test_a_stall_is_found_and_its_cause_is_named(name):
    specimen = quick(name)
    result = runner.run(specimen, QUICK, follow=False)
    assert (result.error, result.detected) == (None, True), result.verdict
    assert result.named in specimen.causes, result.stalls


def test_a_healthy_run_is_not_accused():
    result = runner.run(quick("healthy-fast-loader"), QUICK)
    assert (result.error, result.accused) == (None, False), (result.verdict, result.stalls)


# -- how specimens are run ---------------------------------------------------------------------------------------------

STARVED = Specimen("starved", "x", ("workers_cpu_bound",), "")
CALM = Specimen("calm", "x", (), "")


def stall(cause, *, rank=0, lost=1.0, advice=(), **evidence):
    evidence = {"lost_seconds": {cause: lost}, **evidence}
    return {"rank": rank, "cause": cause, "exposed_wait_ratio": 0.5, "evidence": evidence, "advice": list(advice)}


def more_workers(predicted, **changed):
    advice = {"action": "", "setting": "num_workers", "value": "4", "predicted_speedup": predicted, "because": ""}
    return advice | changed


def report(verdict, *stalls, **more):
    return {"verdict": verdict, "stalls": [*stalls], "changes": [], "ranks": [{"memory": None}]} | more


def test_results_are_kept_for_a_run_of_the_zoo_that_goes_on(tmp_path, monkeypatch):
    path, specimen = tmp_path / "zoo.jsonl", quick("gc-loop")
    advised = Advised("gc_pause", None, None, ("--freeze",), 1.5)
    result = Result("gc-loop", "gc_pause", ("unknown",), detected=True, advised=advised, load=({"others_cores": 0.1},))
    runs = []

    def run(specimen, *_, **__):
        runs.append(specimen)
        return result

    def found(specimen, repetition):
        options = Namespace(setting=[], no_advice=False, most_others=1.0, steady=1.0)
        assert result_of(specimen, repetition, options, Journal(path)) == result
        return len(runs)

    monkeypatch.setattr(runner, "run", run)
    assert [found(specimen, 1), found(specimen, 1), found(specimen, 0)] == [1, 1, 2]
    assert found(dataclasses.replace(specimen, arguments=("--batch-size", "7")), 1) == 3
    monkeypatch.setattr(runner, "_JUDGES", ("judge.py",))  # has the same effect as a change of the agent's code
    assert found(specimen, 1) == 4


def test_what_was_disturbed_is_run_again(monkeypatch):
    runs, loads = [], iter([2.0, 0.9, 0.1])

    def report_and_pace(*_):
        runs.append(1)
        if len(runs) == 2:
            raise RunError("killed")
        return report("Healthy"), float(len(runs))

    monkeypatch.setattr(runner, "report_and_pace", report_and_pace)
    monkeypatch.setattr(Load, "since", lambda _: {"others_cores": next(loads)})
    result = runner.run(quick("healthy-fast-loader"), most_others=0.5)
    assert (result.error, result.steps_per_second, result.load) == (None, 3.0, ({"others_cores": 0.1},))


@pytest.mark.parametrize(
    ("paces", "before", "after", "realised"),
    [
        pytest.param([2.0, 4.0, 2.1], 2.0, 2.1, 4.0 / 2.05, id="steady"),
        pytest.param([2.0, 6.0, 3.0, 6.0, 3.1], 3.0, 3.1, 6.0 / 3.05, id="faster from the advice on"),
        pytest.param([2.0, 6.0, 3.0, 6.0, 2.0, 6.0, 3.0], 2.0, 3.0, 6.0 / 2.5, id="never steady"),
    ],
)
def test_advice_is_followed_between_two_runs_of_one_pace(paces, before, after, realised, monkeypatch):
    told = report("Cause: workers_cpu_bound", stall("workers_cpu_bound", advice=[more_workers(1.9)]))
    runs = []

    def report_and_pace(_specimen, _folder, extra, _settings):
        runs.append(bool(extra))
        return told, paces[len(runs) - 1]

    monkeypatch.setattr(runner, "report_and_pace", report_and_pace)
    result = runner.run(STARVED, steady=0.1)
    assert runs == [bool(number % 2) for number in range(len(paces))]
    assert (result.steps_per_second, result.pace_after) == (before, after)
    assert result.realised == pytest.approx(realised)
    assert (result.right, len(result.load)) == (True, len(paces))


def test_a_run_that_fails_says_so():
    broken = Specimen("broken", "no_such_script", (), "", seconds=1.0)
    result = runner.run(broken)
    assert (result.failed, result.accused) == (True, None)
    assert judgement.scores([broken], [result])[0].right == 0


# -- the specimens -----------------------------------------------------------------------------------------------------


def test_the_specimens_are_complete():
    """Each cause that a CPU can show is there in two styles, and there are as many controls as causes."""
    styles = {cause: [s for s in STALLS if cause in s.causes] for cause in CAUSES}
    few = {cause for cause, specimens in styles.items() if len(specimens) < 2}
    assert few <= {"host_bound", "gpu_throttled", "unknown"}
    assert len(CONTROLS) >= len({cause for s in STALLS for cause in s.causes})
    assert len({s.name for s in ALL}) == len(ALL)
    assert {s.script for s in ALL if not (runner.SCRIPTS / f"{s.script}.py").is_file()} == set()
    assert {cause for s in ALL for cause in s.causes} <= set(CAUSES)


def test_specimens_are_chosen_by_the_beginning_of_their_names():
    assert {s.name for s in chosen(["gc-"])} == {"gc-loop", "gc-callback", "gc-sampler", "gc-timer"}
    assert chosen([]) == ALL
    with pytest.raises(ValueError, match="nonsense"):
        chosen(["gc-", "nonsense"])


@pytest.mark.parametrize("script", sorted({s.script for s in ALL}))
def test_traceml_is_put_into_every_script(script):
    source, shared = (traceml.rewritten((runner.SCRIPTS / f"{name}.py").read_text()) for name in (script, "common"))
    step = "with traceml_ai.trace_step("
    assert (source.count(step), "common.train" in source) in {(1, False), (0, True)}
    assert shared.count(step) == 1
    assert source.count("traceml_ai.init(mode='auto')") == 1
    compile(source, script, "exec")


# -- the judgement of a report -----------------------------------------------------------------------------------------


def test_the_cause_of_the_verdict_comes_first_else_that_of_the_stall_that_cost_most():
    stalls = [stall("workers_cpu_bound"), stall("gc_pause", lost=9)]
    result = judgement.judge(STARVED, report("Starved: rank 0. Cause: workers_cpu_bound; try less.", *stalls))
    assert (result.named, result.right, result.others) == ("workers_cpu_bound", True, ("gc_pause",))
    result = judgement.judge(STARVED, report("Not starved.", *stalls))
    assert (result.named, result.right) == ("gc_pause", False)


HEALTHY = "Healthy: no rank waits."


@pytest.mark.parametrize(
    ("told", "accused"),
    [
        (report(HEALTHY), False),
        (report("Starved: rank 0 spent 30 %."), True),
        (report(HEALTHY, stall("unknown")), True),
        (report(HEALTHY, changes=[{"ratio": 1.2}]), True),
        (report(HEALTHY, ranks=[{"memory": None}, {"memory": {"exhausted_in_seconds": 600.0}}]), True),
        (report(HEALTHY, ranks=[{"memory": {"growth_bytes_per_hour": 1e6, "exhausted_in_seconds": None}}]), False),
    ],
)
def test_a_control_is_accused_by_a_stall_the_verdict_a_change_or_a_forecast(told, accused):
    assert judgement.judge(CALM, told).accused is accused
    assert judgement.judge(STARVED, told).accused is None


@pytest.mark.parametrize(("rank", "slow", "right"), [(0, "rank 1", True), (1, "rank 1", False), (0, "rank 3", False)])
def test_a_straggler_is_right_when_a_peer_points_at_the_slow_rank(rank, slow, right):
    specimen = dataclasses.replace(STARVED, causes=("straggler",), slow_rank=1, ranks=2)
    told = report("Cause: straggler", stall("straggler", rank=rank, slow_rank=slow))
    assert judgement.judge(specimen, told).right is right


def waiting(rank, slow, node, reason):
    return stall("straggler", rank=rank, straggler_rank=slow, straggler_node=node, straggler_reason=reason)


JOB = dataclasses.replace(STARVED, causes=("straggler",), slow_rank=2, ranks=4, nodes=2, reason="takes longer")


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
    assert judgement.judge(JOB, report("Cause: straggler", *stalls)).right is right


def test_each_rank_of_a_slow_node_may_be_named():
    slow = dataclasses.replace(JOB, whole_node=True)
    assert slow.slow_ranks == (2, 3)
    assert judgement.judge(slow, report("Cause: straggler", waiting(0, 3, "n2", "takes longer"))).right


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
    result = judgement.judge(hung, report("Hung before its end", hang=hang))
    assert (result.right, result.accused, result.detected) == (right, None, kind is not None)
    assert hung.truth == "hang: fetch"


IN_WORDS = {"setting": None, "value": None}


@pytest.mark.parametrize(
    ("advice", "remedies", "followed"),
    [
        ([more_workers(None, **IN_WORDS), more_workers(1.5)], {}, (("--num-workers", "4"), 1.5, None)),
        ([more_workers(4.0, predicted_low=2.0)], {}, (("--num-workers", "4"), 4.0, 2.0)),
        ([more_workers(1.4, **IN_WORDS)], {}, None),
        ([more_workers(1.4, **IN_WORDS)], {"workers_cpu_bound": ("--seldom",)}, (("--seldom",), 1.4, None)),
    ],
)
def test_the_first_advice_that_predicts_and_can_be_followed_is_followed(advice, remedies, followed):
    told = report("Cause: workers_cpu_bound", stall("workers_cpu_bound", advice=advice))
    advised = judgement.advice_to_follow(dataclasses.replace(STARVED, remedies=remedies), told)
    assert (advised and (advised.arguments, advised.predicted, advised.low)) == followed


# -- the goals and the table -------------------------------------------------------------------------------------------


def run_of(specimen, named, predicted=None, realised=None, low=None):
    told = report(f"Cause: {named}", stall(named)) if named else report("Healthy")
    advised = None if predicted is None else Advised(named, "num_workers", "4", (), predicted, low)
    return dataclasses.replace(judgement.judge(specimen, told), advised=advised, realised=realised)


def table_of(*results):
    scored = judgement.scores([STARVED, CALM], results)
    return judgement.table(defaultdict(str, load_average=[]), scored, {"starved": "INPUT-BOUND"})


GOOD, QUIET = run_of(STARVED, "workers_cpu_bound"), run_of(CALM, None)
FOLLOWED = run_of(STARVED, "workers_cpu_bound", 1.5, 1.4)
OTHER = run_of(STARVED, "gc_pause")


@pytest.mark.parametrize(
    ("results", "met"),
    [
        ([FOLLOWED, FOLLOWED, QUIET], "1111"),
        ([GOOD, run_of(STARVED, None), QUIET], "0101"),
        ([GOOD, run_of(CALM, "unknown")], "1011"),
        ([*[GOOD] * 18, OTHER, QUIET], "1101"),
        ([*[GOOD] * 19, OTHER, QUIET], "1111"),
        ([run_of(STARVED, "workers_cpu_bound", 2.0, 1.5), QUIET], "1110"),
        ([run_of(STARVED, "workers_cpu_bound", 4.0, 3.0, low=2.0), QUIET], "1111"),
        ([run_of(STARVED, "workers_cpu_bound", 4.0, 1.6, low=2.0), QUIET], "1110"),
        ([run_of(STARVED, "workers_cpu_bound", 4.0, 5.0, low=2.0), QUIET], "1110"),
        ([GOOD, Result("starved", error="ended with 1"), QUIET], "0101"),
        ([GOOD, Result("calm", error="ended with 1")], "1011"),
        ([run_of(STARVED, "workers_cpu_bound", 2.0), QUIET], "1110"),
    ],
)
def test_each_goal_can_be_missed(results, met):
    """Found, not accused, named rightly, predicted. A run that failed counts against each goal it could have met."""
    assert "".join(str(int(goal.met)) for goal in table_of(*results).goals) == met


def test_the_table_shows_every_specimen(tmp_path):
    shown = table_of(FOLLOWED, QUIET)
    assert "INPUT-BOUND" in shown.text()
    assert "1.40 (7 % off)" in shown.text()
    assert "1.40 (7 % off, 2 runs)" in table_of(FOLLOWED, FOLLOWED, GOOD, QUIET).text()
    assert "failed" in table_of(run_of(STARVED, "workers_cpu_bound", 1.5), QUIET).text()
    judgement.write(tmp_path, "zoo-here", shown, judgement.scores([STARVED, CALM], [FOLLOWED, QUIET]), {})
    assert "| starved | workers_cpu_bound | 1/1 |" in (tmp_path / "zoo-here.md").read_text()
    assert json.loads((tmp_path / "zoo-here.json").read_text())["goals"][1]["reached"] == "0 of 1 runs accused"


def test_the_page_says_what_the_published_results_say():
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"benchmarks/results/(zoo-[\w-]+)\.md", page)
    published = json.loads(Path(RESULTS, f"{named}.json").read_text(encoding="utf-8"))
    assert len(published["goals"]) == 4
    for goal in published["goals"]:
        assert f" {goal['reached']} |" in page, goal["name"]
    starving, healthy = (
        [s["rival"] for s in published["specimens"] if bool(s["causes"]) is starves] for starves in (True, False)
    )

    def called(status, rivals):
        return sum(rival.startswith(f"{status}:") for rival in rivals)

    said = " ".join(page.split())
    assert f"`INPUT-BOUND` for {called('INPUT-BOUND', starving)} of the {len(starving)} that starve" in said
    assert f"`COMPUTE-BOUND` for the other {called('COMPUTE-BOUND', starving)}:" in said
    assert f"`INPUT-BOUND` for {called('INPUT-BOUND', healthy)} of the {len(healthy)} healthy" in said
