"""Runs a program as a person would, and reads what it says and what the report says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.campaign import RunError, environment, finish, last_line, report_of, under_the_agent
from tests.campaign.runner import python_with

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
    launcher = [python_with(program.needs)]
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
