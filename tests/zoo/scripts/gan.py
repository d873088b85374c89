"""Two networks, two optimizers, and a slow start: statistics of the data are computed before training."""

from __future__ import annotations

import time

import common
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_step(model, generator, optimizers, pictures):
    """The discriminator ``model`` first, then the generator, twice."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    noise = torch.randn(len(pictures), 16, 8, 8)
    made = generator(noise)
    ones, zeros = torch.ones(len(pictures)), torch.zeros(len(pictures))
    lossf = nn.functional.binary_cross_entropy_with_logits
    (lossf(model(pictures)[:, 0], ones) + lossf(model(made.detach())[:, 0], zeros)).backward()
    optimizers[0].step()
    for _ in range(2):
        optimizers[1].zero_grad()
        lossf(model(generator(noise))[:, 0], ones).backward()
        optimizers[1].step()


def main() -> None:
    options = common.arguments(__doc__, batch_size=8, width=16).parse_args()
    pictures = torch.rand(512, 3, 64, 64)
    time.sleep(6)  # statistics of the whole data set
    loader = DataLoader(TensorDataset(pictures), options.batch_size, shuffle=True, drop_last=True)
    model = common.picture_network(options.width, classes=1)
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Sigmoid(),
    )  # fmt: skip
    optimizers = [torch.optim.Adam(network.parameters(), lr=2e-4) for network in (model, generator)]
    pace = common.Pace(options)
    for _ in range(1000):
        for (batch,) in loader:
            train_step(model, generator, optimizers, batch)
            if pace.step():
                return


if __name__ == "__main__":
    main()
