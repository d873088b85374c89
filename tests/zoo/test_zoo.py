"""Three specimens under the real agent, and the zoo's own arithmetic.

The specimens are chosen so that their causes are the same on a busy machine. Only causes are asserted, never speeds. A
loader without workers always fetches on the training thread, and its waits (10 ms a sample against 20 ms of compute a
batch) are for a server that uses almost no CPU. Checkpoints and steps run on the same core, so load makes both slower.
The healthy specimen has its batches in memory, so it only waits for a copy.
"""

import dataclasses
import resource
import sys

import pytest

from telemetry.diagnosis.causes import CAUSES
from tests.zoo.zoo_results import STARVED, more_workers, stall

from . import journal, processes, runner, score
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
    monkeypatch.setattr(journal, "_JUDGES", ("judge.py",))  # has the same effect as a change of the agent's code
    changed_judge = Journal(path)
    assert (changed_judge.known(specimen, 1), changed_judge.known_verdict(specimen)) == (None, "HEALTHY: nothing")


def test_what_was_disturbed_is_run_again(monkeypatch):
    runs, loads = [], iter([2.0, 0.9, 0.1])

    def under_the_agent(*_):
        runs.append(1)
        if len(runs) == 2:
            raise processes.RunError("killed")
        return {"stalls": [], "verdict": "Healthy", "ranks": [], "changes": []}, float(len(runs))

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
    """The workers of a fork server outlive their parent."""
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
