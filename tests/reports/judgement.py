"""Compares a report with the truth about a script. Reads reports and starts nothing."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.campaign import Goal, Table, alarms, error_of, lost_seconds, named_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .cases import Case

MAX_OFF: Final = 0.2
"""How far a predicted speed-up, or the nearer end of its range, may be from the real one, as a share of it."""

MIN_RIGHT: Final = 0.95
_HEADINGS: Final = ("script", "after", "is", "named first", "cause", "line", "advice", "predicted", "real")
_NOT_THE_END: Final = ("Healthy", "No training step has ended yet")
_FIRST_WORDS: Final = re.compile(r"[^:.]+")


@dataclass(frozen=True, slots=True)
class Said:
    """One entry of the report's ranked list: a stall or a finding.

    Attributes:
        kind: cause of a stall, or kind of a finding.
        share: share of the time that it cost.
        lines: ``file:line``, the most important first.
        advice: as in the report.
    """

    kind: str
    share: float
    lines: tuple[str, ...]
    advice: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """What a report said of a script. None: the question does not apply.

    Attributes:
        named: what was said first, a stall or a finding; "nothing" if there is nothing.
        others: what was said besides.
        cause: whether that, or how the run ended, is right; of a control, whether nothing was said.
        line, advice: whether these are right.
        line_named, advice_given: the first line and the first advice.
        harmful: advice that must not be given; empty without any.
        predicted, low: the speed-up by the first advice.
        workers: their number if the first advice has one. ``only_workers``: whether it has nothing else.
        speedup: the real speed-up of the advised change, or of ``fixed`` without a prediction.
        load: load of the machine by others during the run under the agent.
        error: why there is no report.
    """

    case: str
    named: str = ""
    others: tuple[str, ...] = ()
    cause: bool = False
    line: bool | None = None
    line_named: str = ""
    advice: bool | None = None
    advice_given: str = ""
    harmful: str = ""
    predicted: float | None = None
    low: float | None = None
    workers: int | None = None
    only_workers: bool = False
    speedup: float | None = None
    verdict: str = ""
    load: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def off(self) -> float | None:
        """How far the prediction is off, as a share of the real speed-up; None without both. In its range it is not."""
        if self.predicted is None or not self.speedup:
            return None
        return error_of(self.predicted, self.low, self.speedup)

    @property
    def prediction(self) -> bool | None:
        """Whether the prediction is near the real speed-up; None without both."""
        return None if self.off is None else self.off <= MAX_OFF

    @property
    def failed(self) -> bool:
        """Whether there is nothing to judge."""
        return bool(self.error) and not self.verdict

    @property
    def right(self) -> bool:
        """Whether all that was asked is right."""
        asked = (self.cause, self.line, self.advice, self.prediction)
        return not self.error and not self.harmful and all(answer is not False for answer in asked)


def judge(case: Case, report: dict[str, Any]) -> Judged:
    """Judge a report on a script. The real speed-up is not yet in the result."""
    if case.end:
        return _judge_end(case, report)
    said, verdict = ranked(report), report["verdict"]
    named = said[0].kind if said else "nothing"
    others = tuple(dict.fromkeys(each.kind for each in said[1:] if each.kind != named))
    if case.healthy:
        calm = not said and not alarms(report)
        return Judged(case.name, named, others, calm, verdict=verdict)
    main = _main(case, report, said)
    lines = () if main is None else main.lines[:1]
    advice = next(iter(_advice(report, said)), None)
    return Judged(
        case.name,
        named,
        others,
        cause=main is not None and main.kind in case.found,
        line=_has_marked(case, lines) if case.line else None,
        line_named=lines[0] if lines else "",
        advice=advice is not None and _matches(case.advice, advice) if case.advice else None,
        advice_given="" if advice is None else _text(advice),
        harmful=_harmful(case, report),
        predicted=None if advice is None else advice.get("predicted_speedup"),
        low=None if advice is None else advice.get("predicted_low"),
        workers=_workers(advice),
        only_workers=advice is not None and advice.get("setting") == "num_workers",
        verdict=verdict,
    )


def _main(case: Case, report: dict[str, Any], said: list[Said]) -> Said | None:
    """The first entry or the first finding, if one of them is right; else the first entry.

    A stall says what the training waits for, a finding why: iterators made in each step make workers start.
    """
    first_finding = [_of_finding(finding) for finding in report.get("findings", [])[:1]]
    right = [each for each in (*first_finding, *said[:1]) if each.kind in case.found]
    return next(iter(right), next(iter(said), None))


def _judge_end(case: Case, report: dict[str, Any]) -> Judged:
    """How a run ended is in the verdict, with its line and what to do. A hang has stacks in the hang or the stall."""
    verdict, hang = report["verdict"], report["hang"]
    words = _FIRST_WORDS.match(verdict)
    told = json.dumps([verdict, hang, report["stalls"]])
    places = re.findall(r"[\w./-]+\.py:\d+", told) + [
        f"{file}:{number}" for file, number in re.findall(r"File \W*([\w./-]+\.py)\W*, line (\d+)", told)
    ]
    return Judged(
        case.name,
        f"hang: {hang['kind']}" if hang is not None else words[0] if words else verdict,
        tuple(dict.fromkeys(each.kind for each in ranked(report))),
        cause=re.search(case.end_said, verdict) is not None and not verdict.startswith(_NOT_THE_END),
        line=_has_marked(case, places) if case.line else None,
        line_named=next((place for place in places if _has_marked(case, [place])), next(iter(places), "")),
        advice=re.search(case.advice, verdict, re.IGNORECASE) is not None if case.advice else None,
        harmful=_harmful(case, report),
        verdict=verdict,
    )


def ranked(report: dict[str, Any]) -> list[Said]:
    """What the report says beside how the run ended: what its verdict names, then what cost most."""
    loop = {rank["rank"]: rank["ledger"]["data_wait"] + rank["ledger"]["compute"] for rank in report["ranks"]}
    said = [_of_finding(finding) for finding in report.get("findings", [])]
    said += [_of_stall(stall, loop.get(stall["rank"], 0.0)) for stall in report["stalls"]]
    verdict: str = report["verdict"]
    cause = named_in(verdict)
    if cause:
        first = {cause}
    else:
        first = {finding["kind"] for finding in report.get("findings", []) if finding["text"] in verdict}
    return sorted(said, key=lambda each: (each.kind not in first, -each.share))


def _of_finding(finding: dict[str, Any]) -> Said:
    return Said(
        finding["kind"], finding.get("share_ratio") or 0.0, _lines(finding.get("lines")), tuple(finding["advice"])
    )


def _of_stall(stall: dict[str, Any], loop_seconds: float) -> Said:
    share = min(1.0, lost_seconds(stall) / loop_seconds) if loop_seconds else 0.0
    return Said(stall["cause"], share, _lines(stall["evidence"].get("lines")), tuple(stall["advice"]))


def _lines(lines: list[dict[str, Any]] | None) -> tuple[str, ...]:
    return tuple(f"{line['file']}:{line['line']}" for line in lines or ())


def _has_marked(case: Case, places: Sequence[str]) -> bool:
    marked = {f"{case.path.name}:{number}" for number in case.lines}
    return any(place.rsplit("/", 1)[-1] in marked for place in places)


def _text(advice: dict[str, Any]) -> str:
    setting, value, action = (advice.get(name) for name in ("setting", "value", "action"))
    typed = f"{setting}={value}" if setting and value else setting or ""
    return f"{typed}: {action}" if typed else str(action)


_PLACE: Final = re.compile(r"\S+\.py\b")
"""A script is named after its fault. That is no word of the advice."""


def _matches(pattern: str, advice: dict[str, Any]) -> bool:
    return re.search(pattern, _PLACE.sub("", _text(advice)), re.IGNORECASE) is not None


def _workers(advice: dict[str, Any] | None) -> int | None:
    """The advised number of workers, also if it is only the last step of the advice."""
    found = None if advice is None else re.search(r"num_workers=(\d+)", _text(advice))
    return None if found is None else int(found[1])


def _advice(report: dict[str, Any], said: list[Said]) -> list[dict[str, Any]]:
    """All advice in the report's order; of a report without such a list, that of its entries."""
    listed: list[dict[str, Any]] = report.get("advice") or []
    return listed or [advice for each in said for advice in each.advice]


