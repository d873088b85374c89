"""The results as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

from .judgement import MAX_OFF

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .cases import Case
    from .judgement import Judged

MIN_RIGHT: Final = 0.95
_HEADINGS: Final = ("script", "after", "is", "named first", "cause", "line", "advice", "predicted", "real")


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A goal, and how many of how many reach it."""

    name: str
    least: float
    reached: int
    of: int

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.reached >= self.least * self.of

    def __str__(self) -> str:
        return f"{'reached' if self.met else 'NOT REACHED'}: {self.name} ({self.reached} of {self.of})"


def goals(cases: Sequence[Case], results: Mapping[str, Judged]) -> list[Goal]:
    """The goals, for the scripts that were run."""
    faulty = [results[case.name] for case in cases if not case.healthy]
    controls = [results[case.name] for case in cases if case.healthy]

    def share(name: str, answers: Sequence[bool], least: float = MIN_RIGHT) -> Goal:
        return Goal(name, least, sum(answers), len(answers))

    all_goals = [
        share("cause and how the run ended are right in 95 %", [r.cause for r in faulty]),
        share("the line is right in 95 % of those that have one", [r.line for r in faulty if r.line is not None]),
        share("the first advice is right in 95 %", [r.advice for r in faulty if r.advice is not None]),
        share("no advice is harmful", [not r.harmful for r in faulty], 1.0),
        share(
            f"predictions are within {100 * MAX_OFF:.0f} % of the real speed-up",
            [r.prediction for r in faulty if r.prediction is not None],
            1.0,
        ),
        share("nothing is said of controls", [r.cause for r in controls], 1.0),
    ]
    return [goal for goal in all_goals if goal.of]


def text(about: str, cases: Sequence[Case], results: Mapping[str, Judged]) -> str:
    """The table for a terminal."""
    rows = [list(_HEADINGS), *(_cells(case, results[case.name]) for case in cases)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([about, "", *lines, "", *map(str, goals(cases, results))])


def markdown(about: str, cases: Sequence[Case], results: Mapping[str, Judged]) -> str:
    """The table as a Markdown page."""
    lines = ["# What the agent says of scripts after public reports", "", about, ""]
    lines += [f"- {goal}" for goal in goals(cases, results)]
    lines += ["", f"| {' | '.join(_HEADINGS)} |", "|---" * len(_HEADINGS) + "|"]
    lines += [f"| {' | '.join(_cells(case, results[case.name]))} |" for case in cases]
    return "\n".join([*lines, ""])


def write(
    folder: Path, machine: Mapping[str, Any], about: str, cases: Sequence[Case], results: Mapping[str, Judged]
) -> list[Path]:
    """Write both files. They replace those of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = folder / "reports.json", folder / "reports.md"
    content = {
        "machine": dict(machine),
        "goals": [dataclasses.asdict(goal) | {"met": goal.met} for goal in goals(cases, results)],
        "scripts": [
            {"public": case.public, "is": case.found, "right": results[case.name].right}
            | dataclasses.asdict(results[case.name])
            for case in cases
        ],
    }
    as_json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    as_markdown.write_text(markdown(about, cases, results), encoding="utf-8")
    return [as_json, as_markdown]


def _cells(case: Case, result: Judged) -> list[str]:
    advice = _mark(result.advice)
    if result.harmful:
        advice = "HARMFUL"
    return [
        case.name,
        ", ".join(case.public),
        case.truth,
        "FAILED" if result.error and not result.verdict else result.named,
        _mark(result.cause),
        _mark(result.line),
        advice,
        "" if result.predicted is None else _range(result),
        "" if result.speedup is None else f"{result.speedup:.2f}" + _off(result),
    ]


def _mark(answer: bool | None) -> str:
    return "" if answer is None else "right" if answer else "wrong"


def _range(result: Judged) -> str:
    return f"{result.predicted:.2f}" if result.low is None else f"{result.low:.2f} to {result.predicted:.2f}"


def _off(result: Judged) -> str:
    return "" if result.off is None else f" ({100 * result.off:.0f} % off)"
