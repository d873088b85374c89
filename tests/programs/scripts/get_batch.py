"""A language model: batches from a function that reads an array, the next one drawn before the backward pass."""

import time

import numpy as np
import torch
from torch import nn
from truth import Truth

truth = Truth()
data = np.random.default_rng(0).integers(0, 64, 400_000, dtype=np.uint16)
BLOCK, BATCH = 64, 12


def get_batch(split):
    part = data[:360_000] if split == "train" else data[360_000:]
    at = torch.randint(len(part) - BLOCK, (BATCH,))
    x = torch.stack([torch.from_numpy(part[i : i + BLOCK].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(part[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in at])
    for _ in range(20):  # as if it came from a slower place
        x = torch.stack([row.roll(1) for row in x.unbind()])
    return x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 96)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(96, 4, 192, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(96, 64)

    def forward(self, x, y):
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = {}
    for split in ("train", "val"):
        found[split] = torch.stack([model(*get_batch(split)) for _ in range(80)]).mean()
    model.train()
    return found


x, y = get_batch("train")
begun, step = time.perf_counter(), 0
while not truth.over():
    if step % 150 == 0:
        with truth.timed("evaluation"):
            estimate_loss()
    with truth.timed("forward"):
        loss = model(x, y)
    with truth.timed("fetch"):
        x, y = get_batch("train")
    with truth.timed("backward"):
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with truth.timed("optimizer"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
spent = time.perf_counter() - begun - truth.evaluation_seconds
del truth.parts["fetch"]
truth.parts["rest"] = spent - sum(truth.parts.values())
truth.counts.update(steps=step, optimizer_steps=step)
truth.say()