def _harmful(case: Case, report: dict[str, Any]) -> str:
    """The first harmful advice, also of a smaller cause; empty without any."""
    also = [other for stall in report["stalls"] for other in stall["evidence"].get("also", [])]
    given = _advice(report, ranked(report)) + [advice for other in also for advice in other.get("advice", [])]
    return next((_text(advice) for advice in given if case.harmful and _matches(case.harmful, advice)), "")


# -- all of them -------------------------------------------------------------------------------------------------------


def goals(cases: Sequence[Case], results: Mapping[str, Judged]) -> list[Goal]:
    """The goals, for the scripts that were run."""
    faulty = [results[case.name] for case in cases if not case.healthy]
    controls = [results[case.name] for case in cases if case.healthy]
    asked: list[tuple[str, list[bool | None], float]] = [
        ("cause and how the run ended are right in 95 %", [r.cause for r in faulty], MIN_RIGHT),
        ("the line is right in 95 % of those that have one", [r.line for r in faulty], MIN_RIGHT),
        ("the first advice is right in 95 %", [r.advice for r in faulty], MIN_RIGHT),
        ("no advice is harmful", [not r.harmful for r in faulty], 1.0),
        (f"predictions are within {100 * MAX_OFF:.0f} % of the real speed-up", [r.prediction for r in faulty], 1.0),
        ("nothing is said of controls", [r.cause for r in controls], 1.0),
    ]
    found = [
        Goal(name, answers.count(True), len(answers) - answers.count(None), "scripts", least)
        for name, answers, least in asked
    ]
    return [goal for goal in found if goal.of]


def table(machine: Mapping[str, Any], cases: Sequence[Case], results: Mapping[str, Judged]) -> Table:
    """The results as they are shown."""
    rows = [_row(case, results[case.name]) for case in cases]
    title = "What the agent says of scripts after public reports"
    return Table(title, machine, goals(cases, results), _HEADINGS, rows)


def published(case: Case, result: Judged) -> dict[str, Any]:
    """A result as it is written."""
    return {"public": case.public, "is": case.found, "right": result.right} | dataclasses.asdict(result)


def _row(case: Case, result: Judged) -> list[str]:
    low = "" if result.low is None else f"{result.low:.2f} to "
    off = "" if result.off is None else f" ({100 * result.off:.0f} % off)"
    return [
        case.name,
        ", ".join(case.public),
        case.truth,
        "FAILED" if result.failed else result.named,
        _mark(result.cause),
        _mark(result.line),
        "HARMFUL" if result.harmful else _mark(result.advice),
        "" if result.predicted is None else f"{low}{result.predicted:.2f}",
        "" if result.speedup is None else f"{result.speedup:.2f}{off}",
    ]


def _mark(answer: bool | None) -> str:
    return "" if answer is None else "right" if answer else "wrong"
