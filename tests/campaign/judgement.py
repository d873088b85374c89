"""Compares reports with the truth about the scripts. Reads reports and starts nothing."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tests.campaign import Goal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .specimen import Specimen

MIN_RIGHT: Final = 0.95
"""Share of the runs in which the cause named first, the line and the first advice must be right."""

_NOT_THE_END: Final = ("Healthy", "No training step has ended yet")
_PLACE: Final = re.compile(r"\S+\.py\b")
"""A script is named after its fault. That is no word of the advice."""

# -- one report --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advised:
    """Advice that was followed: the first with a prediction that can be followed here.

    Attributes:
        arguments, variables: what the script got in addition.
        predicted: the predicted speed-up. ``low``: the low end, if it is a range.
    """

    cause: str
    setting: str | None
    value: str | None
    arguments: tuple[str, ...]
    predicted: float
    low: float | None = None
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a specimen, and the run with the advice followed if there was one. None: that was not asked.

    Attributes:
        named: what was named first, a cause or a finding; None if nothing was.
        others: what was named besides.
        detected: whether anything was found.
        right: whether what was named first, or how the run ended, is true. None for a control.
        accused: whether the report accuses a control. None for other specimens.
        line, advice: whether these are right. ``line_named``, ``advice_given``: the first of each.
        harmful: advice that must not be given; empty without any.
        steps_per_second: pace without the advice, or samples of new data per second. ``pace_after``: the same after it
            was followed; None if it was not run.
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
    line: bool | None = None
    line_named: str = ""
    advice: bool | None = None
    advice_given: str = ""
    harmful: str = ""
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

    @property
    def good(self) -> bool:
        """Whether all that was asked is right."""
        asked = (self.right, self.line, self.advice, not self.accused, not self.harmful)
        return not self.error and all(answer is not False for answer in asked)

    @property
    def off(self) -> float | None:
        """How far the prediction is off, as a share of the real speed-up; None without both. In its range it is not."""
        if self.advised is None or not self.realised:
            return None
        return error_of(self.advised.predicted, self.advised.low, self.realised)


def judge(specimen: Specimen, report: dict[str, Any]) -> Result:
    """Judge a report on the specimen."""
    stalls, findings, hang = report["stalls"], report.get("findings", []), report.get("hang")
    kinds = [*(stall["cause"] for stall in stalls), *(finding["kind"] for finding in findings)]
    told = {"verdict": report["verdict"], "stalls": stalls, "detected": bool(kinds) or hang is not None}
    named = first_cause(report)
    others = tuple(dict.fromkeys(kind for kind in kinds if kind != named))
    if specimen.healthy:
        accused = alarms(report) or (specimen.silent and bool(findings))
        return Result(specimen.name, named, others, accused=accused, **told)
    given = _advice(report)
    harmful = [one for one in [*given, *_smaller(report)] if specimen.harmful and _matches(specimen.harmful, one)]
    told["harmful"] = _text(harmful[0]) if harmful else ""
    if specimen.fails:
        return _judged_by_its_end(specimen, report, told)
    first = _main(specimen, report)
    lines = [f"{line['file']}:{line['line']}" for line in first.get("evidence", first).get("lines") or ()][:1]
    return Result(
        specimen.name,
        named,
        others,
        right=_right(specimen, named, report),
        line=_has_marked(specimen, lines) if specimen.line else None,
        line_named=lines[0] if lines else "",
        advice=bool(given) and _matches(specimen.advice, given[0]) if specimen.advice else None,
        advice_given=_text(given[0]) if given else "",
        **told,
    )


def first_cause(report: dict[str, Any]) -> str | None:
    """What a person reads first: the verdict's cause, else that of the stall that cost most, else the first finding."""
    found = re.search(r"Cause: (\w+)", report["verdict"])
    if found is not None:
        return found[1]
    costliest = max(report["stalls"], key=lost_seconds, default=None)
    if costliest is not None:
        return str(costliest["cause"])
    return next((finding["kind"] for finding in report.get("findings", [])), None)


def lost_seconds(stall: dict[str, Any]) -> float:
    """What a stall of a report has cost by its cause."""
    return float((stall["evidence"].get("lost_seconds") or {}).get(stall["cause"], 0.0))


def alarms(report: dict[str, Any]) -> bool:
    """Whether a report accuses a run, by a stall, the verdict, a change of the steps, or memory that runs out."""
    memory = [rank["memory"] or {} for rank in report["ranks"]]
    runs_out = any(each.get("exhausted_in_seconds") is not None for each in memory)
    return bool(report["stalls"] or report["verdict"].startswith("Starved") or report["changes"] or runs_out)


