"""Runs a group of cases bare and under the agent, at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.faults.processes import HANG, ROOT, environment

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BARE, ATTACHED = "1", "0"
"""The value of ``TELEMETRY_DISABLED``."""


def observed(groups: Iterable[str], folder: Path) -> dict[tuple[str, str], dict]:
    """For each group: what the bare run observed, and what the run under the agent."""
    running = {}
    for group in groups:
        for disabled in (BARE, ATTACHED):
            results = folder / group / disabled / "results.json"
            results.parent.mkdir(parents=True)
            running[group, disabled] = (
                results,
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "tests.loaders.observe", group, str(results)],
                    cwd=ROOT,
                    env=environment(TELEMETRY_DISABLED=disabled),
                    stderr=subprocess.PIPE,
                    text=True,
                ),
            )
    seen = {}
    try:
        for key, (results, process) in running.items():
            _, errors = process.communicate(timeout=2 * HANG)
            seen[key] = json.loads(results.read_text()) | {"stderr": errors, "status": process.returncode}
    finally:
        for _, process in running.values():
            process.kill()
            process.wait()
    return seen
