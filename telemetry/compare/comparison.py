"""Compares two runs, or several pairs of runs of the same two versions: the values of ``compare --json``."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from telemetry.compare.pace_interval import FEWEST_BLOCKS
from telemetry.compare.repeated_pairs import mean_ratio
from telemetry.compare.run_facts import SAME_STEP, differences, facts_of
from telemetry.compare.run_pair import Pair, Run, turns_of
from telemetry.records import CATEGORIES
from telemetry.report.process_log import lost_by_cause
from telemetry.util.text import percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from telemetry.compare.pace_interval import RatioInterval
    from telemetry.compare.run_pace import RunPace
    from telemetry.compare.same_load import SameLoad

FASTER: Final = "faster"
SLOWER: Final = "slower"
NO_DIFFERENCE: Final = "no difference"
NOT_COMPARABLE: Final = "not comparable"

MIN_STEPS: Final = 20


def compare_runs(sides: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """B against A, from one or more pairs of runs.

    Besides the keys of the contract the result has ``differences``: where settings and environment differ, ``steps``:
    those that were compared, of the mean rank, in all runs, ``measured``: the ratio and its interval with the time in
    which other programs held the runs up, ``load``: what is known of them, ``pairs``: the ratio and interval of each
    pair, and ``turns``: see `turns_of`. What is unknown is null.
    """
    all_a, all_b = ([side[number] for side in sides] for number in (0, 1))
    result: dict[str, Any] = {
        "a": _names(all_a),
        "b": _names(all_b),
        "verdict": NOT_COMPARABLE,
        "why": _not_comparable(sides),
        "ratio": None,
        "interval": None,
        "measured": None,
        "load": None,
        "turns": turns_of(sides),
        "pairs": [{"a": a.name, "b": b.name, "ratio": None, "interval": None} for a, b in sides],
        "steps": {which: round(sum(run.pace.steps for run in runs)) for which, runs in (("a", all_a), ("b", all_b))},
        "differences": differences(_facts(all_a), _facts(all_b)),
        "per_step_seconds": _per_step(all_a, all_b),
        "causes": _causes(all_a, all_b),
    }
    if result["why"] is not None:
        return result
    pairs = [Pair.of(a, b) for a, b in sides]
    measured = mean_ratio([pair.measured for pair in pairs], result["turns"])
    loads = [pair.same_load for pair in pairs if pair.same_load is not None]
    known = len(loads) == len(pairs)
    each_found = [load.found for load in loads] if known else [pair.measured for pair in pairs]
    found = mean_ratio(each_found, result["turns"])
    verdict, why = _verdict(found), None
    if known and verdict != _verdict(measured):
        why = _other_load(loads, measured)
    return result | {
        "verdict": verdict,
        "why": why,
        **_figures(found),
        "measured": _figures(measured),
        "load": _load(loads, pairs) if known else None,
        "pairs": [told | _figures(each) for told, each in zip(result["pairs"], each_found, strict=True)],
    }


def _verdict(found: RatioInterval) -> str:
    return FASTER if found.low > 1 else SLOWER if found.high < 1 else NO_DIFFERENCE


def _figures(found: RatioInterval) -> dict[str, Any]:
    return {"ratio": round(found.ratio, 5), "interval": [round(found.low, 5), round(found.high, 5)]}


def _other_load(loads: Sequence[SameLoad], measured: RatioInterval) -> str:
    """Why the verdict is another one than the pace alone would give."""
    a, b = (percent(fmean(each)) for each in zip(*((load.held_up_a, load.held_up_b) for load in loads), strict=True))
    held_up = f"other programs {'on average ' if len(loads) > 1 else ''}held up {a} of A's training loop and {b} of B's"
    return f"as measured, B does {measured.ratio:.3f} times the steps per second of A, but {held_up}"


def _load(loads: Sequence[SameLoad], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Other programs: their share of the cores, the share of the loop in which they held the run up, and its cost.

    Of several pairs it is the mean.
    """
    return {
        "others_ratio": _pair(_mean(pair.a.pace.others for pair in pairs), _mean(pair.b.pace.others for pair in pairs)),
        "held_up_ratio": _pair(_mean(load.held_up_a for load in loads), _mean(load.held_up_b for load in loads)),
        "cost": round(fmean(load.cost for load in loads), 3),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def slower_than(result: Mapping[str, Any], percent: float) -> bool:
    """Whether B is slower by more than this, and chance does not explain it: the whole interval is below."""
    return result["interval"] is not None and result["interval"][1] < 1 - percent / 100


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(run.name for run in runs)


def _facts(runs: Sequence[Run]) -> dict[str, Any]:
    return facts_of([process for run in runs for process in run.processes])


def _not_comparable(sides: Sequence[tuple[Run, Run]]) -> str | None:
    """Why a pair cannot be compared, or is no pair of the same two versions; None if all can."""
    first: dict[str, tuple[Any, int]] = {}
    for number, (a, b) in enumerate(sides, 1):
        why = _too_short("A", a.pace) or _too_short("B", b.pace) or _other_work(a.facts, b.facts)
        if why is not None:
            return why if len(sides) == 1 else f"pair {number}: {why}"
        for name in (each for each in SAME_STEP if each in a.facts):
            value, where = first.setdefault(name, (a.facts[name], number))
            if value != a.facts[name]:
                here = f"{value} in pair {where} and {a.facts[name]} in pair {number}"
                return f"the pairs are not of the same work: {name} is {here}"
    return None


def _too_short(which: str, pace: RunPace) -> str | None:
    if len(pace.blocks) < FEWEST_BLOCKS:
        count = "one window" if pace.blocks else "no window"
        return (
            f"{which} has {count} after its first steps, and two are needed to see how its pace scatters; run it for "
            "longer (with the default settings a minute is enough), or with a smaller log_interval_seconds"
        )
    if pace.steps < MIN_STEPS:
        return f"{which} has {pace.steps:.0f} steps after its first ones, and {MIN_STEPS} are needed; run it for longer"
    return None


def _other_work(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    for name in SAME_STEP:
        if name in a and name in b and a[name] != b[name]:
            return f"a step is not the same work: {name} is {a[name]} in A and {b[name]} in B"
    return None


def _per_step(a: Sequence[Run], b: Sequence[Run]) -> dict[str, dict[str, float | None]]:
    return {name: _pair(_seconds(a, name), _seconds(b, name), with_difference=True) for name in CATEGORIES}


def _seconds(runs: Sequence[Run], category: str) -> float | None:
    """Seconds of a category for each step, the mean of the runs: a long run does not count more, as in the ratio."""
    return _mean(run.pace.per_step_seconds.get(category) if run.pace.steps else None for run in runs)


def _causes(a: Sequence[Run], b: Sequence[Run]) -> dict[str, dict[str, float | None]]:
    """Seconds lost in stalls for each step, by cause; without causes that have cost nothing."""
    lost_a, lost_b = _lost_per_step(a), _lost_per_step(b)
    names = sorted({*lost_a, *lost_b}, key=lambda name: -max(lost_a.get(name, 0.0), lost_b.get(name, 0.0)))
    return {name: _pair(lost_a.get(name, 0.0), lost_b.get(name, 0.0)) for name in names}


def _lost_per_step(runs: Sequence[Run]) -> dict[str, float]:
    """The mean of the runs."""
    found: dict[str, float] = {}
    for run in runs:
        steps = sum(process.totals.get("steps_total", 0) for process in run.processes)
        for cause, seconds in lost_by_cause(run.processes).items():
            if steps:
                found[cause] = found.get(cause, 0.0) + seconds / steps / len(runs)
    return found


def _pair(a: float | None, b: float | None, *, with_difference: bool = False) -> dict[str, float | None]:
    pair = {"a": a, "b": b}
    if with_difference:
        pair["difference"] = None if a is None or b is None else b - a
    return {name: None if value is None else round(value, 9) for name, value in pair.items()}
