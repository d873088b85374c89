"""The results as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .judgement import Result
    from .score import Goal, Score

_HEADINGS: Final = ("specimen", "is", "found", "named first", "right", "predicted", "realised", "TraceML 0.5.0")


def text(about: str, scored: Sequence[Score], reached: Sequence[Goal], diagnoses: Mapping[str, str]) -> str:
    """The table for a terminal."""
    rows = [list(_HEADINGS), *(_cells(score, diagnoses) for score in scored)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([about, "", *lines, "", *_goal_lines(reached)])


def markdown(about: str, scored: Sequence[Score], reached: Sequence[Goal], diagnoses: Mapping[str, str]) -> str:
    """The table as a Markdown page."""
    lines = ["# What the agent says of the zoo", "", about, ""]
    lines += [f"- {line}" for line in _goal_lines(reached)]
    lines += ["", f"| {' | '.join(_HEADINGS)} |", "|---" * len(_HEADINGS) + "|"]
    lines += [f"| {' | '.join(_cells(score, diagnoses))} |" for score in scored]
    return "\n".join([*lines, ""])


def write(
    folder: Path,
    slug: str,
    machine: Mapping[str, Any],
    about: str,
    scored: Sequence[Score],
    reached: Sequence[Goal],
    diagnoses: Mapping[str, str],
    name: str = "zoo",
) -> list[Path]:
    """Write both files, named ``name`` and the slug. They replace those of an earlier run on the same kind of machine."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = folder / f"{name}-{slug}.json", folder / f"{name}-{slug}.md"
    content = {
        "machine": dict(machine),
        "goals": [dataclasses.asdict(goal) for goal in reached],
        "specimens": [
            {
                "name": score.specimen.name,
                "about": score.specimen.about,
                "causes": score.specimen.causes,
                "rival": diagnoses.get(score.specimen.name),
                "runs": [_run(result) for result in score.results],
            }
            for score in scored
        ],
    }
    as_json.write_text(json.dumps(content) + "\n", encoding="utf-8")
    as_markdown.write_text(markdown(about, scored, reached, diagnoses), encoding="utf-8")
    return [as_json, as_markdown]


def _run(result: Result) -> dict[str, Any]:
    """A result without its stalls, which ``--evidence`` stores."""
    fields = dataclasses.asdict(result)
    fields["stalls"] = [
        {name: stall.get(name) for name in ("rank", "cause", "exposed_wait_ratio")}
        | {"lost_seconds": stall.get("evidence", {}).get("lost_seconds")}
        for stall in result.stalls
    ]
    return fields


def _cells(score: Score, diagnoses: Mapping[str, str]) -> list[str]:
    specimen, runs = score.specimen, len(score.results)
    named = Counter(_said(result) for result in score.results)
    return [
        specimen.name,
        specimen.truth,
        f"{score.detected}/{runs}" if not specimen.healthy else ("-" if not score.accused else "ACCUSED"),
        ", ".join(name if count == runs else f"{name} {count}" for name, count in named.most_common()),
        f"{score.right}/{runs}" if not specimen.healthy else f"{runs - score.accused}/{runs}",
        "" if score.predicted is None else f"{score.predicted:.2f}",
        _realised(score),
        diagnoses.get(specimen.name, ""),
    ]


def _realised(score: Score) -> str:
    """The speed-up, the error of the prediction, and the number of runs if these are not all."""
    if score.realised is None or score.off is None:
        return "failed" if score.followed else ""
    runs = "" if score.followed == len(score.results) else f", {score.followed} run{'s' * (score.followed > 1)}"
    return f"{score.realised:.2f} ({100 * score.off:.0f} % off{runs})"


def _said(result: Result) -> str:
    if result.error and not result.verdict:
        return "FAILED"
    return result.named or "nothing"


def _goal_lines(reached: Sequence[Goal]) -> list[str]:
    return [f"{'reached' if goal.met else 'NOT REACHED'}: {goal.name} ({goal.reached})" for goal in reached]
