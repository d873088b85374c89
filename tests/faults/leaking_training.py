"""A training that leaks in one of several ways: ``leaking_training.py WHAT BYTES_PER_SECOND WORKERS SECONDS LIST_BYTES``.

``BYTES_PER_SECOND`` is what all processes together leak.
"""

import mmap
import random
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

from tests.quick_optimizers import QuickSGD

WHAT, (BYTES_PER_SECOND, SECONDS) = sys.argv[1], map(float, sys.argv[2:5:2])
WORKERS, LIST_BYTES = map(int, sys.argv[3:6:2])
STEP_SECONDS = 0.1
DOCUMENT_BYTES = 8000
torch.set_num_threads(1)


class Due:
    """What one process has to leak since the last call. By the clock, so that it leaks evenly on a busy machine."""

    def __init__(self, processes):
        self.bytes_per_second = BYTES_PER_SECOND / processes
        self.left, self.newest = 0.0, None

    def __call__(self, unit):
        now = time.monotonic()
        self.left += (now - (self.newest or now)) * self.bytes_per_second
        self.newest = now
        units = int(self.left / unit)
        self.left -= units * unit
        return units


class Documents(Dataset):
    def __init__(self):
        count = LIST_BYTES // DOCUMENT_BYTES if WHAT == "copied_list" else 64
        # Each is a list of 60 small objects.
        self.documents = [[str(word).zfill(70) for word in range(60)] for _ in range(count)]
        self.kept = []
        self.due = Due(WORKERS)
        self.order = None

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if self.order is None:
            self.order = random.Random(index).sample(range(len(self.documents)), len(self.documents))
        length = 10
        if WHAT == "copied_list":
            for _ in range(self.due(DOCUMENT_BYTES)):
                length += sum(map(len, self.documents[self.order.pop()])) % 2 if self.order else 0
        elif WHAT == "worker_cache":
            self.kept.append(b"x" * self.due(1))
        elif WHAT == "worker_mmap":
            pages = self.due(4096)
            if pages:
                leaked = mmap.mmap(-1, pages * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                leaked.write(bytes(len(leaked)))
                self.kept.append(leaked)
        elif WHAT == "kept_batches":
            length += self.due(4)
        return torch.ones(length)


def main():
    loader = DataLoader(Documents(), batch_size=None, num_workers=WORKERS, shuffle=True, persistent_workers=True)
    model = torch.nn.Linear(10, 1)
    optimizer = QuickSGD(model.parameters(), lr=0.1)
    kept, due = [], Due(1)
    until = time.monotonic() + SECONDS
    for batch in loader:
        optimizer.zero_grad()
        model(batch[:10]).mean().backward()
        optimizer.step()
        if WHAT == "kept_tensors":
            kept.append(torch.ones(due(4)))
        if WHAT == "kept_batches":
            kept.append(batch)
        time.sleep(STEP_SECONDS)
        if time.monotonic() > until:
            break


if __name__ == "__main__":
    main()
