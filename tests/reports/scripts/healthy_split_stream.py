"""A stream that two workers share rightly: each gives every second item. The same item may come again in an epoch."""

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for number in range(worker.id, 6400, worker.num_workers):
            yield torch.full((64,), float(number % 13))


def main():
    loader = DataLoader(Stream(), batch_size=16, num_workers=common.workers(2))
    trainer, pace = common.Trainer(seconds=0.02), common.Pace()
    while not pace.over:
        for x in loader:
            trainer.step(x)
            pace.step(len(x))
        pace.epoch()
    pace.say()


if __name__ == "__main__":
    main()
