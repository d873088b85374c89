"""Samples and tokens that the training took: every batch of it, none that was prefetched, evaluated or thrown away."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import telemetry


class Trainer:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.samples = 0

    def step(self, batch) -> None:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        self.model(x.float()).sum().backward()
        self.optimizer.step()
        self.samples += len(x)

    def train(self, loader, epochs: int = 1, stop_after: int | None = None) -> None:
        for _ in range(epochs):
            for number, batch in enumerate(loader, 1):
                self.step(batch)
                if number == stop_after:
                    break


DATA = TensorDataset(torch.zeros(50, 4))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_of_an_epoch_is_counted_as_it_is(run, workers, drop_last):
    trainer = Trainer()
    trainer.train(DataLoader(DATA, 8, num_workers=workers, drop_last=drop_last, shuffle=True), epochs=3)
    assert trainer.samples == (150 if not drop_last else 144)
    assert run()["samples"] == trainer.samples


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_were_only_prefetched_do_not_count(run, persistent):
    trainer = Trainer()
    loader = DataLoader(DATA, 4, num_workers=2, persistent_workers=persistent, prefetch_factor=4)
    trainer.train(loader, epochs=2, stop_after=3)
    trainer.train(loader)
    assert run()["samples"] == trainer.samples == 24 + 50


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_that_become_longer_were_trained_from_the_first_on(run, workers):
    """The short ones look like batches that are thrown away on the way to where a checkpoint was written."""
    trainer = Trainer()
    for number, batch in enumerate(DataLoader(DATA, 4, num_workers=workers)):
        trainer.step(batch)
        if number > 4:
            time.sleep(0.02)
    assert run()["samples"] == trainer.samples == 50


def test_evaluation_batches_do_not_count(run):
    trainer = Trainer()
    for _ in range(2):
        trainer.train(DataLoader(DATA, 8))
        with torch.no_grad():
            for (batch,) in DataLoader(TensorDataset(torch.zeros(33, 4)), 5):
                trainer.model(batch)
    assert run()["samples"] == trainer.samples == 100


def test_an_evaluation_in_the_middle_of_an_epoch_changes_nothing(run):
    trainer, loader = Trainer(), DataLoader(TensorDataset(torch.zeros(99, 4)), 4)
    for number, batch in enumerate(loader):
        trainer.step(batch)
        if number % 10 == 5:
            with torch.no_grad():
                for (other,) in DataLoader(DATA, 16):
                    trainer.model(other)
    assert run()["samples"] == trainer.samples == 99


def test_loaders_that_are_asked_in_turn_are_told_apart(run):
    trainer = Trainer()
    for large, small in zip(DataLoader(DATA, 8), DataLoader(TensorDataset(torch.zeros(20, 4)), 3), strict=True):
        trainer.step(torch.cat([large[0], small[0]]))
    assert run()["samples"] == trainer.samples == 70


@pytest.mark.parametrize(
    "sampler", [SubsetRandomSampler(range(17)), DistributedSampler(DATA, num_replicas=3, rank=1)], ids=["sub", "ddp"]
)
def test_a_sampler_of_torch_decides_how_many_there_are(run, sampler):
    trainer = Trainer()
    trainer.train(DataLoader(DATA, 4, sampler=sampler), epochs=2)
    assert run()["samples"] == trainer.samples == 34


class Wide(Dataset):
    """Makes whole batches itself."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(index + 1, 4)


def test_one_batch_of_unknown_size_makes_the_sum_unknown(run):
    """Without ``batch_size``, nothing tells whether the first dimension is that of the samples."""
    trainer = Trainer()
    trainer.train(DataLoader(DATA, 8))
    trainer.train(DataLoader(Wide(), batch_size=None))
    assert run()["samples"] is None


def test_batches_that_are_thrown_away_after_a_restart_do_not_count(run):
    trainer, loader = Trainer(), DataLoader(TensorDataset(torch.zeros(400, 4)), 4)
    for number, batch in enumerate(loader):
        if number < 60:
            continue
        trainer.step(batch)
        time.sleep(0.01)
    assert run()["samples"] == trainer.samples == 160


def test_a_step_of_two_loaders_throws_both_batches_away(run):
    trainer, data = Trainer(), TensorDataset(torch.zeros(400, 4))
    for number, (batch, _) in enumerate(zip(DataLoader(data, 4), DataLoader(data, 4), strict=True)):
        if number < 60:
            continue
        trainer.step(batch)
        time.sleep(0.01)
    assert run()["samples"] == 2 * trainer.samples == 320


def test_the_last_line_of_the_log_has_the_samples(run, tmp_path):
    Trainer().train(DataLoader(DATA, 8), epochs=2)
    assert run()["samples"] == 100
    (path,) = (tmp_path / "run" / "logs").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["samples_total"] for line in lines if line["event"] == "run_end"] == [100]


# -- tokens ------------------------------------------------------------------------------------------------------


def test_tokens_are_those_that_the_script_tells(run):
    trainer = Trainer()
    for batch in DataLoader(DATA, 10):
        trainer.step(batch)
        telemetry.tokens(np.int64(128))
    with torch.no_grad():
        for (batch,) in DataLoader(DATA, 10):
            trainer.model(batch)
            telemetry.tokens(1000)
    with telemetry.phase("checkpoint"):
        telemetry.tokens(1000)
    assert run()["tokens"] == 5 * 128


def test_without_a_word_on_tokens_there_are_none(run):
    Trainer().train(DataLoader(DATA, 10))
    assert run()["tokens"] is None


@pytest.mark.parametrize(
    ("wrong", "kind"), [(1.5, TypeError), (True, TypeError), (torch.tensor(3), TypeError), (-1, ValueError)]
)
def test_tokens_are_a_whole_number(run, wrong, kind):
    with pytest.raises(kind, match="tokens are"):
        telemetry.tokens(wrong)


def test_tokens_may_be_told_without_an_agent():
    telemetry.tokens(5)
