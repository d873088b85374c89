"""What the scripts share: slow samples, and a record of what the loop was given."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch
from torch.utils.data import Dataset

SECONDS = 0.01
"""A sample takes so long: far more than a step."""


class Slow(Dataset):
    """Samples that take their time, each told from the others."""

    def __init__(self, length: int, seconds: float = SECONDS) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        if not 0 <= index < self.length:
            raise IndexError(index)
        time.sleep(self.seconds)
        return torch.full((4,), float(index)), torch.tensor([float(index % 2)])


class Record:
    """What is compared with the bare run: batches in their order, types, descriptors and threads from epoch to epoch."""

    def __init__(self) -> None:
        self.batches: list[float] = []
        self.facts: dict[str, object] = {}
        self.open: list[tuple[int, int]] = []

    def batch(self, values: torch.Tensor) -> None:
        self.batches.append(round(float(values.double().sum()), 3))

    def epoch(self) -> None:
        self.open.append(self.count())

    def count(self) -> tuple[int, int]:
        """Descriptors and threads."""
        own = sys.modules.get("telemetry.safety.threads")
        return len(os.listdir("/proc/self/fd")), threading.active_count() + (len(own.running()) if own else 0)

    def end(self, steps: int) -> None:
        """``steps``: as the framework counts them."""
        # What workers leave is closed a moment later, and the agent reads files: the least is what stays open.
        before = [min(counts) for counts in zip(*self.open[1:])]
        deadline = time.monotonic() + 10
        while any(grown := [max(0, now - then) for now, then in zip(self.count(), before)]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        print("RESULT " + json.dumps({"steps": steps, "batches": self.batches, "grown": grown} | self.facts))


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train_step(model, optimizer, inputs, targets) -> None:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def error_of(iterate) -> str:
    """What an iteration ends with, in words."""
    try:
        for _ in iterate():
            pass
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"
