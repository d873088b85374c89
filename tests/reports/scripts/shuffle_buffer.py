"""activeloopai/deeplake#1760, webdataset/webdataset#267: each epoch begins with filling a shuffle buffer."""

import random
import time

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SIZE = 450


class Shuffled(IterableDataset):
    def __iter__(self):
        worker, generator, buffer = get_worker_info(), random.Random(0), []
        wanted = 16 if common.FIXED else SIZE
        for number in range(worker.id, 1800, worker.num_workers):
            time.sleep(0.003)  # a record comes from the network  # <- slow
            buffer.append(torch.full((64,), float(number % 97)))  # <- slow
            grows = len(buffer) < SIZE and generator.random() < 0.1
            if len(buffer) >= wanted and not grows:
                yield buffer.pop(generator.randrange(len(buffer)))
        generator.shuffle(buffer)
        yield from buffer


def main():
    keep = common.VARIANT == "persistent"
    loader = DataLoader(Shuffled(), batch_size=16, num_workers=common.workers(2), persistent_workers=keep)
    trainer, pace = common.Trainer(seconds=0.022), common.Pace()
    while not pace.over:
        for x in loader:
            trainer.step(x)
            pace.step(len(x))
        pace.epoch()
    pace.say()


if __name__ == "__main__":
    main()
