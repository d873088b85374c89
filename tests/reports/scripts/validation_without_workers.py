"""awslabs/gluonts#1928, open-mmlab/mmdetection#691: the validation's loader has no workers and takes most of the time."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(0.004)  # a read  # <- slow
        return torch.full((64,), float(index % 97))


def main():
    train = DataLoader(Files(400), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    count = common.workers(4 if common.FIXED else 0)
    valid = DataLoader(Files(640), batch_size=8, num_workers=count, persistent_workers=count > 0)
    trainer, pace = common.Trainer(seconds=0.025), common.Pace()
    while not pace.over:
        trainer.model.train()
        for x in train:
            trainer.step(x)
            pace.step(len(x))
        trainer.model.eval()
        with torch.no_grad():
            for x in valid:
                time.sleep(0.005)
                trainer.model(x).mean()
        pace.epoch()
    pace.say()


if __name__ == "__main__":
    main()
