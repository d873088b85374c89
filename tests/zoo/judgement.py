"""Compares a report with the truth about the specimen. Reads reports and starts nothing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .specimens import Specimen

_NAMED: Final = re.compile(r"Cause: (\w+)")


@dataclass(frozen=True, slots=True)
class Advised:
    """Advice that was followed: the first with a prediction that can be followed here.

    Attributes:
        predicted: the predicted speed-up. ``low``: the low end, if it is a range.
    """

    cause: str
    setting: str | None
    value: str | None
    arguments: tuple[str, ...]
    predicted: float
    low: float | None = None

    def off(self, realised: float) -> float:
        """How far the prediction is from the realised speed-up, as a share of it; 0 within the range."""
        low = self.predicted if self.low is None else self.low
        return max(0.0, low / realised - 1, 1 - self.predicted / realised)


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a specimen, and the run with the advice followed if there was one.

    Attributes:
        named: the cause named first; None if no cause was named.
        others: causes of other stalls in the report.
        detected: whether there was any stall.
        right: whether the cause named first is true. None for a control.
        accused: whether the report says that a control stalls, starves, changes or runs out of memory. None for other
            specimens.
        steps_per_second: pace without the advice. ``pace_after``: pace with the advice; None if it was not run.
        realised: ratio of the pace with the advice to the pace without it.
        load: load of the machine, by run.
        error: why the run has no result; None if it has one.
        stalls: the stalls of the report.
    """

    specimen: str
    named: str | None = None
    others: tuple[str, ...] = ()
    detected: bool = False
    right: bool | None = None
    accused: bool | None = None
    verdict: str = ""
    advised: Advised | None = None
    steps_per_second: float | None = None
    pace_after: float | None = None
    realised: float | None = None
    load: tuple[dict[str, float], ...] = ()
    error: str | None = None
    stalls: list[dict[str, Any]] = field(default_factory=list)


def judge(specimen: Specimen, report: dict[str, Any]) -> Result:
    """Judge a report on the specimen."""
    if specimen.hang:
        return _judge_hang(specimen, report)
    stalls: list[dict[str, Any]] = report["stalls"]
    verdict: str = report["verdict"]
    named = first_cause(report)
    starved = verdict.startswith("Starved")
    return Result(
        specimen=specimen.name,
        named=named,
        others=tuple(dict.fromkeys(stall["cause"] for stall in stalls if stall["cause"] != named)),
        detected=bool(stalls),
        right=None if specimen.healthy else _right(specimen, named, stalls, verdict),
        accused=(bool(stalls) or starved or _other_alarm(report)) if specimen.healthy else None,
        verdict=verdict,
        stalls=stalls,
    )


def _other_alarm(report: dict[str, Any]) -> bool:
    """Whether the report says that the steps changed, or that memory runs out."""
    memory = [rank["memory"] or {} for rank in report["ranks"]]
    return bool(report["changes"]) or any(each.get("exhausted_in_seconds") is not None for each in memory)


def _judge_hang(specimen: Specimen, report: dict[str, Any]) -> Result:
    """Right is the kind, and the one rank on its node."""
    hang: dict[str, Any] | None = report["hang"]
    suspects = [] if hang is None else [(suspect["rank"], suspect["node"]) for suspect in hang["suspects"]]
    return Result(
        specimen=specimen.name,
        named=None if hang is None else f"hang: {hang['kind']}",
        detected=hang is not None,
        right=hang is not None
        and hang["kind"] == specimen.hang
        and suspects == [(specimen.slow_rank, specimen.slow_node)],
        verdict=report["verdict"],
        stalls=report["stalls"],
    )


def first_cause(report: dict[str, Any]) -> str | None:
    """The cause that a person reads first: the verdict's, else that of the stall that cost most."""
    found = _NAMED.search(report["verdict"])
    if found:
        return found[1]
    stalls = report["stalls"]
    return max(stalls, key=_cost)["cause"] if stalls else None


def advice_to_follow(specimen: Specimen, report: dict[str, Any]) -> Advised | None:
    """The first advice on the cause named first that has a prediction and can be followed here."""
    named = first_cause(report)
    of_it = [stall for stall in report["stalls"] if stall["cause"] == named]
    if not of_it or named is None:
        return None
    for advice in max(of_it, key=_cost)["advice"]:
        setting, value, predicted = (advice.get(name) for name in ("setting", "value", "predicted_speedup"))
        arguments = specimen.with_advice(named, setting, value) if predicted is not None else None
        if arguments is not None:
            return Advised(named, setting, value, arguments, float(predicted), advice.get("predicted_low"))
    return None


def _right(specimen: Specimen, named: str | None, stalls: list[dict[str, Any]], verdict: str) -> bool:
    if specimen.both:
        of_it = [stall for stall in stalls if stall["cause"] == named]
        also = {other["cause"] for stall in of_it for other in stall["evidence"].get("also", [])}
        return {named, *also} >= set(specimen.causes)
    if specimen.slow_rank is None:
        return named in specimen.causes
    waiting = [stall for stall in stalls if stall["cause"] == "straggler" and stall["rank"] != specimen.slow_rank]
    if specimen.nodes > 1:
        return named in specimen.causes and bool(waiting) and all(_points(specimen, stall) for stall in waiting)
    points = re.search(rf"\brank[\"_: ]+{specimen.slow_rank}\b", json.dumps(waiting)) is not None
    return named in specimen.causes and bool(waiting) and points


def _points(specimen: Specimen, stall: dict[str, Any]) -> bool:
    """Whether a waiting rank of a job names the slow rank, its node and the reason."""
    evidence = stall["evidence"]
    return (
        evidence.get("straggler_rank") in specimen.slow_ranks
        and evidence.get("straggler_node") == specimen.slow_node
        and specimen.reason in evidence.get("straggler_reason", "")
    )


def _cost(stall: dict[str, Any]) -> float:
    lost = stall["evidence"].get("lost_seconds") or {}
    return float(lost.get(stall["cause"], 0.0))
