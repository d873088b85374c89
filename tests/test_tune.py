"""``telemetry tune`` as a person runs it, which settings it tries, and what a trial does to a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from telemetry.agent.trial import TrialPlan, TrialResult, TrialRun
from telemetry.safety.errors import ErrorLog
from telemetry.tune import LOADER_SETTINGS, Figures, Trial, _usual, best_of, settings_grid
from telemetry.util.identity import identify
from tests.running_agent import wait_for
from tests.tune_scripts import two_paces

SCRIPTS = Path(__file__).with_name("tune_scripts")


@pytest.fixture
def results(tmp_path):
    """A working folder with a checkpoint of an earlier run."""
    (tmp_path / "newest.pt").write_text("the newest")
    return tmp_path


def start(folder, *options, script="saves.py", how=""):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TELEMETRY_")}
    tune = [sys.executable, "-m", "telemetry", "tune", "--seconds", "1", "--warm-up", "0.3"]
    return subprocess.Popen(
        [*tune, *options, str(SCRIPTS / script), *(["--how", how] if how else [])],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment | {"PYTHONPATH": str(SCRIPTS.parents[1]), "TMPDIR": str(folder.parent)},
    )  # fmt: skip


def tune(folder, *options, status=0, **more):
    """What it prints on both streams."""
    process = start(folder, *options, **more)
    out, error = process.communicate(timeout=120)
    assert process.returncode == status, error
    return out, error


def tuned(folder, *options, **more):
    """What ``--json`` prints, of a command that must succeed."""
    out, _ = tune(folder, "--json", *options, **more)
    assert (folder / "newest.pt").read_text() == "the newest"
    return json.loads(out)


def processes_below(folder):
    """The processes of trials whose files are in a folder, if they are still there."""
    wanted, found = f'TELEMETRY_TUNE_TRIAL={{"folder":"{folder}'.encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


ONE = ("--grid", "num_workers=0")
"""A grid that has only the script's own settings."""


def test_a_slow_loader_gets_workers_and_the_checkpoint_stays(results):
    found = tuned(results, "--grid", "num_workers=0,2", "prefetch_factor=3")
    assert [trial["settings"]["num_workers"] for trial in found["trials"]] == [0, 2]  # its own are not tried again
    assert (found["baseline"], found["best"]) == tuple(found["trials"])
    assert found["best"]["settings"]["prefetch_factor"] == 3
    assert found["speedup"] > 1.2
    for trial in found["trials"]:
        assert trial.keys() == {
            "settings", "steps_per_second", "predicted_steps_per_second", "wait_ratio", "memory_bytes", "seconds",
            "steps", "failed",
        }  # fmt: skip
        assert trial["settings"].keys() == set(LOADER_SETTINGS)
        assert 0 < trial["steps_per_second"] < trial["steps"]
        assert 0 <= trial["wait_ratio"] <= 1
    (change,) = found["changes"]
    assert (
        "for step, (items, labels) in enumerate(train)"
        in (SCRIPTS / "saves.py").read_text().splitlines()[change["line"] - 1]
    )
    assert change["code"] == "DataLoader(..., num_workers=2, prefetch_factor=3)"
    assert (results / "loss.txt").exists()
    assert not (results / "done.txt").exists()
    assert processes_below(results.parent) == []


def test_it_says_what_to_change_and_what_it_does_meanwhile(results):
    out, error = tune(results, "--grid", "num_workers=2", how="slow-save")
    assert "trial 1: the script's own settings\ntrial 2: num_workers=2" in error
    assert "num_workers=0 (the script's own)" in out
    assert "DataLoader(..., num_workers=2)" in out
    assert "checkpoints of a trial were not written" in out
    assert (results / "state.json").exists()
    assert not (results / "state.json.tmp").exists()  # a trial ends between two steps


def test_what_goes_into_a_buffer_or_an_open_file_is_saved(results):
    assert tuned(results, *ONE, "--scratch")["baseline"]["steps_per_second"] > 0
    assert not (results / "loss.txt").exists()  # it ran in an empty folder
    tuned(results, *ONE, how="buffers")
    assert torch.load(results / "opened.pt").keys() == {"weight", "bias"}


