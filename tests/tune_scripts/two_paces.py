"""Trains on two ranks that do not wait for each other in their steps. Rank 1 takes at least `SLOW_SECONDS` for a step."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.quick_optimizers import QuickSGD

SLOW_SECONDS = 0.2


class Slow(Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, item: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.zeros(8)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    model = nn.Linear(8, 2)
    optimizer = QuickSGD(model.parameters(), lr=0.1)
    for items in DataLoader(Slow(), batch_size=8, shuffle=True):
        model(items).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 1:
            time.sleep(SLOW_SECONDS)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
