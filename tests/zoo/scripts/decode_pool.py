"""Decode in the loader's worker, but not on its own thread: in a pool of threads, or by another program.

Either way the worker waits, and a core is busy with its work.
"""

from __future__ import annotations

import gzip
import io
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import numpy as np
import samples
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Pooled(Dataset):
    """JPEG files, a batch of them at once decoded by the threads of a pool."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.contents = [path.read_bytes() for path in samples.write_photographs(folder, 60, 640, 480)]
        self.threads = threads
        self.pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads)
        return list(self.pool.map(self.decode, indices))

    def decode(self, index: int) -> tuple[torch.Tensor, int]:
        picture = Image.open(io.BytesIO(self.contents[index % len(self.contents)])).convert("RGB").resize((64, 64))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255, index % 10


class Unpacked(Dataset):
    """Raw frames in gzip files, each unpacked by the gzip program."""

    def __init__(self, folder: Path) -> None:
        generator = np.random.default_rng(0)
        self.paths = [folder / f"{number}.gz" for number in range(20)]
        for path in self.paths:
            frames = generator.integers(0, 24, (8, 3, 128, 128), dtype=np.uint8)
            path.write_bytes(gzip.compress(frames.tobytes(), 6))

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        command = ["gzip", "-dc", str(self.paths[index % len(self.paths)])]
        raw = subprocess.run(command, capture_output=True, check=True).stdout
        frames = np.frombuffer(raw, dtype=np.uint8).reshape(8, 3, 128, 128)
        return torch.from_numpy(frames[index % 8, :, ::2, ::2] / np.float32(24)), index % 10


def main() -> None:
    parser = common.arguments(__doc__, num_workers=1)
    parser.add_argument("--how", choices=("threads", "program"), default="threads")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        dataset = Pooled(Path(folder), options.threads) if options.how == "threads" else Unpacked(Path(folder))
        loader = DataLoader(dataset, options.batch_size, shuffle=True, **common.loader_settings(options))
        common.train(loader, options)


if __name__ == "__main__":
    main()
