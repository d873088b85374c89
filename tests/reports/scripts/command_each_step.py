"""Lightning-AI/pytorch-lightning#189: a program that shows the memory of the GPUs is called after each batch."""

import subprocess

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), 1e-3 * (index % 97))


def memory():
    """As slow as the real one is on some nodes."""
    return subprocess.run(["sh", "-c", "sleep 0.05; echo 1000"], capture_output=True, check=True).stdout  # <- slow


def main():
    trainer, pace, step = common.Trainer(), common.Pace(), 0
    every = 100 if common.FIXED else 1
    for x in DataLoader(Rows(), batch_size=32, num_workers=common.workers(1)):
        trainer.step(x)
        if step % every == 0:
            memory()
        step += 1
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
