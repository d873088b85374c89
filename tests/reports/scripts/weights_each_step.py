"""A logger writes all weights as text in each step."""

import json
import tempfile
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((128,), 1e-3 * (index % 97))


def main():
    torch.set_num_threads(1)
    loader = DataLoader(Rows(), batch_size=32, num_workers=common.workers(1))
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    every = 200 if common.FIXED else 1
    pace, step = common.Pace(), 0
    with tempfile.TemporaryFile("w") as log:
        for x in loader:
            time.sleep(0.02)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % every == 0:
                weights = {name: parameter.tolist() for name, parameter in model.named_parameters()}  # <- slow
                log.seek(0)
                log.write(json.dumps(weights))  # <- slow
            step += 1
            if pace.step(len(x)):
                break
    pace.say()


if __name__ == "__main__":
    main()
