"""pytorch/pytorch#12831, nmichlo/disent#49: an iterator made in each step starts the workers each time."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)  # a read
        return torch.full((64,), float(index % 97))


def main():
    loader = DataLoader(Files(), batch_size=16, shuffle=True, num_workers=common.workers(2))
    trainer, pace = common.Trainer(seconds=0.03), common.Pace()
    batches = iter(loader) if common.FIXED else None
    while True:
        x = next(batches) if batches else next(iter(loader))  # <- slow
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
