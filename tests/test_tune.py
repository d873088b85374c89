"""``telemetry tune`` as a person runs it, and which settings a trial may override."""

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
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

from telemetry import tune as tune_command
from telemetry.agent.trial import LoaderFacts, TrialHooks, TrialOutcome, TrialPlan, refused, with_settings
from telemetry.sources.cgroup import MemoryLimit
from telemetry.tune import Candidate, Limits, Trial, TrialMemory, settings_for, settings_grid
from telemetry.util.errors import ErrorLog
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
        assert trial.keys() == {
            "settings", "steps_per_second", "predicted_steps_per_second", "wait_ratio", "memory_bytes", "seconds",
            "steps", "failed",
        }  # fmt: skip
        assert trial["steps_per_second"] > 0
        assert 0 <= trial["wait_ratio"] <= 1
        assert trial["memory_bytes"] > 0
    assert found["trials"][1]["predicted_steps_per_second"] > 0
    (change,) = found["changes"]  # the loader of the evaluation, made by the same line, is left alone
    assert "return DataLoader(" in (SCRIPTS / "saves.py").read_text().splitlines()[change["line"] - 1]
    assert f"num_workers={found['best']['settings']['num_workers']}" in change["code"]
    assert (results / "loss.txt").exists()
    assert not (results / "done.txt").exists()


def test_it_says_what_to_change_and_what_it_does_meanwhile(results):
    out, error = tune(results, "--trials", "2", how="slow-save")
    assert "trial 1 of at most 2: the script's own settings; at most" in error
    assert "num_workers=0 (the script's own)" in out
    assert "DataLoader(..., num_workers=" in out
    assert "checkpoints were not written" in out
    assert (results / "state.json").exists()
    assert not (results / "state.json.tmp").exists()  # a trial ends between two steps


def test_what_goes_into_a_buffer_or_an_open_file_is_saved(results):
    assert tuned(results, "--trials", "1", "--scratch")["baseline"]["steps_per_second"] > 0
    assert not (results / "loss.txt").exists()  # it ran in an empty folder
    tuned(results, "--trials", "1", how="buffers")
    assert torch.load(results / "opened.pt").keys() == {"weight", "bias"}


def test_a_checkpoint_that_was_not_written_cannot_be_renamed(results):
    _, error = tune(results, "--trials", "1", how="renames", status=1)
    assert "--no-protection" in error
    assert (results / "newest.pt").read_text() == "the newest"
    tune(results, "--trials", "1", "--no-protection", how="renames")
    assert torch.load(results / "newest.pt").keys() == {"weight", "bias"}


def test_a_stream_gets_at_most_one_worker(results):
    found = tuned(results, "--trials", "3", how="stream")
    assert max(trial["settings"]["num_workers"] for trial in found["trials"]) <= 1
    assert any("get_worker_info" in note for note in found["notes"])
    found = tuned(results, "--grid", "num_workers=2,4,8", how="stream")
    assert found["trials"] == [found["best"]], "the script as it is"


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
    ("how", "options", "words"),
    [
        ("crash", [], ["nothing can be tuned: the script failed (exit status 1)", "| there is no data set in /data"]),
        ("no-batch", [], ["nothing can be tuned: no batch was drawn from a DataLoader"]),
        ("", ["--memory", "20M"], ["memory was short"]),
    ],
)
def test_a_script_that_cannot_be_tuned_is_told(results, how, options, words):
    out, error = tune(results, *options, how=how, status=1)
    assert out == ""
    assert all(word in error for word in words)
    assert processes_below(results.parent) == []


def test_a_trial_that_fails_late_counts_until_then(results):
    out, _ = tune(results, "--trials", "1", "--seconds", "60", how="late-crash")
    assert "the script ended with exit status 1 before the trial did" in out


