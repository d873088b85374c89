"""A network that trains a few steps, and a dict that must not be read: for what the hooks tell of checkpoints."""

from __future__ import annotations

import torch


class Training:
    def __init__(self, kind=torch.optim.Adam) -> None:
        self.net = torch.nn.Linear(4, 1)
        self.optimizer = kind(self.net.parameters(), lr=0.1)

    def steps(self, number: int) -> None:
        for batch in torch.utils.data.DataLoader(torch.randn(number, 4)):
            self.step(batch)

    def step(self, batch) -> None:
        self.net(batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}


class Lazy(dict):
    """Loads what it contains when it is asked for."""

    def __contains__(self, key) -> bool:
        raise AssertionError("asked by the agent")

    values = __getitem__ = get = items = __contains__
