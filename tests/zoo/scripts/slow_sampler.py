"""Class-balanced training: a batch sampler weighs the whole data set anew for every batch, in pure Python.

It runs on the training thread, however many workers there are. ``--lookup-ms`` has it wait for a server as well, and
``--precomputed BATCHES`` draws so many batches before the training, and them again after the last.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator

import common
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Balanced(Sampler):
    def __init__(self, labels: list[int], size: int, lookup_seconds: float) -> None:
        self.labels = labels
        self.size = size
        self.lookup_seconds = lookup_seconds
        self.seen = dict.fromkeys(set(labels), 1)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            time.sleep(self.lookup_seconds)
            weights = [1 / self.seen[label] for label in self.labels]
            chosen = random.choices(range(len(self.labels)), weights, k=self.size)
            for index in chosen:
                self.seen[self.labels[index]] += 1
            yield chosen


def main() -> None:
    parser = common.arguments(__doc__, num_workers=2)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--lookup-ms", type=float, default=0.0)
    parser.add_argument("--precomputed", type=int, metavar="BATCHES")
    options = parser.parse_args()
    pictures = torch.rand(1, 3, 64, 64).expand(options.samples, -1, -1, -1)
    labels = torch.randint(0, 10, (options.samples,))
    batches: Iterable[list[int]] = Balanced(labels.tolist(), options.batch_size, options.lookup_ms / 1e3)
    if options.precomputed:
        batches = itertools.cycle(list(itertools.islice(batches, options.precomputed)))
    loader = DataLoader(
        TensorDataset(pictures, labels),
        batch_sampler=batches,
        **common.loader_settings(options),
    )
    common.train(loader, options)


if __name__ == "__main__":
    main()
