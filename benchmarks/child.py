"""Measurements run in processes of their own: started with parameters as JSON, answering with JSON."""

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
TIMEOUT_SECONDS: Final = 300.0


class ChildError(RuntimeError):
    """A measurement could not be taken; the text is one line and fit for a table."""


def run(module: str, parameters: Mapping[str, Any], *roles: str) -> dict[str, Any]:
    """Run ``module``'s measurement in a fresh interpreter; ``roles`` tells it which, where it has several.

    Raises:
        ChildError: it failed, took too long or gave no answer.
    """
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        answer = Path(folder) / "answer.json"
        arguments = [json.dumps(parameters), str(answer), *roles]
        return collect([sys.executable, "-m", module, *arguments], answer, environment(), cwd=folder)


def collect(command: Sequence[str], answer: Path, variables: Mapping[str, str], *, cwd: str | Path) -> dict[str, Any]:
    """Run a command that writes its answer to a file.

    Raises:
        ChildError: it failed, took too long or gave no answer.
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
    """This process's variables, without settings of ours, of a job or of the rival; the package can be found."""
    dropped = ("TELEMETRY_", "TRACEML_", "PROMETHEUS_", "SLURM_")
    single = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped) and k not in single}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept


def answer(measure: Callable[..., Mapping[str, Any]], argv: Sequence[str] | None = None) -> None:
    """The child's side: measure with the parameters given, and write the result where the parent looks for it."""
    parameters, path = sys.argv[1:3] if argv is None else argv[:2]
    result = measure(**json.loads(parameters))
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(result), encoding="utf-8")
    temporary.replace(path)
