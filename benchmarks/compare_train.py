"""A small training whose work per step is known. `benchmarks.compare_pairs` and `benchmarks.change_series` run it.

    python -m telemetry run benchmarks/compare_train.py [--seconds 24] [--work 100] [--loader thread|worker]

``--work`` is the work of the slower part of a step: of the compute, or with ``--loader worker`` of a batch's fetch.
"""

from __future__ import annotations

import argparse
import time
from typing import Final

import torch
from torch.utils.data import DataLoader, Dataset

_SIZE: Final = 128
_BATCH: Final = 4
_FEW: Final = 20
"""Work of the part of a step that is not the slower one."""


def work(amount: int) -> torch.Tensor:
    """Multiply small matrices this often: about a tenth of a millisecond each."""
    values = weights = torch.full((_SIZE, _SIZE), 1.0 / _SIZE)
    for _ in range(amount):
        values = values @ weights
    return values


class Parts(Dataset[torch.Tensor]):
    """Each sample is a part of a batch."""

    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return work(self.amount // _BATCH)[0]


def main() -> None:
    """Train for a while."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--work", type=int, default=100)
    parser.add_argument("--loader", choices=("thread", "worker"), default="thread")
    parser.add_argument("--later-work", type=int, help="the work from the middle on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    starved = options.loader == "worker"
    data = Parts(options.work if starved else _FEW)
    model = torch.nn.Linear(_SIZE, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    for batch in DataLoader(data, batch_size=_BATCH, num_workers=1 if starved else 0):
        passed = time.perf_counter() - began
        if passed > options.seconds:
            break
        late = options.later_work is not None and 2 * passed > options.seconds
        work(_FEW if starved else options.later_work if late else options.work)
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
