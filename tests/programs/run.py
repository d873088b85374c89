"""Runs a program as a person would, and reads what it says and what the report says."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.campaign import ROOT, RunError, environment, finish, last_line, report_of, under_the_agent

from .cases import Program


def run(program: Program, folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run it under the agent; leaves the run folder, the output and the reports in ``folder``.

    Returns:
        What the program says of itself, the report as JSON, and as text.

    Raises:
        RunError: it failed, or has said nothing of itself.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    truth, run_dir = folder / "truth.json", folder / "run"
    launcher = [python_of(program)]
    if program.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(program.ranks)]
    script = [str(program.script), *program.arguments]
    variables = environment(TRUTH_FILE=str(truth), RUN_FOR=f"{program.seconds:g}", OMP_NUM_THREADS="1")
    code, output = finish([*launcher, *under_the_agent(run_dir), *script], folder, program.seconds, variables)
    if code != program.exit_status:
        raise RunError(f"ended with {code}: {last_line(output)}")
    text, values = report_of(run_dir), report_of(run_dir, "--json")
    (folder / "report.txt").write_text(text, encoding="utf-8")
    (folder / "report.json").write_text(values, encoding="utf-8")
    try:
        return json.loads(truth.read_text(encoding="utf-8")), json.loads(values), text
    except (OSError, ValueError):
        raise RunError("the program has said nothing of itself") from None


def python_of(program: Program) -> str:
    """A package that this Python does not have is in the frameworks' environment.

    Raises:
        RunError: that is not here, either.
    """
    if not program.needs or importlib.util.find_spec(program.needs) is not None:
        return sys.executable
    python = ROOT / ".venv-frameworks" / "bin" / "python"
    if not python.exists():
        raise RunError(f"{program.needs} is not installed: make test-frameworks installs it")
    return str(python)
