"""pytorch/pytorch#1838: a lock that another thread holds while the workers are forked is never free in them."""

import threading
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset

LOCK = threading.Lock()


def use_the_library():
    while not common.FIXED:
        with LOCK:
            time.sleep(0.02)


class Texts(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        with LOCK:  # <- slow
            return torch.full((64,), float(index % 97))


def main():
    threading.Thread(target=use_the_library, daemon=True).start()
    time.sleep(0.01)
    loader = DataLoader(Texts(), 16, shuffle=True, num_workers=common.workers(2), timeout=common.RUN_FOR)
    trainer, pace = common.Trainer(), common.Pace()
    for x in loader:
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