def test_ctrl_c_ends_the_trial_and_shows_what_is_known(results):
    process = start(results, "--seconds", "60", "--trials", "2", "--steps", "5")
    (plan,) = wait_for(lambda: [*results.parent.glob("telemetry-tune-*/2/plan.json")], 60)
    wait_for(lambda: processes_below(plan), 30)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "num_workers=0 (the script's own)" in out
    assert "stopped before the end" in out
    assert processes_below(plan) == []
    assert not plan.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--grid", "num_worker=2"], "no setting of a DataLoader"),
        (["--grid", "num_workers=two"], "whole number"),
        (["--grid", "in_order=0"], "True or False"),
        (["--grid", "num_workers=0", "num_workers=2"], "twice"),
        (["--grid", f"num_workers={','.join(map(str, range(40)))}", "prefetch_factor=1,2,3,4,5,6"], "at most 200"),
        ([], "--nproc-per-node"),  # under torchrun
    ],
)
def test_a_wrong_use_is_refused(results, monkeypatch, options, words):
    if not options:
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert words in tune(results, *options, status=2)[1]


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
        capture_output=True, text=True, cwd=results,
    )  # fmt: skip
    assert found.returncode == 1
    assert "so the script was not started" in found.stderr
    assert not (results / "done.txt").exists()


# -- which settings a trial may override ---------------------------------------------------------------------------

