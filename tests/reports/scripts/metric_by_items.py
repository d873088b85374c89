"""A metric is counted in Python, element by element, in each step."""

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), 1e-3 * (index % 97))


def accuracy(scores):
    if common.FIXED:
        return (scores > 0).float().mean().item()
    right = 0
    for row in scores:
        for score in row:  # <- slow
            right += score.item() > 0  # <- slow
    return right / scores.numel()


def main():
    torch.set_num_threads(1)
    loader = DataLoader(Points(), batch_size=128, num_workers=common.workers(1))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    pace = common.Pace()
    for x in loader:
        scores = model(x)
        loss = scores.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy(scores.detach())
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
