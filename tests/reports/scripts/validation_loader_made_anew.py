"""Every few steps a validation makes its loader anew, with workers that start by spawning."""

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
        time.sleep(0.002)
        return torch.full((64,), float(index % 97))


def validation_loader():
    return DataLoader(
        Files(64), batch_size=8, num_workers=1, multiprocessing_context="spawn", persistent_workers=common.FIXED
    )


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        for x in loader:  # <- slow
            model(x).mean()
    model.train()


def main():
    train = DataLoader(Files(10_000_000), batch_size=8, num_workers=1)
    kept = validation_loader()
    trainer, pace = common.Trainer(), common.Pace()
    for number, x in enumerate(train):
        trainer.step(x)
        if number % 100 == 99:
            validate(trainer.model, kept if common.FIXED else validation_loader())
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
