"""Runs a script under the agent as a person would, and its variants without the agent."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.zoo.load import Load

from .cases import SCRIPTS, Case
from .judgement import Judged, judge

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = SCRIPTS.parents[2]
_PATIENCE_SECONDS: Final = 90.0
_BARE: Final = 0.6
"""Runs without the agent last this part of the run under it. Those of steps that grow last as long."""
_SMALL_SHM: Final = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'
_PACE: Final = re.compile(r"^PACE (.*)$", re.MULTILINE)


class RunError(RuntimeError):
    """A run failed; the text is one line."""


class Paces:
    """Samples of new data per second without the agent. With a file they are measured once per version of a script.

    Args:
        path: where they are kept; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, float] = {}
        if path is not None and path.exists():
            self._known = json.loads(path.read_text(encoding="utf-8"))

    def of(self, case: Case, variant: str, environment: Mapping[str, str]) -> float:
        """The pace of a variant.

        Raises:
            RunError: it failed, or printed no pace.
        """
        content = b"".join(path.read_bytes() for path in (case.path, SCRIPTS / "common.py"))
        version = hashlib.sha256(content).hexdigest()[:8]
        key = " ".join([case.path.stem, variant, *(f"{k}={v}" for k, v in sorted(environment.items())), version])
        if key not in self._known:
            self._known[key] = _bare_pace(case, variant, environment)
            if self._path is not None:
                self._path.write_text(json.dumps(self._known, indent=1) + "\n", encoding="utf-8")
        return self._known[key]


def run(
    case: Case, paces: Paces, *, speedups: str = "predicted", keep: Path | None = None, again: bool = False
) -> Judged:
    """Run a case under the agent, and without it where a speed-up was predicted.

    Args:
        case: what to run.
        paces: the paces without the agent.
        speedups: which real speed-ups to measure: ``none``, those ``predicted``, or ``all``.
        keep: a folder for the report, as text and JSON.
        again: judge the report that is kept there, instead of a new one.
    """
    try:
        report, load = _kept(case, keep) if again and keep is not None else _report(case, keep)
    except RunError as error:
        return Judged(case.name, error=str(error))
    result = dataclasses.replace(judge(case, report), load=load)
    wanted = {"none": False, "predicted": result.predicted is not None, "all": True}[speedups]
    if case.healthy or case.end or not wanted:
        return result
    try:
        return dataclasses.replace(result, speedup=_speedup(case, result, paces))
    except RunError as error:
        return dataclasses.replace(result, error=f"without the agent: {error}")


def _speedup(case: Case, result: Judged, paces: Paces) -> float:
    """The speed-up of the advised change: that of the fix, of a number of workers, or of both."""
    variant, environment = "fixed", dict(case.environment)
    if result.workers is not None and result.predicted is not None:
        variant = case.variant if result.only_workers else "fixed"
        environment["WORKERS"] = str(result.workers)
    return paces.of(case, variant, environment) / paces.of(case, case.variant, case.environment)


def _kept(case: Case, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    try:
        kept = json.loads((folder / f"{case.name}.json").read_text(encoding="utf-8"))
    except OSError:
        raise RunError("no report is kept") from None
    return kept, kept["load"]


def _report(case: Case, keep: Path | None) -> tuple[dict[str, Any], dict[str, float]]:
    """The report, and the load of the machine during the run."""
    load = Load()
    with tempfile.TemporaryDirectory(prefix=f"reports-{case.name}-") as name:
        folder = Path(name)
        agent = ["-m", "telemetry", "run", "--run-dir", str(folder / "run"), "--port", "0"]
        code, output = _finish(case, [*agent, str(case.path), case.variant], case.environment, case.seconds)
        if code and not case.end:
            raise RunError(f"ended with {code}: {_last_line(output)}")
        if case.end and not code:
            raise RunError("has ended as if nothing had happened")
        seen = load.since()
        as_text = _told(folder / "run")
        report: dict[str, Any] = json.loads(_told(folder / "run", "--json"))
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{case.name}.json").write_text(json.dumps(report | {"load": seen}, indent=1), encoding="utf-8")
        (keep / f"{case.name}.txt").write_text(f"{as_text}\n-- output --\n{output}", encoding="utf-8")
    return report, seen


def _told(run: Path, *form: str) -> str:
    """What ``telemetry report`` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "telemetry", "report", str(run), *form],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=_environment({}),
    )
    if done.returncode:
        raise RunError(f"no report: {_last_line(done.stderr)}")
    return done.stdout


def _bare_pace(case: Case, variant: str, environment: Mapping[str, str]) -> float:
    seconds = case.seconds if "step_growth" in case.found else _BARE * case.seconds
    code, output = _finish(case, [str(case.path), variant], environment, seconds)
    found = _PACE.search(output)
    if code or found is None:
        raise RunError(f"{variant} ended with {code}: {_last_line(output)}")
    return float(json.loads(found[1])["samples_per_second"])


def _finish(case: Case, arguments: list[str], environment: Mapping[str, str], seconds: float) -> tuple[int, str]:
    """Run Python to its end. Returns its exit status and its output.

    Raises:
        RunError: it cannot be started here, or had to be killed.
    """
    command = [_python(case), *arguments]
    if case.shared_memory:
        command = ["unshare", "--mount", "sh", "-c", _SMALL_SHM, case.shared_memory, *command]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=tempfile.gettempdir(),
            env=_environment({"RUN_FOR": f"{seconds:g}", **environment}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds + _PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunError(f"has not ended within {seconds + _PATIENCE_SECONDS:.0f} s") from None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # workers that outlive it, too
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        return code, output.read()


def _python(case: Case) -> str:
    """This interpreter, or that of the frameworks' environment for a package that this one does not have."""
    if not case.needs or importlib.util.find_spec(case.needs) is not None:
        return sys.executable
    other = ROOT / ".venv-frameworks" / "bin" / "python"
    if not other.exists():
        raise RunError(f"{case.needs} is not installed")
    return str(other)


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """This process's variables without settings of the agent and of threads, as a person would have them."""
    dropped = ("TELEMETRY_", "OMP_", "MKL_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path} | dict(added)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1][:200]
