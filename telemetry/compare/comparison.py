"""Compares two runs: the values of ``compare --json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.compare.pace_interval import MIN_BLOCKS, ratio_interval
from telemetry.compare.run_facts import SAME_STEP, differences, facts_of
from telemetry.compare.run_pace import pace_of
from telemetry.compare.same_load import without_others
from telemetry.core.formatting import percent
from telemetry.core.labels import CATEGORIES
from telemetry.report.rank_processes import not_replaced
from telemetry.report.stall_losses import lost_by_cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.compare.pace_interval import RatioInterval
    from telemetry.compare.run_pace import RunPace
    from telemetry.compare.same_load import SameLoad
    from telemetry.report.process_log import ProcessLog

FASTER: Final = "faster"
SLOWER: Final = "slower"
NO_DIFFERENCE: Final = "no difference"
NOT_COMPARABLE: Final = "not comparable"

MIN_STEPS: Final = 20


def compare_runs(a: Sequence[ProcessLog], b: Sequence[ProcessLog]) -> dict[str, Any]:
    """B against A.

    Besides the keys of the contract the result has ``differences``: where settings and environment differ, ``steps``:
    those that were compared, of the mean rank, ``measured``: the ratio and its interval with the time in which other
    programs held the runs up, and ``load``: what is known of them. What is unknown is null.
    """
    a, b = not_replaced(a), not_replaced(b)
    pace_a, pace_b = pace_of(a), pace_of(b)
    facts_a, facts_b = facts_of(a), facts_of(b)
    result: dict[str, Any] = {
        "a": _name(a),
        "b": _name(b),
        "verdict": NOT_COMPARABLE,
        "why": _too_short("A", pace_a) or _too_short("B", pace_b) or _other_work(facts_a, facts_b),
        "ratio": None,
        "interval": None,
        "measured": None,
        "load": None,
        "steps": {"a": round(pace_a.steps), "b": round(pace_b.steps)},
        "differences": differences(facts_a, facts_b),
        "per_step_seconds": _per_step(pace_a, pace_b),
        "causes": _causes(a, b),
    }
    if result["why"] is not None:
        return result
    measured = ratio_interval(pace_a.blocks, pace_b.blocks)
    same_load = without_others(pace_a.blocks, pace_b.blocks, pace_a.ranks)
    found = measured if same_load is None else same_load.found
    verdict = _verdict(found)
    why = None
    if same_load is not None and verdict != _verdict(measured):
        why = _other_load(same_load, measured)
    return result | {
        "verdict": verdict,
        "why": why,
        **_figures(found),
        "measured": _figures(measured),
        "load": None if same_load is None else _load(same_load, pace_a, pace_b),
    }


def _verdict(found: RatioInterval) -> str:
    return FASTER if found.low > 1 else SLOWER if found.high < 1 else NO_DIFFERENCE


def _figures(found: RatioInterval) -> dict[str, Any]:
    return {"ratio": round(found.ratio, 5), "interval": [round(found.low, 5), round(found.high, 5)]}


def _other_load(same_load: SameLoad, measured: RatioInterval) -> str:
    """Why the verdict is another one than the pace alone would give."""
    shares = f"{percent(same_load.held_up_a)} of A's training loop and {percent(same_load.held_up_b)} of B's"
    return (
        f"as measured, B does {measured.ratio:.3f} times the steps per second of A, but other programs held up {shares}"
    )


def _load(same_load: SameLoad, a: RunPace, b: RunPace) -> dict[str, Any]:
    """Other programs: their share of the cores, the share of the loop in which they held the run up, and its cost."""
    return {
        "others_ratio": _pair(a.others, b.others),
        "held_up_ratio": _pair(same_load.held_up_a, same_load.held_up_b),
        "cost": round(same_load.cost, 3),
    }


def slower_than(result: Mapping[str, Any], percent: float) -> bool:
    """Whether B is slower by more than this, and chance does not explain it: the whole interval is below."""
    return result["interval"] is not None and result["interval"][1] < 1 - percent / 100


def _name(processes: Sequence[ProcessLog]) -> str:
    return processes[-1].run if processes else ""


def _too_short(which: str, pace: RunPace) -> str | None:
    if not pace.blocks:
        return f"{which} has no window after its first steps; compare longer runs"
    if len(pace.blocks) < MIN_BLOCKS:
        return (
            f"{which} has {len(pace.blocks)} windows after its first steps, and {MIN_BLOCKS} are needed; run it for "
            "longer, or with a smaller log_interval_seconds"
        )
    if pace.steps < MIN_STEPS:
        return f"{which} has {pace.steps:.0f} steps after its first ones, and {MIN_STEPS} are needed; run it for longer"
    return None


def _other_work(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    for name in SAME_STEP:
        if name in a and name in b and a[name] != b[name]:
            return f"a step is not the same work: {name} is {a[name]} in A and {b[name]} in B"
    return None


def _per_step(a: RunPace, b: RunPace) -> dict[str, dict[str, float | None]]:
    return {name: _pair(_seconds(a, name), _seconds(b, name), with_difference=True) for name in CATEGORIES}


def _seconds(pace: RunPace, category: str) -> float | None:
    return pace.per_step_seconds.get(category) if pace.steps else None


def _causes(a: Sequence[ProcessLog], b: Sequence[ProcessLog]) -> dict[str, dict[str, float | None]]:
    """Seconds lost in stalls for each step, by cause; without causes that have cost nothing."""
    lost_a, lost_b = _lost_per_step(a), _lost_per_step(b)
    names = sorted({*lost_a, *lost_b}, key=lambda name: -max(lost_a.get(name, 0.0), lost_b.get(name, 0.0)))
    return {name: _pair(lost_a.get(name, 0.0), lost_b.get(name, 0.0)) for name in names}


def _lost_per_step(processes: Sequence[ProcessLog]) -> dict[str, float]:
    steps = sum(process.totals.get("steps_total", 0) for process in processes)
    return {cause: seconds / steps for cause, seconds in lost_by_cause(processes).items() if steps}


def _pair(a: float | None, b: float | None, *, with_difference: bool = False) -> dict[str, float | None]:
    pair = {"a": a, "b": b}
    if with_difference:
        pair["difference"] = None if a is None or b is None else b - a
    return {name: None if value is None else round(value, 9) for name, value in pair.items()}
