"""The scripts of examples/, as a new user runs them: the report agrees with what the script itself has counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from .test_frameworks import ROOT, needs

OWN = {"loader_on_training_thread"}
WORKERS = {"workers_cpu_bound", "workers_throttled", "worker_startup", "uneven_batches", "batch_transfer"}


@dataclass(frozen=True)
class Example:
    """A script, and what is to be said of it.

    Attributes:
        causes: that its stalls may have; on a fast machine it has none.
        evaluates: whether the ledger has to show evaluations. All of them write checkpoints.
        own_lines: whether the script, or a library of it, writes to stderr.
    """

    package: str
    arguments: tuple[str, ...]
    causes: set[str]
    evaluates: bool = False
    own_lines: bool = False


EXAMPLES = {
    "mnist": Example("torch", ("--digits", "1000", "--epochs", "2"), OWN, evaluates=True),
    "imagenet": Example("PIL", ("--pictures", "200", "--epochs", "2"), WORKERS),
    "finetune": Example("transformers", ("--reviews", "320", "--epochs", "2"), OWN, True, own_lines=True),
}


@pytest.mark.frameworks
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_report_counts_what_the_script_counts(tmp_path, name):
    example = EXAMPLES[name]
    needs(example.package)
    script = str(ROOT / "examples" / f"{name}.py")
    done = telemetry(tmp_path, "run", "--run-dir", "run", script, *example.arguments)
    steps, samples = map(int, re.search(r"^(\d+) steps, (\d+) samples$", done.stdout, re.MULTILINE).groups())
    said = done.stderr.splitlines()
    ours = [line for line in said if line.startswith("telemetry: ")]
    assert example.own_lines or all(line.startswith(("telemetry: ", "  ")) for line in said), done.stderr
    start, end = ours
    assert start.startswith("telemetry: run run, rank 0: ")
    assert end.endswith(f"; see: telemetry report {tmp_path / 'run'}")

    report = json.loads(telemetry(tmp_path, "report", "run", "--json").stdout)
    (rank,) = report["ranks"]
    assert (rank["steps"], rank["samples"]) == (steps, samples)
    assert bool(rank["ledger"]["evaluation"]) == example.evaluates
    assert rank["ledger"]["checkpoint"] > 0
    assert sum(rank["ledger"].values()) == pytest.approx(rank["wall_seconds"], rel=0.01)
    assert {stall["cause"] for stall in report["stalls"]} <= example.causes
    assert [attempt["end"] for attempt in report["job"]["attempts"]] == ["finished"]


def telemetry(folder, *arguments):
    """The command in a folder, with no setting but those of a new user. One thread: other tests use the cores, too."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TELEMETRY_")}
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "telemetry", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done
