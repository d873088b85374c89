"""Stream photographs from tar shards with an IterableDataset: shards split among workers, a shuffle buffer.

With ``--open-seconds`` the shards are remote, and the first byte of each is as long in coming; with
``--listing-seconds`` so is the list of them.
"""

from __future__ import annotations

import io
import itertools
import random
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import common
import numpy as np
import samples
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    def __init__(self, paths: list[Path], size: int, listing_seconds: float, open_seconds: float) -> None:
        self.paths = paths
        self.size = size
        self.listing_seconds = listing_seconds
        self.open_seconds = open_seconds

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        time.sleep(self.listing_seconds)
        mine = itertools.islice(itertools.cycle(self.paths), first, None, step)
        buffer: list[tuple[bytes, int]] = []
        for sample in itertools.chain.from_iterable(self.read(path) for path in mine):
            buffer.append(sample)
            if len(buffer) >= 32:
                yield self.decode(*buffer.pop(random.randrange(len(buffer))))

    def read(self, path: Path) -> Iterator[tuple[bytes, int]]:
        time.sleep(self.open_seconds)
        with tarfile.open(path) as shard:
            for number, member in enumerate(shard):
                file = shard.extractfile(member)
                assert file is not None
                yield file.read(), number % 10

    def decode(self, content: bytes, label: int) -> tuple[torch.Tensor, int]:
        picture = Image.open(io.BytesIO(content)).convert("RGB").resize((self.size, self.size))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255, label


def write_shards(folder: Path, shards: int, pictures: int, width: int) -> list[Path]:
    generator = np.random.default_rng(0)
    contents = [samples.photograph(generator, width, width * 3 // 4) for _ in range(40)]
    paths = [folder / f"shard-{number:03}.tar" for number in range(shards)]
    for path in paths:
        with tarfile.open(path, "w") as shard:
            for number in range(pictures):
                member = tarfile.TarInfo(f"{number:05}.jpg")
                content = contents[number % len(contents)]
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    return paths


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--picture-width", type=int, default=640)
    parser.add_argument("--shard-pictures", type=int, default=200)
    parser.add_argument("--listing-seconds", type=float, default=0.0)
    parser.add_argument("--open-seconds", type=float, default=0.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        paths = write_shards(Path(folder), 8, options.shard_pictures, options.picture_width)
        dataset = Shards(paths, 64, options.listing_seconds, options.open_seconds)
        loader = DataLoader(dataset, batch_size=options.batch_size, **common.loader_settings(options))
        common.train(loader, options)


if __name__ == "__main__":
    main()
