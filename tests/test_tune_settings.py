"""Which settings a trial may override, and what the machine can hold."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

from telemetry.agent.trial import TrialOutcome
from telemetry.hooks.trial import LoaderFacts, TrialHooks, TrialPlan, refused, with_settings
from telemetry.sources.cgroup import MemoryLimit
from telemetry.tune import trial as tune_trial
from telemetry.tune.search import Limits, settings_grid
from telemetry.tune.trial import Candidate, Trial, TrialMemory, settings_for
from telemetry.util.errors import ErrorLog

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
        plan = TrialPlan(folder="", seconds=1, loaders=loaders or {}, saves=True)
        remove()
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


def trial(batch=0):
    """A trial with one worker of 100 MiB."""
    facts = LoaderFacts("here", "train.py", 1, applied={"num_workers": 1}, batches=9, batch_bytes=batch)
    outcome = TrialOutcome(loaders=[facts])
    return Trial(Candidate({}), None, (outcome,), 0, "", (), 1.0, memory_bytes=200 * MIB, main_bytes=100 * MIB)


@pytest.mark.parametrize(
    ("limits", "batch", "wanted", "words"),
    [
        (Limits(1024 * MIB, None, cores=2, ranks=1), 0, {"num_workers": 1}, ""),
        (Limits(1024 * MIB, None, cores=2, ranks=1), 0, {"num_workers": 4}, ""),
        (Limits(1024 * MIB, None, cores=2, ranks=1), 0, {"num_workers": 6}, "6 workers would need"),
        (Limits(1024 * MIB, None, cores=2, ranks=2), 0, {"num_workers": 4}, "4 workers would need"),
        (Limits(1024 * MIB, None, cores=2, ranks=1), 0, {"num_workers": 9}, "more than 2 cores can hold"),
        (Limits(1 << 40, 64 * MIB, cores=4, ranks=1), 10 * MIB, {"num_workers": 2}, ""),
        (Limits(1 << 40, 64 * MIB, cores=4, ranks=1), 10 * MIB, {"num_workers": 2, "prefetch_factor": 4}, "/dev/shm"),
    ],
)
def test_what_memory_and_cores_hold(limits, batch, wanted, words):
    known = trial(batch)
    found = limits.against(wanted, known, [known])
    assert words in found
    assert bool(found) == bool(words)


def test_a_grid_has_each_combination_once():
    assert settings_grid(["num_workers=0,2", "prefetch_factor=2,4", "sharing_strategy=file_system"]) == [
        {"num_workers": 0, "sharing_strategy": "file_system"},
        {"num_workers": 2, "prefetch_factor": 2, "sharing_strategy": "file_system"},
        {"num_workers": 2, "prefetch_factor": 4, "sharing_strategy": "file_system"},
    ]


@pytest.mark.parametrize(
    ("left", "short"),
    [
        ([700, 500, 300, 100], True),
        ([700, 300, 300, 290], False),
        ([700, 690, 680, 79], True),
        ([700, 690, 680, 670], False),
    ],
    ids=["lasting growth", "one burst, as loading torch is", "hardly anything left", "slow growth"],
)
def test_when_a_trial_must_end_for_memory(monkeypatch, left, short):
    readings = iter(left)
    monkeypatch.setattr(tune_trial, "memory_left", lambda *_: MemoryLimit(next(readings), 1000))
    memory = TrialMemory("no such plan", None)
    assert any([memory.short() for _ in left]) == short
