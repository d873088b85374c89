"""Sets of pairs of calm runs, as ``telemetry compare --again`` takes them: how often it is wrong.

`benchmarks.compare_loads` prints the figures.
"""

from __future__ import annotations

import math
import random
import statistics
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Final

from benchmarks.recorded_runs import (
    CALM,
    KNOWN,
    LABELS,
    LONG_CALM,
    SHORT_CALM,
    SLOWER,
    STRETCHED,
    held_up,
    load_of,
    runs_of,
    stretched,
)
from telemetry.compare.pace_interval import ratio_interval
from telemetry.compare.repeated_pairs import mean_ratio
from telemetry.compare.same_load import without_others

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.recorded_runs import Run
    from telemetry.compare.pace_interval import RatioInterval

PAIRS_OF_A_SET: Final = (3, 5)
MOST_SETS: Final = 2000
"""Sets that are drawn of one recording and kind of runs; all of them if there are no more."""


def sets_of(recorded: Sequence[dict[str, Any]], loader: str, slower: float, pairs: int) -> list[list[tuple[Run, Run]]]:
    """Sets of so many pairs of calm runs of one recording, in the order of recording.

    Of equal runs, the first of a pair is A in the first, third and fifth pair, and B in the others, as the
    documentation recommends. The runs of a set are drawn from all of the recording: those of a pair may be far apart.
    """
    plain, more = ([run for run in runs_of(recorded, loader, each) if held_up(run) <= CALM] for each in (1.0, slower))
    rng = random.Random(len(plain))
    if slower == 1.0:
        return [_in_turn([plain[number] for number in each]) for each in _drawn(len(plain), 2 * pairs, rng)]
    sides = [_drawn(len(runs), pairs, rng) for runs in (plain, more)]
    if math.prod(map(len, sides)) <= MOST_SETS:
        both = [*product(*sides)]
    else:
        both = [(rng.choice(sides[0]), rng.choice(sides[1])) for _ in range(MOST_SETS)]  # a few may be drawn twice
    return [[(plain[a], more[b]) for a, b in zip(*each, strict=True)] for each in both]


def _in_turn(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Neighbours as pairs: A and B, B and A, A and B and so on."""
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return [(b, a) if number % 2 else (a, b) for number, (a, b) in enumerate(pairs)]


def _drawn(size: int, count: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Sets of ``count`` numbers below ``size``, each in order: all of them, or `MOST_SETS`."""
    if math.comb(size, count) <= MOST_SETS:
        return [*combinations(range(size), count)]
    found: set[tuple[int, ...]] = set()
    while len(found) < MOST_SETS:
        found.add(tuple(sorted(rng.sample(range(size), count))))
    return sorted(found)


def judged_sets(sets: Sequence[Sequence[tuple[Run, Run]]], slower: float) -> dict[str, Any] | None:
    """How many sets are called slower or faster by `telemetry compare`; None without any."""
    known: dict[tuple[int, int], RatioInterval] = {}

    def found(pair: tuple[Run, Run]) -> RatioInterval:
        key = id(pair[0]), id(pair[1])
        if key not in known:
            adjusted = without_others(*pair)
            known[key] = adjusted.found if adjusted is not None else ratio_interval(*pair)
        return known[key]

    means = [mean_ratio([found(pair) for pair in each]) for each in sets]
    return {"sets": len(sets)} | counted(means, slower) if sets else None


def figures_of_sets(recordings: Sequence[Sequence[dict[str, Any]]], loader: str) -> dict[str, Any]:
    """By length of the runs and number of pairs, and by what B is: `judged_sets` of all recordings."""
    told: dict[str, Any] = {}
    for load, pairs in product((SHORT_CALM, LONG_CALM), PAIRS_OF_A_SET):
        equal, *more = (
            [
                each
                for recorded in recordings
                for each in sets_of(recorded, loader, slower, pairs)
                if load_of(*each[0]) == load
            ]
            for slower in (1.0, *SLOWER)
        )
        told[f"{load}; {pairs}"] = {
            "1.00": judged_sets(equal, 1.0),
            f"{STRETCHED:.2f} longer": judged_sets(_longer(equal), STRETCHED),
            **{f"{slower:.2f}": judged_sets(sets, slower) for slower, sets in zip(SLOWER, more, strict=True)},
        }
    return told


def _longer(sets: Sequence[Sequence[tuple[Run, Run]]]) -> list[list[tuple[Run, Run]]]:
    """With each window of B stretched. A run is one object in all sets, as `judged_sets` expects."""
    kept: dict[int, Run] = {}
    for each in sets:
        for _, run in each:
            if id(run) not in kept:
                kept[id(run)] = stretched(run)
    return [[(a, kept[id(b)]) for a, b in each] for each in sets]


def counted(found: Sequence[RatioInterval], slower: float) -> dict[str, Any]:
    """How many intervals say slower or faster, and how many have the true ratio in them. At least one."""
    return {
        "slower": sum(each.high < 1 for each in found),
        "faster": sum(each.low > 1 for each in found),
        "covered": sum(each.low < 1 / slower < each.high for each in found),
        "median_half": round(statistics.median((each.high - each.low) / 2 / each.ratio for each in found), 4),
    }


def rows_of_sets(kinds: dict[str, dict[str, Any]]) -> list[str]:
    """The table: by kind of loader, what `figures_of_sets` has found."""
    lines = [
        "",
        "Sets of several pairs of calm runs, as with `--again`. The runs of a set are drawn from a whole recording,",
        "and each run is in many sets.",
        "",
        "| Loader | Load; pairs | B | Sets | Slower | Faster | Interval | Has the true ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = (
        (loader, load, slower, told)
        for loader, found in kinds.items()
        for load, by_slower in found.items()
        for slower, told in by_slower.items()
    )
    for loader, load, slower, told in rows:
        if told is not None:
            covered = told["covered"] if slower in KNOWN else "-"
            interval = f"± {percent(told['median_half'])}"
            found = [told["sets"], told["slower"], told["faster"]]
            cells = [loader, load, LABELS[slower], *found, interval, covered]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def percent(ratio: float) -> str:
    """With one decimal."""
    return f"{100 * ratio:.1f} %"
