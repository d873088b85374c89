"""Train on arrays behind an index file with a lock; another program rebuilds the index, and holds the lock."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

REBUILD = """
import fcntl, sys, time
time.sleep(float(sys.argv[2]))
with open(sys.argv[1]) as index:
    fcntl.flock(index, fcntl.LOCK_EX)
    time.sleep(float(sys.argv[3]))
"""


class Locked(Dataset):
    def __init__(self, index: Path) -> None:
        self.index = index

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with self.index.open() as index:
            fcntl.flock(index, fcntl.LOCK_SH)
            seed = int(index.readline()) + number
        return torch.from_numpy(np.random.default_rng(seed).random((3, 64, 64), dtype=np.float32)), number % 10


def main() -> None:
    parser = common.arguments(__doc__, num_workers=2)
    parser.add_argument("--rebuild-after", type=float, default=12.0)
    parser.add_argument("--rebuild-seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        index = Path(folder) / "index"
        index.write_text("17\n")
        times = [str(options.rebuild_after), str(options.rebuild_seconds)]
        with subprocess.Popen([sys.executable, "-c", REBUILD, str(index), *times]):
            loader = DataLoader(Locked(index), batch_size=options.batch_size, **common.loader_settings(options))
            common.train(loader, options)


if __name__ == "__main__":
    main()
