"""Measures costs of the agent that a long run does not show: the first seconds, and iterators of one batch.

    python -m benchmarks.unnoticed

Processes with the agent and without it take turns. Each line has the medians of both, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Final

_RUN: Final = """
import itertools, json, statistics, sys, time
import torch
from torch.utils.data import DataLoader
import telemetry

seconds = float(sys.argv[1])
torch.set_num_threads(1)
telemetry.start(start_line=False, end_line=False, port="off")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = DataLoader([torch.ones(64)] * 64, batch_size=4)

def step(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()

def timed(do, *, skipped, until):
    took, end = [], time.perf_counter() + until
    for number in itertools.count():
        start = time.perf_counter()
        if start > end:
            return statistics.median(took)
        do()
        if number >= skipped:
            took.append(1e6 * (time.perf_counter() - start))

def epochs():
    while True:
        for x in loader:
            yield step(x)

def iteration():
    step(next(iter(loader)))

found = {"step, from the tenth on, in the first seconds": timed(epochs().__next__, skipped=10, until=seconds)}
found["step of an iterator of its own"] = timed(iteration, skipped=10, until=seconds)
telemetry.stop()
print(json.dumps(found))
"""


def microseconds(seconds: float, *, agent: bool) -> dict[str, float]:
    """What one process finds, in microseconds. Each figure takes ``seconds``."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TELEMETRY_DISABLED": "0" if agent else "1"}
        command = [sys.executable, "-c", _RUN, str(seconds)]
        said = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, float] = json.loads(said)
    return found


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure of a process")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    turns = [
        [microseconds(options.seconds, agent=agent) for agent in (False, True)] for _ in range(max(1, options.turns))
    ]
    print("| what | us without the agent | us with it | ratio |")
    print("|---|---|---|---|")
    for what in turns[0][0]:
        bare, ours = (statistics.median(turn[which][what] for turn in turns) for which in (0, 1))
        print(f"| {what} | {bare:.1f} | {ours:.1f} | {ours / bare:.2f} |")


if __name__ == "__main__":
    main()
