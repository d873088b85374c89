"""Measures how often `telemetry compare` is right: on drawn pairs of runs, and on recorded runs of a real script.

    python -m benchmarks.compare --record FILE [--minutes 20] [--seconds 40]      # runs benchmarks/compare_train.py
    python -m benchmarks.compare [FILE ...] [--output FOLDER]

Drawn runs have windows that resemble their neighbours (an autoregressive series), and a pace that drifts slowly. The
true ratio of a pair is known: it is 1, or 0.95 where each window of B is stretched.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks import machine
from telemetry.compare import Ratio, Run, Window, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"

CORRELATIONS: Final = (0.0, 0.3, 0.5, 0.7, 0.9)
COUNTS: Final = (3, 5, 8, 16, 40, 160)
SCATTER: Final = 0.04
DRIFT: Final = 0.012
DRIFT_SECONDS: Final = 900.0
PLACE: Final = 0.005
"""Paces of drawn runs also drift by this standard deviation, for so long, and differ by ``PLACE`` from run to run. So
short ones scatter by 1.3 %, as recorded ones do."""

WINDOW_SECONDS: Final = 10.0

STRETCHED: Final = 1.05
MIN_WINDOWS: Final = 8
CALM: Final = 0.1
"""A recorded run is calm if others held up at most this share of its training loop, which older recordings tell."""

KINDS: Final = ("thread", "worker", "busy")


@dataclass
class Count:
    """Of pairs of runs: how many there are, and what was said of them."""

    pairs: int = 0
    covered: int = 0
    slower: int = 0
    faster: int = 0
    halves: tuple[float, ...] = ()

    def add(self, found: Ratio, truth: float) -> None:
        """Count one."""
        low, high = found.interval
        self.pairs += 1
        self.covered += low <= truth <= high
        self.slower += high < 1
        self.faster += low > 1
        self.halves += (found.half,)

    def row(self, *names: object) -> str:
        """As a row of a table."""
        covered = f"{100 * self.covered / self.pairs:.1f} %" if self.pairs else "-"
        half = f"± {100 * median(self.halves):.1f} %" if self.halves else "-"
        figures = (self.pairs, covered, self.slower, self.faster, half)
        return "| " + " | ".join(map(str, (*names, *figures))) + " |"

    def as_json(self) -> dict[str, Any]:
        """As numbers."""
        half = median(self.halves) if self.halves else None
        counts = {"pairs": self.pairs, "covered": self.covered, "slower": self.slower, "faster": self.faster}
        return counts | {"median_half": half}


def drawn(rng: random.Random, count: int, correlation: float) -> list[Window]:
    """A run with this many windows."""
    memories = (correlation, math.exp(-WINDOW_SECONDS / DRIFT_SECONDS))
    states = [rng.gauss(0, 1), rng.gauss(0, 1)]
    place, windows = PLACE * rng.gauss(0, 1), []
    for _ in range(count):
        windows.append(Window(1000 * math.exp(place + SCATTER * states[0] + DRIFT * states[1]), WINDOW_SECONDS))
        states = [m * state + math.sqrt(1 - m * m) * rng.gauss(0, 1) for m, state in zip(memories, states, strict=True)]
    return windows


def simulated(pairs: int) -> dict[tuple[float, int], Count]:
    """By correlation and number of windows."""
    found = {}
    for correlation in CORRELATIONS:
        for count in COUNTS:
            rng, counted = random.Random(1), Count()
            for _ in range(pairs):
                counted.add(ratio_interval(*(drawn(rng, count, correlation) for _ in range(2))), 1.0)
            found[correlation, count] = counted
    return found


def stretched(windows: Sequence[Window]) -> list[Window]:
    """The run as if each step had taken longer: a slow-down that is known exactly."""
    return [Window(window.steps, STRETCHED * window.seconds) for window in windows]


def runs_of(recordings: Iterable[dict[str, Any]], loader: str) -> list[list[list[Window]]]:
    """The calm runs of one kind that are not slowed down, by recording."""
    found = []
    for recording in recordings:
        blocks = [r["blocks"] for r in recording["runs"] if (r["loader"], r["slower"]) == (loader, 1.0)]
        calm = [each for each in blocks if sum(_held_up(block) for block in each) <= CALM * sum(b[1] for b in each)]
        found.append([[Window(*block[:2]) for block in each] for each in calm if len(each) >= MIN_WINDOWS])
    return found


def _held_up(block: Sequence[float | None]) -> float:
    return (block[3] if len(block) > 3 else None) or 0.0


def recorded(recordings: Sequence[dict[str, Any]], *, longer: bool) -> dict[str, Count]:
    """All pairs of runs of one recording, by kind. ``longer``: each window of B is stretched."""
    found = {}
    for loader in KINDS:
        found[loader] = counted = Count()
        for runs in runs_of(recordings, loader):
            for a, b in combinations(runs, 2):
                ratio = ratio_interval(a, stretched(b) if longer else b)
                counted.add(ratio, 1 / STRETCHED if longer else 1.0)
    return found


def record(file: Path, minutes: float, seconds: float) -> None:
    """Run the script for so many minutes, and write the windows of each run."""
    runs: list[dict[str, Any]] = []
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            loader, run_dir = KINDS[len(runs) % len(KINDS)], Path(folder) / str(len(runs))
            options = ["--run-dir", str(run_dir), "--port", "off", "--max-snapshots", "0"]
            options += ["--interval-seconds", "0.4", "--log-interval-seconds", "0.8"]
            script = [str(ROOT / "benchmarks" / "compare_train.py"), "--seconds", str(seconds), "--loader", loader]
            subprocess.run([sys.executable, "-m", "telemetry", "run", *options, *script], cwd=ROOT, check=True)
            blocks = [[round(figure, 4) for figure in window] for window in Run.of(str(run_dir)).windows]
            runs.append({"loader": loader, "slower": 1.0, "blocks": blocks})
    file.write_text(json.dumps({"machine": machine.describe(), "runs": runs}) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="recordings; by default those in benchmarks/results")
    parser.add_argument("--record", type=Path, metavar="FILE", help="record runs instead")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of a run")
    parser.add_argument("--pairs", type=int, default=2000, help="drawn pairs of each kind")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args()
    if options.record:
        record(options.record, options.minutes, options.seconds)
        return
    files = options.files or sorted(RESULTS.glob("compare-*-runs-*.json"))
    recordings = [json.loads(path.read_text()) for path in files]
    place = recordings[0]["machine"]
    head = "pairs | interval has the truth | slower | faster | median interval |"
    lines = [
        "# How often `telemetry compare` is right",
        "",
        "By `python -m benchmarks.compare`.",
        "",
        "## Drawn runs",
        "",
    ]
    lines += [f"| correlation of windows | windows | {head}", "| --- " * 7 + "|"]
    drawn_pairs = simulated(options.pairs)
    lines += [counted.row(correlation, count) for (correlation, count), counted in drawn_pairs.items()]
    lines += ["", "## Recorded runs on a calm machine", "", f"{place['cores']} cores of {place['cpu']}.", ""]
    lines += [f"| kind | B | {head}", "| --- " * 7 + "|"]
    real = {}
    for longer, name in ((False, "equal"), (True, "5 % longer")):
        for loader, counted in recorded(recordings, longer=longer).items():
            real[f"{loader}; {name}"] = counted.as_json()
            lines.append(counted.row(loader, name))
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.output:
        stem = options.output / f"compare-{machine.slug(place)}"
        told = {f"{correlation}; {count}": each.as_json() for (correlation, count), each in drawn_pairs.items()}
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps({"drawn": told, "recorded": real}, indent=1) + "\n")


if __name__ == "__main__":
    main()
