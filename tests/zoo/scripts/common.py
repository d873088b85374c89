"""Shared by all scripts of the zoo: the loader's options on the command line, a step counter, small networks."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

WARM_UP_SECONDS = 5.0
"""Seconds at the start of training that do not count: batches prefetched before, first allocations."""


def truth(text: str) -> bool:
    """Parse a setting as a person types it: True or False."""
    if text not in {"True", "False"}:
        raise argparse.ArgumentTypeError(f"True or False, not {text!r}")
    return text == "True"


def arguments(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """A command line parser with the options that every script has. ``defaults`` are this script's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=22.0, help="of training")
    parser.add_argument("--pace-file", type=Path, help="where the steps per second are written to")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--prefetch-factor", type=int, default=2)
    parser.add_argument("--persistent-workers", type=truth, default=False)
    parser.add_argument("--pin-memory", type=truth, default=False)
    parser.add_argument("--in-order", type=truth, default=True)
    parser.add_argument("--start-method", default="fork", choices=("fork", "spawn", "forkserver"))
    parser.add_argument("--width", type=int, default=32, help="channels of the network: how much a step computes")
    parser.set_defaults(**defaults)
    return parser


def loader_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options as keywords of a DataLoader."""
    settings: dict[str, Any] = {"num_workers": options.num_workers, "pin_memory": options.pin_memory}
    if options.num_workers:
        settings |= {
            "prefetch_factor": options.prefetch_factor,
            "persistent_workers": options.persistent_workers,
            "multiprocessing_context": options.start_method,
        }
        if not options.in_order:
            settings["in_order"] = False
    return settings


class Pace:
    """Counts the steps of a training loop by the wall clock, and ends the loop after the given time.

    Args:
        options: from `arguments`. The time starts at the first step.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._seconds: float = options.seconds
        self._file: Path | None = options.pace_file
        self._stamps: list[float] = []

    def step(self) -> bool:
        """Count a step that has ended. Returns whether it was the last one."""
        self._stamps.append(time.monotonic())
        over = self._stamps[-1] - self._stamps[0] >= self._seconds
        if over:
            self._write()
        return over

    def _write(self) -> None:
        first = self._stamps[0]
        steady = [stamp for stamp in self._stamps if stamp - first >= WARM_UP_SECONDS]
        passed = steady[-1] - steady[0] if len(steady) > 1 else 0.0
        rate = (len(steady) - 1) / passed if passed > 0 else None
        if self._file is not None:
            said = {"steps": len(self._stamps), "seconds": self._stamps[-1] - first, "steps_per_second": rate}
            self._file.write_text(json.dumps(said), encoding="utf-8")


def picture_network(width: int, classes: int = 10) -> nn.Module:
    """Three convolutions and a linear layer, for pictures of any size."""
    torch.set_num_threads(1)  # more threads would not make such a small network faster
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for wider in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.BatchNorm2d(wider), nn.ReLU()]
        channels = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, pictures: torch.Tensor, labels: torch.Tensor
) -> None:
    """One update of a classifier."""
    loss = nn.functional.cross_entropy(model(pictures), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(loader: Iterable[tuple[torch.Tensor, torch.Tensor]], options: argparse.Namespace) -> None:
    """Train a picture network until the time is over."""
    model = picture_network(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pace = Pace(options)
    while True:
        for pictures, labels in loader:
            train_step(model, optimizer, pictures, labels)
            if pace.step():
                return


class TextNetwork(nn.Module):
    """Embedded tokens through two convolutions, averaged."""

    def __init__(self, width: int, words: int = 4096, classes: int = 10) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.embedding = nn.Embedding(words, 2 * width)
        self.body = nn.Sequential(
            nn.Conv1d(2 * width, 4 * width, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(4 * width, 4 * width, 5, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of shape (batch, length) to logits of shape (batch, classes)."""
        hidden = self.body(self.embedding(tokens).transpose(1, 2))
        return self.head(hidden.mean(2))