def error_of(predicted: float, low: float | None, real: float) -> float:
    """How far a predicted speed-up, or the nearer end of its range, is from the real one, as a share of that."""
    nearest = min(max(real, predicted if low is None else low), predicted)
    return abs(nearest / real - 1)


def advice_to_follow(specimen: Specimen, report: dict[str, Any]) -> Advised | None:
    """The first advice on the cause named first that has a prediction and can be followed here."""
    named = first_cause(report)
    if specimen.fixed:  # its variant is what the first advice says
        given = _advice(report)[:1]
    else:
        given = (_costliest(report, named) or {"advice": []})["advice"]
    for advice in given:
        predicted = advice.get("predicted_speedup")
        change = None if predicted is None or named is None else specimen.with_advice(named, advice)
        if change is not None and named is not None:
            arguments, variables = change
            setting, value, low = (advice.get(name) for name in ("setting", "value", "predicted_low"))
            return Advised(named, setting, value, arguments, float(predicted), low, variables)
    return None


def _costliest(report: dict[str, Any], cause: str | None) -> dict[str, Any] | None:
    return max((stall for stall in report["stalls"] if stall["cause"] == cause), key=lost_seconds, default=None)


def _main(specimen: Specimen, report: dict[str, Any]) -> dict[str, Any]:
    """The first finding if that is right, else the stall named first, else the first finding; empty without any.

    A stall says what the training waits for, a finding why: iterators made in each step make workers start.
    """
    finding: dict[str, Any] = next(iter(report.get("findings", [])), {})
    return finding if finding.get("kind") in specimen.causes else _costliest(report, first_cause(report)) or finding


def _right(specimen: Specimen, named: str | None, report: dict[str, Any]) -> bool:
    stalls = report["stalls"]
    if specimen.both:
        also = {other["cause"] for s in stalls if s["cause"] == named for other in s["evidence"].get("also", [])}
        return {named, *also} >= set(specimen.causes)
    if specimen.slow_rank is None:
        main = _main(specimen, report)
        return named in specimen.causes or main.get("kind") in specimen.causes
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


def _judged_by_its_end(specimen: Specimen, report: dict[str, Any], told: dict[str, Any]) -> Result:
    """How a run ended is in the verdict, with what to do. A hang has stacks in the hang or the stall.

    Of a hang of a job the kind must be right, and the one rank on its node.
    """
    verdict, hang = report["verdict"], report.get("hang")
    said = json.dumps([verdict, hang, report["stalls"]])
    places = re.findall(r"[\w./-]+\.py:\d+", said)
    places += [f"{file}:{line}" for file, line in re.findall(r"File \W*([\w./-]+\.py)\W*, line (\d+)", said)]
    if specimen.hang:
        suspects = [(suspect["rank"], suspect["node"]) for suspect in (hang or {"suspects": []})["suspects"]]
        right = hang is not None and hang["kind"] == specimen.hang
        right = right and suspects == [(specimen.slow_rank, specimen.slow_node)]
        told["detected"] = hang is not None
    else:
        right = re.search(specimen.end_said, verdict) is not None and not verdict.startswith(_NOT_THE_END)
        told["detected"] = not verdict.startswith(_NOT_THE_END)
    return Result(
        specimen.name,
        named=f"hang: {hang['kind']}" if hang is not None else re.split("[:.]", verdict)[0],
        right=right,
        line=_has_marked(specimen, places) if specimen.line else None,
        line_named=next((place for place in places if _has_marked(specimen, [place])), next(iter(places), "")),
        advice=re.search(specimen.advice, verdict, re.IGNORECASE) is not None if specimen.advice else None,
        **told,
    )


def _has_marked(specimen: Specimen, places: Iterable[str]) -> bool:
    return any(place.rsplit("/", 1)[-1] in specimen.marked for place in places)


def _advice(report: dict[str, Any]) -> list[dict[str, Any]]:
    """All advice in the report's order; of a report without such a list, that of its stalls and findings."""
    listed: list[dict[str, Any]] = report.get("advice") or []
    return listed or [advice for each in (*report["stalls"], *report.get("findings", [])) for advice in each["advice"]]


