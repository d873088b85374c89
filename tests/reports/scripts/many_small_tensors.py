"""A batch is a list of five hundred small tensors, and each is sent from the worker alone."""

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Molecules(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), float(index % 97))


def as_list(molecules):
    return molecules


def main():
    collate = torch.stack if common.FIXED else as_list
    loader = DataLoader(Molecules(), batch_size=500, num_workers=common.workers(1), collate_fn=collate)
    trainer, pace = common.Trainer(seconds=0.005), common.Pace()
    for batch in loader:
        x = batch if common.FIXED else torch.stack(batch)
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
