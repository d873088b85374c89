"""Measures how often `telemetry compare` is wrong: on pairs of equal runs, and on pairs of which one is 5 % slower.

    python -m benchmarks.compare_pairs --record FILE [--runs 60] [--together 3]     # runs benchmarks/compare_train.py
    python -m benchmarks.compare_pairs FILE [--pairs 2000] [--output FOLDER]

The first call records the paces of real runs, window by window. The second compares all pairs of them. Then it draws
pairs of longer runs: stretches of the recorded scatter, joined, which keep the correlation of windows within a stretch;
and runs with the scatter and the correlation of neighbours that were measured (an autoregressive series).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import machine
from telemetry.compare.pace_interval import MIN_BLOCKS, PaceBlock, ratio_interval
from telemetry.compare.run_pace import pace_of
from telemetry.report.logs import load

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parents[1]
SLOWER: Final = 1.05
KINDS: Final = (("thread", 1.0), ("worker", 1.0), ("thread", SLOWER), ("thread", 1.0), ("worker", SLOWER))
"""Kinds of runs, in the order in which they are recorded."""

LENGTHS: Final = (20, 40, 80, 160)
STRETCH: Final = 8
WINDOW_SECONDS: Final = 10.0
"""The default of ``log_interval_seconds``."""

QUIETER: Final = (0.01, 0.02, 0.04)
QUIET_MEMORY: Final = 0.45
"""Scatter of windows, and their correlation, of machines that are used by fewer others."""


def record(file: Path, runs: int, together: int, seconds: float) -> None:
    """Run the script this often, and write the windows of each run."""
    with tempfile.TemporaryDirectory() as folder:

        def one(number: int) -> dict[str, Any] | None:
            loader, slower = KINDS[number % len(KINDS)]
            run_dir = Path(folder) / str(number)
            options = ["--run-dir", str(run_dir), "--port", "off", "--max-snapshots", "0"]
            windows = ["--interval-seconds", "0.4", "--log-interval-seconds", "0.8"]
            script = [str(ROOT / "benchmarks" / "compare_train.py"), "--seconds", str(seconds), "--loader", loader]
            command = [sys.executable, "-m", "telemetry", "run", *options, *windows, *script, "--slower", str(slower)]
            done = subprocess.run(command, check=False, capture_output=True, cwd=ROOT, timeout=20 * seconds)
            if done.returncode:
                return None
            pace = pace_of(load(run_dir))
            blocks = [[round(block.steps, 3), round(block.seconds, 5)] for block in pace.blocks]
            load_average = round(os.getloadavg()[0], 2)
            return {"loader": loader, "slower": slower, "load_average": load_average, "blocks": blocks}

        with ThreadPoolExecutor(together) as pool:
            found = [each for each in pool.map(one, range(runs)) if each is not None]
    write_runs(file, machine.describe(), found)


def write_runs(file: Path, description: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    """Write recorded runs, a line each."""
    lines = ",\n".join(json.dumps(each) for each in runs)
    file.write_text(f'{{"machine": {json.dumps(description)}, "runs": [\n{lines}\n]}}\n')


def judged(pairs: Sequence[tuple[Sequence[PaceBlock], Sequence[PaceBlock]]]) -> dict[str, Any]:
    """How many pairs are called slower or faster, and half the length of the interval."""
    intervals = [ratio_interval(a, b) for a, b in pairs]
    halves = sorted((each.high - each.low) / 2 / each.ratio for each in intervals)
    return {
        "pairs": len(intervals),
        "slower": sum(each.high < 1 for each in intervals),
        "faster": sum(each.low > 1 for each in intervals),
        "median_half": round(statistics.median(halves), 4) if halves else None,
    }


class Recorded:
    """The runs of one kind of loader."""

    def __init__(self, runs: Sequence[dict[str, Any]], loader: str) -> None:
        def of(slower: float) -> list[list[PaceBlock]]:
            found = [each for each in runs if each["loader"] == loader and each["slower"] == slower]
            return [blocks for each in found if len(blocks := [PaceBlock(*b) for b in each["blocks"]]) >= MIN_BLOCKS]

        self.plain, self.slow = of(1.0), of(SLOWER)
        scatters = [_deviations(blocks) for blocks in self.plain]
        self.scatters = scatters
        squares = sum(value * value for each in scatters for value in each)
        count = sum(map(len, scatters))
        products = sum(a * b for each in scatters for a, b in pairwise(each))
        self.scatter = math.sqrt(squares / count)
        self.memory = max(0.0, min(0.95, (products / squares) + 1 / statistics.mean(map(len, scatters))))
        paces = [sum(b.steps for b in blocks) / sum(b.seconds for b in blocks) for blocks in self.plain]
        self.between = statistics.stdev(paces) / statistics.mean(paces)

    def figures(self, pairs: int, rng: random.Random) -> dict[str, Any]:
        """All figures of this kind."""
        found: dict[str, Any] = {
            "runs": len(self.plain),
            "scatter_of_windows": round(self.scatter, 4),
            "correlation_of_neighbours": round(self.memory, 3),
            "scatter_between_runs": round(self.between, 4),
            "equal": judged(list(combinations(self.plain, 2))),
            "one after the other": judged(list(pairwise(self.plain))),
            "5 % slower": judged(list(product(self.plain, self.slow))),
        }
        for name, draw in (("joined", self._joined), ("autoregressive", self._autoregressive)):
            found[name] = {
                length: {
                    "equal": judged([(draw(length, rng), draw(length, rng)) for _ in range(pairs)]),
                    "5 % slower": judged([(draw(length, rng), draw(length, rng, SLOWER)) for _ in range(pairs)]),
                }
                for length in LENGTHS
            }
        return found

    def _joined(self, length: int, rng: random.Random, slower: float = 1.0) -> list[PaceBlock]:
        values: list[float] = []
        while len(values) < length:
            scatter = rng.choice(self.scatters)
            start = rng.randrange(max(1, len(scatter) - STRETCH))
            values += scatter[start : start + STRETCH]
        return [PaceBlock(100 / slower * max(0.01, 1 + value), 1.0) for value in values[:length]]

    def _autoregressive(self, length: int, rng: random.Random, slower: float = 1.0) -> list[PaceBlock]:
        paces = autoregressive(self.scatter, self.memory, length, rng)
        return [PaceBlock(100 / slower * pace, 1.0) for pace in paces]


def autoregressive(scatter: float, memory: float, length: int, rng: random.Random) -> list[float]:
    """Relative paces of windows that scatter, and resemble their neighbours."""
    state, paces = rng.gauss(0, 1), []
    for _ in range(length):
        state = memory * state + math.sqrt(1 - memory**2) * rng.gauss(0, 1)
        paces.append(math.exp(scatter * state))
    return paces


def quieter(scatter: float, pairs: int, rng: random.Random) -> dict[int, dict[str, Any]]:
    """Pairs of runs on a quieter machine, by number of windows: less scatter, and the correlation measured here."""

    def draw(length: int, slower: float = 1.0) -> list[PaceBlock]:
        paces = autoregressive(scatter, QUIET_MEMORY, length, rng)
        return [PaceBlock(100 / slower * pace * WINDOW_SECONDS, WINDOW_SECONDS) for pace in paces]

    return {
        length: {
            "equal": judged([(draw(length), draw(length)) for _ in range(pairs)]),
            "5 % slower": judged([(draw(length), draw(length, SLOWER)) for _ in range(pairs)]),
        }
        for length in LENGTHS
    }


def _deviations(blocks: Sequence[PaceBlock]) -> list[float]:
    pace = sum(b.steps for b in blocks) / sum(b.seconds for b in blocks)
    return [block.steps / block.seconds / pace - 1 for block in blocks]


def text_of(figures: dict[str, Any]) -> str:
    """The figures as a page."""
    kinds, place = figures["kinds"], figures["machine"]
    lines = [
        "# Comparisons of two runs",
        "",
        f"By `python -m benchmarks.compare_pairs`, on {place['cores']} cores of {place['cpu']}.",
        f"On {place['date'][:10]}; other jobs used the machine at the same time.",
        "",
        "## Real runs",
        "",
        "| Loader | Runs | Equal pairs | differ | One after the other | differ | One 5 % slower | slower | Interval |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_real_row(name, each) for name, each in kinds.items()),
        "",
        "*Differ*, *slower*: so many pairs were said to be so. *One after the other*: equal pairs recorded so.",
        "*Interval*: half of its length, median.",
        "",
        "| Loader | Scatter of windows | Correlation of neighbours | Scatter between runs |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {_percent(each['scatter_of_windows'])} | {each['correlation_of_neighbours']:.2f} | "
            f"{_percent(each['scatter_between_runs'])} |"
            for name, each in kinds.items()
        ),
        "",
        f"## Drawn from them ({figures['pairs']} pairs each)",
        "",
        "| Loader | Windows of a run | Drawn as | Equal: said to differ | 5 % slower: found |",
        "| --- | --- | --- | --- | --- |",
    ]
    for scatter, drawn in figures["quieter"].items():
        for length, found in drawn.items():
            lines.append(_drawn_row(f"windows scatter by {_percent(scatter)}", length, "autoregressive", found))
    for name, each in kinds.items():
        for method in ("joined", "autoregressive"):
            for length, found in each[method].items():
                lines.append(_drawn_row(name, length, method, found))
    return "\n".join([*lines, ""])


def _drawn_row(name: str, length: int, method: str, found: dict[str, Any]) -> str:
    equal, slow = found["equal"], found["5 % slower"]
    wrong = (equal["slower"] + equal["faster"]) / equal["pairs"]
    return f"| {name} | {length} | {method} | {_percent(wrong)} | {_percent(slow['slower'] / slow['pairs'])} |"


def _real_row(name: str, each: dict[str, Any]) -> str:
    equal, near, slow = each["equal"], each["one after the other"], each["5 % slower"]
    counts = [count for found in (equal, near) for count in (found["pairs"], found["slower"] + found["faster"])]
    cells = [name, each["runs"], *counts, slow["pairs"], slow["slower"], f"± {_percent(equal['median_half'])}"]
    return f"| {' | '.join(map(str, cells))} |"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def main() -> None:
    """Record, or compare and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_pairs", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="recorded runs")
    parser.add_argument("--record", type=Path, metavar="FILE", help="record runs into this file")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--together", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a run")
    parser.add_argument("--pairs", type=int, default=2000, help="drawn pairs of each kind")
    parser.add_argument("--output", type=Path, help="also write a .json and a .md file into this folder")
    options = parser.parse_args()
    if options.record is not None:
        record(options.record, options.runs, options.together, options.seconds)
        return
    if options.file is None:
        parser.error("name a file of recorded runs, or --record")
    recorded = json.loads(options.file.read_text())
    runs = recorded["runs"]
    rng = random.Random(0)
    loaders = dict.fromkeys(each["loader"] for each in runs)
    kinds = {loader: Recorded(runs, loader).figures(options.pairs, rng) for loader in loaders}
    figures = {
        "machine": recorded["machine"],
        "pairs": options.pairs,
        "kinds": kinds,
        "quieter": {scatter: quieter(scatter, options.pairs, rng) for scatter in QUIETER},
    }
    text = text_of(figures)
    print(text)
    if options.output:
        stem = f"compare-{machine.slug(recorded['machine'])}"
        (options.output / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n")
        (options.output / f"{stem}.md").write_text(text)


if __name__ == "__main__":
    main()
