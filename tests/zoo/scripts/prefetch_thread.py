"""A thread of the script's own iterates the DataLoader and keeps a queue of batches filled."""

from __future__ import annotations

import queue
import threading
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class RemotePictures(Dataset):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.0005)
        return torch.full((3, 64, 64), index % 256 / 255), index % 10


class Prefetcher:
    def __init__(self, loader: DataLoader, depth: int) -> None:
        self.loader = loader
        self.ready: queue.Queue = queue.Queue(depth)
        threading.Thread(target=self.fill, daemon=True).start()

    def fill(self) -> None:
        for batch in self.loader:
            self.ready.put(batch)

    def __iter__(self):
        while True:
            yield self.ready.get()


def main() -> None:
    options = common.arguments(__doc__).parse_args()
    loader = DataLoader(RemotePictures(), options.batch_size, shuffle=True, **common.loader_settings(options))
    common.train(Prefetcher(loader, 4), options)


if __name__ == "__main__":
    main()
