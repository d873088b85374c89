"""facebookresearch/PyTorch-BigGraph#6: each worker computes with many OpenMP threads."""

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Spectra(Dataset):
    def __init__(self):
        self.filters = torch.randn(256, 256)

    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        wave = torch.full((256, 256), 1e-3 * (index % 97))
        return (self.filters @ wave).tanh()[0, :64]  # <- slow


def many_threads(_worker):
    torch.set_num_threads(1 if common.FIXED else 16)


def main():
    loader = DataLoader(Spectra(), 16, num_workers=common.workers(2), worker_init_fn=many_threads)
    trainer, pace = common.Trainer(seconds=0.003), common.Pace()
    for x in loader:
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
