"""Samples that are counted in each fetch: of streams, and of samplers of the user's own."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import telemetry
from telemetry.attach.fetched_samples import FetchedSamples
from telemetry.report.log_reader import load
from telemetry.report.summary import summarize


class Items(Dataset):
    def __init__(self, size: int = 30, fail_at: int = -1) -> None:
        self.size = size
        self.fail_at = fail_at

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if int(index) == self.fail_at:
            raise ValueError(index)
        return torch.full((4,), float(index))


class Stream(IterableDataset):
    """Its first worker has most of the items."""

    def __init__(self, size: int = 30) -> None:
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        if info is None:
            return iter(torch.zeros(self.size, 4))
        small = self.size // 6
        return iter(torch.zeros(small if info.id else self.size - small * (info.num_workers - 1), 4))


class Seedable(RandomSampler):
    """As accelerate's."""


class Sharded(BatchSampler):
    """As accelerate's."""


class Uneven(BatchSampler):
    def __iter__(self):
        yield from ([0, 1, 2], (3,), range(4, 6), torch.tensor([6, 7, 8, 9]), np.array([10]))


def packed(items):
    """A batch whose first dimension is not the samples. The script is told their number."""
    return torch.cat(list(items)).unsqueeze(0), len(items)


class Trainer:
    def __init__(self) -> None:
        self.weight = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.samples = 0

    def step(self, batch) -> None:
        x, samples = batch
        (self.weight * x.sum()).sum().backward()
        self.optimizer.step()
        self.samples += samples

    def train(self, loader, epochs: int = 1, stop_after: int | None = None) -> None:
        for _ in range(epochs):
            for number, batch in enumerate(loader, 1):
                self.step(batch)
                if number == stop_after:
                    break


ITEMS = Items()
LOADERS = {
    "stream": {"dataset": Stream(), "batch_size": 4},
    "stream without the last": {"dataset": Stream(), "batch_size": 4, "drop_last": True},
    "sampler": {"dataset": ITEMS, "batch_size": 4, "sampler": Seedable(ITEMS)},
    "batch sampler": {"dataset": ITEMS, "batch_sampler": Sharded(SequentialSampler(ITEMS), 4, drop_last=False)},
    "uneven": {"dataset": ITEMS, "batch_sampler": Uneven(SequentialSampler(ITEMS), 3, drop_last=False)},
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("workers", "kept"), [(0, False), (2, False), (2, True)])
def test_samples_are_those_that_the_script_trained_on(run, workers, kept, kind):
    """Epochs with a shorter last batch, one that is left early, and again a whole one."""
    trainer = Trainer()
    loader = DataLoader(num_workers=workers, persistent_workers=kept, collate_fn=packed, **LOADERS[kind])
    trainer.train(loader, epochs=2)
    trainer.train(loader, stop_after=2)
    trainer.train(loader)
    assert run()["samples"] == trainer.samples > 0


def test_workers_that_are_spawned_count_too(run):
    trainer = Trainer()
    trainer.train(DataLoader(Stream(), 4, num_workers=2, collate_fn=packed, multiprocessing_context="spawn"), epochs=2)
    assert run()["samples"] == trainer.samples == 60


