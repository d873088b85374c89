"""Measures how much more CPU time a batch costs if workers fetch it, compared with the training thread.

    python -m benchmarks.worker_cost

If the work of a batch needs all cores, workers gain less than the number of cores. Processes share caches and memory
bandwidth, batches are sent and mapped, and the next batch is not always ready when it is requested.
`telemetry.diagnosis.advice` uses this cost to predict the speed-up of a loader without workers. Its two
constants are measured here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from torch.utils.data import DataLoader, Dataset

_WARM_UP = 10
"""Batches until the workers have started and their prefetched batches are used up."""


class Work(Dataset):  # type: ignore[misc]
    """Batches of small pictures. Each takes the given rounds of work.

    Args:
        rounds: rounds of `work`.
        length: number of batches.
    """

    def __init__(self, rounds: int, length: int) -> None:
        self.rounds = rounds
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.set_num_threads(1)
        work(self.rounds)
        return torch.full((16, 3, 64, 64), float(index)), torch.zeros(16)


def work(rounds: int) -> None:
    """About 0.2 ms per round on one core of the machine of the results: Python, and then tensors."""
    for _ in range(rounds):
        sum([number * number for number in range(4000)])
        picture = torch.ones(3, 96, 96)
        for _ in range(4):
            picture = picture * 1.01 + 0.1


def seconds_per_batch(rounds: int, workers: int, seconds: float) -> float:
    """Seconds per batch of a loop that computes as long as it fetches."""
    batches = iter(DataLoader(Work(rounds, 1_000_000), batch_size=None, num_workers=workers))
    for _ in range(_WARM_UP):
        next(batches)
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        next(batches)
        work(rounds)
        count += 1
    return (time.monotonic() - began) / count


def main() -> None:
    """Measure alternately, and print one row for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="comparisons of each size")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each loop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    print(f"| ms of a batch on one core | ms on {cores} cores, {cores} workers | ms of the cores more | times faster |")
    print("|---|---|---|---|")
    for rounds in (4, 16, 64):
        alone, beside = [], []
        for _ in range(options.repeat):
            alone.append(1e3 * seconds_per_batch(rounds, 0, options.seconds))
            beside.append(1e3 * seconds_per_batch(rounds, cores, options.seconds))
        more = sorted(cores * then - now for now, then in zip(alone, beside, strict=True))
        gain = statistics.median(now / then for now, then in zip(alone, beside, strict=True))
        print(
            f"| {statistics.median(alone):.1f} | {statistics.median(beside):.1f}"
            f" | {statistics.median(more):.1f} ({more[0]:.1f} to {more[-1]:.1f}) | {gain:.2f} |"
        )


if __name__ == "__main__":
    main()
