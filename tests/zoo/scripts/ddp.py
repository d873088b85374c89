"""Data-parallel training over gloo, started by torchrun. One rank may be slower than its peers.

``--slow`` says in what: its loader reads from slow storage, it computes more, or it keeps the books for all.
"""

from __future__ import annotations

import argparse
import os
import time

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __init__(self, seconds_per_sample: float) -> None:
        self.pictures = torch.rand(128, 3, 48, 48)
        self.seconds_per_sample = seconds_per_sample

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.seconds_per_sample:
            time.sleep(self.seconds_per_sample)  # the storage of this node
        return self.pictures[index % len(self.pictures)], index % 10


def keep_books(model: nn.Module, pictures: torch.Tensor) -> float:
    """Statistics of the activations for a dashboard, by one rank for all."""
    with torch.no_grad():
        return sum(float(model(pictures).std()) for _ in range(12))


def agreed(over: bool) -> bool:
    """As rank 0 says, which writes down the pace when its own time is up."""
    flag = torch.tensor(float(over))
    dist.broadcast(flag, src=0)
    return bool(flag)


def parse() -> argparse.Namespace:
    parser = common.arguments(__doc__, batch_size=8, width=24)
    parser.add_argument("--slow", choices=("nothing", "loader", "compute", "books", "hang"), default="nothing")
    parser.add_argument("--slow-rank", type=int, default=1)
    parser.add_argument("--hang-after", type=float, default=12.0)
    parser.add_argument("--hang-seconds", type=float, default=20.0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank:
        options.pace_file = None
    slow = options.slow if rank == options.slow_rank else "nothing"
    dist.init_process_group("gloo")
    dataset = Pictures(0.008 if slow == "loader" else 0.0)
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler, **common.loader_settings(options))
    network = common.picture_network(options.width)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    began = time.monotonic()
    for pictures, labels in loader:
        if slow == "compute":
            time.sleep(0.06)  # an accelerator that has clocked itself down
        if slow == "hang" and time.monotonic() - began > options.hang_after:
            slow = "nothing"
            time.sleep(options.hang_seconds)
        common.train_step(model, optimizer, pictures, labels)
        if slow == "books":
            keep_books(network, pictures)
        if agreed(pace.step()):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
