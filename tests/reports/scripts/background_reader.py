"""justheuristic/prefetch_generator#7: a background thread reads the iterator of a DataLoader's subclass."""

import queue
import threading
import time

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Background(threading.Thread):
    def __init__(self, batches):
        super().__init__(daemon=True)
        self.batches, self.queue = batches, queue.Queue(3)
        self.start()

    def run(self):
        for batch in self.batches:
            self.queue.put(batch)
        self.queue.put(None)

    def __iter__(self):
        return iter(self.queue.get, None)


class BackgroundLoader(DataLoader):
    def __iter__(self):
        return iter(Background(super().__iter__()))


class Files(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.004)  # a read from the network
        return torch.full((64,), float(index % 97))


def main():
    count = common.workers(4 if common.FIXED else 1)
    loader = BackgroundLoader(Files(), batch_size=16, shuffle=True, num_workers=count)
    trainer, pace = common.Trainer(), common.Pace()
    for x in loader:  # waits for the thread  # <- slow
        trainer.step(x)
        if pace.step(len(x)):
            break
    pace.say()


if __name__ == "__main__":
    main()