NAMES = {"num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "pin_memory"}
MIB = 1 << 20


class Items(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(4)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Sharded(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        return iter(range(0 if worker is None else worker.id, 8))


class PerEpoch(Items):
    def set_epoch(self, epoch):
        self.epoch = epoch


class OnDevice(torch.Tensor):
    """Says that it is in the memory of a device, which is not there."""

    @property
    def device(self):
        return torch.device("cuda")


@pytest.mark.parametrize(
    ("arguments", "names", "most"),
    [
        ({"dataset": Stream()}, {"num_workers", "in_order"}, 1),
        ({"dataset": Sharded()}, {"in_order"}, 0),
        ({"dataset": Stream(), "num_workers": 4}, {"in_order"}, 0),  # the script knows what it does
        ({"dataset": Items()}, {"in_order"}, 0),
        ({"dataset": Items(), "batch_sampler": [[0]]}, {"in_order"}, 0),
        ({"dataset": Items(), "shuffle": True}, set(), 0),
        ({"dataset": Items(), "sampler": RandomSampler(Items())}, set(), 0),
        ({"dataset": PerEpoch(), "shuffle": True}, {"persistent_workers"}, 0),
    ],
)
def test_what_must_not_be_changed(arguments, names, most):
    reasons, max_workers = refused(arguments)
    assert (set(reasons), max_workers) == (names, most)


def test_settings_without_workers_drop_what_needs_workers():
    given = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "timeout": 5, "pin_memory": False}
    assert with_settings(given, {"num_workers": 0}, NAMES) == {"num_workers": 0, "pin_memory": False}
    assert with_settings(given, {}, NAMES) == given
    assert with_settings({}, {"num_workers": 1, "in_order": False}, NAMES) == {"num_workers": 1}  # an older torch


@pytest.fixture
def hooks(observed):
    """Makes the hooks of a plan, in place of those before, and takes them away at the end."""
    made = []

    def make(loaders=None):
        remove()
        plan = TrialPlan(folder="", seconds=1, loaders=loaders or {}, saves=True)
        made.append(TrialHooks(plan, observed.tracker, ErrorLog()))
        return made[-1].loaders

    def remove():
        for one in made:
            one._patches.undo()

    yield make
    remove()
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ImportWatch"]


def test_loaders_are_told_apart_by_their_callers(hooks):
    def loader_of(dataset):
        return DataLoader(dataset, 4)

    found = hooks()
    first = loader_of(Items())
    second = loader_of(Items())
    for _ in range(2):
        list(loader_of(Items()))  # in every epoch a new loader: the same place
    with torch.no_grad():
        list(second)
    list(first)
    facts = list(found.values())
    assert [one.trains for one in facts] == [True, False, True]
    assert [one.batches + one.evaluation_batches for one in facts] == [16, 16, 32]
    assert facts[0].batch_bytes == 64
    assert len({one.line for one in facts}) == 1


@pytest.mark.parametrize("on_device", [True, False])
def test_batches_on_a_device_get_no_workers(hooks, on_device):
    found = hooks()
    collate = (lambda _: {"pictures": [torch.zeros(2).as_subclass(OnDevice)]}) if on_device else None
    list(DataLoader(Items(), 4, shuffle=True, collate_fn=collate))
    (facts,) = found.values()
    assert set(facts.refused) == ({"num_workers", "pin_memory"} if on_device else set())


def test_a_plan_overrides_one_place_alone(hooks):
    loaders = {}
    for _ in range(2):
        found = hooks(loaders)
        first = DataLoader(Items(), 4)
        second = DataLoader(Items(), 4, num_workers=1)
        loaders = {next(iter(found)): {"num_workers": 3, "prefetch_factor": 5}}
    assert (first.num_workers, first.prefetch_factor) == (3, 5)
    assert (second.num_workers, second.prefetch_factor) == (1, 2)


@pytest.mark.parametrize(
    ("wanted", "gets"),
    [
        ({"num_workers": 4, "prefetch_factor": 4, "persistent_workers": True}, {"prefetch_factor": 4}),
        ({"num_workers": 1, "persistent_workers": False}, {"num_workers": 1, "persistent_workers": False}),
        ({"in_order": False, "pin_memory": True}, {"pin_memory": True}),
        ({"in_order": True}, {"in_order": True}),
    ],
)
def test_a_loader_does_not_get_what_it_refuses(wanted, gets):
    names = ("num_workers", "persistent_workers", "in_order")
    stream = LoaderFacts("here", "train.py", 1, max_workers=1, refused=dict.fromkeys(names, "of this loader"))
    assert settings_for(stream, wanted) == gets
    assert settings_for(LoaderFacts("there", "train.py", 2), wanted) == wanted


@pytest.mark.parametrize(
    ("limits", "batch", "wanted", "words"),
    [
        (Limits(1024 * MIB, None, cores=2, ranks=1), 0, {"num_workers": 4}, ""),
        (Limits(1024 * MIB, None, cores=2, ranks=1), 0, {"num_workers": 6}, "6 workers would need"),
        (Limits(1024 * MIB, None, cores=2, ranks=2), 0, {"num_workers": 4}, "4 workers would need"),
        (Limits(1024 * MIB, None, cores=2, ranks=1), 0, {"num_workers": 9}, "more than 2 cores can hold"),
        (Limits(1 << 40, 64 * MIB, cores=4, ranks=1), 10 * MIB, {"num_workers": 2}, ""),
        (Limits(1 << 40, 64 * MIB, cores=4, ranks=1), 10 * MIB, {"num_workers": 2, "prefetch_factor": 4}, "/dev/shm"),
    ],
)
def test_what_memory_and_cores_hold(limits, batch, wanted, words):
    """After a trial with one worker of 100 MiB."""
    facts = LoaderFacts("here", "train.py", 1, applied={"num_workers": 1}, batches=9, batch_bytes=batch)
    outcomes = (TrialOutcome(loaders=[facts]),)
    known = Trial(Candidate({}), None, outcomes, 0, "", (), 1.0, memory_bytes=200 * MIB, main_bytes=100 * MIB)
    found = limits.against(wanted, known, [known])
    assert words in found
    assert bool(found) == bool(words)


def test_a_grid_has_each_combination_once():
    assert settings_grid(["num_workers=0,2", "prefetch_factor=2,4"]) == [
        {"num_workers": 0},
        {"num_workers": 2, "prefetch_factor": 2},
        {"num_workers": 2, "prefetch_factor": 4},
    ]


@pytest.mark.parametrize(("left", "short"), [(79, True), (81, False)])
def test_when_a_trial_must_end_for_memory(monkeypatch, left, short):
    monkeypatch.setattr(tune_command, "memory_left", lambda *_: MemoryLimit(left, 1000))
    assert bool(TrialMemory("no such plan", None).short()) == short
