"""webdataset: tar shards on the local disk, read by a WebLoader."""

import io
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import common
import torch
import webdataset


def write(folder: Path) -> list[str]:
    paths = []
    for shard in range(2):
        path = folder / f"shard-{shard}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(40):
                data = str(40 * shard + number).encode()
                info = tarfile.TarInfo(f"{number:04d}.txt")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        paths.append(str(path))
    return paths


def decode(data: bytes):
    time.sleep(common.SECONDS)
    return torch.full((4,), float(data)), torch.tensor([1.0])


def main():
    record, model = common.Record(), common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        shards = webdataset.WebDataset(write(Path(folder)), shardshuffle=False).to_tuple("txt").map_tuple(decode)
        loader = webdataset.WebLoader(shards.map(lambda sample: sample[0]), batch_size=4, num_workers=int(sys.argv[1]))
        steps = 0
        for _ in range(3):
            for inputs, targets in loader:
                record.batch(inputs)
                common.train_step(model, optimizer, inputs, targets)
                steps += 1
            record.epoch()
    record.facts = {"type": type(loader).__name__}
    record.end(steps)


main()
