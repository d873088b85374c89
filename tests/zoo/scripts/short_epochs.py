"""Fine-tune on a small data set: many short epochs, each evaluated; every worker reads an index when it starts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import common
import torch
from torch.utils.data import DataLoader, Dataset


class Indexed(Dataset):
    def __init__(self, index: Path, length: int) -> None:
        self.path = index
        self.length = length
        self.index: list[dict[str, int]] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if not self.index:
            self.index = json.loads(self.path.read_text())
        entry = self.index[number % len(self.index)]
        generator = torch.Generator().manual_seed(entry["seed"])
        return torch.rand(3, 64, 64, generator=generator), entry["label"]


@torch.no_grad()
def evaluate(model, dataset) -> float:
    model.eval()
    loader = DataLoader(dataset, batch_size=16)
    right = sum(int((model(pictures).argmax(1) == labels).sum()) for pictures, labels in loader)
    model.train()
    return right / len(dataset)


def main() -> None:
    parser = common.arguments(__doc__, num_workers=2)
    parser.add_argument("--samples", type=int, default=160, help="of an epoch")
    parser.add_argument("--held-out", type=int, default=0, help="samples that are evaluated after each epoch")
    parser.add_argument("--index-entries", type=int, default=150_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        index = Path(folder) / "index.json"
        index.write_text(json.dumps([{"seed": n, "label": n % 10, "size": 64} for n in range(options.index_entries)]))
        dataset = Indexed(index, options.samples)
        held_out = Indexed(index, options.held_out)
        loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, **common.loader_settings(options))
        model = common.picture_network(options.width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pace = common.Pace(options)
        over = False
        while not over:
            for pictures, labels in loader:
                common.train_step(model, optimizer, pictures, labels)
                over = pace.step()
                if over:
                    break
            if options.held_out:
                evaluate(model, held_out)


if __name__ == "__main__":
    main()
