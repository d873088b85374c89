"""Lightning-AI/pytorch-lightning#17725: after each short epoch a logger writes all rows so far anew."""

import csv
import tempfile
from pathlib import Path

import common
import torch
from torch.utils.data import DataLoader, TensorDataset

NAMES = [f"metric_{number}" for number in range(12)]


class History:
    def __init__(self, path):
        self.path, self.rows = path, []

    def add(self, value):
        self.rows.append([value * number for number in range(len(NAMES))])

    def save(self):
        with self.path.open("a" if common.FIXED else "w", newline="") as file:
            csv.writer(file).writerows([NAMES, *self.rows])  # <- slow
        if common.FIXED:
            self.rows = []


def main():
    loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=64)
    trainer, pace = common.Trainer(seconds=0.001), common.Pace()
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "history.csv")
        while not pace.over:
            for (x,) in loader:
                loss = trainer.step(x)
                for _ in range(4):
                    history.add(loss)
                pace.step(len(x))
            history.save()
            pace.epoch()
    pace.say()


if __name__ == "__main__":
    main()
