"""Compares reports with the truth about the specimens. Reads reports and starts nothing."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tests.campaign import Goal, Table, alarms, error_of, lost_seconds, named_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .specimens import Specimen

MIN_RIGHT: Final = 0.95
"""Share of the runs in which the cause named first must be right."""

MAX_OFF: Final = 0.15
"""How far a predicted speed-up, or the nearer end of its range, may be from the realised one, as a share of it."""

_HEADINGS: Final = ("specimen", "is", "found", "named first", "right", "predicted", "realised", "TraceML 0.5.0")

# -- one report --------------------------------------------------------------------------------------------------------


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

    @property
    def failed(self) -> bool:
        """Whether there is nothing to judge."""
        return bool(self.error) and not self.verdict


def judge(specimen: Specimen, report: dict[str, Any]) -> Result:
    """Judge a report on the specimen."""
    stalls, verdict = report["stalls"], report["verdict"]
    if specimen.hang:  # right is the kind, and the one rank on its node
        hang = report["hang"]
        suspects = [] if hang is None else [(suspect["rank"], suspect["node"]) for suspect in hang["suspects"]]
        right = bool(suspects) and hang["kind"] == specimen.hang
        return Result(
            specimen=specimen.name,
            named=None if hang is None else f"hang: {hang['kind']}",
            detected=hang is not None,
            right=right and suspects == [(specimen.slow_rank, specimen.slow_node)],
            verdict=verdict,
            stalls=stalls,
        )
    named = first_cause(report)
    return Result(
        specimen=specimen.name,
        named=named,
        others=tuple(dict.fromkeys(stall["cause"] for stall in stalls if stall["cause"] != named)),
        detected=bool(stalls),
        right=None if specimen.healthy else _right(specimen, named, stalls),
        accused=alarms(report) if specimen.healthy else None,
        verdict=verdict,
        stalls=stalls,
    )


def first_cause(report: dict[str, Any]) -> str | None:
    """The cause that a person reads first: the verdict's, else that of the stall that cost most."""
    costliest = max(report["stalls"], key=lost_seconds, default={"cause": None})
    return named_in(report["verdict"]) or costliest["cause"]


def advice_to_follow(specimen: Specimen, report: dict[str, Any]) -> Advised | None:
    """The first advice on the cause named first that has a prediction and can be followed here."""
    named = first_cause(report)
    of_it = [stall for stall in report["stalls"] if stall["cause"] == named]
    if not of_it or named is None:
        return None
    for advice in max(of_it, key=lost_seconds)["advice"]:
        setting, value, predicted = (advice.get(name) for name in ("setting", "value", "predicted_speedup"))
        arguments = specimen.with_advice(named, setting, value) if predicted is not None else None
        if arguments is not None:
            return Advised(named, setting, value, arguments, float(predicted), advice.get("predicted_low"))
    return None


def _right(specimen: Specimen, named: str | None, stalls: list[dict[str, Any]]) -> bool:
    if specimen.both:
        of_it = [stall for stall in stalls if stall["cause"] == named]
        also = {other["cause"] for stall in of_it for other in stall["evidence"].get("also", [])}
        return {named, *also} >= set(specimen.causes)
    if specimen.slow_rank is None:
        return named in specimen.causes
    waiting = [stall for stall in stalls if stall["cause"] == "straggler" and stall["rank"] != specimen.slow_rank]
    points = re.search(rf"\brank[\"_: ]+{specimen.slow_rank}\b", json.dumps(waiting)) is not None
    if specimen.nodes > 1:
        points = all(_points(specimen, stall["evidence"]) for stall in waiting)
    return named in specimen.causes and bool(waiting) and points


def _points(specimen: Specimen, evidence: dict[str, Any]) -> bool:
    """Whether a waiting rank of a job names the slow rank, its node and the reason."""
    return (
        evidence.get("straggler_rank") in specimen.slow_ranks
        and evidence.get("straggler_node") == specimen.slow_node
        and specimen.reason in evidence.get("straggler_reason", "")
    )


