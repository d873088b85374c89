"""Fetches wait for storage, so more workers are faster than there are cores."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    """Every item takes 10 ms to come."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)
        return torch.zeros(16), item % 10


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Linear(16, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for items, labels in DataLoader(Remote(), batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(items), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
