"""Three specimens under the real agent, and the zoo's own arithmetic.

The specimens are chosen so that a busy machine does not change what is true of them, and only causes are asserted,
never speeds. A loader without workers fetches on the training thread whatever else runs, and its waits (10 ms a
sample against 20 ms a batch of compute) are for a server that hardly computes. The checkpoints take their time on the
same core as the steps beside them, so both grow together. The healthy one has its batches in memory: there is nothing
to wait for but a copy.
"""

import dataclasses
import json
import re
import resource
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from telemetry.records import CAUSES

from . import journal, judgement, processes, rival, runner, score, table
from .journal import Journal
from .judgement import Advised, Result
from .load import Load
from .specimens import ALL, CONTROLS, STALLS, Specimen, chosen

QUICK = {"TELEMETRY_STALL_WINDOW_SECONDS": "4"}
SECONDS = 6.0

OF_A_GPU = {"host_bound", "gpu_throttled"}


def quick(name):
    (specimen,) = (s for s in ALL if s.name == name)
    return dataclasses.replace(specimen, seconds=SECONDS)


@pytest.mark.parametrize("name", ["main-store", "checkpoint-phase"])
def test_a_stall_is_found_and_its_cause_is_named(name):
    specimen = quick(name)
    result = runner.run(specimen, QUICK, follow=False)
    assert result.error is None
    assert result.detected, result.verdict
    assert result.named in specimen.causes, result.stalls


def test_a_healthy_run_is_not_accused():
    result = runner.run(quick("healthy-fast-loader"), QUICK)
    assert result.error is None
    assert result.accused is False, (result.verdict, result.stalls)


def test_results_are_kept_for_a_run_of_the_zoo_that_goes_on(tmp_path, monkeypatch):
    path, specimen = tmp_path / "zoo.jsonl", quick("gc-loop")
    advised = Advised("gc_pause", None, None, ("--freeze",), 1.5)
    result = Result("gc-loop", "gc_pause", ("unknown",), detected=True, advised=advised, load=({"others_cores": 0.1},))
    new = Journal(path)
    assert (new.known(specimen, 1), new.known_verdict(specimen)) == (None, None)
    new.keep(specimen, 1, result)
    new.keep_verdict(specimen, "HEALTHY: nothing")
    again = Journal(path)
    assert (again.known(specimen, 1), again.known(specimen, 0)) == (result, None)
    assert again.known_verdict(specimen) == "HEALTHY: nothing"
    changed = dataclasses.replace(specimen, arguments=("--batch-size", "7"))
    assert (again.known(changed, 1), again.known_verdict(changed)) == (None, None)
    monkeypatch.setattr(journal, "_JUDGES", ("judge.py",))  # as a change of the agent's code would
    changed_judge = Journal(path)
    assert (changed_judge.known(specimen, 1), changed_judge.known_verdict(specimen)) == (None, "HEALTHY: nothing")


def test_what_was_disturbed_is_run_again(monkeypatch):
    runs, loads = [], iter([2.0, 0.9, 0.1])

    def under_the_agent(*_):
        runs.append(1)
        if len(runs) == 2:
            raise processes.RunError("killed")
        return {"stalls": [], "verdict": "Healthy"}, float(len(runs))

    monkeypatch.setattr(processes, "under_the_agent", under_the_agent)
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
    report = {
        "verdict": "Cause: workers_cpu_bound",
        "stalls": [stall("workers_cpu_bound", advice=[more_workers(1.9)])],
    }
    runs = []

    def under_the_agent(_specimen, _folder, extra, _settings):
        runs.append(bool(extra))
        return report, paces[len(runs) - 1]

    monkeypatch.setattr(processes, "under_the_agent", under_the_agent)
    result = runner.run(STARVED, steady=0.1)
    assert runs == [bool(number % 2) for number in range(len(paces))]
    assert (result.steps_per_second, result.pace_after) == (before, after)
    assert result.realised == pytest.approx(realised)
    assert (result.right, len(result.load)) == (True, len(paces))


