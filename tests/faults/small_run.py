"""A real training loop that uses everything that is hooked, and is small enough for each test."""

from __future__ import annotations

import torch

import telemetry

BATCHES = 6


class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        return torch.tensor([float(index), 1.0])


def train(epochs: int = 1, steps: bool = False, saved=None) -> list[list[float]]:
    """Run a real loop with everything that is hooked. Returns what it has seen and learned."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Dataset(), batch_size=2)
    seen = []
    for _ in range(epochs):
        for batch in loader:
            with telemetry.step() if steps else telemetry.phase("a part"):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            seen.append(batch.flatten().tolist())
        evaluation = torch.utils.data.DataLoader(Dataset(), batch_size=4)
        with torch.no_grad():
            seen += [model(batch).flatten().tolist() for batch in evaluation]
            with telemetry.phase("evaluation"):
                seen += [model(batch).flatten().tolist() for batch in evaluation]
        if saved is not None:
            torch.save(model.state_dict(), saved)
    seen.append([p for parameter in model.parameters() for p in parameter.flatten().tolist()])
    return seen
