"""A small training whose work per step is known. `benchmarks.compare` runs it.

    python -m telemetry run benchmarks/compare_train.py [--seconds 20] [--loader thread|worker|busy]

A step needs the CPU for a part of its time. For the rest the training thread waits, as for a device, or with ``--loader
worker`` the worker does. With ``--loader busy`` a step has no such wait: the training thread computes all the time.
"""

from __future__ import annotations

import argparse
import time
from typing import Final

import torch
from torch.utils.data import DataLoader

_SIZE: Final = 128
_BATCH: Final = 4
_MULTIPLICATIONS: Final = 20
_BUSY_MULTIPLICATIONS: Final = 120
_PAUSE_SECONDS: Final = 0.010


def work(share: float = 1.0) -> torch.Tensor:
    """Multiply small matrices, about 2 ms in all, and wait for 10 ms."""
    values = multiplied(round(_MULTIPLICATIONS * share))
    time.sleep(_PAUSE_SECONDS * share)
    return values


def multiplied(times: int) -> torch.Tensor:
    """Multiply small matrices, 0.05 to 0.1 ms each time."""
    values = weights = torch.full((_SIZE, _SIZE), 1.0 / _SIZE)
    for _ in range(times):
        values = values @ weights
    return values


class Parts:
    """A data set of which each sample is a part of a batch."""

    def __init__(self, *, starved: bool) -> None:
        self.starved = starved

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return work(1 / _BATCH)[0] if self.starved else torch.ones(_SIZE)


def main() -> None:
    """Train for a while."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--loader", choices=("thread", "worker", "busy"), default="thread")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    starved = options.loader == "worker"
    model = torch.nn.Linear(_SIZE, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    for batch in DataLoader(Parts(starved=starved), batch_size=_BATCH, num_workers=1 if starved else 0):
        if time.perf_counter() - began > options.seconds:
            break
        if options.loader == "busy":
            multiplied(_BUSY_MULTIPLICATIONS)
        elif not starved:
            work()
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
