"""pytorch/pytorch#5040, bytedance/Protenix#2: /dev/shm of a container is too small for the batches of the workers."""

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        frames = 30 if common.FIXED else min(60 + index // 8, 700)  # longer and longer clips
        return torch.zeros(frames, 1, 1024)


def main():
    loader = DataLoader(Clips(), batch_size=8, num_workers=common.workers(4))
    trainer, pace = common.Trainer(1024, seconds=0.05), common.Pace()
    for x in loader:  # <- slow
        trainer.step(x[:, :4])
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