def test_a_checkpoint_that_was_not_written_cannot_be_renamed(results):
    _, error = tune(results, *ONE, how="renames", status=1)
    assert "--no-protection" in error
    assert (results / "newest.pt").read_text() == "the newest"
    tune(results, *ONE, "--no-protection", how="renames")
    assert torch.load(results / "newest.pt").keys() == {"weight", "bias"}


def test_a_stream_gets_at_most_one_worker(results):
    found = tuned(results, "--grid", "num_workers=1,4", how="stream")
    assert [trial["settings"]["num_workers"] for trial in found["trials"]] == [0, 1]
    assert "get_worker_info" in found["notes"][0]


def test_a_data_set_that_fails_in_workers_gets_none(results):
    found = tuned(results, "--grid", "num_workers=1", how="main-only")
    first, failed = found["trials"]
    assert (found["best"], found["speedup"], found["changes"]) == (first, 1, [])
    assert failed["failed"] == "the script failed (exit status 1)"
    assert failed["steps_per_second"] is None


@pytest.mark.parametrize(
    ("how", "options", "words"),
    [
        ("crash", [], ["nothing can be tuned: the script failed (exit status 1)", "| there is no data set in /data"]),
        ("no-batch", [], ["nothing can be tuned: the script ended after 0 measured steps"]),
        ("", ["--timeout", "1"], ["too few steps ended within 1 s: raise --timeout"]),
    ],
)
def test_a_script_that_cannot_be_tuned_is_told(results, how, options, words):
    out, error = tune(results, *options, how=how, status=1)
    assert out == ""
    assert all(word in error for word in words)
    assert processes_below(results.parent) == []


def test_a_trial_that_fails_late_counts_until_then(results):
    out, _ = tune(results, *ONE, "--seconds", "60", how="late-crash")
    assert "the script ended before the trial did" in out


def test_ctrl_c_ends_the_trial_and_shows_what_is_known(results):
    process = start(results, "--grid", "num_workers=2", "--seconds", "60", "--steps", "5")
    (folder,) = wait_for(lambda: [*results.parent.glob("telemetry-tune-*/2")], 60)
    wait_for(lambda: processes_below(folder), 30)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "num_workers=0 (the script's own)" in out
    assert "stopped before the end" in out
    assert processes_below(folder) == []
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--grid", "num_worker=2"], "not a setting of a DataLoader"),
        ([], "--nproc-per-node"),  # under torchrun
    ],
)
def test_a_wrong_use_is_refused(results, monkeypatch, options, words):
    if not options:
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert words in tune(results, *options, status=2)[1]


def test_ranks_of_a_node_are_tuned_together(results):
    found = tuned(results, "--grid", "num_workers=1", "--nproc-per-node", "2", script="two_paces.py")
    assert [trial["failed"] for trial in found["trials"]] == [None, None]
    for trial in found["trials"]:
        assert 0 < trial["steps_per_second"] <= 1 / two_paces.SLOW_SECONDS  # the fast rank's pace is above that
    assert processes_below(results.parent) == []


def test_a_script_is_not_started_in_a_trial_without_hooks(results):
    script = results / "script.py"
    script.write_text("open('done.txt', 'w')")
    found = subprocess.run(
        [sys.executable, "-m", "telemetry", "run", "--run-dir", str(results / "run"), str(script)],
        env=os.environ | {"TELEMETRY_TUNE_TRIAL": "no plan", "TELEMETRY_PORT": "off"},
        capture_output=True, text=True, cwd=results,
    )  # fmt: skip
    assert found.returncode == 1
    assert "so the script was not started" in found.stderr
    assert not (results / "done.txt").exists()


# -- which settings are tried ------------------------------------------------------------------------------------------


def test_a_grid_has_each_combination_once():
    assert settings_grid(["num_workers=0,2", "prefetch_factor=2,4", "pin_memory=True"]) == [
        {"num_workers": 0, "pin_memory": True},
        {"num_workers": 2, "prefetch_factor": 2, "pin_memory": True},
        {"num_workers": 2, "prefetch_factor": 4, "pin_memory": True},
    ]


