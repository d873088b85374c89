"""`telemetry compare`, on logs written by hand and on logs of real runs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks.compare import drawn
from telemetry.cli import main
from telemetry.compare import Run, ratio_interval
from telemetry.model.records import CATEGORIES
from telemetry.util.clock import iso_time
from tests.faults.warm_python import warm_python
from tests.report_logs import START, line, write

TRAIN = Path(__file__).parents[1] / "benchmarks" / "compare_train.py"


def run_of(folder, paces, *, wait=0.0, ranks=1, seconds=2.0, last=None, start=(), noise_of=None, cpu=None, **head):
    """A run whose windows have these paces, in steps per second. ``wait``: share of the loop. ``last``: its last window,
    in seconds."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        steps = wall = waited = 0.0
        lines = [line("run_start", rank, **START, world_size=ranks, life=f"{folder.name}{rank}", **head), *start]
        for number, pace in enumerate(paces, 1):
            seconds = last if last is not None and number == len(paces) else seconds
            steps, wall, waited = steps + pace * seconds, wall + seconds, waited + wait * seconds
            ledger = dict.fromkeys(CATEGORIES, 0.0) | {"data_wait": waited, "compute": wall - waited}
            totals = dict(steps_total=round(steps), wall_seconds=wall, ledger_total_seconds=ledger)
            when = iso_time(1_767_225_600 + wall)
            measured = cpu(wall) if cpu else {}
            lines.append(line("window", rank, **totals, **(noise_of or {}), **measured) | {"time": when})
        write(folder, rank, *lines, line("run_end", rank, **totals) | {"time": when})
    return folder


def noisy(seed, pace=100.0, *, count=40, scatter=0.04, memory=0.5, exact=True):
    """Paces that resemble their neighbours. ``exact``: their mean is ``pace``."""
    rng, state, paces = random.Random(seed), 0.0, []
    for _ in range(count):
        state = memory * state + math.sqrt(1 - memory**2) * rng.gauss(0, 1)
        paces.append(pace * math.exp(scatter * state))
    mean = sum(paces) / count if exact else pace
    return [each * pace / mean for each in paces]


@pytest.fixture
def compared(capsys):
    """Compares two runs: the exit status, the result, and the text."""

    def run(*folders, options=()):
        command = ["compare", *map(str, folders), *options]
        status = main([*command, "--json"])
        result = json.loads(capsys.readouterr().out)
        main(command)
        return status, result, capsys.readouterr().out

    return run


def rewritten(folder, change):
    """The run, with each line of its log as a function has changed it."""
    path = next((folder / "logs").iterdir())
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    for number, each in enumerate(lines):
        change(number, each)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slower_run_is_found_with_its_category(tmp_path, compared, ranks):
    a = run_of(tmp_path / "a", noisy(1), wait=0.2, ranks=ranks)
    b = run_of(tmp_path / "b", noisy(2, 80.0), wait=0.36, ranks=ranks)
    assert compared(b, a)[1]["verdict"] == "faster"
    status, result, _ = compared(a, b)
    assert (status, result["verdict"], result["why"]) == (0, "slower", None)
    low, high = result["interval"]
    assert low < 0.8 < high < 1
    assert low < result["ratio"] < high
    wait, compute = result["per_step_seconds"]["data_wait"], result["per_step_seconds"]["compute"]
    assert wait["difference"] == pytest.approx(0.36 / 80 - 0.2 / 100, rel=0.1)
    assert abs(compute["difference"]) < abs(wait["difference"]) / 5
    assert set(result["per_step_seconds"]) == set(CATEGORIES)
    assert result["steps"]["a"] == pytest.approx(40 * 200 * 0.9, rel=0.05)  # of the mean rank


def test_a_short_run_tells_no_small_difference(tmp_path, compared):
    """However little it scatters: a disturbance that lasts for many minutes shows in none of its windows."""
    verdicts = []
    for seconds in (20.0, 400.0):
        a = run_of(tmp_path / f"a{seconds}", noisy(1, scatter=0.002), seconds=seconds)
        b = run_of(tmp_path / f"b{seconds}", noisy(2, 97.5, scatter=0.002), seconds=seconds)
        verdicts.append(compared(a, b)[1]["verdict"])
    assert verdicts == ["no difference", "slower"]


