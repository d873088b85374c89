"""Measures how often `telemetry compare` is wrong on a machine whose load by others changes from run to run.

    python -m benchmarks.compare_loads --record FILE [--minutes 20] [--together 3] [--beside 0]
    python -m benchmarks.compare_loads FILE [FILE ...] [--output FOLDER]

The first call records runs of benchmarks/compare_train.py, window by window. Beside some of them runs a program that
uses a part of a core; with ``--beside 0`` beside none, for calm runs on an idle machine. The second call compares all
pairs of one file and kind of loader: of equal runs, of equal runs of which one has windows stretched by 5 %, and of
runs of which one has 5 % or 10 % more work. A step has parts that do not grow with that work. Of calm runs it also
compares sets of three and of five pairs, as with ``--again``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import machine
from benchmarks.compare_sets import counted, figures_of_sets, percent, rows_of_sets
from benchmarks.recorded_runs import (
    CALM,
    CHANGING,
    JOINED,
    KNOWN,
    LABELS,
    LOADS,
    LONG_CALM,
    LONG_SECONDS,
    SHORT_CALM,
    SLOWER,
    STRETCHED,
    first_windows,
    held_up,
    load_of,
    record,
    runs_of,
    stretched,
    twice_as_fast,
)
from telemetry.compare.pace_interval import MIN_BLOCKS, pace, ratio_interval
from telemetry.compare.same_load import without_others

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.recorded_runs import Run
    from telemetry.compare.pace_interval import RatioInterval

FEW: Final = range(2, MIN_BLOCKS)
"""Windows of short runs."""

MIN_RUNS: Final = 8
"""The scatter of fewer runs is not told."""

TUNED_ON: Final = "tuned_on"
"""Runs with this field were there when constants of `telemetry.compare` were chosen."""

LOADS_OF_PAIRS: Final = (CHANGING, SHORT_CALM, LONG_CALM)


def judged(pairs: Sequence[tuple[Run, Run]], slower: float) -> dict[str, Any]:
    """How many pairs are called slower or faster: as measured, and without the time in which others held them up."""
    told: dict[str, Any] = {"pairs": len(pairs)}
    adjusted = [same_load.found for a, b in pairs if (same_load := without_others(a, b)) is not None]
    for name, found in (("measured", [ratio_interval(a, b) for a, b in pairs]), ("without others", adjusted)):
        told[name] = counted(found, slower) if found else None
    return told


def scatter_of(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """By kind of loader: how much the paces of the calm, equal runs of one recording scatter, and what more work did.

    ``scatter``: standard deviation of the logarithm. ``realised``: see there. None: not recorded.
    """
    told = []
    for loader in dict.fromkeys(run["loader"] for run in recorded["runs"]):
        calm = [run for run in runs_of(recorded["runs"], loader, 1.0) if held_up(run) <= CALM]
        if len(calm) >= MIN_RUNS:
            lengths = [sum(block.seconds for block in run) for run in calm]
            told.append(
                {
                    "date": recorded["machine"]["date"][:10],
                    "loader": loader,
                    "runs": len(calm),
                    "seconds": round(statistics.median(lengths)),
                    "scatter": round(statistics.stdev(math.log(pace(run)) for run in calm), 4),
                    "realised": [realised(recorded["runs"], loader, slower) for slower in SLOWER],
                }
            )
    return told


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
    return told | {"few": few_windows(recordings, loader), "sets": figures_of_sets(recordings, loader)}


def few_windows(recordings: Sequence[Sequence[dict[str, Any]]], loader: str) -> list[dict[str, Any]]:
    """What `compare` says of the beginnings of equal runs, and if one of them had been twice as fast."""
    told = []
    for joined, count in product(JOINED, FEW):
        pairs = [(a, b) for a, b in pairs_of(recordings, loader, 1.0) if min(len(a), len(b)) >= count * joined]
        short = [(first_windows(a, count, joined), first_windows(b, count, joined)) for a, b in pairs]
        equal, twice = (
            [found_of(a, b) for a, b in each] for each in (short, [(a, twice_as_fast(b)) for a, b in short])
        )
        if pairs:
            told.append(
                {
                    "windows": count,
                    "length": JOINED[joined],
                    "pairs": len(pairs),
                    "differ": sum(found.low > 1 or found.high < 1 for found in equal),
                    "twice": sum(found.low > 1 for found in twice),
                    "median_half": round(statistics.median(math.log(found.high / found.ratio) for found in equal), 4),
                }
            )
    return told


def found_of(a: Run, b: Run) -> RatioInterval:
    """What `compare` says of a pair."""
    same_load = without_others(a, b)
    return ratio_interval(a, b) if same_load is None else same_load.found


def realised(runs: Sequence[dict[str, Any]], loader: str, slower: float) -> float | None:
    """How much longer a step is with more work: of the mean paces of runs of one recording. None without such runs."""
    plain, more = ([pace(run) for run in runs_of(runs, loader, each)] for each in (1.0, slower))
    return round(statistics.mean(plain) / statistics.mean(more) - 1, 4) if plain and more else None


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
        lines.append(f"| {loader} | {each['runs']} | {', '.join(map(percent, each['held_up']))} |")
    lines += [
        "",
        f"*Calm*: others held up at most {100 * CALM:.0f} % of the training loop of both runs. *Long*: both took at",
        f"least {LONG_SECONDS / 60:.0f} minutes. *Measured*: by the pace alone. *Without*: what `compare` says, which",
        "leaves out the time in which others held the runs up.",
        "*Interval*: half of its length, median. *5 % longer*: an equal pair, with each window of B stretched by 5 %.",
        "",
        "Calm, equal runs of each recording. *Scatter*: the standard deviation of their paces. *More work*: by how",
        "much steps are longer with 5 % and with 10 % more work.",
        "",
        "| Date | Loader | Runs | Seconds | Scatter | More work |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(_row_of_scatter, figures["scatter"]),
        "",
        *(_of_later(loader, each["later"]) for loader, each in figures["kinds"].items() if each["later"]["pairs"]),
        *(
            _of_later_slower(loader, slower, told)
            for loader, each in figures["kinds"].items()
            for slower, told in each["later_slower"].items()
            if told["pairs"]
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
    lines += [
        "",
        "Runs of a few windows: the beginnings of equal runs. *Twice*: the same pairs, as if B had been twice as fast;",
        "called faster.",
        "",
        "| Loader | Length of a window | Windows | Pairs | Called different | Interval | Twice |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row_of_few(loader, told) for loader, each in figures["kinds"].items() for told in each["few"]),
    ]
    lines += rows_of_sets({loader: each["sets"] for loader, each in figures["kinds"].items()})
    return "\n".join([*lines, ""])


def _row_of_few(loader: str, told: dict[str, Any]) -> str:
    half = percent(math.exp(told["median_half"]) - 1)
    cells = [loader, told["length"], told["windows"], told["pairs"], told["differ"], f"+ {half}", told["twice"]]
    return f"| {' | '.join(map(str, cells))} |"


def _row_of_scatter(told: dict[str, Any]) -> str:
    more = ", ".join("-" if longer is None else percent(longer) for longer in told["realised"])
    cells = [told["date"], told["loader"], told["runs"], told["seconds"], percent(told["scatter"]), more]
    return f"| {' | '.join(map(str, cells))} |"


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
        cells += [found["slower"], found["faster"], f"± {percent(found['median_half'])}"]
    return f"| {' | '.join(map(str, cells))} |"


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
    figures = {
        "machine": recorded[0]["machine"],
        "dates": sorted({each["machine"]["date"][:10] for each in recorded}),
        "scatter": [told for each in recorded for told in scatter_of(each)],
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
