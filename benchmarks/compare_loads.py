"""Measures how often `telemetry compare` is wrong on a machine whose load by others changes from run to run.

    python -m benchmarks.compare_loads --record FILE [--minutes 20] [--together 3] [--beside 0]
    python -m benchmarks.compare_loads FILE [FILE ...] [--output FOLDER]

The first call records runs of benchmarks/compare_train.py, window by window. Beside some of them runs a program that
uses a part of a core; with ``--beside 0`` beside none, for calm runs on an idle machine. The second call compares all
pairs of one file and kind of loader: of equal runs, of equal runs of which one has windows stretched by 5 %, and of
runs of which one has 5 % or 10 % more work. A step has parts that do not grow with that work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import machine
from benchmarks.compare_pairs import ROOT, write_runs
from telemetry.compare.pace_interval import MIN_BLOCKS, PaceBlock, RatioInterval, pace, ratio_interval
from telemetry.compare.run_pace import pace_of
from telemetry.compare.same_load import without_others
from telemetry.report.log_reader import load

if TYPE_CHECKING:
    from collections.abc import Sequence

TUNED_ON: Final = "tuned_on"
"""Runs with this field were there when the constants of `telemetry.compare.same_load` were chosen."""

Run = tuple[PaceBlock, ...]

SLOWER: Final = (1.05, 1.10)
KINDS: Final = (
    ("thread", 1.0), ("worker", 1.0), ("thread", 1.05), ("thread", 1.0), ("worker", 1.05),
    ("thread", 1.1), ("worker", 1.0), ("thread", 1.0), ("worker", 1.1),
)  # fmt: skip
"""Kinds of runs, in the order in which they are recorded."""

LOADS: Final[tuple[float, ...]] = (0.0, 0.0, 0.2, 0.5, 0.8)
"""Parts of a core that a program beside the runs uses: one of these, drawn for each batch of runs."""

KNOWN: Final = ("1.00", "1.05 longer")
"""Pairs whose ratio is known."""

STRETCHED: Final = 1.05
"""The windows of one of two equal runs are stretched by this: a slow-down that is known exactly."""

CALM: Final = 0.1
"""A run is calm if others held up at most this share of its training loop."""

LONG_SECONDS: Final = 120.0
"""Calm runs of at least this length are paired with each other."""

LABELS: Final = {
    "1.00": "equal",
    "1.05 longer": "5 % longer",
    "1.05": "5 % more work",
    "1.10": "10 % more work",
}

CHANGING, SHORT_CALM, LONG_CALM = "changing", "calm", "calm, long"
LOADS_OF_PAIRS: Final = (CHANGING, SHORT_CALM, LONG_CALM)

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
    blocks = [
        [None if value is None else round(value, 4) for value in block] for block in pace_of(load(run_dir)).blocks
    ]
    return {"loader": loader, "slower": slower, "beside": beside, "blocks": blocks}


def runs_of(recorded: Sequence[dict[str, Any]], loader: str, slower: float) -> list[Run]:
    """The recorded runs of one kind that are long enough."""
    kind = [each for each in recorded if (each["loader"], each["slower"]) == (loader, slower)]
    found = [tuple(PaceBlock(*block) for block in each["blocks"]) for each in kind]
    return [run for run in found if len(run) >= MIN_BLOCKS]


def held_up(run: Run) -> float:
    """The share of the training loop in which others held the run up."""
    return sum(block.held_up or 0.0 for block in run) / sum(block.seconds for block in run)


def judged(pairs: Sequence[tuple[Run, Run]], slower: float) -> dict[str, Any]:
    """How many pairs are called slower or faster: as measured, and without the time in which others held them up."""
    told: dict[str, Any] = {"pairs": len(pairs)}
    adjusted = [same_load.found for a, b in pairs if (same_load := without_others(a, b)) is not None]
    for name, found in (("measured", [ratio_interval(a, b) for a, b in pairs]), ("without others", adjusted)):
        told[name] = _counted(found, slower) if found else None
    return told


def _counted(found: Sequence[RatioInterval], slower: float) -> dict[str, Any]:
    return {
        "slower": sum(each.high < 1 for each in found),
        "faster": sum(each.low > 1 for each in found),
        "covered": sum(each.low < 1 / slower < each.high for each in found),
        "median_half": round(statistics.median((each.high - each.low) / 2 / each.ratio for each in found), 4),
    }


def pairs_of(recordings: Sequence[Sequence[dict[str, Any]]], loader: str, slower: float) -> list[tuple[Run, Run]]:
    """All pairs of one recording each: on another day the same machine may have another pace."""
    found: list[tuple[Run, Run]] = []
    for recorded in recordings:
        plain = runs_of(recorded, loader, 1.0)
        found += combinations(plain, 2) if slower == 1.0 else product(plain, runs_of(recorded, loader, slower))
    return found


def figures_of(recordings: Sequence[Sequence[dict[str, Any]]], loader: str) -> dict[str, Any]:
    """All figures of one kind of loader, by the load of the pairs. ``later``: of runs without `TUNED_ON`."""
    plain = [run for recorded in recordings for run in runs_of(recorded, loader, 1.0)]
    shares = sorted(held_up(run) for run in plain)
    fresh = [[each for each in recorded if not each.get(TUNED_ON)] for recorded in recordings]
    pairs = {slower: pairs_of(recordings, loader, slower) for slower in (1.0, *SLOWER)}
    later = {slower: pairs_of(fresh, loader, slower) for slower in (1.0, *SLOWER)}
    told: dict[str, Any] = {
        "runs": len(plain),
        "later": judged(later[1.0], 1.0),
        "later_slower": {f"{slower:.2f}": judged(later[slower], slower) for slower in SLOWER},
        "held_up": [round(shares[0], 3), round(statistics.median(shares), 3), round(shares[-1], 3)],
    }
    for name in LOADS_OF_PAIRS:
        chosen = {slower: [pair for pair in each if load_of(*pair) == name] for slower, each in pairs.items()}
        told[name] = {f"{slower:.2f}": judged(each, slower) for slower, each in chosen.items()}
        longer = [(a, stretched(b)) for a, b in chosen[1.0]]
        told[name][f"{STRETCHED:.2f} longer"] = judged(longer, STRETCHED)
    return told


def stretched(run: Run) -> Run:
    """The run as if each step had taken longer."""
    return tuple(block._replace(seconds=STRETCHED * block.seconds) for block in run)


def realised(runs: Sequence[dict[str, Any]], loader: str, slower: float) -> float:
    """How much longer a step is with more work: of the mean paces of runs of one recording."""
    plain, more = ([pace(run) for run in runs_of(runs, loader, each)] for each in (1.0, slower))
    return statistics.mean(plain) / statistics.mean(more) - 1


def load_of(a: Run, b: Run) -> str:
    """One of `LOADS_OF_PAIRS`."""
    if max(held_up(a), held_up(b)) > CALM:
        return CHANGING
    shortest = min(sum(block.seconds for block in run) for run in (a, b))
    return LONG_CALM if shortest >= LONG_SECONDS else SHORT_CALM


def text_of(figures: dict[str, Any]) -> str:
    """The figures as a page."""
    place = figures["machine"]
    lines = [
        "# Comparisons of two real runs",
        "",
        f"By `python -m benchmarks.compare_loads`, on {place['cores']} cores of {place['cpu']}.",
        f"Recorded on {' and '.join(figures['dates'])}, while other programs used the machine at times more, at times",
        "less, and at times hardly at all.",
        "",
        "| Loader | Equal runs | Held up by others: least, median, most |",
        "| --- | --- | --- |",
    ]
    for loader, each in figures["kinds"].items():
        lines.append(f"| {loader} | {each['runs']} | {', '.join(map(_percent, each['held_up']))} |")
    lines += [
        "",
        f"*Calm*: others held up at most {100 * CALM:.0f} % of the training loop of both runs. *Long*: both took at",
        f"least {LONG_SECONDS / 60:.0f} minutes. *Measured*: by the pace alone. *Without*: what `compare` says, which",
        "leaves out the time in which others held the runs up.",
        "*Interval*: half of its length, median. *5 % longer*: an equal pair, with each window of B stretched by 5 %.",
        *(_of_realised(loader, each) for loader, each in figures["realised"].items()),
        "",
        *(_of_later(loader, each["later"]) for loader, each in figures["kinds"].items()),
        *(
            _of_later_slower(loader, slower, told)
            for loader, each in figures["kinds"].items()
            for slower, told in each["later_slower"].items()
        ),
        "",
        _of_covered(figures),
        "",
        "| Loader | Load | B | Pairs | Measured: slower | faster | Interval | Without: slower | faster | Interval |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for loader, each in figures["kinds"].items():
        for name in LOADS_OF_PAIRS:
            lines += [_row(loader, name, slower, told) for slower, told in each[name].items() if told["pairs"]]
    return "\n".join([*lines, ""])


def _of_realised(loader: str, realised: Sequence[float]) -> str:
    more = ", ".join(
        f"{LABELS[f'{slower:.2f}']}: {_percent(each)}" for slower, each in zip(SLOWER, realised, strict=True)
    )
    return f"Steps are longer by this in the newest recording, {loader}: {more}."


def _of_later(loader: str, told: dict[str, Any]) -> str:
    """The runs on which the constants of `same_load` were not chosen."""
    found = told["without others"] or {"slower": 0, "faster": 0}
    wrong = found["slower"] + found["faster"]
    return f"Equal pairs of runs recorded after the constants were chosen, {loader}: {told['pairs']}, differ: {wrong}."


def _of_later_slower(loader: str, slower: str, told: dict[str, Any]) -> str:
    found = (told["without others"] or {"slower": 0})["slower"]
    return f"Pairs of such runs, B with {LABELS[slower]}, {loader}: {told['pairs']}, found: {found}."


def _of_covered(figures: dict[str, Any]) -> str:
    """How often the interval held the true ratio, where that is known. More than 95 % says that it is too wide."""
    all_ = [each[load][pairs] for each in figures["kinds"].values() for load in LOADS_OF_PAIRS for pairs in KNOWN]
    pairs = sum(told["pairs"] for told in all_)
    with_, without = (
        sum(told[name]["covered"] for told in all_ if told["pairs"]) for name in ("measured", "without others")
    )
    return (
        f"The interval has the true ratio in it in {without} of {pairs} pairs; that of the measured pace in {with_} "
        f"({100 * with_ / pairs:.0f} %)."
    )


def _row(loader: str, name: str, slower: str, told: dict[str, Any]) -> str:
    cells = [loader, name, LABELS[slower], told["pairs"]]
    for method in ("measured", "without others"):
        found = told[method]
        cells += [found["slower"], found["faster"], f"± {_percent(found['median_half'])}"]
    return f"| {' | '.join(map(str, cells))} |"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def main() -> None:
    """Record, or compare and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_loads", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="recorded runs")
    parser.add_argument("--record", type=Path, metavar="FILE", help="record runs into this file")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--together", type=int, default=3, help="runs at the same time")
    parser.add_argument(
        "--beside", type=float, metavar="CORES", help="part of a core that a program beside each run uses"
    )
    parser.add_argument("--seconds", type=float, default=22.0, help="length of a run")
    parser.add_argument("--output", type=Path, help="also write a .json and a .md file into this folder")
    options = parser.parse_args()
    if options.record is not None:
        loads = LOADS if options.beside is None else (options.beside,)
        record(options.record, options.minutes, options.together, options.seconds, loads)
        return
    if not options.files:
        parser.error("name a file of recorded runs, or --record")
    recorded = [json.loads(file.read_text()) for file in options.files]
    recordings = [each["runs"] for each in recorded]
    loaders = dict.fromkeys(run["loader"] for runs in recordings for run in runs)
    newest = max(recorded, key=lambda each: str(each["machine"]["date"]))["runs"]
    figures = {
        "machine": recorded[0]["machine"],
        "dates": sorted({each["machine"]["date"][:10] for each in recorded}),
        "realised": {loader: [round(realised(newest, loader, slower), 4) for slower in SLOWER] for loader in loaders},
        "kinds": {loader: figures_of(recordings, loader) for loader in loaders},
    }
    text = text_of(figures)
    print(text)
    if options.output:
        stem = f"compare-loads-{machine.slug(figures['machine'])}"
        (options.output / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n")
        (options.output / f"{stem}.md").write_text(text)


if __name__ == "__main__":
    main()
