"""Runs specimens one at a time: judges the report, follows the advice, runs again, and compares."""

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

    from .specimens import Specimen


_MAX_TRIES: Final = 6
"""Maximum runs until one is quiet. If none is quiet enough, the last one counts, and its load is recorded."""

_MAX_COMPARISONS: Final = 3
"""Maximum comparisons until the pace is steady. If none is steady, the last one counts. Both paces are recorded."""


def run(
    specimen: Specimen,
    settings: Mapping[str, str] | None = None,
    *,
    follow: bool = True,
    most_others: float = math.inf,
    steady: float = math.inf,
) -> Result:
    """Run a specimen. With ``follow``, run it again with the advice followed. A failed run has an error in its result.

    Args:
        specimen: the specimen.
        settings: variables of the agent.
        follow: whether to follow the advice.
        most_others: a run is repeated if other processes used more cores than this.
        steady: run without the advice before and after following it, and repeat all three if the two paces differ by
            more than this share. Other virtual machines on the same cores change the pace, but not the load.
    """
    loads: list[dict[str, float]] = []

    def once(extra: tuple[str, ...] = ()) -> tuple[dict[str, Any], float | None]:
        return _undisturbed(specimen, extra, settings or {}, loads, most_others)

    try:
        report, pace = once()
    except processes.RunError as error:
        return Result(specimen.name, error=str(error), load=tuple(loads))
    result = dataclasses.replace(judge(specimen, report), steps_per_second=pace)
    if follow and not specimen.healthy and pace is not None:
        result = _follow(specimen, result, report, pace, once, steady)
    return dataclasses.replace(result, load=tuple(loads))


def _follow(
    specimen: Specimen,
    result: Result,
    report: dict[str, Any],
    pace: float,
    once: Callable[..., tuple[dict[str, Any], float | None]],
    steady: float,
) -> Result:
    """The result, with the advice followed if there is advice to follow."""
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
) -> tuple[dict[str, Any], float | None]:
    """Run it, and repeat that until others use few enough cores. The load of the last run is recorded."""
    found: tuple[dict[str, Any], float | None] | processes.RunError
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
