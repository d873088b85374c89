"""``telemetry tune`` as a person runs it: real scripts, real DataLoaders, real trials."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.running_agent import wait_for
from tests.tune_scripts import two_paces

SCRIPTS = Path(__file__).with_name("tune_scripts")
SHORT = ["--seconds", "1", "--warm-up", "0.3"]


@pytest.fixture
def results(tmp_path):
    """A working folder with a checkpoint of an earlier run."""
    (tmp_path / "newest.pt").write_text("the newest")
    return tmp_path


def start(folder, *options, script="saves.py", how=""):
    script_options = ["--how", how] if how else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TELEMETRY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "telemetry", "tune", *SHORT, *options, str(SCRIPTS / script), *script_options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONPATH": str(SCRIPTS.parents[1]), "TMPDIR": str(folder.parent)},
    )


def tune(folder, *options, **more):
    process = start(folder, *options, **more)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def tuned(folder, *options, **more):
    """What ``--json`` prints, of a command that must succeed."""
    status, out, error = tune(folder, "--json", *options, **more)
    assert status == 0, error
    assert (folder / "newest.pt").read_text() == "the newest"
    return json.loads(out)


def processes_below(folder):
    """The processes of trials whose files are in a folder, if they are still there."""
    wanted, found = f"TELEMETRY_TUNE_TRIAL={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def test_a_slow_loader_gets_workers_and_the_checkpoint_stays(results):
    found = tuned(results, "--trials", "3")
    assert found["baseline"] == found["trials"][0]
    assert found["baseline"]["settings"]["num_workers"] == 0
    assert found["best"]["settings"]["num_workers"] > 0
    assert found["speedup"] > 1
    for trial in found["trials"]:
        assert trial["steps_per_second"] > 0
        assert 0 <= trial["wait_ratio"] <= 1
        assert trial["memory_bytes"] > 0
    assert found["trials"][1]["predicted_steps_per_second"] > 0
    (change,) = found["changes"]  # the loader of the evaluation, made by the same line, is left alone
    line = (SCRIPTS / "saves.py").read_text().splitlines()[change["line"] - 1]
    assert "return DataLoader(" in line
    assert f"num_workers={found['best']['settings']['num_workers']}" in change["code"]
    assert (results / "loss.txt").exists()
    assert not (results / "done.txt").exists()


def test_it_says_what_to_change_and_what_it_does_meanwhile(results):
    status, out, error = tune(results, "--trials", "2", how="slow-save")
    assert status == 0, error
    assert "trial 1 of at most 2: the script's own settings; at most" in error
    assert "num_workers=0 (the script's own)" in out
    assert "DataLoader(..., num_workers=" in out
    assert "checkpoints were not written" in out
    assert (results / "state.json").exists()
    assert not (results / "state.json.tmp").exists()  # a trial ends between two steps


def test_what_goes_into_a_buffer_or_an_open_file_is_saved(results):
    assert tuned(results, "--trials", "1", how="buffers")["baseline"]["steps_per_second"] > 0
    assert torch.load(results / "opened.pt").keys() == {"weight", "bias"}


def test_a_checkpoint_that_was_not_written_cannot_be_renamed(results):
    status, _, error = tune(results, "--trials", "1", how="renames")
    assert status == 1
    assert "--no-protection" in error
    assert (results / "newest.pt").read_text() == "the newest"
    status, _, error = tune(results, "--trials", "1", "--no-protection", how="renames")
    assert status == 0, error
    assert torch.load(results / "newest.pt").keys() == {"weight", "bias"}


def test_in_an_empty_folder_nothing_is_left_behind(results):
    tuned(results, "--trials", "1", "--scratch")
    assert not (results / "loss.txt").exists()


def test_a_stream_gets_at_most_one_worker(results):
    found = tuned(results, "--trials", "3", how="stream")
    assert max(trial["settings"]["num_workers"] for trial in found["trials"]) <= 1
    assert any("get_worker_info" in note for note in found["notes"])
    found = tuned(results, "--grid", "num_workers=2,4,8", how="stream")
    assert found["trials"] == [found["best"]], "the script as it is"
    assert any("num_workers is left alone" in note for note in found["notes"])


def test_of_two_loaders_each_gets_only_what_it_takes(results):
    found = tuned(results, "--grid", "num_workers=2", "prefetch_factor=4", how="two-loaders")
    assert [trial["failed"] for trial in found["trials"]] == [None, None]  # the script fails if its stream has two
    assert found["trials"][1]["settings"]["num_workers"] == 2
    (note,) = found["notes"]
    assert "num_workers is left alone at line" in note
    assert "get_worker_info" in note


def test_a_data_set_that_fails_in_workers_gets_none(results):
    found = tuned(results, how="main-only")
    first, failed = found["trials"]
    assert found["best"] == first
    assert "exit status 1" in failed["failed"]
    assert failed["steps_per_second"] is None
    assert any("fails with workers" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("crash", ["the script failed (exit status 1)", "| there is no data set in /data"]),
        ("no-batch", ["no batch was drawn from a DataLoader"]),
    ],
)
def test_a_script_that_cannot_be_tuned_is_told(results, how, words):
    status, out, error = tune(results, how=how)
    assert status == 1
    assert out == ""
    assert "nothing can be tuned" in error
    assert all(word in error for word in words)


def test_a_trial_that_fails_late_counts_until_then(results):
    status, out, error = tune(results, "--trials", "1", "--seconds", "60", how="late-crash")
    assert status == 0, error
    assert "the script ended with exit status 1 before the trial did" in out


def test_ctrl_c_ends_the_trial_and_shows_what_is_known(results):
    process = start(results, "--seconds", "60", "--trials", "2", "--steps", "5")
    plans = lambda: [p for p in results.parent.glob("telemetry-tune-*/2/plan.json")]
    (plan,) = wait_for(plans, 60)
    wait_for(lambda: processes_below(plan), 30)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "num_workers=0 (the script's own)" in out
    assert "stopped before the end" in out
    assert processes_below(plan) == []
    assert not plan.exists()


def test_a_grid_is_a_table_and_bars(results):
    status, out, error = tune(results, "--steps", "5", "--grid", "num_workers=0,2", "prefetch_factor=4")
    assert status == 0, error
    assert "num_workers=2 prefetch_factor=4  #" in out


def test_a_trial_ends_before_memory_is_short(results):
    status, _, error = tune(results, "--memory", "20M")
    assert status == 1
    assert "memory was short" in error
    assert processes_below(results.parent) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--grid", "num_worker=2"], "no setting of a DataLoader"),
        (["--grid", "num_workers=two"], "whole number"),
        (["--grid", "in_order=0"], "True or False"),
        (["--grid", "num_workers=0", "num_workers=2"], "twice"),
        (["--grid", f"num_workers={','.join(map(str, range(40)))}", "prefetch_factor=1,2,3,4,5,6"], "at most 200"),
    ],
)
def test_a_wrong_grid_is_refused(results, options, words):
    status, _, error = tune(results, *options)
    assert status == 2
    assert words in error


def test_under_torchrun_it_says_how_to_start(results, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, error = tune(results)
    assert status == 2
    assert "--nproc-per-node" in error


def test_ranks_of_a_node_are_tuned_together(results):
    found = tuned(results, "--trials", "2", "--nproc-per-node", "2", script="two_paces.py")
    assert found["baseline"] == found["trials"][0]
    assert found["best"] in found["trials"]
    assert len(found["trials"]) == 2
    for trial in found["trials"]:
        assert 0 < trial["steps_per_second"] <= 1 / two_paces.SLOW_SECONDS  # the fast rank's pace is above that
    assert processes_below(results.parent) == []


def test_a_script_is_not_started_in_a_trial_without_hooks(results):
    script = results / "script.py"
    script.write_text("open('done.txt', 'w')")
    found = subprocess.run(
        [sys.executable, "-m", "telemetry", "run", "--run-dir", str(results / "run"), str(script)],
        env=os.environ | {"TELEMETRY_TUNE_TRIAL": str(results / "nothing.json"), "TELEMETRY_PORT": "off"},
        capture_output=True,
        text=True,
        cwd=results,
    )
    assert found.returncode == 1
    assert "so the script was not started" in found.stderr
    assert not (results / "done.txt").exists()
