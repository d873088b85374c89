"""A small validation after each epoch, with a loader of its own that has no workers and needs none."""

import common
import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    train = DataLoader(
        TensorDataset(torch.randn(6400, 64)), 16, shuffle=True, num_workers=common.workers(1), persistent_workers=True
    )
    valid = DataLoader(TensorDataset(torch.randn(640, 64)), 32)
    trainer, pace = common.Trainer(seconds=0.025), common.Pace()
    while not pace.over:
        trainer.model.train()
        for (x,) in train:
            trainer.step(x)
            pace.step(len(x))
        trainer.model.eval()
        with torch.no_grad():
            for (x,) in valid:
                trainer.model(x).mean()
        pace.epoch()
    pace.say()


if __name__ == "__main__":
    main()
