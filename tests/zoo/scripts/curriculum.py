"""Curriculum learning: each epoch chooses its samples anew, and makes a new DataLoader for them."""

from __future__ import annotations

import common
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset


def choose(dataset: Dataset, epoch: int, count: int) -> Subset:
    """The samples of an epoch: every time other ones."""
    generator = torch.Generator().manual_seed(epoch)
    return Subset(dataset, torch.randperm(len(dataset), generator=generator)[:count].tolist())


def main() -> None:
    parser = common.arguments(__doc__, num_workers=4)
    parser.add_argument("--samples", type=int, default=96, help="of an epoch")
    options = parser.parse_args()
    dataset = TensorDataset(torch.rand(2000, 3, 64, 64), torch.randint(0, 10, (2000,)))
    model = common.picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    for epoch in range(100_000):
        chosen = choose(dataset, epoch, options.samples)
        loader = DataLoader(chosen, options.batch_size, shuffle=True, **common.loader_settings(options))
        for pictures, labels in loader:
            common.train_step(model, optimizer, pictures, labels)
            if pace.step():
                return


if __name__ == "__main__":
    main()
