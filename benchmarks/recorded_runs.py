"""Runs of benchmarks/compare_train.py: how `benchmarks.compare_loads` records and reads them."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import machine
from benchmarks.compare_pairs import ROOT, write_runs
from telemetry.compare.pace_interval import MIN_BLOCKS, PaceBlock
from telemetry.compare.run_pace import pace_of
from telemetry.report.logs import load

if TYPE_CHECKING:
    from collections.abc import Sequence

Run = tuple[PaceBlock, ...]

SLOWER: Final = (1.05, 1.10)
KINDS: Final = (
    ("thread", 1.0), ("worker", 1.0), ("busy", 1.0), ("thread", 1.05), ("worker", 1.0), ("busy", 1.0),
    ("thread", 1.0), ("worker", 1.05), ("busy", 1.0), ("thread", 1.0), ("worker", 1.0), ("busy", 1.05),
    ("thread", 1.1), ("worker", 1.1), ("busy", 1.1),
)  # fmt: skip
"""Kinds of runs, in the order in which they are recorded. The newest recording has the first twelve, over and over."""

LOADS: Final[tuple[float, ...]] = (0.0, 0.0, 0.2, 0.5, 0.8)
"""Parts of a core that a program beside the runs uses: one of these, drawn for each batch of runs."""

STRETCHED: Final = 1.05
"""The windows of one of two equal runs are stretched by this: a slow-down that is known exactly."""

JOINED: Final = {1: "0.8 s", 6: "5 s"}
"""How long windows are of which so many recorded ones are joined."""

CALM: Final = 0.1
"""A run is calm if others held up at most this share of its training loop."""

LONG_SECONDS: Final = 120.0
"""Calm runs of at least this length are paired with each other."""

CHANGING, SHORT_CALM, LONG_CALM = "changing", "calm", "calm, long"
"""The load of pairs of runs."""

KNOWN: Final = ("1.00", "1.05 longer")
"""What B is, by the name of a pair's figures: pairs whose ratio is known."""

LABELS: Final = {
    "1.00": "equal",
    "1.05 longer": "5 % longer",
    "1.05": "5 % more work",
    "1.10": "10 % more work",
}

BURN: Final = """
import sys, time
share, until = float(sys.argv[1]), time.time() + float(sys.argv[2])
while time.time() < until:
    began = time.perf_counter()
    while time.perf_counter() - began < 0.02 * share:
        pass
    time.sleep(0.02 * (1 - share))
"""


def record(file: Path, minutes: float, together: int, seconds: float, loads: Sequence[float] = LOADS) -> None:
    """Run the script for ``minutes``, and write the windows of each run. ``loads``: cores of the program beside it."""
    found, number, rng = [], 0, random.Random()
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            beside = rng.choice(loads)
            burning = subprocess.Popen(burner(beside, 2 * seconds)) if beside else None
            started = []
            for kind in (KINDS[(number + each) % len(KINDS)] for each in range(together)):
                run_dir = Path(folder) / str(number)
                started.append((run_dir, kind, subprocess.Popen(command(run_dir, *kind, seconds), cwd=ROOT)))
                number += 1
            for run_dir, kind, process in started:
                if process.wait() == 0:
                    found.append(recorded_run(run_dir, *kind, beside))
            if burning is not None:
                burning.kill()
                burning.wait()
    write_runs(file, machine.describe(), found)


def burner(share: float, seconds: float) -> list[str]:
    """The command of a program that uses a part of a core."""
    return [sys.executable, "-c", BURN, str(share), str(seconds)]


def command(run_dir: Path, loader: str, slower: float, seconds: float) -> list[str]:
    """The command of one run."""
    options = ["--run-dir", str(run_dir), "--port", "off", "--max-snapshots", "0"]
    windows = ["--interval-seconds", "0.4", "--log-interval-seconds", "0.8"]
    script = [str(ROOT / "benchmarks" / "compare_train.py"), "--seconds", str(seconds), "--loader", loader]
    return [sys.executable, "-m", "telemetry", "run", *options, *windows, *script, "--slower", str(slower)]


def recorded_run(run_dir: Path, loader: str, slower: float, beside: float) -> dict[str, Any]:
    """What is kept of a run: its windows, each with the fields of `PaceBlock`."""
    windows = pace_of(load(run_dir)).blocks
    blocks = [[None if figure is None else round(figure, 4) for figure in window] for window in windows]
    return {"loader": loader, "slower": slower, "beside": beside, "blocks": blocks}


def runs_of(recorded: Sequence[dict[str, Any]], loader: str, slower: float) -> list[Run]:
    """The recorded runs of one kind that are long enough."""
    kind = [each for each in recorded if (each["loader"], each["slower"]) == (loader, slower)]
    found = [tuple(PaceBlock(*block) for block in each["blocks"]) for each in kind]
    return [run for run in found if len(run) >= MIN_BLOCKS]


def held_up(run: Run) -> float:
    """The share of the training loop in which others held the run up."""
    return sum(block.held_up or 0.0 for block in run) / sum(block.seconds for block in run)


def stretched(run: Run) -> Run:
    """The run as if each step had taken longer."""
    return tuple(block._replace(seconds=STRETCHED * block.seconds) for block in run)


def first_windows(run: Run, count: int, joined: int) -> Run:
    """The beginning of a run, as if it had been logged in ``count`` windows, each of so many recorded ones."""
    return tuple(_one(run[start : start + joined]) for start in range(0, count * joined, joined))


def _one(windows: Run) -> PaceBlock:
    steps, seconds = sum(block.steps for block in windows), sum(block.seconds for block in windows)
    if any(block.held_up is None for block in windows):
        return PaceBlock(steps, seconds)
    return PaceBlock(
        steps,
        seconds,
        sum((block.others or 0.0) * block.seconds for block in windows) / seconds,
        sum(block.held_up or 0.0 for block in windows),
        sum(block.workers_held_up or 0.0 for block in windows),
        sum(block.cpu or 0.0 for block in windows),
    )


def twice_as_fast(run: Run) -> Run:
    """The run as if everything in it had taken half of the time."""
    return tuple(
        block._replace(
            seconds=block.seconds / 2,
            held_up=_half(block.held_up),
            workers_held_up=_half(block.workers_held_up),
            cpu=_half(block.cpu),
        )
        for block in run
    )


def _half(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 2


def load_of(a: Run, b: Run) -> str:
    """The load of a pair."""
    if max(held_up(a), held_up(b)) > CALM:
        return CHANGING
    shortest = min(sum(block.seconds for block in run) for run in (a, b))
    return LONG_CALM if shortest >= LONG_SECONDS else SHORT_CALM
