"""Runs specimens one at a time: judges the report, follows the advice, runs again, and compares."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from tests.campaign import ROOT, Load, RunError, environment, finish, last_line, report_of, under_the_agent

from .judgement import Advised, Result, advice_to_follow, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .specimen import Specimen

_ON_NODES: Final = Path(__file__).with_name("on_nodes.py")
_SMALL_SHM: Final = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'

_MAX_TRIES: Final = 6
"""Maximum runs until one is quiet. If none is quiet enough, the last one counts, and its load is recorded."""

_MAX_COMPARISONS: Final = 3
"""Maximum comparisons until the pace is steady. If none is steady, the last one counts. Both paces are recorded."""

_JUDGES: Final = ("agent", "diagnosis", "log", "loop", "model", "report", "seams", "sources", "util")
_SHARED: Final = ("common.py", "samples.py", "store_server.py")


@dataclass(frozen=True, slots=True)
class How:
    """How specimens are run.

    Attributes:
        settings: variables of the agent.
        follow: whether to follow the advice.
        most_others: a run is repeated if other processes used more cores than this.
        steady: run without the advice before and after following it, and repeat all three if the two paces differ by
            more than this share. Other virtual machines on the same cores change the pace, but not the load.
        keep: a folder for each report and output. With ``again`` the reports kept there are judged, and nothing is run.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    follow: bool = True
    most_others: float = math.inf
    steady: float = math.inf
    keep: Path | None = None
    again: bool = False


def run(specimen: Specimen, how: How | None = None) -> Result:
    """Run a specimen. A failed run has an error in its result."""
    how = how or How()
    if how.again and how.keep is not None:
        return _judged_again(specimen, how.keep)
    loads: list[dict[str, float]] = []

    def once(advised: Advised | None = None) -> tuple[dict[str, Any], float | None]:
        return _undisturbed(specimen, advised, how, loads)

    try:
        report, pace = once()
    except RunError as error:
        return Result(specimen.name, error=str(error), load=tuple(loads))
    result = dataclasses.replace(judge(specimen, report), steps_per_second=pace)
    if how.follow and not specimen.healthy and pace is not None:
        result = _follow(specimen, result, report, pace, once, how.steady)
    return dataclasses.replace(result, load=tuple(loads))


def _judged_again(specimen: Specimen, folder: Path) -> Result:
    try:
        return judge(specimen, json.loads((folder / f"{specimen.name}.json").read_text(encoding="utf-8")))
    except OSError:
        return Result(specimen.name, error="no report is kept")


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
            _, faster = once(advised)
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
    specimen: Specimen, advised: Advised | None, how: How, loads: list[dict[str, float]]
) -> tuple[dict[str, Any], float | None]:
    """Run it, and repeat that until others use few enough cores. The load of the last run is recorded."""
    found: tuple[dict[str, Any], float | None] | RunError
    for tries_left in reversed(range(_MAX_TRIES)):
        load = Load()
        with tempfile.TemporaryDirectory(prefix=f"{specimen.name}-") as folder:
            try:
                found = report_and_pace(specimen, Path(folder), advised, how.settings)
            except RunError as error:
                found = error
            if how.keep is not None and advised is None:
                _keep(Path(folder), how.keep, specimen.name)
        seen = load.since()
        if not tries_left or seen["others_cores"] <= how.most_others:
            break
    loads.append(seen)
    if isinstance(found, RunError):
        raise found
    return found


def _keep(folder: Path, kept: Path, name: str) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for file in ("report.json", "report.txt", "output.txt"):
        if (folder / file).exists():
            shutil.copy(folder / file, kept / file.replace("report", name).replace("output", f"{name}.output"))


def report_and_pace(
    specimen: Specimen, folder: Path, advised: Advised | None, settings: Mapping[str, str]
) -> tuple[dict[str, Any], float | None]:
    """Run a specimen under the agent, with the advice followed if there is any. Leaves the report in the folder.

    Returns:
        The report, and the script's own pace; None of one that does not end by itself.

    Raises:
        RunError: it failed, timed out, or left no report or no pace.
    """
    run_dir, pace = folder / "run", folder / "pace.json"
    launcher = [python_with(specimen.needs)]
    if specimen.nodes > 1:
        launcher += [str(_ON_NODES), str(specimen.nodes), str(specimen.ranks // specimen.nodes)]
    elif specimen.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(specimen.ranks)]
    if specimen.shared_memory:
        launcher = ["unshare", "--mount", "sh", "-c", _SMALL_SHM, specimen.shared_memory, *launcher]
    script = [str(specimen.script), *arguments_of(specimen, pace), *(advised.arguments if advised else ())]
    variables = {**settings, **variables_of(specimen, pace), **(advised.variables if advised else {})}
    to_its_end(specimen, [*launcher, *under_the_agent(run_dir), *script], folder, environment(**variables))
    (folder / "report.txt").write_text(report_of(run_dir), encoding="utf-8")
    (folder / "report.json").write_text(report_of(run_dir, "--json"), encoding="utf-8")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    if specimen.fails:
        return report, None
    try:
        said = json.loads(pace.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RunError("the script has left no pace") from None
    rate = next(value for name, value in said.items() if name.endswith("_per_second"))
    if rate is None:
        raise RunError("the script made too few steps to have a pace")
    return report, float(rate)


def python_with(package: str) -> str:
    """A Python that has this package, if any is wanted: this one, or that of the frameworks' environment.

    Raises:
        RunError: that is not here, either.
    """
    if not package or importlib.util.find_spec(package) is not None:
        return sys.executable
    python = ROOT / ".venv-frameworks" / "bin" / "python"
    if not python.exists():
        raise RunError(f"{package} is not installed: make test-frameworks installs it")
    return str(python)


def arguments_of(specimen: Specimen, pace: Path) -> list[str]:
    """A specimen's own arguments, and those that the runner adds to a script of the zoo."""
    if specimen.fixed:
        return [*specimen.arguments]
    odd = [] if specimen.nodes == 1 or specimen.slow_rank is None else ["--odd-rank", str(specimen.slow_rank)]
    return ["--seconds", f"{specimen.seconds:g}", "--pace-file", str(pace), *specimen.arguments, *odd]


def variables_of(specimen: Specimen, pace: Path) -> dict[str, str]:
    """A specimen's own variables, and those by which a script after a public report is told the same."""
    return {"RUN_FOR": f"{specimen.seconds:g}", "PACE_FILE": str(pace), **specimen.variables}


def to_its_end(specimen: Specimen, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
    """Run a command to its end. One whose fault is its end must fail: a job that hangs by the collective's timeout.

    Raises:
        RunError: it failed, or timed out and was ended.
    """
    code, output = finish(command, folder, specimen.seconds, variables, cores=specimen.cores)
    if specimen.fails and not code:
        raise RunError("has ended as if nothing had happened")
    if code and not specimen.fails:
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
    files = [specimen.script, *map(specimen.script.with_name, _SHARED)]
    script = b"".join(file.read_bytes() for file in files if file.exists())
    truth = {name: value for name, value in dataclasses.asdict(specimen).items() if name != "remedies"}
    return hashlib.sha256(script + repr((truth, judges)).encode()).hexdigest()[:12]