def _smaller(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Advice on smaller causes."""
    also = [other for stall in report["stalls"] for other in stall["evidence"].get("also", [])]
    return [advice for each in also for advice in each.get("advice", [])]


def _text(advice: dict[str, Any]) -> str:
    setting, value, action = (advice.get(name) for name in ("setting", "value", "action"))
    typed = f"{setting}={value}" if setting and value else setting or ""
    return f"{typed}: {action}" if typed else str(action)


def _matches(pattern: str, advice: dict[str, Any]) -> bool:
    return re.search(pattern, _PLACE.sub("", _text(advice)), re.IGNORECASE) is not None


# -- all of them -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """One specimen over its repetitions."""

    specimen: Specimen
    results: tuple[Result, ...]

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
        return _middle(r.off for r in self.results)

    def cells(self, rival: str) -> dict[str, str]:
        """What a table can show of it, by heading."""
        runs, healthy = len(self.results), self.specimen.healthy
        named = Counter("FAILED" if r.failed else r.named or "nothing" for r in self.results)
        predicted, low = (
            _middle(getattr(r.advised, name) for r in self.results if r.advised is not None)
            for name in ("predicted", "low")
        )
        detected = sum(r.detected for r in self.results)
        right, realised = f"{self.right}/{runs}", self._realised()
        return {
            "specimen": self.specimen.name,
            "script": self.specimen.name,
            "after": self.specimen.about,
            "is": self.specimen.truth,
            "found": f"{detected}/{runs}" if not healthy else "-" if self.right == runs else "ACCUSED",
            "named first": ", ".join(name if n == runs else f"{name} {n}" for name, n in named.most_common()),
            "right": right,
            "cause": right,
            "line": _of_those_asked(r.line for r in self.results),
            "advice": "HARMFUL" if any(r.harmful for r in self.results) else _of_those_asked(r.advice for r in self.results),
            "predicted": "" if predicted is None else f"{predicted:.2f}" if low is None else f"{low:.2f} to {predicted:.2f}",
            "realised": realised,
            "real": realised,
            "TraceML 0.5.0": rival,
        }  # fmt: skip

    def _realised(self) -> str:
        """The speed-up, the error of the prediction, and the number of runs if these are not all."""
        realised = _middle(r.realised for r in self.results)
        if realised is None or self.off is None:
            return "failed" if self.followed else ""
        runs = "" if self.followed == len(self.results) else f", {self.followed} run{'s' * (self.followed > 1)}"
        return f"{realised:.2f} ({100 * self.off:.0f} % off{runs})"


def _middle(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def _of_those_asked(answers: Iterable[bool | None]) -> str:
    asked = [answer for answer in answers if answer is not None]
    return f"{sum(asked)}/{len(asked)}" if asked else ""


def scores(specimens: Sequence[Specimen], results: Sequence[Result]) -> list[Score]:
    """Scores by specimen, in the order of the specimens."""
    return [Score(s, tuple(r for r in results if r.specimen == s.name)) for s in specimens]


def goals(scored: Sequence[Score], max_off: float) -> list[Goal]:
    """The goals that the specimens that were run can reach. A run that failed reaches none.

    ``max_off``: how far a predicted speed-up, or the nearer end of its range, may be from the realised one, as a share
    of it.
    """
    faulty = [(s.specimen, result) for s in scored if not s.specimen.healthy for result in s.results]
    controls = [s for s in scored if s.specimen.healthy]
    compared = [s for s in scored if s.followed]
    lines, advice, harmless = (
        [result for specimen, result in faulty if getattr(specimen, name)] for name in ("line", "advice", "harmful")
    )
    least, near = f"in {100 * MIN_RIGHT:.0f} % of the runs", f"within {100 * max_off:.0f} % of the realised one"
    calm, controlled = sum(s.right for s in controls), sum(len(s.results) for s in controls)
    found = [
        Goal("every stall is found", sum(r.detected for _, r in faulty), len(faulty)),
        Goal("no control is accused", calm, controlled, "runs accused", tells_missed=True),
        Goal(f"the cause named first is right {least}", sum(r.right is True for _, r in faulty), len(faulty), least=MIN_RIGHT),
        Goal(f"the line is right {least}", sum(r.line is True for r in lines), len(lines), least=MIN_RIGHT),
        Goal(f"the first advice is right {least}", sum(r.advice is True for r in advice), len(advice), least=MIN_RIGHT),
        Goal("no advice is harmful", sum(not r.harmful and not r.failed for r in harmless), len(harmless)),
        Goal(
            f"each predicted speed-up is {near}", sum(s.off is not None and s.off <= max_off for s in compared),
            len(compared), "specimens whose advice can be followed here",
        ),
    ]  # fmt: skip
    return [goal for goal in found if goal.of]


def published(scored: Sequence[Score], rivals: Mapping[str, str]) -> list[dict[str, Any]]:
    """The results as they are written, without evidence, which ``--evidence`` stores."""
    return [
        {
            "name": score.specimen.name,
            "about": score.specimen.about,
            "causes": score.specimen.causes,
            "rival": rivals.get(score.specimen.name),
            "runs": [asdict(result) | {"stalls": [*map(_brief, result.stalls)]} for result in score.results],
        }
        for score in scored
    ]


def _brief(stall: dict[str, Any]) -> dict[str, Any]:
    kept = {name: stall.get(name) for name in ("rank", "cause", "exposed_wait_ratio")}
    return kept | {"lost_seconds": stall.get("evidence", {}).get("lost_seconds")}
