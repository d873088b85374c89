"""A logger writes one line each ten steps, and the loss goes to a file."""

import logging
import os

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), float(index % 97))


def main():
    logging.basicConfig(filename=os.devnull, level=logging.INFO)
    log = logging.getLogger("training")
    loader = DataLoader(Rows(), batch_size=32, num_workers=common.workers(1))
    trainer, pace, losses = common.Trainer(), common.Pace(), []
    for number, x in enumerate(loader):
        losses.append(trainer.step(x))
        if number % 10 == 0:
            log.info("step %d: loss %.4f, mean of the last ten %.4f", number, losses[-1], sum(losses[-10:]) / 10)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
