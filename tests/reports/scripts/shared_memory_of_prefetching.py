"""Large batches, each prefetched many times, fill a small /dev/shm before the first step has ended."""

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Volumes(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return torch.zeros(64, 64, 64)  # 1 MB


def main():
    ahead = 2 if common.FIXED else 32
    loader = DataLoader(Volumes(), batch_size=4, num_workers=common.workers(2), prefetch_factor=ahead)
    trainer, pace = common.Trainer(64, seconds=0.2), common.Pace()
    for x in loader:  # <- slow
        trainer.step(x[:, 0, 0])
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