# -- all of them -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """One specimen over its repetitions."""

    specimen: Specimen
    results: tuple[Result, ...]

    @property
    def detected(self) -> int:
        """Runs in which a stall was found."""
        return sum(r.detected for r in self.results)

    @property
    def right(self) -> int:
        """Runs in which the cause named first was right, or in which nothing was said of a control."""
        return sum(r.accused is False if self.specimen.healthy else bool(r.right) for r in self.results)

    @property
    def followed(self) -> int:
        """Runs after which advice was followed, with any result."""
        return sum(r.advised is not None for r in self.results)

    @property
    def off(self) -> float | None:
        """Median error of the predictions; None if no advice was followed, or no run with it succeeded."""
        return _middle(
            error_of(r.advised.predicted, r.advised.low, r.realised)
            for r in self.results
            if r.advised is not None and r.realised
        )

    def row(self, rival: str) -> list[str]:
        """Its row in the table."""
        runs, healthy = len(self.results), self.specimen.healthy
        named = Counter("FAILED" if r.failed else r.named or "nothing" for r in self.results)
        predicted = _middle(r.advised.predicted for r in self.results if r.advised is not None)
        found = f"{self.detected}/{runs}" if not healthy else "-" if self.right == runs else "ACCUSED"
        return [
            self.specimen.name,
            self.specimen.truth,
            found,
            ", ".join(name if count == runs else f"{name} {count}" for name, count in named.most_common()),
            f"{self.right}/{runs}",
            "" if predicted is None else f"{predicted:.2f}",
            self._realised(),
            rival,
        ]

    def _realised(self) -> str:
        """The speed-up, the error of the prediction, and the number of runs if these are not all."""
        realised = _middle(r.realised for r in self.results if r.realised is not None)
        if realised is None or self.off is None:
            return "failed" if self.followed else ""
        runs = "" if self.followed == len(self.results) else f", {self.followed} run{'s' * (self.followed > 1)}"
        return f"{realised:.2f} ({100 * self.off:.0f} % off{runs})"


def _middle(values: Any) -> float | None:
    found = [*values]
    return median(found) if found else None


def scores(specimens: Sequence[Specimen], results: Sequence[Result]) -> list[Score]:
    """Scores by specimen, in the order of the specimens."""
    return [Score(s, tuple(r for r in results if r.specimen == s.name)) for s in specimens]


def goals(scored: Sequence[Score]) -> list[Goal]:
    """The goals for the specimens that were run."""
    stalls = [s for s in scored if not s.specimen.healthy]
    controls = [s for s in scored if s.specimen.healthy]
    wanted, compared = sum(len(s.results) for s in stalls), [s for s in scored if s.followed]
    calm, controlled = sum(s.right for s in controls), sum(len(s.results) for s in controls)
    near = sum(s.off is not None and s.off <= MAX_OFF for s in compared)
    right = f"the cause named first is right in {100 * MIN_RIGHT:.0f} % of the runs"
    predicted = f"each predicted speed-up is within {100 * MAX_OFF:.0f} % of the realised one"
    return [
        Goal("every stall is found", sum(s.detected for s in stalls), wanted),
        Goal("no control is accused", calm, controlled, "runs accused", tells_missed=True),
        Goal(right, sum(s.right for s in stalls), wanted, least=MIN_RIGHT),
        Goal(predicted, near, len(compared), "specimens whose advice can be followed here"),
    ]


def table(machine: Mapping[str, Any], scored: Sequence[Score], rivals: Mapping[str, str]) -> Table:
    """The results as they are shown. ``rivals``: TraceML's diagnoses."""
    rows = [score.row(rivals.get(score.specimen.name, "")) for score in scored]
    return Table("What the agent says of the zoo", machine, goals(scored), _HEADINGS, rows)


def write(folder: Path, name: str, shown: Table, scored: Sequence[Score], rivals: Mapping[str, str]) -> None:
    """Write the results without evidence, which ``--evidence`` stores."""
    specimens = [
        {
            "name": score.specimen.name,
            "about": score.specimen.about,
            "causes": score.specimen.causes,
            "rival": rivals.get(score.specimen.name),
            "runs": [
                dataclasses.asdict(result) | {"stalls": [*map(_brief, result.stalls)]} for result in score.results
            ],
        }
        for score in scored
    ]
    shown.write(folder, name, {"specimens": specimens})


def _brief(stall: dict[str, Any]) -> dict[str, Any]:
    kept = {name: stall.get(name) for name in ("rank", "cause", "exposed_wait_ratio")}
    return kept | {"lost_seconds": stall.get("evidence", {}).get("lost_seconds")}
