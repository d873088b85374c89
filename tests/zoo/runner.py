"""Run specimens one at a time: judge the report, follow the advice, run again, compare."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from . import processes
from .judgement import Result, advice_to_follow, judge
from .load import Load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .specimens import Specimen


def run(specimen: Specimen, settings: Mapping[str, str] | None = None, *, follow: bool = True) -> Result:
    """Run a specimen, and with ``follow`` once more with the advice followed. ``settings`` are the agent's variables.

    A run that fails gives a result that says so.
    """
    loads: list[dict[str, float]] = []
    try:
        report, pace = _once(specimen, (), settings or {}, loads)
    except processes.RunError as error:
        return Result(specimen.name, error=str(error), load=tuple(loads))
    result = dataclasses.replace(judge(specimen, report), steps_per_second=pace, load=tuple(loads))
    advised = advice_to_follow(specimen, report) if follow and not specimen.healthy else None
    if advised is None:
        return result
    try:
        _, faster = _once(specimen, advised.arguments, settings or {}, loads)
    except processes.RunError as error:
        return dataclasses.replace(result, advised=advised, load=tuple(loads), error=f"with the advice: {error}")
    return dataclasses.replace(result, advised=advised, realised=faster / pace, load=tuple(loads))


def _once(
    specimen: Specimen, extra: tuple[str, ...], settings: Mapping[str, str], loads: list[dict[str, float]]
) -> tuple[dict[str, object], float]:
    load = Load()
    with tempfile.TemporaryDirectory(prefix=f"zoo-{specimen.name}-") as folder:
        try:
            return processes.under_the_agent(specimen, Path(folder), extra, settings)
        finally:
            loads.append(load.since())
