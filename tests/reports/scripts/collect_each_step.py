"""pytorch/pytorch#103339: the sampler's list of all indices makes each gc.collect() of the loop slow."""

import gc

import common
import torch
from torch.utils.data import DataLoader, Dataset

ROWS = 8_000_000


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.full((64,), float(index % 97))


def main():
    loader = DataLoader(Rows(), batch_size=32, shuffle=True)
    trainer, pace = common.Trainer(), common.Pace()
    for x in loader:
        trainer.step(x)
        if not common.FIXED:
            gc.collect()  # <- slow
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
