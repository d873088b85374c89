"""Runs a script under the agent as a person would, and its variants without the agent."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.campaign import ROOT, Journal, Load, RunError, environment, finish, last_line, report_of, under_the_agent

from .cases import SCRIPTS, Case
from .judgement import Judged, judge

if TYPE_CHECKING:
    from collections.abc import Mapping

_BARE: Final = 0.6
"""Runs without the agent last this part of the run under it. Those of steps that grow last as long."""
_SMALL_SHM: Final = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'
_PACE: Final = re.compile(r"^PACE (.*)$", re.MULTILINE)


def run(
    case: Case, paces: Journal, *, speedups: str = "predicted", keep: Path | None = None, again: bool = False
) -> Judged:
    """Run a case under the agent, and without it where a speed-up was predicted.

    Args:
        case: what to run.
        paces: samples of new data per second without the agent, by version of a script.
        speedups: which real speed-ups to measure: ``none``, those ``predicted``, or ``all``.
        keep: a folder for the report, as text and JSON.
        again: judge the report that is kept there, instead of a new one.
    """
    try:
        report = _kept(case, keep) if again and keep is not None else _report(case, keep)
    except RunError as error:
        return Judged(case.name, error=str(error))
    result = dataclasses.replace(judge(case, report), load=report["load"])
    wanted = {"none": False, "predicted": result.predicted is not None, "all": True}[speedups]
    if case.healthy or case.end or not wanted:
        return result
    try:
        return dataclasses.replace(result, speedup=_speedup(case, result, paces))
    except RunError as error:
        return dataclasses.replace(result, error=f"without the agent: {error}")


def _speedup(case: Case, result: Judged, paces: Journal) -> float:
    """The speed-up of the advised change: that of the fix, of a number of workers, or of both."""
    variant, variables = "fixed", dict(case.environment)
    if result.workers is not None and result.predicted is not None:
        variant = case.variant if result.only_workers else "fixed"
        variables["WORKERS"] = str(result.workers)
    return _pace(case, variant, variables, paces) / _pace(case, case.variant, case.environment, paces)


def _pace(case: Case, variant: str, variables: Mapping[str, str], paces: Journal) -> float:
    """Samples of new data per second without the agent.

    Raises:
        RunError: the variant failed, or printed no pace.
    """
    content = b"".join(path.read_bytes() for path in (case.path, SCRIPTS / "common.py"))
    version = hashlib.sha256(content).hexdigest()[:8]
    key = " ".join([case.path.stem, variant, *(f"{k}={v}" for k, v in sorted(variables.items())), version])
    pace: float | None = paces.known(key)
    if pace is None:
        seconds = case.seconds if "step_growth" in case.found else _BARE * case.seconds
        with tempfile.TemporaryDirectory(prefix=f"reports-{case.name}-") as folder:
            code, output = _finish(case, [str(case.path), variant], Path(folder), seconds, variables)
        found = _PACE.search(output)
        if code or found is None:
            raise RunError(f"{variant} ended with {code}: {last_line(output)}")
        pace = float(json.loads(found[1])["samples_per_second"])
        paces.keep(key, pace)
    return pace


def _kept(case: Case, folder: Path) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads((folder / f"{case.name}.json").read_text(encoding="utf-8"))
    except OSError:
        raise RunError("no report is kept") from None
    return kept


def _report(case: Case, keep: Path | None) -> dict[str, Any]:
    """The report, with the load of the machine during the run."""
    load = Load()
    with tempfile.TemporaryDirectory(prefix=f"reports-{case.name}-") as name:
        folder, run_dir = Path(name), Path(name) / "run"
        command = [*under_the_agent(run_dir), str(case.path), case.variant]
        code, output = _finish(case, command, folder, case.seconds, case.environment)
        if code and not case.end:
            raise RunError(f"ended with {code}: {last_line(output)}")
        if case.end and not code:
            raise RunError("has ended as if nothing had happened")
        seen = load.since()
        as_text, report = report_of(run_dir), json.loads(report_of(run_dir, "--json")) | {"load": seen}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{case.name}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        (keep / f"{case.name}.txt").write_text(f"{as_text}\n-- output --\n{output}", encoding="utf-8")
    return report


def _finish(
    case: Case, arguments: list[str], folder: Path, seconds: float, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Run Python to its end. A package that this one does not have is in the frameworks' environment.

    Raises:
        RunError: it cannot be started here, or had to be killed.
    """
    python = sys.executable
    if case.needs and importlib.util.find_spec(case.needs) is None:
        python = str(ROOT / ".venv-frameworks" / "bin" / "python")
        if not Path(python).exists():
            raise RunError(f"{case.needs} is not installed")
    command = [python, *arguments]
    if case.shared_memory:
        command = ["unshare", "--mount", "sh", "-c", _SMALL_SHM, case.shared_memory, *command]
    return finish(command, folder, seconds, environment(RUN_FOR=f"{seconds:g}", **variables))
