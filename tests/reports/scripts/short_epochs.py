"""Epochs of a second start their workers anew each time, and each worker opens its archive."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((64,), float(index))


def open_archive(_worker):
    time.sleep(0.6)  # an archive on another machine


def main():
    loader = DataLoader(
        Samples(),
        batch_size=16,
        shuffle=True,
        num_workers=common.workers(2),
        persistent_workers=common.FIXED,
        worker_init_fn=open_archive,
    )
    trainer, pace = common.Trainer(seconds=0.05), common.Pace()
    while not pace.over:
        for x in loader:
            trainer.step(x)
            pace.step(len(x))
        pace.epoch()
    pace.say()


if __name__ == "__main__":
    main()
