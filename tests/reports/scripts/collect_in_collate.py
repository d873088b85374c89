"""NVIDIA/Megatron-Energon#66: the function that makes a batch collects garbage each time."""

import gc

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Captions(Dataset):
    def __init__(self):
        self.captions = [[f"word-{number}", [number]] for number in range(300_000)]

    def __len__(self):
        return len(self.captions)

    def __getitem__(self, index):
        return torch.full((64,), float(self.captions[index][1][0] % 97))


def collate(samples):
    batch = torch.stack(samples)
    if not common.FIXED:
        gc.collect()  # <- slow
    return batch


def main():
    loader = DataLoader(Captions(), batch_size=32, shuffle=True, num_workers=common.workers(0), collate_fn=collate)
    trainer, pace = common.Trainer(), common.Pace()
    while not pace.over:
        for x in loader:
            trainer.step(x)
            if pace.step(len(x)):
                break
    pace.say()


if __name__ == "__main__":
    main()
