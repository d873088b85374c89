"""Measures how long a tick of the agent takes beside a loop that keeps the GIL, and what the loop loses.

    python -m benchmarks.gil_turns

The loop sorts a list, which holds the GIL for 4 ms, and reads a DataLoader without workers. That calls an operator of
torch, which gives the GIL up for an instant. Runs in turns: without an agent; with one; and with one that does not
shorten the switch interval.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader, Dataset

import telemetry
from benchmarks import machine
from telemetry.agent.agent import Agent
from telemetry.safety import gil

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
KINDS: Final = ("bare", "agent", "agent, interval as it is")
NUMBERS: Final = [(i * 7919) % 1000003 for i in range(100_000)]


class Ready(Dataset):  # type: ignore[misc]
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> int:
        return index


def loop(kind: str, seconds: float) -> str:
    """Run the loop. Returns steps per second, ticks that have ended, and the longest, which may not have ended."""
    spans: list[list[float]] = []
    original = Agent._tick

    def timed(agent: Agent) -> None:
        spans.append([time.monotonic(), 0.0])
        original(agent)
        spans[-1][1] = time.monotonic()

    if kind == KINDS[2]:
        gil._LATE_NS = 1 << 62  # type: ignore[misc]
    Agent._tick = timed  # type: ignore[assignment,method-assign]
    with tempfile.TemporaryDirectory() as folder:
        if kind != KINDS[0]:
            telemetry.start(folder, port="off", start_line=False)
        steps, began = 0, time.monotonic()
        for _ in DataLoader(Ready(), batch_size=None):
            sorted(NUMBERS)
            steps += 1
            if time.monotonic() - began > seconds:
                break
        until = time.monotonic()
        rate = steps / (until - began)
        telemetry.stop()
    ended = [min(end or until, until) - start for start, end in spans]
    return f"{rate} {len(ended)} {max(ended, default=0.0)}"


def measured(kind: str, seconds: float) -> tuple[float, ...]:
    """The loop in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gil_turns", "--kind", kind, "--seconds", str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()))


def row(kind: str, found: list[tuple[float, ...]], bare: list[tuple[float, ...]]) -> str:
    """One row of the table: medians, with the least and the most."""
    ratios = [one[0] / other[0] for one, other in zip(found, bare, strict=True)]
    cells: list[Any] = [kind, f"{statistics.median(one[0] for one in found):.0f}"]
    cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if kind != KINDS[0]:
        longest = [one[2] for one in found]
        cells.append(f"{statistics.median(one[1] for one in found):.0f}")
        cells.append(f"{statistics.median(longest):.2f} s ({min(longest):.2f} to {max(longest):.2f})")
    return f"| {' | '.join([*cells, '-', '-'][:5])} |"


def main() -> int:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gil_turns", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    if options.kind:
        print(loop(options.kind, options.seconds))
        return 0
    about = machine.describe()
    found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeat):
        for kind in KINDS:
            found[kind].append(measured(kind, options.seconds))
    lines = [
        "# Ticks beside a loop that keeps the GIL",
        "",
        (
            f"Measured by `python -m benchmarks.gil_turns` on {about['cpu']}, {about['cores']} cores shared with other "
            f"work; Python {about['python']}, torch {about['torch']}. Medians of {options.repeat} runs of "
            f"{options.seconds:.0f} s, with the least and the most."
        ),
        "",
        "| Loop | Steps/s | Of the bare loop's | Ticks | The longest |",
        "|---|---|---|---|---|",
        *(row(kind, found[kind], found[KINDS[0]]) for kind in KINDS),
        "",
    ]
    print("\n".join(lines))
    path = options.results / f"gil-turns-{machine.slug(about)}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
