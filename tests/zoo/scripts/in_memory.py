"""Train on tensors that are all in memory."""

from __future__ import annotations

import common
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_step(model, optimizer, pictures, labels):
    loss = nn.functional.cross_entropy(model(pictures), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--samples", type=int, default=1024)
    options = parser.parse_args()
    data = TensorDataset(torch.rand(options.samples, 3, 64, 64), torch.randint(0, 10, (options.samples,)))
    loader = DataLoader(data, options.batch_size, shuffle=True, **common.loader_settings(options))
    model = common.picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = common.Pace(options)
    while True:
        for pictures, labels in loader:
            train_step(model, optimizer, pictures, labels)
            if pace.step():
                return


if __name__ == "__main__":
    main()
