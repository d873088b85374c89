"""A data set of one shard, read by one worker that is fast enough."""

import time

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    def __init__(self, count):
        self.shards = list(range(count))

    def __iter__(self):
        worker = get_worker_info()
        for shard in self.shards[worker.id :: worker.num_workers]:
            for number in range(1_000_000):
                time.sleep(0.0005)
                yield torch.full((64,), float(shard + number % 97))


def main():
    loader = DataLoader(Shards(1), batch_size=8, num_workers=common.workers(1))
    trainer, pace = common.Trainer(seconds=0.02), common.Pace()
    for x in loader:
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
