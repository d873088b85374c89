"""Stream in short epochs: the IterableDataset reads and shuffles its index anew at the start of each of them.

That is done by the workers, and keeping them does not save it.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import common
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Reshuffled(IterableDataset):
    def __init__(self, index: Path, samples: int) -> None:
        self.index = index
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        entries = json.loads(self.index.read_text())
        random.shuffle(entries)
        worker = get_worker_info()
        count = self.samples // worker.num_workers if worker is not None else self.samples
        for entry in entries[:count]:
            yield torch.full((3, 64, 64), entry["value"]), entry["label"]


def main() -> None:
    parser = common.arguments(__doc__, num_workers=2, persistent_workers=True)
    parser.add_argument("--samples", type=int, default=320, help="of an epoch")
    parser.add_argument("--index-entries", type=int, default=200_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        index = Path(folder) / "index.json"
        index.write_text(json.dumps([{"value": n / 1e6, "label": n % 10} for n in range(options.index_entries)]))
        dataset = Reshuffled(index, options.samples)
        loader = DataLoader(dataset, options.batch_size, **common.loader_settings(options))
        common.train(loader, options)


if __name__ == "__main__":
    main()
