"""Run specimens one at a time: judge the report, follow the advice, run again, compare."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from . import processes
from .judgement import Result, advice_to_follow, judge
from .load import Load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .specimens import Specimen


_MOST_TRIES: Final = 6
"""A machine that is never quiet enough does not stop the zoo: the last run counts, and its load stands beside it."""


def run(
    specimen: Specimen,
    settings: Mapping[str, str] | None = None,
    *,
    follow: bool = True,
    most_others: float = math.inf,
) -> Result:
    """Run a specimen, and with ``follow`` once more with the advice followed. A run that fails says so in its result.

    Args:
        specimen: what to run.
        settings: variables of the agent.
        follow: whether the advice is followed.
        most_others: a run in which others used more cores than this is made again.
    """
    loads: list[dict[str, float]] = []
    try:
        report, pace = _undisturbed(specimen, (), settings or {}, loads, most_others)
    except processes.RunError as error:
        return Result(specimen.name, error=str(error), load=tuple(loads))
    result = dataclasses.replace(judge(specimen, report), steps_per_second=pace, load=tuple(loads))
    advised = advice_to_follow(specimen, report) if follow and not specimen.healthy else None
    if advised is None:
        return result
    try:
        _, faster = _undisturbed(specimen, advised.arguments, settings or {}, loads, most_others)
    except processes.RunError as error:
        return dataclasses.replace(result, advised=advised, load=tuple(loads), error=f"with the advice: {error}")
    return dataclasses.replace(result, advised=advised, realised=faster / pace, load=tuple(loads))


def _undisturbed(
    specimen: Specimen,
    extra: tuple[str, ...],
    settings: Mapping[str, str],
    loads: list[dict[str, float]],
    most_others: float,
) -> tuple[dict[str, object], float]:
    """Run it, again and again until others have left it the machine. The load of the run that counts is noted."""
    found: tuple[dict[str, object], float] | processes.RunError
    for tries_left in reversed(range(_MOST_TRIES)):
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
