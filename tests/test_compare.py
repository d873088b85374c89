"""`telemetry compare`, on logs written by hand and on logs of real runs."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.cli import main
from telemetry.records import CATEGORIES
from telemetry.util.clock import iso_time
from tests.faults.warm_python import warm_python
from tests.report_logs import START, line, write

TRAIN = Path(__file__).parents[1] / "benchmarks" / "compare_train.py"


def run_of(folder, paces, *, wait=0.0, ranks=1, seconds=2.0, last=None, start=(), noise_of=None, **head):
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
            lines.append(line("window", rank, **totals, **(noise_of or {})) | {"time": when})
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


def compared(a, b, *options, capsys):
    status = main(["compare", str(a), str(b), *options])
    out, err = capsys.readouterr()
    return status, json.loads(out) if "--json" in options and out else out, err


def test_a_slower_run_is_found_with_its_category(tmp_path, capsys):
    a = run_of(tmp_path / "a", noisy(1), wait=0.2)
    b = run_of(tmp_path / "b", noisy(2, 80.0), wait=0.36)
    status, result, _ = compared(a, b, "--json", capsys=capsys)
    assert status == 0
    assert result["verdict"] == "slower"
    assert result["why"] is None
    low, high = result["interval"]
    assert low < 0.8 < high < 1
    assert low < result["ratio"] < high
    wait, compute = result["per_step_seconds"]["data_wait"], result["per_step_seconds"]["compute"]
    assert wait["difference"] == pytest.approx(0.36 / 80 - 0.2 / 100, rel=0.1)
    assert abs(compute["difference"]) < abs(wait["difference"]) / 5
    assert set(result["per_step_seconds"]) == set(CATEGORIES)


def test_the_other_way_round_it_is_faster(tmp_path, capsys):
    a, b = run_of(tmp_path / "a", noisy(1, 80.0)), run_of(tmp_path / "b", noisy(2))
    assert compared(a, b, "--json", capsys=capsys)[1]["verdict"] == "faster"


def test_equal_runs_are_rarely_called_different(tmp_path, capsys):
    different = 0
    for seed in range(0, 80, 2):
        a, b = (run_of(tmp_path / name, noisy(seed + add, exact=False)) for add, name in enumerate("ab"))
        different += compared(a, b, "--json", capsys=capsys)[1]["verdict"] != "no difference"
    assert different <= 4


def test_a_short_run_tells_no_small_difference(tmp_path, capsys):
    """However little it scatters: a disturbance that lasts for many minutes shows in none of its windows."""
    verdicts = []
    for seconds in (0.8, 20.0, 400.0):
        a = run_of(tmp_path / f"a{seconds}", noisy(1, scatter=0.002), seconds=seconds)
        b = run_of(tmp_path / f"b{seconds}", noisy(2, 97.5, scatter=0.002), seconds=seconds)
        verdicts.append(compared(a, b, "--json", capsys=capsys)[1]["verdict"])
    assert verdicts == ["no difference", "no difference", "slower"]


def test_first_steps_do_not_count(tmp_path, capsys):
    a = run_of(tmp_path / "a", noisy(1))
    b = run_of(tmp_path / "b", [5.0, 5.0, 5.0, *noisy(2)])
    assert compared(a, b, "--json", capsys=capsys)[1]["ratio"] == pytest.approx(1, abs=0.02)


def test_a_slow_stretch_widens_the_interval(tmp_path, capsys):
    """A disturbance of a third of one run is no difference between the two."""
    a = run_of(tmp_path / "a", noisy(1, memory=0.0))
    paces = noisy(2, memory=0.0)
    b = run_of(tmp_path / "b", [*paces[:26], *(0.9 * pace for pace in paces[26:])])
    result = compared(a, b, "--json", capsys=capsys)[1]
    assert result["verdict"] == "no difference"
    assert result["interval"][1] - result["interval"][0] > 0.05


@pytest.mark.parametrize(("percent", "status"), [("5", 1), ("30", 0)])
def test_the_exit_status_serves_a_ci_job(tmp_path, capsys, percent, status):
    a, b = run_of(tmp_path / "a", noisy(1)), run_of(tmp_path / "b", noisy(2, 80.0))
    assert compared(a, b, "--fail-over", percent, capsys=capsys)[0] == status


def test_chance_fails_no_ci_job(tmp_path, capsys):
    a = run_of(tmp_path / "a", noisy(1, count=80, scatter=0.02))
    b = run_of(tmp_path / "b", noisy(2, 96.0, count=80, scatter=0.02))
    status, result, _ = compared(a, b, "--json", "--fail-over", "3", capsys=capsys)
    assert (result["verdict"], status) == ("slower", 0)  # slower, but perhaps by less than 3 %


def test_mistakes_end_with_status_2(tmp_path, capsys):
    a = run_of(tmp_path / "a", noisy(1))
    status, out, err = compared(a, tmp_path / "none", capsys=capsys)
    assert (status, out) == (2, "")
    assert "not a run folder" in err
    with pytest.raises(SystemExit) as error:
        main(["compare", str(a), str(a), "--fail-over", "much"])
    assert error.value.code == 2


def test_what_differs_comes_first(tmp_path, capsys):
    surroundings = [
        {"environment": {"torch_version": version, "cpu": "x"}, "loader": {"num_workers": workers, "batch_size": 8}}
        for version, workers in (("2.12.0", 2), ("2.13.0", 4))
    ]
    a = run_of(tmp_path / "a", noisy(1), noise_of=surroundings[0], python_version="3.12.1")
    b = run_of(tmp_path / "b", noisy(2), noise_of=surroundings[1], python_version="3.12.1")
    result = compared(a, b, "--json", capsys=capsys)[1]
    assert result["differences"] == [
        {"what": "num_workers", "a": 2, "b": 4},
        {"what": "torch_version", "a": "2.12.0", "b": "2.13.0"},
    ]
    text = compared(a, b, capsys=capsys)[1]
    assert text.index("torch_version") < text.index("times the steps per second")


@pytest.mark.parametrize("name", ["batch_size", "world_size"])
def test_other_work_per_step_is_refused(tmp_path, capsys, name):
    sizes = {"a": {}, "b": {}}
    if name == "batch_size":
        sizes = {run: {"noise_of": {"loader": {"batch_size": size}}} for run, size in (("a", 8), ("b", 16))}
    a = run_of(tmp_path / "a", noisy(1), **sizes["a"])
    b = run_of(tmp_path / "b", noisy(2), ranks=2 if name == "world_size" else 1, **sizes["b"])
    status, result, _ = compared(a, b, "--json", capsys=capsys)
    assert (status, result["verdict"], result["ratio"], result["interval"]) == (2, "not comparable", None, None)
    assert name in result["why"]
    assert result["differences"][0]["what"] == name


@pytest.mark.parametrize(
    ("windows", "last", "told"),
    [(0, None, "no window"), (1, None, "one window"), (2, 0.3, "one window")],
    ids=["none", "one", "one and a bit"],
)
def test_a_run_with_one_window_is_refused_with_what_to_do(tmp_path, capsys, windows, last, told):
    """A run that ends in the middle of a window has a last one that is short: it tells no scatter."""
    a = run_of(tmp_path / "a", noisy(1))
    b = run_of(tmp_path / "b", noisy(2, 200.0, count=1 + windows, exact=False), seconds=10.0, last=last)
    status, text, _ = compared(a, b, capsys=capsys)
    assert status == 2
    assert f"Not comparable: B has {told} after its first steps, and two are needed" in text
    assert "run it for longer (with the default settings a minute is enough)" in text


WINDOWS = range(2, 8)
"""Of a run of half a minute to a minute and a half with the default settings, after its first steps."""


def few(folder, seed, windows, pace=100.0):
    return run_of(folder, noisy(seed, pace, count=1 + windows, scatter=0.03, exact=False), seconds=10.0)


def test_of_few_windows_a_run_that_is_twice_as_fast_is_faster(tmp_path, capsys):
    verdicts = []
    for windows in WINDOWS:
        for seed in range(0, 10, 2):
            a, b = few(tmp_path / "a", seed, windows), few(tmp_path / "b", seed + 1, windows, 200.0)
            result = compared(a, b, "--json", capsys=capsys)[1]
            assert result["interval"][0] < 2 < result["interval"][1]
            verdicts.append(result["verdict"])
    assert verdicts.count("faster") >= 0.95 * len(verdicts)
    assert set(verdicts) <= {"faster", "no difference"}
    text = compared(a, b, capsys=capsys)[1]
    assert "A has 7 windows after its first steps; more make the interval shorter" in text


@pytest.mark.parametrize("longer", [False, True], ids=["both short", "one long"])
def test_of_few_windows_equal_runs_are_rarely_called_different(tmp_path, capsys, longer):
    different = pairs = 0
    for windows in WINDOWS:
        for seed in range(0, 40, 2):
            a = few(tmp_path / "a", seed, windows)
            b = few(tmp_path / "b", seed + 1, 60 if longer else windows)
            different += compared(a, b, "--json", capsys=capsys)[1]["verdict"] != "no difference"
            pairs += 1
    assert different <= 0.05 * pairs


def test_evaluations_do_not_count_as_slower_steps(tmp_path, capsys):
    a = run_of(tmp_path / "a", noisy(1))
    b = run_of(tmp_path / "b", noisy(2))
    path = next((b / "logs").iterdir())
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    for number, each in enumerate(lines):
        if "wall_seconds" in each:  # ten seconds of evaluation after every fourth window
            spent = 10.0 * ((number - 1) // 4)
            each["wall_seconds"] += spent
            each["ledger_total_seconds"]["evaluation"] = spent
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    result = compared(a, b, "--json", capsys=capsys)[1]
    assert result["verdict"] == "no difference"
    assert result["per_step_seconds"]["evaluation"]["difference"] > 0.01


def test_ranks_are_added_up(tmp_path, capsys):
    a, b = run_of(tmp_path / "a", noisy(1), ranks=2), run_of(tmp_path / "b", noisy(2, 80.0), ranks=2)
    result = compared(a, b, "--json", capsys=capsys)[1]
    assert result["ratio"] == pytest.approx(0.8, abs=0.02)
    assert result["steps"]["a"] == pytest.approx(40 * 200 * 0.9, rel=0.05)  # of the mean rank


def test_causes_are_seconds_for_each_step(tmp_path, capsys):
    a = run_of(tmp_path / "a", noisy(1))
    lost = {"stall_lost_total_seconds": {"workers_cpu_bound": 40.0, "checkpoint": 0.0}}
    b = run_of(tmp_path / "b", noisy(2, 80.0), noise_of=lost)
    path = next((b / "logs").iterdir())
    last = json.loads(path.read_text().splitlines()[-1]) | lost
    path.write_text(path.read_text() + json.dumps(last) + "\n")
    causes = compared(a, b, "--json", capsys=capsys)[1]["causes"]
    assert set(causes) == {"workers_cpu_bound"}
    assert causes["workers_cpu_bound"]["a"] == 0
    assert causes["workers_cpu_bound"]["b"] == pytest.approx(40 / (80 * 80), rel=0.05)


def test_a_damaged_log_is_compared_and_said_so(tmp_path, capsys):
    a, b = run_of(tmp_path / "a", noisy(1)), run_of(tmp_path / "b", noisy(2))
    with next((b / "logs").iterdir()).open("a") as file:
        file.write('{"event": "window", "wall_sec')
    status, text, _ = compared(a, b, capsys=capsys)
    assert status == 0
    assert "B has 1 torn line" in text


def test_it_imports_no_torch():
    code = "import sys; from telemetry.compare import command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_real_runs_tell_what_differs(tmp_path, capsys):
    """Of runs of a real script the settings of the loader, the batch size and the versions are known."""
    for name, loader in (("a", "thread"), ("b", "worker")):
        options = ["--run-dir", str(tmp_path / name), "--log-interval-seconds", "0.2", "--interval-seconds", "0.2"]
        script = [str(TRAIN), "--seconds", "3.5", "--loader", loader]
        done = warm_python("-m", "telemetry", "run", "--port", "off", *options, *script, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    status, result, _ = compared(tmp_path / "a", tmp_path / "b", "--json", capsys=capsys)
    assert status == 0, result["why"]
    assert result["differences"] == [{"what": "num_workers", "a": 0, "b": 1}]
    assert 0 <= result["load"]["others_ratio"]["a"] <= 1  # the logs tell who else used the cores
    assert 0 <= result["load"]["held_up_ratio"]["b"] < 1
    path = next((tmp_path / "a" / "logs").iterdir())
    told = [json.loads(each) for each in path.read_text().splitlines()]
    loaders = [each["loader"] for each in told if "loader" in each]
    assert loaders[-1] == {"num_workers": 0, "batch_size": 4}
    environments = [each["environment"] for each in told if "environment" in each]
    assert {"script", "torch_version", "cores"} <= set(environments[-1])
    assert len(environments) <= 3  # only what has changed is written
