"""huggingface/datasets#8669, hiyouga/LlamaFactory#9590: fewer shards than workers, so some workers have nothing to read."""

import time

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    def __init__(self, count):
        self.shards = list(range(count))

    def __iter__(self):  # <- slow
        worker = get_worker_info()
        mine = self.shards[worker.id :: worker.num_workers] if worker else self.shards
        for shard in mine:
            for number in range(1_000_000):
                time.sleep(0.006)  # read and decode elsewhere  # <- slow
                yield torch.full((64,), float(shard + number % 97))  # <- slow


def main():
    loader = DataLoader(Shards(16 if common.FIXED else 1), batch_size=8, num_workers=common.workers(4))
    trainer, pace = common.Trainer(seconds=0.012), common.Pace()
    for x in loader:
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
