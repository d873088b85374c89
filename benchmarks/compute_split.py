"""Measures how well the agent splits the compute: against timers that the training script has itself.

    python -m benchmarks.compute_split [--seconds 60] [--results DIR]

Each loop runs in this process, with the agent at its default settings.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import machine
from telemetry.log.reader import load
from telemetry.model.records import BACKWARD, COMPUTE_PARTS, FORWARD, OPTIMIZER, OTHER

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS: Final = Path(__file__).parent / "results"
_PARTS: Final = (FORWARD, BACKWARD, OPTIMIZER, OTHER)
_BATCH: Final = 32
_LOGGED: Final = 50_000
_MOST_APART: Final = 3.0


class Rows(Dataset):  # type: ignore[misc]
    """Random rows."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((128,), 1e-3 * (index % 89))


class Timers:
    """A script's own timers: the seconds of each part. A part ends where the next begins."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_PARTS, 0.0)
        self._part, self._at = "", 0.0

    def begin(self, part: str) -> None:
        """End the part in progress, and begin another one; an empty one is not counted."""
        now = time.perf_counter()
        if self._part:
            self.seconds[self._part] += now - self._at
        self._part, self._at = part, now


class Loop:
    """A training with a model of equal layers."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(24)])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6)
        self.timers = Timers()

    def _pass(self, x: torch.Tensor) -> torch.Tensor:
        self.timers.begin(FORWARD)
        loss = self.model(x).square().mean()
        self.timers.begin(BACKWARD)
        loss.backward()
        self.timers.begin(OTHER)
        return loss

    def _update(self) -> None:
        self.timers.begin(OPTIMIZER)
        self.optimizer.step()
        self.timers.begin(OTHER)
        self.optimizer.zero_grad()

    def plain(self, batches: Iterator[torch.Tensor]) -> None:
        """One pass and one update."""
        self._pass(next(batches))
        self._update()

    def clipped_and_logged(self, batches: Iterator[torch.Tensor]) -> None:
        """Gradients are clipped before the update, and Python works after it."""
        self._pass(next(batches))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._update()
        sum(number % 7 for number in range(_LOGGED))

    def accumulated(self, batches: Iterator[torch.Tensor]) -> None:
        """Four passes over parts of the batch before each update."""
        for part in next(batches).chunk(4):
            self._pass(part)
        self._update()

    def zeroed_before_backward(self, batches: Iterator[torch.Tensor]) -> None:
        """The forward pass ends with the script's own operators, before gradients are dropped."""
        batch = next(batches)
        self.timers.begin(FORWARD)
        out = self.model(batch)
        for _ in range(30):
            out = out * 0.9 + batch
        loss = out.mean()
        self.timers.begin(OTHER)
        self.optimizer.zero_grad()
        self.timers.begin(BACKWARD)
        loss.backward()
        self.timers.begin(OPTIMIZER)
        self.optimizer.step()

    def in_a_closure(self, batches: Iterator[torch.Tensor]) -> None:
        """The optimizer calls for the passes itself."""
        batch = next(batches)

        def closure() -> torch.Tensor:
            loss = self._pass(batch)
            self.timers.begin(OPTIMIZER)
            return loss

        self.timers.begin(OPTIMIZER)
        self.optimizer.step(closure)
        self.timers.begin(OTHER)
        self.optimizer.zero_grad()

    def run(self, kind: str, batches: Iterator[torch.Tensor], seconds: float) -> None:
        """Train for so many seconds."""
        step = getattr(self, kind)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            step(batches)
            self.timers.begin("")


KINDS: Final = ("plain", "clipped_and_logged", "accumulated", "zeroed_before_backward", "in_a_closure")


def measured(kind: str, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """The shares of the parts by the script's own timers, and by the agent, in per cent."""
    import telemetry

    loop = Loop()
    loader = DataLoader(Rows(), batch_size=_BATCH)
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir:
        telemetry.start(run_dir, port="off", start_line=False, end_line=False, max_snapshots=0)
        try:
            batches = itertools.chain.from_iterable(iter(loader.__iter__, None))
            loop.run(kind, batches, 1.0)
            loop.timers = Timers()
            loop.run(kind, batches, seconds)
        finally:
            telemetry.stop()
        (process,) = load(Path(run_dir))
    told = process.totals.compute_total_seconds
    return shares(loop.timers.seconds), shares({part: told[part] for part in _PARTS})


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """The shares of the parts, in per cent."""
    return {part: 100 * spent / sum(seconds.values()) for part, spent in seconds.items()}


def main() -> int:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compute_split", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each loop")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine.describe()
    lines = [
        "# Where the compute goes, by the agent and by the script's own timers",
        "",
        (
            f"Measured by `python -m benchmarks.compute_split` on {about['cpu']}, {about['cores']} cores shared with "
            f"other work; Python {about['python']}, torch {about['torch']}. Each loop ran for {options.seconds:.0f} s. "
            "Shares of the compute in per cent: by the script, and by the agent, as its report has them. It ends with "
            f"an error if they differ by more than {_MOST_APART:g} points."
        ),
        "",
        f"| Loop | {' | '.join(part for part in COMPUTE_PARTS if part in _PARTS)} | Largest difference |",
        f"|---|{'---|' * (len(_PARTS) + 1)}",
    ]
    worst = 0.0
    for kind in KINDS:
        own, agent = measured(kind, options.seconds)
        cells = [f"{own[part]:.1f}, {agent[part]:.1f}" for part in _PARTS]
        apart = max(abs(own[part] - agent[part]) for part in _PARTS)
        worst = max(worst, apart)
        lines.append(f"| {kind.replace('_', ' ')} | {' | '.join(cells)} | {apart:.1f} |")
    print("\n".join(lines))
    path = options.results / f"compute-split-{machine.slug(about)}.md"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"written: {path}")
    return int(worst > _MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
