"""vahidk/tfrecord#78: each worker reads the whole record file."""

import os
import struct
import tempfile
import time

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RECORD = struct.Struct("<64f")


class RecordFile(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):  # <- slow
        worker = get_worker_info()
        with open(self.path, "rb") as file:
            for number, start in enumerate(range(0, os.path.getsize(self.path), RECORD.size)):
                if common.FIXED and worker and number % worker.num_workers != worker.id:
                    continue
                file.seek(start)
                record = RECORD.unpack(file.read(RECORD.size))  # <- slow
                time.sleep(0.01)  # decompress on a device of its own  # <- slow
                yield torch.tensor(record)  # <- slow


def main():
    with tempfile.NamedTemporaryFile() as file:
        for number in range(320):
            file.write(RECORD.pack(*[float(number)] * 64))
        file.flush()
        loader = DataLoader(RecordFile(file.name), batch_size=8, num_workers=common.workers(2))
        trainer, pace = common.Trainer(seconds=0.01), common.Pace()
        while not pace.over:
            seen = set()
            for x in loader:
                trainer.step(x)
                numbers = set(x[:, 0].tolist())
                pace.step(len(numbers - seen))
                seen |= numbers
            pace.epoch()
        pace.say()


if __name__ == "__main__":
    main()