def test_first_steps_and_evaluations_do_not_count(tmp_path, compared):
    a = run_of(tmp_path / "a", noisy(1))
    b = run_of(tmp_path / "b", [5.0, 5.0, 5.0, *noisy(2)])

    def evaluating(number, each):  # ten seconds after every fourth window
        if "wall_seconds" in each:
            each["wall_seconds"] += 10.0 * ((number - 1) // 4)
            each["ledger_total_seconds"]["evaluation"] = 10.0 * ((number - 1) // 4)

    result = compared(a, rewritten(b, evaluating))[1]
    assert result["ratio"] == pytest.approx(1, abs=0.02)
    assert result["per_step_seconds"]["evaluation"]["difference"] > 0.01


def test_the_exit_status_serves_a_ci_job_that_chance_does_not_fail(tmp_path, compared):
    a, b = run_of(tmp_path / "a", noisy(1)), run_of(tmp_path / "b", noisy(2, 80.0))
    assert [compared(a, b, options=("--fail-over", percent))[0] for percent in ("5", "30")] == [1, 0]
    a = run_of(tmp_path / "a", noisy(1, count=80, scatter=0.02))
    b = run_of(tmp_path / "b", noisy(2, 96.0, count=80, scatter=0.02))
    status, result, _ = compared(a, b, options=("--fail-over", "3"))
    assert (result["verdict"], status) == ("slower", 0)  # slower, but perhaps by less than 3 %


def test_mistakes_end_with_status_2(tmp_path, capsys):
    a = run_of(tmp_path / "a", noisy(1))
    assert main(["compare", str(a), str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "not a run folder" in err
    with pytest.raises(SystemExit) as error:
        main(["compare", str(a), str(a), "--fail-over", "much"])
    assert error.value.code == 2


def of_batch(size):
    return {"noise_of": {"loader": {"batch_size": size}}}


@pytest.mark.parametrize(
    ("name", "of_a", "of_b"), [("batch_size", of_batch(8), of_batch(16)), ("world_size", {}, {"ranks": 2})]
)
def test_other_work_per_step_is_refused(tmp_path, compared, name, of_a, of_b):
    a, b = run_of(tmp_path / "a", noisy(1), **of_a), run_of(tmp_path / "b", noisy(2), **of_b)
    status, result, _ = compared(a, b)
    assert (status, result["verdict"], result["ratio"], result["interval"]) == (2, "not comparable", None, None)
    assert name in result["why"]
    assert name in [each["what"] for each in result["differences"]]


@pytest.mark.parametrize(("windows", "last", "told"), [(0, None, "no window"), (2, 0.3, "one window")])
def test_a_run_with_one_window_is_refused_with_what_to_do(tmp_path, compared, windows, last, told):
    """A run that ends in the middle of a window has a last one that is short: it tells no scatter."""
    a = run_of(tmp_path / "a", noisy(1))
    b = run_of(tmp_path / "b", noisy(2, 200.0, count=1 + windows, exact=False), seconds=10.0, last=last)
    status, _, text = compared(a, b)
    assert status == 2
    assert f"Not comparable: B has {told} after its first steps, and two are needed" in text
    assert "run it for longer (with the default settings a minute is enough)" in text


def test_of_few_windows_a_run_that_is_twice_as_fast_is_faster(tmp_path, compared):
    """Of a run of half a minute to a minute and a half with the default settings, after its first steps."""
    verdicts = []
    for windows in (2, 4, 7):
        for seed in range(0, 10, 2):
            a, b = (
                run_of(tmp_path / name, noisy(s, pace, count=1 + windows, scatter=0.03, exact=False), seconds=10.0)
                for name, s, pace in (("a", seed, 100.0), ("b", seed + 1, 200.0))
            )
            result = compared(a, b)[1]
            assert result["interval"][0] < 2 < result["interval"][1]
            verdicts.append(result["verdict"])
    assert verdicts.count("faster") >= 0.95 * len(verdicts)
    assert set(verdicts) <= {"faster", "no difference"}


def test_real_runs_tell_what_differs(tmp_path, compared):
    """Of runs of a real script the settings of the loader, the batch size and the versions are known."""
    for name, loader in (("a", "thread"), ("b", "worker")):
        options = ["--run-dir", str(tmp_path / name), "--log-interval-seconds", "0.2", "--interval-seconds", "0.2"]
        script = [str(TRAIN), "--seconds", "3.5", "--loader", loader]
        done = warm_python("-m", "telemetry", "run", "--port", "off", *options, *script, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    status, result, _ = compared(tmp_path / "a", tmp_path / "b")
    assert status == 0, result["why"]
    assert result["differences"] == [{"what": "num_workers", "a": 0, "b": 1}]
    assert 0 <= Run.of(str(tmp_path / "b")).without_core_ratio < 1  # the logs tell how long threads waited for a core
    path = next((tmp_path / "a" / "logs").iterdir())
    told = [json.loads(each) for each in path.read_text().splitlines()]
    assert [each["loader"] for each in told if "loader" in each][-1] == {"num_workers": 0, "batch_size": 4}
    environments = [each["environment"] for each in told if "environment" in each]
    assert {"script", "torch_version", "cores"} <= set(environments[-1])
    assert len(environments) <= 3  # only what has changed is written


def test_a_cause_and_a_part_of_the_compute_are_compared(tmp_path, compared):
    runs = [run_of(tmp_path / name, noisy(seed)) for name, seed in (("a", 1), ("b", 2))]
    for run, backward, lost in zip(runs, (40.0, 48.0), ({}, {"workers_cpu_bound": 80.0}), strict=True):
        assert compared(*runs)[1]["compute_seconds"] == {}  # until both have it
        parts = {"compute_total_seconds": {"forward": 16.0, "backward": backward, "optimizer": 0.0, "compile": 0.0}}
        end = parts | {"stall_lost_total_seconds": lost}
        rewritten(run, lambda _, each, end=end: each.update(end if each["event"] == "run_end" else {}))
    _, result, text = compared(*runs)
    assert result["causes"] == {"workers_cpu_bound": {"a": 0, "b": 0.01}}  # of 8000 steps
    assert list(result["compute_seconds"])[:2] == ["backward", "forward"]
    assert result["compute_seconds"]["backward"] == {"a": 0.005, "b": 0.006}
    assert "compute, for each step" in text
    assert "lost in stalls, for each step" in text


def test_settings_that_differ_are_named_and_damage_is_noted(tmp_path, compared):
    a, b = (
        run_of(tmp_path / name, noisy(seed), python_version=version)
        for name, seed, version in (("a", 1, "3.12.1"), ("b", 2, "3.13.0"))
    )
    with next((a / "logs").iterdir()).open("a") as file:
        file.write('{"event": "window", "wall_sec')
    status, result, text = compared(a, b)
    assert (status, result["verdict"]) == (0, "no difference")
    assert result["differences"] == [{"what": "python_version", "a": "3.12.1", "b": "3.13.0"}]
    assert result["notes"] == ["A has 1 damaged line(s) in its logs; they were skipped"]
    assert text.index("python_version  ") < text.index("times the steps per second")


# -- the interval, and what is said of other programs ------------------------------------------------------------------


@pytest.mark.parametrize(("correlation", "windows"), [(0.0, 8), (0.3, 40), (0.5, 5), (0.5, 16), (0.7, 40)])
def test_the_interval_has_the_truth_in_it_in_95_of_100_pairs(correlation, windows):
    rng = random.Random(3)
    pairs = [[drawn(rng, windows, correlation) for _ in range(2)] for _ in range(400)]
    covered = sum(low <= 1 <= high for low, high in (ratio_interval(a, b).interval for a, b in pairs))
    assert 0.93 <= covered / len(pairs) < 1


def delayed(share, waited=0.0):
    """Fields of windows in which threads waited for a core for this share of the wall clock."""
    return lambda wall: {
        "cpu_total_seconds": {
            "used": wall / 2, "others": wall, "known": wall, "thread": wall / 2, "thread_delay": share * wall,
            "worker": wall / 5, "worker_delay": waited * wall,
        }
    }  # fmt: skip


def test_threads_that_wait_for_a_core_in_one_run_alone_are_warned_of(tmp_path, compared):
    a = run_of(tmp_path / "a", noisy(1), cpu=delayed(0.0))
    b = run_of(tmp_path / "b", noisy(2, 80.0), cpu=delayed(0.2))
    _, result, text = compared(a, b)
    assert result["verdict"] == "slower"  # as measured
    assert "Warning: the training loop waited for a CPU core for 0.0 % of its time in A and 20.0 % in B." in text
    assert "a machine that nobody else uses" in result["warning"]
    assert compared(a, run_of(tmp_path / "c", noisy(2, 80.0), cpu=delayed(0.005)))[1]["warning"] is None
    assert compared(a, run_of(tmp_path / "d", noisy(2, 80.0)))[1]["warning"] is None  # not measured
    waits = run_of(tmp_path / "a", noisy(1), wait=0.75, cpu=delayed(0.0, waited=0.4))  # there the workers count
    assert "for 30.0 % of its time in A" in compared(waits, b)[1]["warning"]
