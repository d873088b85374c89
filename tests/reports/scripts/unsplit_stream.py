"""huggingface/datasets#3423, pytorch/pytorch#30599: a stream that is not split gives all its items in each worker."""

import time

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Records(IterableDataset):
    def __iter__(self):  # <- slow
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker and common.FIXED else (0, 1)
        for number in range(first, 400, every):
            time.sleep(0.006)  # a record comes from the network  # <- slow
            yield torch.full((64,), float(number))  # <- slow


def main():
    count = common.workers(3 if common.FIXED else 0)
    loader = DataLoader(Records(), batch_size=8, num_workers=count, persistent_workers=common.FIXED)
    trainer, pace = common.Trainer(seconds=0.015), common.Pace()
    while not pace.over:
        seen = set()
        for x in loader:
            trainer.step(x)
            numbers = set(x[:, 0].tolist())
            pace.step(len(numbers - seen))
            seen |= numbers
        pace.epoch()
    pace.say()


if __name__ == "__main__":
    main()
