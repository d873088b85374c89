"""Runs measurements in their own processes: parameters and answers are JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS: Final = 900.0


class ChildError(RuntimeError):
    """A measurement could not be taken; the text is one line that fits into a table."""


def run(module: str, parameters: Mapping[str, Any], *roles: str) -> dict[str, Any]:
    """Run ``module``'s measurement in a fresh interpreter. ``roles`` selects one if the module has several.

    Raises:
        ChildError: it failed, timed out or gave no answer.
    """
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        answer = Path(folder) / "answer.json"
        arguments = [json.dumps(parameters), str(answer), *roles]
        return collect([sys.executable, "-m", module, *arguments], answer, environment(), cwd=folder)


def collect(command: Sequence[str], answer: Path, variables: Mapping[str, str], *, cwd: str | Path) -> dict[str, Any]:
    """Run a command that writes its answer to a file.

    Raises:
        ChildError: it failed, timed out or gave no answer.
    """
    try:
        done = subprocess.run(
            command, env=dict(variables), cwd=cwd, capture_output=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChildError(f"the measuring process did not end: {type(error).__name__}") from None
    try:
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing on stderr"]
        raise ChildError(f"the measuring process ended with {done.returncode}: {said[-1][:160]}") from None
    return result


def environment() -> dict[str, str]:
    """This process's variables, without settings of telemetry, of a job or of TraceML. The package can be imported."""
    dropped = ("TELEMETRY_", "TRACEML_", "PROMETHEUS_", "SLURM_")
    single = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped) and k not in single}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept


def answer(measure: Callable[..., Mapping[str, Any]], argv: Sequence[str] | None = None) -> None:
    """In the child: measure with the given parameters, and write the result to the file that the parent reads."""
    parameters, path = sys.argv[1:3] if argv is None else argv[:2]
    result = measure(**json.loads(parameters))
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(result), encoding="utf-8")
    temporary.replace(path)
