"""A memory callback calls gc.collect() at the end of each batch, beside a vocabulary of many Python objects."""

import gc

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Words(Dataset):
    def __init__(self):
        self.vocabulary = {f"word-{number}": {"id": number, "forms": [number]} for number in range(150_000)}

    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), float(index % 97))


class MemoryCallback:
    def on_batch_end(self):
        if not common.FIXED:
            gc.collect()  # <- slow


def main():
    loader = DataLoader(Words(), batch_size=32, num_workers=common.workers(1))
    callbacks = [MemoryCallback()]
    trainer, pace = common.Trainer(seconds=0.03), common.Pace()
    for x in loader:
        trainer.step(x)
        for callback in callbacks:
            callback.on_batch_end()
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
