"""Shared by the scripts: the variant, a small network, and the pace in samples of new data per second."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

VARIANT = sys.argv[-1] if len(sys.argv) > 1 else "base"
FIXED = VARIANT == "fixed"
RUN_FOR = float(os.environ.get("RUN_FOR", "45"))

torch.manual_seed(0)


def workers(default: int) -> int:
    """The number of workers: of the variable, else the script's own."""
    return int(os.environ.get("WORKERS", default))


class Trainer:
    """A linear layer with its optimizer. ``seconds``: how long an accelerator would compute each step."""

    def __init__(self, features: int = 64, seconds: float = 0.02) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.Linear(features, 1)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self._seconds = seconds

    def step(self, x: torch.Tensor) -> float:
        """One update. Returns the loss."""
        time.sleep(self._seconds)
        loss = self.model(x).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


class Pace:
    """Counts samples from after the warm-up to the end. With epochs, from the end of the first to that of the last."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._samples = 0
        self._steady: tuple[float, int] | None = None
        self._epochs: list[tuple[float, int]] = []

    @property
    def over(self) -> bool:
        """Whether the time of the run has passed."""
        return time.monotonic() - self._began >= RUN_FOR

    def step(self, samples: int) -> bool:
        """Count a step with so many samples that are new in this epoch. Returns whether the run is over."""
        self._samples += samples
        now = time.monotonic()
        if self._steady is None and now - self._began >= RUN_FOR / 6:
            self._steady = now, self._samples
        return self.over

    def epoch(self) -> bool:
        """An epoch has ended. Returns whether the run is over."""
        self._epochs.append((time.monotonic(), self._samples))
        return self.over

    def say(self) -> None:
        """Print the pace, and write it into the file that a variable names."""
        end = time.monotonic(), self._samples
        (since, before), (until, after) = (
            (self._epochs[0], self._epochs[-1]) if len(self._epochs) > 1 else (self._steady or (self._began, 0), end)
        )
        said = {
            "samples_per_second": (after - before) / max(until - since, 1e-9),
            "samples": self._samples,
            "epochs": len(self._epochs),
        }
        print("PACE", json.dumps(said), flush=True)
        if "PACE_FILE" in os.environ:
            Path(os.environ["PACE_FILE"]).write_text(json.dumps(said), encoding="utf-8")
