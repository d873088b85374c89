"""braindecode/braindecode#89: each item takes its row out of a pandas frame."""

import common
import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self):
        rows = 50_000
        self.signal = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
        self.frame = pd.DataFrame({"start": np.arange(rows), "length": 64, "label": np.arange(rows) % 4})
        self.start, self.label = self.frame["start"].to_numpy(), self.frame["label"].to_numpy()

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, index):
        if common.FIXED:
            start, label = self.start[index], self.label[index]
        else:
            start = self.frame.iloc[index]["start"]  # <- slow
            label = self.frame.iloc[index]["label"]  # <- slow
        return self.signal[start : start + 64], label


def main():
    loader = DataLoader(Windows(), batch_size=64, shuffle=True, num_workers=common.workers(0))
    trainer, pace = common.Trainer(seconds=0.004), common.Pace()
    over = False
    while not over:
        for x, _ in loader:
            trainer.step(torch.as_tensor(x))
            over = pace.step(len(x))
            if over:
                break
    pace.say()


if __name__ == "__main__":
    main()
