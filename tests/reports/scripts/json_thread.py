"""A thread writes the whole history of the run as JSON, again and again."""

import json
import os
import threading
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset

HISTORY = [{"step": step, "loss": step / 7, "name": f"step {step}"} for step in range(5_000)]


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), float(index % 97))


def publish():
    while True:
        with open(os.devnull, "w") as file:
            file.write(json.dumps(HISTORY))  # <- slow
        time.sleep(0.01)


def main():
    torch.set_num_threads(1)
    if not common.FIXED:
        threading.Thread(target=publish, name="publisher", daemon=True).start()
    loader = DataLoader(Rows(), batch_size=32, num_workers=common.workers(1))
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
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
