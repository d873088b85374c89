"""javiribera/locating-objects-without-bboxes#46: the validation goes through its pictures one by one."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((64,), float(index % 97))


def main():
    train = DataLoader(Pictures(480), batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
    valid = DataLoader(Pictures(320), batch_size=32 if common.FIXED else 1, num_workers=common.workers(1))
    trainer, pace = common.Trainer(seconds=0.03), common.Pace()
    while not pace.over:
        trainer.model.train()
        for x in train:
            trainer.step(x)
            pace.step(len(x))
        trainer.model.eval()
        with torch.no_grad():
            for x in valid:
                time.sleep(0.008)  # an accelerator takes about as long for one as for many  # <- slow
                trainer.model(x).mean()
        pace.epoch()
    pace.say()


if __name__ == "__main__":
    main()
