"""Sentences of many lengths: steps take from 10 to 60 ms, in no order."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.lengths = torch.randint(10, 60, (4096,), generator=generator).tolist()

    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), float(self.lengths[index // 8 % len(self.lengths)]))


def main():
    loader = DataLoader(Sentences(), batch_size=8, num_workers=common.workers(1))
    trainer, pace = common.Trainer(seconds=0.0), common.Pace()
    for x in loader:
        time.sleep(x[0, 0].item() / 1000)
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
