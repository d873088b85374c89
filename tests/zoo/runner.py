"""Run specimens one at a time: judge the report, follow the advice, run again, compare."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from . import processes
from .judgement import Result, advice_to_follow, judge
from .load import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .specimen import Specimen


_MAX_TRIES: Final = 6
"""Runs until a quiet one is found. If none is quiet enough, the last one counts, and its load is recorded."""

_MAX_COMPARISONS: Final = 3
"""Comparisons until the pace is steady. If none is steady, the last one counts, and both paces are recorded."""


def run(
    specimen: Specimen,
    settings: Mapping[str, str] | None = None,
    *,
    follow: bool = True,
    most_others: float = math.inf,
    steady: float = math.inf,
) -> Result:
    """Run a specimen, and with ``follow`` once more with the advice followed. A run that fails says so in its result.

    Args:
        specimen: what to run.
        settings: variables of the agent.
        follow: whether the advice is followed.
        most_others: a run in which others used more cores than this is made again.
        steady: the advice is followed between two runs without it, and again where their paces differ by more than this
            share. What shares a virtual machine's cores from outside of it shows in no load, only in the pace.
    """
    loads: list[dict[str, float]] = []

    def once(extra: tuple[str, ...] = ()) -> tuple[dict[str, Any], float]:
        return _undisturbed(specimen, extra, settings or {}, loads, most_others)

    try:
        report, pace = once()
    except processes.RunError as error:
        return Result(specimen.name, error=str(error), load=tuple(loads))
    result = dataclasses.replace(judge(specimen, report), steps_per_second=pace)
    if follow and not specimen.healthy:
        result = _follow(specimen, result, report, pace, once, steady)
    return dataclasses.replace(result, load=tuple(loads))


def _follow(
    specimen: Specimen,
    result: Result,
    report: dict[str, Any],
    pace: float,
    once: Callable[..., tuple[dict[str, Any], float]],
    steady: float,
) -> Result:
    """The result, and what came of its advice, if it has one to follow."""
    for tries_left in reversed(range(_MAX_COMPARISONS)):
        advised = advice_to_follow(specimen, report)
        if advised is None:
            break
        result = dataclasses.replace(result, advised=advised)
        try:
            _, faster = once(advised.arguments)
            if steady == math.inf:
                return dataclasses.replace(result, realised=faster / pace)
            report, after = once()
        except processes.RunError as error:
            return dataclasses.replace(result, error=f"with the advice, or after it: {error}")
        result = dataclasses.replace(result, realised=faster / mean((pace, after)), pace_after=after)
        if not tries_left or abs(after / pace - 1) <= steady:
            break
        result, pace = dataclasses.replace(judge(specimen, report), steps_per_second=after), after
    return result


def _undisturbed(
    specimen: Specimen,
    extra: tuple[str, ...],
    settings: Mapping[str, str],
    loads: list[dict[str, float]],
    most_others: float,
) -> tuple[dict[str, Any], float]:
    """Run it, again and again until others have left it the machine. The load of the run that counts is noted."""
    found: tuple[dict[str, Any], float] | processes.RunError
    for tries_left in reversed(range(_MAX_TRIES)):
        load = Load()
        with tempfile.TemporaryDirectory(prefix=f"zoo-{specimen.name}-") as folder:
            try:
                found = processes.under_the_agent(specimen, Path(folder), extra, settings)
            except processes.RunError as error:
                found = error
        seen = load.since()
        if not tries_left or seen["others_cores"] <= most_others:
            break
    loads.append(seen)
    if isinstance(found, processes.RunError):
        raise found
    return found
