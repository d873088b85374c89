"""Starts a training run like a person would, waits for its end with a time limit, and reads its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .specimens import Specimen

ROOT: Final = Path(__file__).resolve().parents[2]
SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"
_ON_NODES: Final = Path(__file__).with_name("on_nodes.py")
_ADOPT: Final = Path(__file__).with_name("adopt.py")

_PATIENCE_SECONDS: Final = 90.0
"""How much longer than its training a run may take: data is written, workers start, the agent writes its log."""


class RunError(RuntimeError):
    """A run failed; the text is one line."""


def under_the_agent(
    specimen: Specimen, folder: Path, extra: Sequence[str], settings: Mapping[str, str]
) -> tuple[dict[str, Any], float | None]:
    """Run a specimen with ``telemetry run``, with ``extra`` arguments after its own.

    Args:
        specimen: the specimen.
        folder: an empty folder for its output.
        extra: more arguments of the script; they override its own.
        settings: variables of the agent; empty for the defaults.

    Returns:
        The report, as ``telemetry report --json`` prints it, and the script's own steps per second; None of one that
        hangs.

    Raises:
        RunError: it failed, timed out, or left no report or no pace.
    """
    run, pace = folder / "run", folder / "pace.json"
    agent = ["-m", "telemetry", "run", "--run-dir", str(run), "--port", "0"]
    launcher = [sys.executable]
    if specimen.nodes > 1:
        each = specimen.ranks // specimen.nodes
        launcher += [str(_ON_NODES), str(specimen.nodes), str(each)]
    elif specimen.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(specimen.ranks)]
    script = [str(SCRIPTS / f"{specimen.script}.py"), *script_arguments(specimen, pace), *extra]
    finish([*launcher, *agent, *script], folder, specimen, environment() | dict(settings))
    told = subprocess.run(
        [sys.executable, "-m", "telemetry", "report", str(run), "--json"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    if told.returncode:
        raise RunError(f"no report: {_last_line(told.stderr)}")
    return json.loads(told.stdout), None if specimen.hang else read_pace(pace)


def script_arguments(specimen: Specimen, pace: Path) -> list[str]:
    """A specimen's own arguments, and those that the zoo adds."""
    return ["--seconds", f"{specimen.seconds:g}", "--pace-file", str(pace), *specimen.arguments]


def read_pace(path: Path) -> float:
    """Steps per second, as written by the script.

    Raises:
        RunError: the script has not written it.
    """
    try:
        rate = json.loads(path.read_text(encoding="utf-8"))["steps_per_second"]
    except (OSError, ValueError, KeyError):
        raise RunError("the script has left no pace") from None
    if rate is None:
        raise RunError("the script made too few steps to have a pace")
    return float(rate)


def finish(command: Sequence[str], folder: Path, specimen: Specimen, variables: Mapping[str, str]) -> None:
    """Run a command to its end, with its output in ``folder``. A job that hangs must fail, by the collective's timeout.

    Raises:
        RunError: it failed, or timed out and was ended.
    """
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", str(_ADOPT), *command],
            cwd=folder,
            env=dict(variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            if specimen.cores is not None:  # inherited by all processes that it starts
                allowed = sorted(os.sched_getaffinity(0))[: specimen.cores]
                os.sched_setaffinity(process.pid, allowed)
            code = process.wait(specimen.seconds + _PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunError(f"has not ended within {specimen.seconds + _PATIENCE_SECONDS:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if specimen.hang:
        if not code:
            raise RunError("has ended as if it had not hung")
    elif code:
        raise RunError(f"ended with {code}: {_last_line((folder / 'output.txt').read_text(errors='replace'))}")


def environment() -> dict[str, str]:
    """This process's variables, without settings of the agent or of a job. The package can be imported."""
    dropped = ("TELEMETRY_", "TRACEML_", "PROMETHEUS_", "SLURM_")
    single = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped) and k not in single}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept


def _last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["nothing was said"]
    return lines[-1][:200]
