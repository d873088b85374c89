"""Each epoch begins with a worker's read of the index of its archive."""

import json
import tempfile
import time
from pathlib import Path

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

READ = {}


def read_index(path):
    if common.FIXED and path in READ:
        return READ[path]
    time.sleep(1.2)  # the index is far away  # <- slow
    READ[path] = json.loads(Path(path).read_text())
    return READ[path]


class Archive(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        worker = get_worker_info()
        for number in read_index(self.path)[worker.id :: worker.num_workers]:
            yield torch.full((64,), float(number % 97))


def main():
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(list(range(1600)), file)
        file.flush()
        loader = DataLoader(Archive(file.name), 16, num_workers=common.workers(2), persistent_workers=True)
        trainer, pace = common.Trainer(seconds=0.025), common.Pace()
        while not pace.over:
            for x in loader:
                trainer.step(x)
                pace.step(len(x))
            pace.epoch()
        pace.say()


if __name__ == "__main__":
    main()
