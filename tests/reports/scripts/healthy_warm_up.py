"""The first steps compile and choose algorithms, and take longer. Then all steps are alike."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), float(index % 97))


def main():
    loader = DataLoader(Rows(), batch_size=32, num_workers=common.workers(1))
    trainer, pace = common.Trainer(seconds=0.03), common.Pace()
    for number, x in enumerate(loader):
        if number < 100:
            time.sleep(0.15 * (1 - number / 100))
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
