"""The average of all losses so far is computed anew in each step, from a list of tensors."""

import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), 1e-3 * (index % 97))


def main():
    torch.set_num_threads(1)
    loader = DataLoader(Rows(), batch_size=32, num_workers=common.workers(1))
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    pace, losses, total = common.Pace(), [], 0.0
    for x in loader:
        time.sleep(0.005)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        total += losses[-1]
        if not common.FIXED:
            total = sum(losses)  # <- slow
        if pace.step(len(x)):
            break
    print("mean loss", float(total / len(losses)))
    pace.say()


if __name__ == "__main__":
    main()
