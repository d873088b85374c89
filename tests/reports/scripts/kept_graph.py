"""onejiin/CycleGAN-VC2#4, EagleW/Writing-editing-Network#3: the graph of all earlier steps is kept."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((512,), 1e-3 * (index % 97))


def main():
    torch.set_num_threads(1)
    loader = DataLoader(Rows(), batch_size=64, num_workers=common.workers(1))
    model = torch.nn.Linear(512, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    pace, total = common.Pace(), 0
    for x in loader:
        time.sleep(0.01)
        loss = model(x).square().mean()
        total = loss if common.FIXED else total + loss  # <- slow
        optimizer.zero_grad()
        total.backward(retain_graph=not common.FIXED)  # <- slow
        optimizer.step()
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
