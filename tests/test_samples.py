"""Samples and tokens that the training took: no batch that was prefetched, evaluated or thrown away."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import telemetry
from telemetry.log.reader import load
from tests.data_sets import Numbers, Stream
from tests.report_logs import summarize

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Uneven(BatchSampler):
    """Of the user: batches of different sizes."""

    def __iter__(self):
        yield from ([0, 1, 2], (3,), range(4, 6), [6, 7, 8, 9], [10])


class Shuffled(RandomSampler):
    """Of the user."""


class Trainer:
    """A loop that counts the samples that it trains on. Its batches are lists of samples."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.batches = self.samples = 0

    def step(self, *batches: list) -> None:
        self.weight.sum().backward()
        self.optimizer.step()
        self.batches += len(batches)
        self.samples += sum(map(len, batches))

    def train(self, loader, epochs: int = 1, stop_after: int | None = None) -> None:
        for _ in range(epochs):
            for number, batch in enumerate(loader, 1):
                self.step(batch)
                if number == stop_after:
                    break


@pytest.fixture
def counted(run):
    """Ends the run; returns its samples and tokens."""

    def ended() -> tuple[int | None, int | None]:
        rank = run()
        return rank["samples"], rank["tokens"]

    return ended


def loader_of(data: Dataset, batch_size: int | None = 4, workers: int = 0, **settings) -> DataLoader:
    if "batch_sampler" not in settings:
        settings["batch_size"] = batch_size
    return DataLoader(data, num_workers=workers, collate_fn=list, **settings)


LOADERS = {
    "a smaller last batch": {"batch_size": 8},
    "without it": {"batch_size": 8, "drop_last": True, "shuffle": True},
    "torch's shard": {"sampler": DistributedSampler(Numbers(60), num_replicas=3, rank=1)},
    "a sampler of the user": {"sampler": Shuffled(Numbers(60))},
    "a batch sampler of the user": {"batch_sampler": Uneven(SequentialSampler(Numbers(60)), 3, False)},
}


@pytest.mark.parametrize(
    ("kind", "kept"), [*((kind, False) for kind in LOADERS), ("a smaller last batch", True), ("without it", True)]
)
def test_samples_with_workers_are_those_that_the_script_trained_on(counted, kept, kind):
    """Over several epochs. One is left while other batches are prefetched, of the same size where nothing varies."""
    trainer, loader = Trainer(), loader_of(Numbers(60), workers=2, persistent_workers=kept, **LOADERS[kind])
    trainer.train(loader, epochs=3)
    if "batch_sampler" not in LOADERS[kind]:
        trainer.train(loader, stop_after=2)
    trainer.train(loader, epochs=2)
    assert counted() == (trainer.samples, None)


@pytest.mark.parametrize(("epochs", "samples"), [(20, 120), (40, None)])
def test_more_epochs_between_two_readings_than_workers_keep_are_unknown(observed, epochs, samples):
    Trainer().train(loader_of(Numbers(6), workers=1, persistent_workers=True), epochs)
    observed.read()
    observed.accounting.batches.settle(0.0)
    assert observed.accounting.trained_samples() == samples


@pytest.mark.parametrize("data", [Numbers(33), Stream()], ids=["items", "stream"])
def test_without_workers_only_the_last_batch_of_a_stream_counts_as_a_whole_one(counted, data):
    trainer = Trainer()
    trainer.train(loader_of(data, 5), epochs=2)
    assert counted() == (trainer.samples if isinstance(data, Numbers) else trainer.batches * 5, None)


def test_a_fetch_that_raises_takes_nothing_from_others(counted):
    trainer = Trainer()
    batches = iter(loader_of(Numbers(60, fail_at=9), 3, workers=2))
    while True:
        try:
            trainer.step(next(batches))
        except StopIteration:
            break
        except ValueError:
            continue
    assert counted() == (trainer.samples, None) == (57, None)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_batches_do_not_count(counted, workers):
    """The training goes on after each; its last batch is smaller."""
    trainer = Trainer()
    for number, batch in enumerate(loader_of(Numbers(62), 4, workers)):
        trainer.step(batch)
        if number % 5 == 2:
            with torch.no_grad():
                list(loader_of(Numbers(33), 5, workers))
    assert counted() == (trainer.samples, None)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_thrown_away_after_a_restart_do_not_count(counted, workers):
    trainer = Trainer()
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    for number, batch in enumerate(loader_of(Numbers(400), 4, workers)):
        if number < 60:
            continue
        trainer.step(batch)
        time.sleep(0.05)  # much longer than a busy machine holds up a batch that is thrown away
    assert counted() == (trainer.samples, None)


def test_loaders_that_are_asked_in_turn(counted):
    trainer = Trainer()
    for batches in zip(loader_of(Numbers(38), 4, workers=2), loader_of(Numbers(29), 3, workers=1), strict=True):
        trainer.step(*batches)
    assert counted() == (trainer.samples, None)


def test_a_loader_that_goes_on_from_a_state(counted):
    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(Numbers(60), 7, num_workers=2, collate_fn=list)

    trainer, first = Trainer(), loader()
    trainer.train(first, stop_after=3)
    state, second = first.state_dict(), loader()
    second.load_state_dict(state)
    trainer.train(second, epochs=2)
    assert counted() == (trainer.samples, None)


# -- what is not known is absent -----------------------------------------------------------------------------------


def test_an_iteration_whose_workers_began_before_the_agent_is_unknown(tmp_path):
    trainer, batches = Trainer(), iter(loader_of(Numbers(60), workers=1))
    trainer.step(next(batches))
    telemetry.start(tmp_path, port="off", interval_seconds=0.1, start_line=False)
    for batch in batches:
        trainer.step(batch)
    telemetry.stop()
    (rank,) = summarize(load(tmp_path))["ranks"]
    assert rank["samples"] is None


UNKNOWN = {
    "no batch size, no workers": DataLoader(torch.zeros(9, 4), batch_size=None),
    "no batch size, workers": DataLoader(torch.zeros(9, 4), batch_size=None, num_workers=2),
    "a batch sampler of the user, no workers": DataLoader(Numbers(60), batch_sampler=Uneven(range(1), 1, False)),
}


@pytest.mark.parametrize("loader", UNKNOWN.values(), ids=UNKNOWN)
def test_one_batch_without_a_size_makes_the_sum_unknown(counted, loader):
    trainer = Trainer()
    trainer.train(loader_of(Numbers(50), 8))
    trainer.train(loader)
    assert counted() == (None, None)


# -- tokens are what the script tells ------------------------------------------------------------------------------


def test_tokens_of_the_training(counted):
    trainer = Trainer()
    for batch in loader_of(Numbers(50), 10):
        trainer.step(batch)
        telemetry.tokens(np.int64(128))
    with torch.no_grad():
        for _ in loader_of(Numbers(50), 10):
            telemetry.tokens(1000)
    with telemetry.phase("checkpoint"):
        telemetry.tokens(1000)
    assert counted() == (50, 5 * 128)


@pytest.mark.parametrize(
    ("wrong", "kind"), [(1.5, TypeError), (True, TypeError), (torch.tensor(3), TypeError), (-1, ValueError)]
)
def test_tokens_are_a_whole_number(counted, wrong, kind):
    with pytest.raises(kind, match="tokens are"):
        telemetry.tokens(wrong)
