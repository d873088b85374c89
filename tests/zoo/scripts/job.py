"""Data-parallel training on several nodes over gloo, one torchrun on each.

``--slow`` says what one rank does more slowly than its peers, or all ranks of its node. ``--hang`` says in what one rank
stops to go on. The others wait in a collective until its timeout ends the job, as it does in production.
"""

from __future__ import annotations

import argparse
import io
import os
import threading
import time
from datetime import timedelta

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

ACCELERATOR_SECONDS = 0.03
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class Pictures(Dataset):
    """Pictures on the storage of a node, which may be slow, or stop to answer."""

    def __init__(self, seconds_per_sample: float = 0.0) -> None:
        self.pictures = torch.rand(128, 3, 32, 32)
        self.seconds_per_sample = seconds_per_sample
        self.answers = True

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self.answers:
            reading, _writing = os.pipe()
            os.read(reading, 1)
        if self.seconds_per_sample:
            time.sleep(self.seconds_per_sample)
        return self.pictures[index % len(self.pictures)], index % 10


class Bucket(io.BytesIO):
    """A remote store: 2 MB/s."""

    def write(self, data) -> int:
        time.sleep(len(data) / 2e6)
        return super().write(data)


def throttled() -> None:
    time.sleep(0.06)


def evaluate(model: nn.Module, pictures: Pictures) -> None:
    with torch.no_grad():
        for number, (batch, _) in enumerate(DataLoader(pictures, 8)):
            model(batch)
            if number == 7:
                break


def publish_metrics(lock: threading.Lock) -> None:
    with lock:  # whoever holds it does not release it
        pass


def agreed(over: bool) -> bool:
    """As rank 0 says, which writes down the pace when its own time is up."""
    flag = torch.tensor(float(over))
    dist.broadcast(flag, src=0)
    return bool(flag)


def parse() -> argparse.Namespace:
    parser = common.arguments(__doc__, batch_size=4, width=8)
    parser.add_argument("--slow", choices=("nothing", "loader", "compute", "evaluation", "checkpoint", "node"))
    parser.add_argument("--hang", choices=("nothing", "fetch", "lock", "left", "order"))
    parser.add_argument("--odd-rank", type=int, default=1)
    parser.add_argument("--hang-after", type=float, default=10.0)
    parser.set_defaults(slow="nothing", hang="nothing")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rank, ranks_of_node = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if rank:
        options.pace_file = None
    odd = rank == options.odd_rank
    with_odd = rank // ranks_of_node == options.odd_rank // ranks_of_node
    slow = options.slow if odd or (options.slow == "node" and with_odd) else "nothing"
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    data = Pictures(0.016 if slow == "loader" else 0.0)
    network = common.picture_network(options.width)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace, step, began, lock = common.Pace(options), 0, time.monotonic(), threading.Lock()
    for pictures, labels in DataLoader(data, options.batch_size, **common.loader_settings(options)):
        step += 1
        if slow in {"compute", "node"}:
            throttled()
        common.train_step(model, optimizer, pictures, labels)
        time.sleep(ACCELERATOR_SECONDS)
        if slow == "evaluation" and step % 10 == 0:
            evaluate(network, Pictures(0.012))
        if slow == "checkpoint" and step % 10 == 0:
            torch.save({"model": network.state_dict(), "table": torch.zeros(300_000)}, Bucket())
        if odd and options.hang != "nothing" and time.monotonic() - began > options.hang_after:
            if options.hang == "fetch":
                data.answers = False
            elif options.hang == "lock":
                lock.acquire()
                publish_metrics(lock)
            elif options.hang == "order":
                dist.all_reduce(torch.zeros(3))
            elif options.hang == "left":
                break
        if agreed(pace.step()):
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