class Nested(IterableDataset):
    """Its items are the batches of two other streams in turn."""

    def __iter__(self):
        inner = [DataLoader(Stream(6600), batch_size=6, collate_fn=len) for _ in range(2)]
        for sizes in zip(*inner, strict=True):
            yield torch.tensor([float(sum(sizes))] * 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_reads_other_loaders(run, workers):
    """A wrapper around ``collate_fn`` for each batch would end the training after a thousand."""
    trainer = Trainer()
    trainer.train(DataLoader(Nested(), batch_size=1, num_workers=workers, collate_fn=packed))
    assert run()["samples"] == trainer.samples == 1100


def warning(items):
    warnings.warn("of the caller", stacklevel=2)
    return packed(items)


def test_a_warning_of_the_collate_function_names_torch_s_file(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer().train(DataLoader(Stream(), batch_size=4, collate_fn=warning))
    assert {Path(each.filename).name for each in caught if str(each.message) == "of the caller"} == {"fetch.py"}
    assert run()["samples"] == 30


def test_tokens_and_samples_of_the_same_batches(run):
    samples = tokens = 0
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for workers in (0, 2):
        for batch in DataLoader(Stream(), 4, num_workers=workers, collate_fn=as_texts):
            weight.sum().backward()
            optimizer.step()
            samples, tokens = samples + len(batch["input_ids"]), tokens + batch["input_ids"].numel()
    totals = run()
    assert (totals["samples"], totals["tokens"]) == (samples, tokens) == (60, 420)


def as_texts(items):
    return {"input_ids": torch.zeros(len(items), 7, dtype=torch.long)}


@pytest.mark.parametrize("workers", [0, 2])
def test_more_batches_than_a_worker_looks_at_for_tokens(run, workers):
    trainer = Trainer()
    trainer.train(DataLoader(Stream(150), 2, num_workers=workers, collate_fn=packed))
    assert run()["samples"] == trainer.samples == 150


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_with_the_same_kind_of_loader(run, workers):
    trainer = Trainer()
    other = DataLoader(Stream(17), 5, num_workers=workers, collate_fn=packed)
    for number, batch in enumerate(DataLoader(Stream(), 2, num_workers=workers, collate_fn=packed)):
        trainer.step(batch)
        if number % 5 == 3:
            with torch.no_grad():
                list(other)
    assert run()["samples"] == trainer.samples == 30


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_phase_do_not_count(run, workers):
    trainer = Trainer()
    batches = iter(DataLoader(Stream(60), 2, num_workers=workers, collate_fn=packed))
    for number, batch in enumerate(batches):
        trainer.step(batch)
        if number % 7 == 3:
            with telemetry.phase("evaluation"):
                next(batches)
    assert run()["samples"] == trainer.samples < 60


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fetch_that_raises_takes_no_samples_from_others(run, workers):
    trainer, items = Trainer(), Items(fail_at=9)
    sampler = Sharded(SequentialSampler(items), 4, drop_last=False)
    batches = iter(DataLoader(items, batch_sampler=sampler, num_workers=workers, collate_fn=packed))
    while True:
        try:
            trainer.step(next(batches))
        except StopIteration:
            break
        except ValueError:
            continue
    assert run()["samples"] == trainer.samples == 26


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_goes_on_from_a_state(run, workers):
    trainer = Trainer()

    def loader():
        sampler = Sharded(SequentialSampler(ITEMS), 4, drop_last=False)
        return StatefulDataLoader(ITEMS, batch_sampler=sampler, num_workers=workers, collate_fn=packed)

    first = loader()
    trainer.train(first, stop_after=3)
    state, second = first.state_dict(), loader()
    second.load_state_dict(state)
    trainer.train(second)
    assert run()["samples"] == trainer.samples == 30


def test_an_iteration_that_began_before_the_agent_is_unknown(tmp_path):
    batches = iter(DataLoader(Stream(), 4, collate_fn=packed))
    trainer = Trainer()
    trainer.step(next(batches))
    telemetry.start(tmp_path, port="off", interval_seconds=0.1, start_line=False)
    for batch in batches:
        trainer.step(batch)
    telemetry.stop()
    (rank,) = summarize(load(tmp_path))["ranks"]
    assert rank["samples"] is None


def broken(items):
    raise LookupError(len(items))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_collate_function_is_as_it_was(run, workers):
    with pytest.raises(LookupError) as caught:
        list(DataLoader(Stream(), 4, num_workers=workers, collate_fn=broken))
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "noting" not in names
    run()


def test_after_the_agent_loaders_are_as_they_were(run):
    loader = DataLoader(Stream(), 4, collate_fn=packed)
    Trainer().train(loader)
    run()
    fetcher = iter(loader)._dataset_fetcher
    assert "fetch" not in vars(fetcher)
    assert fetcher.collate_fn is packed


@pytest.mark.parametrize(
    ("indices", "samples"),
    [([1, 2], 2), ((), 0), (np.zeros((3, 2)), 3), (torch.tensor(4), None), ({1, 2}, None), ("ab", None), (7, None)],
)
def test_samples_of_indices(indices, samples):
    assert FetchedSamples(stream=False).of(indices) == samples


def test_indices_of_an_unknown_class_are_not_touched():
    class Own(list):
        def __len__(self) -> int:
            raise AssertionError("a method of the user's")

    assert FetchedSamples(stream=False).of(Own([1])) is None
