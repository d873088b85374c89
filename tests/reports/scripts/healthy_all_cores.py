"""A tuned job: it computes on all cores, and its loader is ready in time."""

import os

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((1024,), 1e-3 * (index % 97))


def main():
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loader = DataLoader(Rows(), batch_size=512, num_workers=common.workers(1))
    model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    pace = common.Pace()
    for x in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
