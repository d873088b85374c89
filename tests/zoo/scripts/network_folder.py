"""Train on small array files in a folder that is mounted over a network, with a hand-written Accelerate-like loader.

The wrapper iterates the DataLoader one batch ahead and moves it to the device, as such libraries do.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class NetworkFolder(Dataset):
    """Array files; opening one takes a round trip to the file server."""

    def __init__(self, paths: list[Path], length: int, round_trip: float) -> None:
        self.paths = paths
        self.length = length
        self.round_trip = round_trip

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.round_trip)
        picture = np.load(self.paths[index % len(self.paths)])
        return {"pixels": torch.from_numpy(picture), "label": index % 10}


class PreparedLoader:
    """A DataLoader that knows the last batch when it gives it, and gives batches on the device."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self.loader = loader
        self.device = device
        self.end_of_loader = False

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.end_of_loader = False
        batches = iter(self.loader)
        current = next(batches)
        while True:
            current = {name: value.to(self.device, non_blocking=True) for name, value in current.items()}
            try:
                following = next(batches)
            except StopIteration:
                self.end_of_loader = True
                yield current
                return
            yield current
            current = following


def train_step(model, optimizer, batch):
    loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["label"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--round-trip-ms", type=float, default=6.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        paths = [Path(folder) / f"{number}.npy" for number in range(200)]
        for path in paths:
            np.save(path, np.random.rand(3, 64, 64).astype(np.float32))
        dataset = NetworkFolder(paths, 1_000_000, options.round_trip_ms / 1e3)
        loader = PreparedLoader(
            DataLoader(dataset, batch_size=options.batch_size, shuffle=True, **common.loader_settings(options)),
            torch.device("cpu"),
        )
        model = common.picture_network(options.width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pace = common.Pace(options)
        for batch in loader:
            train_step(model, optimizer, batch)
            if pace.step():
                break


if __name__ == "__main__":
    main()
