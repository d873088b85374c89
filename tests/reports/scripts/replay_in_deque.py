"""ageron/handson-ml#204: a random sample of a deque walks through half of it for each item."""

import collections
import random

import common
import torch

STORED = 400_000


def main():
    torch.set_num_threads(1)
    random.seed(0)
    items = (list if common.FIXED else collections.deque)((step % 97 / 97, step % 89 / 89) for step in range(STORED))
    model = torch.nn.Sequential(torch.nn.Linear(2, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    pace = common.Pace()
    over = False
    while not over:
        drawn = random.sample(items, 512)  # <- slow
        x = torch.tensor(drawn)
        loss = torch.stack([model(part).square().mean() for part in x.split(64)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        over = pace.step(len(x))
    pace.say()


if __name__ == "__main__":
    main()
