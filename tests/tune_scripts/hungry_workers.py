"""Each worker takes a lot of memory, and more workers would be faster: fetches wait for storage."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORKER_BYTES = 150 << 20


class Remote(Dataset):
    """Every item takes 10 ms to come. The first one makes an index in memory."""

    def __init__(self) -> None:
        self.index: bytearray | None = None

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        if self.index is None:
            self.index = bytearray(WORKER_BYTES)
            self.index[::4096] = b"1" * len(self.index[::4096])
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
