"""A loop by steps: one iterator is kept, made anew at the end of the data, and garbage is collected then."""

import gc

import common
import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    loader = DataLoader(TensorDataset(torch.randn(8000, 64)), 16, shuffle=True, num_workers=common.workers(1))
    trainer, pace = common.Trainer(seconds=0.02), common.Pace()
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        if batch is None:
            gc.collect()
            batches = iter(loader)
            continue
        trainer.step(batch[0])
        if pace.step(len(batch[0])):
            break
    pace.say()


if __name__ == "__main__":
    main()
