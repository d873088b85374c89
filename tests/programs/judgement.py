"""Compares a report with what a program says of itself. Starts nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from .cases import Program

COUNTS: Final = ("steps", "optimizer_steps", "epochs", "samples")
"""Figures that must be the same."""

MAX_OFF: Final = 0.05
"""Share by which the seconds of evaluations may differ, and of the training loop by which its parts may."""

MAX_ESTIMATE_OFF: Final = 0.15
"""Share by which an estimated number of steps may differ."""

NOISE_SECONDS: Final = 0.1
"""Difference of the seconds of evaluations that counts for nothing."""


@dataclass(slots=True)
class Judged:
    """One run.

    Attributes:
        figures: whether each figure is right. ``wrong``: what is not, for a person.
        advice_right: None if no advice was asked.
    """

    verdict_right: bool = True
    advice_right: bool | None = None
    figures: dict[str, bool] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def judge(program: Program, truth: dict[str, Any], report: dict[str, Any], text: str) -> Judged:
    """Judge the report of one run."""
    judged = Judged(verdict_right=re.search(program.verdict, report["verdict"]) is not None)
    if not judged.verdict_right:
        judged.wrong.append(f"verdict {report['verdict']!r}")
    if program.advice:
        given = [f"{one['setting']}: {one['action']}" for one in report["advice"][:1]]
        judged.advice_right = bool(given) and re.search(program.advice, given[0]) is not None
        if not judged.advice_right:
            judged.wrong.append(f"first advice {given[0] if given else 'none'!r}")
    for pattern in program.unsaid:
        found = re.search(pattern, text)
        judged.figures[f"without {pattern}"] = found is None
        if found:
            judged.wrong.append(f"says {found[0]!r}")
    for name, true in figures_of(truth).items():
        said = figures_of_report(report).get(name)
        right = said is None if name in program.unknown else _is_right(name, said, true)
        judged.figures[name] = right
        if not right:
            judged.wrong.append(f"{name} {_told(said)}, true {_told(true)}")
    return judged


def figures_of(truth: dict[str, Any]) -> dict[str, float]:
    """The figures in what a program says of itself: parts as shares of its training loop."""
    figures = {name: value for name, value in truth.items() if name != "parts"}
    loop = sum(truth.get("parts", {}).values())
    return figures | {part: seconds / loop for part, seconds in truth.get("parts", {}).items()}


def figures_of_report(report: dict[str, Any]) -> dict[str, float | None]:
    """The same figures of the first rank of a report; None where it says that it does not know."""
    rank = report["ranks"][0]
    ledger, split = rank["ledger"], rank["compute_seconds"]
    whole, loop = sum(split.values()), ledger["data_wait"] + ledger["compute"]
    found: dict[str, float | None] = {name: rank.get(name) for name in COUNTS}
    found["estimated_steps"] = rank.get("estimated_steps")
    found["epochs"] = (rank["epochs"] or {}).get("count")
    found["evaluation_seconds"] = ledger["evaluation"]
    if loop:
        found["wait"] = ledger["data_wait"] / loop
        named = sum(split.get(part, 0.0) for part in ("forward", "backward", "optimizer"))
        found["rest"] = (1 - named / whole) * ledger["compute"] / loop if whole else None
        found |= {part: seconds / whole * ledger["compute"] / loop for part, seconds in split.items() if whole}
    return found


def _is_right(name: str, said: float | None, true: float) -> bool:
    if name in COUNTS:
        return said == true
    if name == "estimated_steps":
        return said is not None and abs(said - true) <= MAX_ESTIMATE_OFF * true
    if said is None:
        return False
    return abs(said - true) <= (max(NOISE_SECONDS, MAX_OFF * true) if name == "evaluation_seconds" else MAX_OFF)


def _told(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
