"""A data set of two text files is split by file among four workers, epoch after epoch."""

import tempfile
import time
from pathlib import Path

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class TextFiles(IterableDataset):
    def __init__(self, paths):
        self.paths = paths

    def __iter__(self):  # <- slow
        worker = get_worker_info()
        for path in self.paths[worker.id :: worker.num_workers]:
            with path.open() as file:
                for line in file:
                    time.sleep(0.008)  # a look-up of the words elsewhere  # <- slow
                    yield torch.tensor([float(word) for word in line.split()])  # <- slow


def main():
    count = 16 if common.FIXED else 2
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"part-{number}.txt") for number in range(count)]
        for path in paths:
            path.write_text((" ".join(["0.5"] * 64) + "\n") * (1920 // count))
        loader = DataLoader(TextFiles(paths), batch_size=8, num_workers=common.workers(4))
        trainer, pace = common.Trainer(seconds=0.01), common.Pace()
        while not pace.over:
            for x in loader:
                trainer.step(x)
                pace.step(len(x))
            pace.epoch()
        pace.say()


if __name__ == "__main__":
    main()
