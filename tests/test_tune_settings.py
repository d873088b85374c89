"""Which settings a trial may override, and what the machine can hold."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, get_worker_info

from telemetry.attach.loader_safety import refused, refused_batch, tensor_bytes
from telemetry.attach.trial_loaders import TrialLoaders, with_settings
from telemetry.core.trial_records import LoaderFacts, TrialPlan
from telemetry.hooks.patching import Patches
from telemetry.tune.memory_room import Room
from telemetry.tune.settings_grid import GridError, settings_grid
from telemetry.tune.settings_limits import Limits
from telemetry.tune.trial_process import TrialMemory
from telemetry.tune.trial_result import Settings, Trial, settings_for

NAMES = {"num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "pin_memory"}


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


def on_meta():
    """A tensor that is not in the host's memory cannot be had without a device; this one says so."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda")

    return torch.zeros(2).as_subclass(Elsewhere)


def test_a_stream_that_ignores_its_worker_gets_one_at_most():
    reasons, most = refused({"dataset": Stream()})
    assert "num_workers" in reasons
    assert most == 1
    assert "num_workers" not in refused({"dataset": Sharded()})[0]
    assert "num_workers" not in refused({"dataset": Stream(), "num_workers": 4})[0]  # the script knows what it does


def test_batches_on_a_device_get_no_workers():
    reasons, most = refused({"dataset": TensorDataset(on_meta())})
    assert {"num_workers", "pin_memory"} <= set(reasons)
    assert most == 0
    assert set(refused_batch({"pictures": [on_meta()]})) == {"num_workers", "pin_memory"}
    assert refused_batch({"pictures": [torch.zeros(2)]}) == {}


def test_the_order_is_kept_unless_it_is_random():
    items = Items()
    assert "in_order" in refused({"dataset": items})[0]
    assert "in_order" in refused({"dataset": items, "batch_sampler": [[0]]})[0]
    assert "in_order" not in refused({"dataset": items, "shuffle": True})[0]
    assert "in_order" not in refused({"dataset": items, "sampler": RandomSampler(items)})[0]


def test_data_sets_with_epochs_keep_no_workers():
    assert "persistent_workers" in refused({"dataset": PerEpoch()})[0]
    assert "persistent_workers" not in refused({"dataset": Items()})[0]


def test_settings_without_workers_drop_what_needs_workers():
    given = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "timeout": 5, "pin_memory": False}
    assert with_settings(given, {"num_workers": 0}, NAMES) == {"num_workers": 0, "pin_memory": False}
    assert with_settings(given, {}, NAMES) == given
    assert with_settings({}, {"num_workers": 1, "in_order": False}, NAMES) == {"num_workers": 1}  # an older torch


def test_loaders_are_told_apart_by_their_callers(observed):
    def loader_of(dataset):
        return DataLoader(dataset, 4)

    patches = Patches()
    loaders = TrialLoaders(TrialPlan(folder="", seconds=1), observed.tracker)
    loaders.patch_torch(sys.modules["torch.utils.data.dataloader"], patches)
    try:
        first = loader_of(Items())
        second = loader_of(Items())
        for _ in range(2):
            again = loader_of(Items())  # in every epoch a new loader: the same place
            list(again)
        with torch.no_grad():
            list(second)
        list(first)
    finally:
        patches.undo()
    facts = list(loaders.places.all.values())
    assert [one.loaders for one in facts] == [1, 1, 2]
    assert [one.trains for one in facts] == [True, False, True]
    assert facts[1].evaluation_batches == 16
    assert facts[2].batches == 32
    assert facts[0].batch_bytes == 64
    assert len({one.line for one in facts}) == 1
    assert tensor_bytes([torch.zeros(4), {"a": torch.zeros(2)}]) == 24


def test_a_plan_overrides_one_place_alone(observed):
    patches = Patches()
    seen = TrialLoaders(TrialPlan(folder="", seconds=1), observed.tracker)
    seen.patch_torch(sys.modules["torch.utils.data.dataloader"], patches)

    def make():
        first = DataLoader(Items(), 4)
        return first, DataLoader(Items(), 4, num_workers=1)

    def twice(loaders):
        loaders.patch_torch(sys.modules["torch.utils.data.dataloader"], patches)
        try:
            return make()
        finally:
            patches.undo()

    patches.undo()
    for loaders in (seen, None):
        if loaders is None:
            place = next(iter(seen.places.all))
            plan = TrialPlan(folder="", seconds=1, loaders={place: {"num_workers": 3, "prefetch_factor": 5}})
            loaders = TrialLoaders(plan, observed.tracker)
        first, second = twice(loaders)
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
    stream = LoaderFacts("here", "train.py", 1, max_workers=1)
    stream.refused = dict.fromkeys(("num_workers", "persistent_workers", "in_order"), "of this loader")
    assert settings_for(stream, Settings(wanted)) == gets
    assert settings_for(LoaderFacts("there", "train.py", 2), Settings(wanted)) == wanted


def trial(memory, worker, batch=0, workers=1):
    rest = dict.fromkeys(("steps_per_second", "predicted", "wait_ratio", "step_wait_seconds", "step_compute_seconds"))
    return Trial(
        **rest,
        number=1,
        wanted=Settings(),
        settings={"num_workers": workers},
        memory_bytes=memory,
        worker_bytes=worker,
        batch_bytes=batch,
        seconds=1.0,
        steps=10,
        failed="",
        remarks=(),
        output=(),
        evidence=None,
        loaders=(),
        device=None,
        evaluation_ratio=0.0,
    )


@pytest.mark.parametrize(
    ("workers", "words"), [(1, ""), (4, ""), (6, "6 workers would need"), (9, "more than 2 cores can hold")]
)
def test_no_more_workers_than_memory_and_cores_hold(workers, words):
    limits = Limits(Room(1 << 30, 1 << 30), None, cores=2, ranks=1)
    known = trial(memory=200 << 20, worker=100 << 20)
    found = limits.against(Settings({"num_workers": workers}), known, [known])
    assert words in found
    assert bool(found) == bool(words)


def test_batches_must_fit_into_shared_memory():
    limits = Limits(Room(1 << 40, 1 << 40), 64 << 20, cores=4, ranks=1)
    known = trial(memory=200 << 20, worker=100 << 20, batch=10 << 20)
    assert limits.against(Settings({"num_workers": 2}), known, [known]) == ""
    assert "/dev/shm" in limits.against(Settings({"num_workers": 2, "prefetch_factor": 4}), known, [known])


def test_a_grid_has_each_combination_once():
    found = settings_grid(["num_workers=0,2", "prefetch_factor=2,4", "sharing_strategy=file_system"])
    assert [settings.loader for settings in found] == [
        {"num_workers": 0},
        {"num_workers": 2, "prefetch_factor": 2},
        {"num_workers": 2, "prefetch_factor": 4},
    ]
    assert {settings.sharing for settings in found} == {"file_system"}
    with pytest.raises(GridError, match="twice"):
        settings_grid(["num_workers=0", "num_workers=2"])
    with pytest.raises(GridError, match="at most"):
        settings_grid([f"num_workers={','.join(map(str, range(40)))}", "prefetch_factor=1,2,3,4,5,6"])


class Readings:
    """A limit of 1000 bytes, and what is left of it at each reading."""

    def __init__(self, *left):
        self._left = iter(left)

    def now(self, used):
        del used
        return Room(1000, next(self._left))


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
def test_when_a_trial_must_end_for_memory(left, short):
    memory = TrialMemory("no such plan", Readings(*left))
    assert any([memory.short() for _ in left]) == short
