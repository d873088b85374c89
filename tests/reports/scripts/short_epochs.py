"""Epochs of a second start their workers anew each time."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self):
        self.samples = [torch.full((64,), float(number)) for number in range(320)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        time.sleep(0.001)
        return self.samples[index]


def main():
    loader = DataLoader(
        Samples(),
        batch_size=16,
        shuffle=True,
        num_workers=common.workers(2),
        persistent_workers=common.FIXED,
        multiprocessing_context="forkserver",
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
