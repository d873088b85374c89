"""Runs specimens one at a time: judges the report, follows the advice, runs again, and compares."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from tests.campaign import ROOT, Load, RunError, environment, finish, last_line, report_of, under_the_agent

from .judgement import Result, advice_to_follow, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .specimens import Specimen

SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"
_ON_NODES: Final = Path(__file__).with_name("on_nodes.py")

_MAX_TRIES: Final = 6
"""Maximum runs until one is quiet. If none is quiet enough, the last one counts, and its load is recorded."""

_MAX_COMPARISONS: Final = 3
"""Maximum comparisons until the pace is steady. If none is steady, the last one counts. Both paces are recorded."""

_JUDGES: Final = ("agent", "diagnosis", "log", "loop", "model", "report", "seams", "sources", "util")
_SHARED: Final = ("common.py", "samples.py", "store_server.py")


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
    except RunError as error:
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
        except RunError as error:
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
    found: tuple[dict[str, Any], float | None] | RunError
    for tries_left in reversed(range(_MAX_TRIES)):
        load = Load()
        with tempfile.TemporaryDirectory(prefix=f"zoo-{specimen.name}-") as folder:
            try:
                found = report_and_pace(specimen, Path(folder), extra, settings)
            except RunError as error:
                found = error
        seen = load.since()
        if not tries_left or seen["others_cores"] <= most_others:
            break
    loads.append(seen)
    if isinstance(found, RunError):
        raise found
    return found


def report_and_pace(
    specimen: Specimen, folder: Path, extra: Sequence[str], settings: Mapping[str, str]
) -> tuple[dict[str, Any], float | None]:
    """Run a specimen under the agent, with ``extra`` arguments after its own.

    Returns:
        The report, and the script's own steps per second; None of one that hangs.

    Raises:
        RunError: it failed, timed out, or left no report or no pace.
    """
    run_dir, pace = folder / "run", folder / "pace.json"
    launcher = [sys.executable]
    if specimen.nodes > 1:
        launcher += [str(_ON_NODES), str(specimen.nodes), str(specimen.ranks // specimen.nodes)]
    elif specimen.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(specimen.ranks)]
    script = [str(SCRIPTS / f"{specimen.script}.py"), *arguments_of(specimen, pace), *extra]
    to_its_end(specimen, [*launcher, *under_the_agent(run_dir), *script], folder, environment(**settings))
    report = json.loads(report_of(run_dir, "--json"))
    if specimen.hang:
        return report, None
    try:
        rate = json.loads(pace.read_text(encoding="utf-8"))["steps_per_second"]
    except (OSError, ValueError, KeyError):
        raise RunError("the script has left no pace") from None
    if rate is None:
        raise RunError("the script made too few steps to have a pace")
    return report, float(rate)


def arguments_of(specimen: Specimen, pace: Path) -> list[str]:
    """A specimen's own arguments, and those that the zoo adds."""
    return ["--seconds", f"{specimen.seconds:g}", "--pace-file", str(pace), *specimen.arguments]


def to_its_end(specimen: Specimen, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
    """Run a command to its end. A job that hangs must fail, by the collective's timeout.

    Raises:
        RunError: it failed, or timed out and was ended.
    """
    code, output = finish(command, folder, specimen.seconds, variables, cores=specimen.cores)
    if specimen.hang and not code:
        raise RunError("has ended as if it had not hung")
    if code and not specimen.hang:
        raise RunError(f"ended with {code}: {last_line(output)}")


def agents_version() -> str:
    """The version of the code on which the agent's judgement depends."""
    digest = hashlib.sha256()
    for part in _JUDGES:
        for file in sorted((ROOT / "telemetry" / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def version_of(specimen: Specimen, judges: str) -> str:
    """The version of a specimen, and of what judges it. A journal keeps results by it."""
    script = b"".join((SCRIPTS / name).read_bytes() for name in (f"{specimen.script}.py", *_SHARED))
    how = (specimen.arguments, specimen.seconds, specimen.ranks, specimen.cores, specimen.causes, specimen.nodes)
    how += (specimen.hang, specimen.reason)
    return hashlib.sha256(script + repr((*how, judges)).encode()).hexdigest()[:12]
