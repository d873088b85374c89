"""Semi-supervised training: two loaders zipped, one with labels and one without.

With ``--unlabelled-ms`` the storage of the second is slow.
"""

from __future__ import annotations

import time

import common
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Unlabelled(Dataset):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((3, 64, 64), index % 256 / 255)


def train_step(model, optimizer, labelled, unlabelled):
    pictures, labels = labelled
    with torch.no_grad():
        guessed = model(unlabelled).argmax(1)
    logits = model(torch.cat([pictures, unlabelled]))
    loss = nn.functional.cross_entropy(logits, torch.cat([labels, guessed]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = common.arguments(__doc__, batch_size=8, width=24)
    parser.add_argument("--unlabelled-ms", type=float, default=0.05)
    options = parser.parse_args()
    data = TensorDataset(torch.rand(10_000, 3, 64, 64), torch.randint(0, 10, (10_000,)))
    labelled = DataLoader(data, options.batch_size, shuffle=True)
    unlabelled = DataLoader(
        Unlabelled(options.unlabelled_ms / 1e3), options.batch_size, **common.loader_settings(options)
    )
    model = common.picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    for ours, theirs in zip(labelled, unlabelled, strict=False):
        train_step(model, optimizer, ours, theirs)
        if pace.step():
            break


if __name__ == "__main__":
    main()