def ran(wanted, pace, workers=None, *, wait=0.5, on_gpu=False):
    """A trial with this pace, of a script with so many workers; a pace of 0: it has failed."""
    known = {"num_workers": wanted.get("num_workers", workers), "pin_memory": False} | wanted
    settings = dict.fromkeys(LOADER_SETTINGS) | known
    result = TrialResult(50, 1.0, wait, known, None, False, on_gpu, 2.0, 0, early=False)
    figures = Figures(settings, pace or None, wait if pace else None, 9.0, 50, None if pace else "it failed")
    return Trial(wanted, figures, result, ())


@pytest.mark.parametrize(
    ("own", "paces", "most", "tried", "best"),
    [
        (0, {0: 10, 1: 9, 2: 8}, 8, [1, 2], 0),
        (0, {0: 10, 1: 0, 2: 0}, 8, [1, 2], 0),  # it fails with workers
        (0, {0: 10, 1: 9, 2: 9.6, 4: 20, 8: 40}, 8, [1, 2, 4, 8], 8),  # two workers hardly differ from none
        (0, {0: 10, 1: 20, 2: 40, 4: 39.9, 8: 37, 16: 35}, 32, [1, 2, 4, 8, 16], 2),
        (6, {0: 10, 1: 20, 2: 30, 4: 40, 6: 60, 8: 70}, 8, [0, 1, 2, 4, 8], 8),
        (6, {0: 10, 1: 20, 2: 30, 4: 69, 6: 70, 8: 70}, 8, [0, 1, 2, 4, 8], 6),  # as good: its own
        (0, {0: 10, 1: 20}, 1, [1], 1),
    ],
)
def test_workers_are_added_until_it_is_slower_twice(own, paces, most, tried, best):
    trials = [ran({}, paces[own], own)]
    for wanted in _usual(trials, most):
        trials.append(ran(wanted, paces[wanted.get("num_workers", own)], own))
    counts = [trial.wanted["num_workers"] for trial in trials[1:] if "prefetch_factor" not in trial.wanted]
    assert counts == tried
    assert len(trials) == 1 + len(tried) + (best > 0)  # then the next setting, of the best
    assert best_of(trials).workers == best


def test_no_more_is_tried_than_the_waits_are_worth():
    trials = [ran({}, 10, 4)]
    for wanted in _usual(trials, 8):
        trials.append(ran(wanted, 20, 4, wait=0.5 - 0.24 * wanted["num_workers"]))
    assert [trial.wanted for trial in trials[1:]] == [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}]
    assert list(_usual([ran({}, 10, 4, wait=0.02)], 8)) == []
    assert list(_usual([ran({}, 10, 4, wait=0.02, on_gpu=True)], 8)) == [{"pin_memory": True}]


def test_pinned_memory_is_tried_on_a_gpu_with_the_best_of_the_rest():
    trials = [ran({}, 10, 0, on_gpu=True)]
    for wanted in _usual(trials, 1):
        trials.append(ran(wanted, 20 + 5 * len(wanted), 0))
    assert [trial.wanted for trial in trials[1:]] == [
        {"num_workers": 1},
        {"num_workers": 1, "prefetch_factor": 4},
        {"num_workers": 1, "prefetch_factor": 4, "pin_memory": True},
    ]


# -- what a trial does to a loader -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "workers", "prefetch"),
    [({"num_workers": 3, "prefetch_factor": 5}, 3, 5), ({"num_workers": 0}, 0, None), ({"prefetch_factor": 7}, 2, 7)],
)
def test_a_loader_gets_the_settings_of_the_trial(observed, tmp_path, wanted, workers, prefetch):
    plan = TrialPlan(str(tmp_path), wanted, warm_up_seconds=0, seconds=1, saves=True)
    trial = TrialRun(msgspec.json.encode(plan).decode(), identify("run", None, {}), observed.tracker, ErrorLog())
    try:
        items = TensorDataset(torch.zeros(8))
        loader = DataLoader(items, 4, None, None, None, 2, prefetch_factor=4, persistent_workers=True, timeout=9)
    finally:
        trial._patches.undo()
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ImportWatch"]
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (4, workers, prefetch)
    assert loader.persistent_workers == (workers > 0)
