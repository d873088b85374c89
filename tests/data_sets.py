"""Data sets that several tests use."""

from __future__ import annotations

import time

import torch
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset):
    """The numbers from 0 to ``length - 1``. Each takes some seconds; the one at ``fail_at`` raises ValueError."""

    def __init__(self, length: int = 12, seconds: float = 0.0, fail_at: int | None = None) -> None:
        self.length, self.seconds, self.fail_at = length, seconds, fail_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.fail_at:
            raise ValueError(f"no sample {index}")
        if self.seconds:
            time.sleep(self.seconds)
        return index


class Stream(IterableDataset):
    """The numbers from 0 to 11, distributed over the workers."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            yield from range(12)
        else:
            yield from range(worker.id, 12, worker.num_workers)
