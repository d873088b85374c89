"""A generator reads a plain DataLoader without workers ahead on a thread."""

import queue
import threading
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.003)  # a read from the network
        return torch.full((64,), float(index % 97))


def read_ahead(loader):
    batches = queue.Queue(4)

    def read():
        for batch in loader:
            batches.put(batch)

    threading.Thread(target=read, name="reader", daemon=True).start()
    while True:
        yield batches.get()  # <- slow


def main():
    loader = DataLoader(Files(), batch_size=16, shuffle=True, num_workers=common.workers(4 if common.FIXED else 0))
    trainer, pace = common.Trainer(seconds=0.015), common.Pace()
    for x in read_ahead(loader):
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
