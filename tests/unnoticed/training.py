"""A small training for the scripts of these tests. It imports nothing of the agent."""

from __future__ import annotations

import time

import torch
from quick_optimizers import QuickSGD
from torch.utils.data import DataLoader, Dataset

from unnoticed.looks import looked_at

_sleep = time.sleep  # a script may replace it


def work() -> None:
    """Take the time of a step: the agent does not split one that is shorter than a millisecond."""
    _sleep(0.002)


class Items(Dataset):
    """64 items of 8 ones."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(8)


class Training:
    """A model, an optimizer, and a loader of 16 batches.

    Args:
        items: the data set.
        optimizer: its class.
        workers: how many, which are forked.
        options: of the loader.
    """

    def __init__(self, items=None, *, optimizer=QuickSGD, workers: int = 0, **options) -> None:
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)
        options = {"batch_size": 4, "multiprocessing_context": "fork" if workers else None} | options
        self.loader = DataLoader(Items() if items is None else items, num_workers=workers, **options)

    def step(self, x: torch.Tensor) -> None:
        """Forward, backward and the optimizer."""
        work()
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()

    def epoch(self) -> None:
        """Train for an epoch."""
        for x in self.loader:
            self.step(x)

    def run(self, looks: int = 4, *, bare: int = 3) -> None:
        """Train for epoch after epoch; see `looked_at` for how many."""
        for _ in looked_at(looks, bare=bare):
            self.epoch()
