"""Measures what torch's flight recorder costs a collective: with its default against switched off.

    python -m benchmarks.flight_recorder

Two ranks on gloo run all_reduce on a tensor of four numbers. The agent is not there. Processes with the recorder's
default and with ``TORCH_FR_BUFFER_SIZE=0`` take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Final

_RANK: Final = """
import sys, time
import torch
import torch.distributed as dist

rank, store, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
tensor = torch.ones(4)
for _ in range(number // 10):
    dist.all_reduce(tensor)
cpu, began = time.process_time(), time.perf_counter()
for _ in range(number):
    dist.all_reduce(tensor)
print((time.perf_counter() - began) / number * 1e6, (time.process_time() - cpu) / number * 1e6)
"""


def microseconds(number: int, **variables: str) -> tuple[float, float]:
    """Wall and CPU time of one collective on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")} | variables
        commands = [[sys.executable, "-c", _RANK, str(rank), f"{folder}/store", str(number)] for rank in (0, 1)]
        first, second = (subprocess.Popen(c, env=env, stdout=subprocess.PIPE, text=True) for c in commands)
        wall, cpu = first.communicate()[0].split()
        second.communicate()
    return float(wall), float(cpu)


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", type=int, default=10_000, help="of each process")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    ways: dict[str, dict[str, str]] = {"default": {}, "`TORCH_FR_BUFFER_SIZE=0`": {"TORCH_FR_BUFFER_SIZE": "0"}}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(options.turns):
        for way, variables in ways.items():
            found[way].append(microseconds(options.collectives, **variables))
    print("| recorder | us of wall time: median, least | us of CPU time: median, least |")
    print("|---|---|---|")
    for way, readings in found.items():
        wall, cpu = zip(*readings, strict=True)
        print(f"| {way} | {_both(wall)} | {_both(cpu)} |")


def _both(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.1f}, {min(values):.1f}"


if __name__ == "__main__":
    main()
