"""A data set keeps every file open that it has read, until its process may open no more."""

import resource

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Shards(Dataset):
    def __init__(self):
        self.opened = []

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        file = open(__file__)  # noqa: PTH123, SIM115  # <- slow
        if common.FIXED:
            file.close()
        else:
            self.opened.append(file)
        return torch.full((64,), float(index % 97))


def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    loader = DataLoader(Shards(), batch_size=4, num_workers=common.workers(0))
    trainer, pace = common.Trainer(64, seconds=0.04), common.Pace()
    for x in loader:
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
