"""A thread of the process looks at the disk once in a while, and mostly waits."""

import shutil
import threading
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((64,), float(index % 97))


def watch_disk():
    while shutil.disk_usage("/").total:
        time.sleep(0.5)


def main():
    torch.set_num_threads(1)
    threading.Thread(target=watch_disk, name="disk", daemon=True).start()
    loader = DataLoader(Rows(), batch_size=32, num_workers=common.workers(1))
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    pace = common.Pace()
    for x in loader:
        time.sleep(0.02)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