def test_what_outlives_the_run_is_counted_as_its_own(tmp_path):
    """The workers of a fork server do."""
    (tmp_path / "orphan.py").write_text("import time\nwhile time.process_time() < 0.5: pass\n")
    (tmp_path / "run.py").write_text("import subprocess, sys\nsubprocess.Popen([sys.executable, 'orphan.py'])\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes.finish([sys.executable, "run.py"], tmp_path, quick("gc-loop"), processes.environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime >= 0.5


# -- the specimens ---------------------------------------------------------------------------------------------


def test_every_cause_that_a_cpu_can_show_is_there_in_two_styles():
    styles = {cause: [s for s in STALLS if cause in s.causes] for cause in CAUSES}
    few = {cause for cause, specimens in styles.items() if len(specimens) < 2}
    assert few <= OF_A_GPU | {"unknown"}


def test_there_are_as_many_controls_as_causes():
    assert len(CONTROLS) >= len({cause for s in STALLS for cause in s.causes})


def test_specimens_are_distinct_and_their_scripts_exist():
    assert len({s.name for s in ALL}) == len(ALL)
    assert {s.script for s in ALL if not (processes.SCRIPTS / f"{s.script}.py").is_file()} == set()
    assert {cause for s in ALL for cause in s.causes} <= set(CAUSES)


def test_specimens_are_chosen_by_the_beginning_of_their_names():
    assert {s.name for s in chosen(["gc-"])} == {"gc-loop", "gc-callback", "gc-sampler", "gc-timer"}
    assert chosen([]) == ALL
    with pytest.raises(ValueError, match="nonsense"):
        chosen(["gc-", "nonsense"])


def test_a_run_that_fails_says_so(tmp_path):
    broken = Specimen("broken", "no_such_script", (), "")
    result = runner.run(dataclasses.replace(broken, seconds=1.0))
    assert result.error is not None
    assert result.accused is None
    assert score.scores([broken], [result])[0].accused == 1


# -- the judgement ---------------------------------------------------------------------------------------------

STARVED = Specimen("starved", "x", ("workers_cpu_bound",), "")
CALM = Specimen("calm", "x", (), "")


def stall(cause, *, rank=0, lost=1.0, advice=(), **evidence):
    return {
        "rank": rank,
        "cause": cause,
        "exposed_wait_ratio": 0.5,
        "evidence": {"lost_seconds": {cause: lost}, **evidence},
        "advice": list(advice),
    }


def more_workers(predicted):
    return {"action": "", "setting": "num_workers", "value": "4", "predicted_speedup": predicted, "because": ""}


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
    assert judgement.judge(CALM, {"verdict": verdict, "stalls": stalls}).accused is accused


def test_a_straggler_is_right_when_a_peer_points_at_the_slow_rank():
    specimen = dataclasses.replace(STARVED, causes=("straggler",), slow_rank=1, ranks=2)
    peer = stall("straggler", rank=0, slow_rank="rank 1")
    assert judgement.judge(specimen, {"verdict": "Cause: straggler", "stalls": [peer]}).right
    itself = stall("straggler", rank=1, slow_rank="rank 1")
    assert judgement.judge(specimen, {"verdict": "Cause: straggler", "stalls": [itself]}).right is False
    elsewhere = stall("straggler", rank=0, slow_rank="rank 3")
    assert judgement.judge(specimen, {"verdict": "Cause: straggler", "stalls": [elsewhere]}).right is False


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


# -- the goals -------------------------------------------------------------------------------------------------


def run_of(specimen, *, named, predicted=None, realised=None):
    report = {"verdict": f"Cause: {named}" if named else "Healthy", "stalls": [stall(named)] if named else []}
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


# -- the rival -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted({s.script for s in ALL}))
def test_the_rival_is_put_into_every_script(script):
    source = rival.rewritten((processes.SCRIPTS / f"{script}.py").read_text())
    assert source.count("with traceml_ai.trace_step(") == 1
    assert source.count("traceml_ai.init(mode='auto')") == 1
    compile(source, script, "exec")


@pytest.fixture(scope="module")
def readme():
    return (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def published(readme):
    (named,) = re.findall(r"benchmarks/results/(zoo-[\w-]+)\.md", readme)
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    return json.loads((results / f"{named}.json").read_text(encoding="utf-8"))


def test_the_readme_says_what_the_published_results_say(published, readme):
    assert len(published["goals"]) == 4
    for goal in published["goals"]:
        assert f" {goal['reached']} |" in readme, goal["name"]
    starving, healthy = (
        [s for s in published["specimens"] if bool(s["causes"]) is starves] for starves in (True, False)
    )
    said = " ".join(readme.split())
    assert f"`INPUT-BOUND` for {_called('INPUT-BOUND', starving)} of the {len(starving)} that starve" in said
    assert f"`COMPUTE-BOUND` for the other {_called('COMPUTE-BOUND', starving)}:" in said
    assert f"`INPUT-BOUND` for {_called('INPUT-BOUND', healthy)} of the {len(healthy)} healthy" in said


def test_the_readme_says_of_every_cause_how_far_off_its_predictions_are(published, readme):
    """Each script counts with the median of its runs."""
    followed = defaultdict(list)
    for specimen in published["specimens"]:
        runs = [run for run in specimen["runs"] if run["advised"] is not None and run["realised"]]
        if runs:
            predicted = median(run["advised"]["predicted"] for run in runs)
            off = median(abs(run["advised"]["predicted"] / run["realised"] - 1) for run in runs)
            followed[runs[0]["advised"]["cause"]].append((predicted, 100 * off))
    for cause, scripts in followed.items():
        low, *_, high = sorted(predicted for predicted, _ in scripts * 2)
        between = f"{low:.2f} to {high:.2f} times" if low < high else f"{low:.2f} times"
        off = [off for _, off in scripts]
        most = f"{median(off):.0f} %, {max(off):.0f} %" if len(scripts) > 1 else f"{off[0]:.0f} %"
        assert f"| `{cause}` | {len(scripts)} | {between} | {most} |" in readme
    assert len(re.findall(r"\| `\w+` \| \d+ \| [^|]+ times \|", readme)) == len(followed)


def _called(status, specimens):
    return sum(specimen["rival"].startswith(f"{status}:") for specimen in specimens)
