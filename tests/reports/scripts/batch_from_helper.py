"""A helper draws one batch of real samples and one of noise in each step, each time from a new iterator."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.003)  # a read
        return torch.full((64,), float(index % 89))


class Batches:
    def __init__(self, loader):
        self.loader, self.iterator = loader, None

    def draw(self):
        if not common.FIXED:
            return next(iter(self.loader))  # <- slow
        self.iterator = self.iterator or iter(self.loader)
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


def main():
    count = common.workers(1)
    real = Batches(DataLoader(Pictures(), batch_size=8, shuffle=True, num_workers=count))
    trainer, pace = common.Trainer(seconds=0.03), common.Pace()
    while True:
        x = real.draw()
        trainer.step(x + 0.1 * torch.randn_like(x))
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
