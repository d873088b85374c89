"""Loops on a GPU under the agent: how much of their waits the device felt, against the loop's own events."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from telemetry.seams.table import SEAMS
from tests.faults import processes as faults

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU, or CUDA_STAND_IN=PYTHON make test-cuda (CONTRIBUTING.md)"
    ),
]

SLOW = {"CUDA_STUB_KERNEL_US": "300"}
"""On a stand-in, kernels that take so long that the device, not the host, is behind. A GPU has no such variable."""


ILLEGAL = ("forked_calls", "captures_invalidated", "captured_events", "wrong_devices")
"""What a stand-in counts at the end of a process. A GPU counts nothing."""


def started(*arguments: str, under: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module, under the agent if there is a run folder."""
    agent = [] if under is None else ["telemetry", "run", "--run-dir", str(under), "--port", "off", "-m"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TELEMETRY_END_LINE": "off", "CUDA_STUB_SUMMARY": "1"}
    command = [sys.executable, "-m", *agent, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=300, check=False
    )
    for counted in re.findall(r"^cuda-stub\[\d+\]: (\{.*\})$", done.stderr, re.MULTILINE):
        assert {name: json.loads(counted)[name] for name in ILLEGAL} == dict.fromkeys(ILLEGAL, 0)
    return done


def run(folder: Path, *arguments: str, **variables: str) -> tuple[dict, dict]:
    """Run the loop under the agent. Returns what it says of itself, and the report."""
    done = started("tests.cuda.loop", *arguments, under=folder, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1]), faults.report(folder)


CASES = [
    *(("starved", "--workers", str(workers)) for workers in (0, 1, 2, 8)),
    *((kind,) for kind in ("gpu_bound", "host_bound", "accumulation", "side_stream", "graph", "graph_elsewhere")),
    *((kind, "--device", "1") for kind in ("starved", "two_devices")),
    ("starved", "--workers", "2", "--context", "spawn"),
]


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_the_wait_that_the_device_felt(tmp_path, arguments):
    """Within 3 % of the events around every wait, or 1 % of the loop."""
    true, report = run(tmp_path / "run", *arguments, **(SLOW if arguments[0] == "gpu_bound" else {}))
    (rank,) = report["ranks"]
    loop = rank["ledger"]["data_wait"] + rank["ledger"]["compute"]
    assert rank["steps"] == pytest.approx(true["steps"], abs=1)
    told = rank["exposed_wait_ratio"] * loop
    assert told == pytest.approx(true["exposed_seconds"], rel=0.03, abs=0.01 * true["loop_seconds"])


@pytest.mark.parametrize("kind", ["caught", "uncaught", "in_capture", "assertion"])
def test_a_failure_ends_the_run_as_it_would_without_the_agent(tmp_path, kind):
    variables = {"TELEMETRY_INTERVAL_SECONDS": "0.1"}
    if kind == "assertion":
        variables |= {"CUDA_STUB_FAIL_AFTER": "2000", "CUDA_STUB_FAIL_CODE": "710"}
    bare = started("tests.cuda.failing", kind, **variables)
    seen = started("tests.cuda.failing", kind, under=tmp_path / "run", **variables)
    assert (seen.returncode, seen.stdout) == (bare.returncode, bare.stdout)
    assert (seen.returncode == 0) == (kind in {"caught", "in_capture"})
    errors = [re.findall(r"^\S*Error: .*", done.stderr, re.MULTILINE) for done in (bare, seen)]
    assert len(errors[0]) == len(errors[1]), "nothing fails once more at the end"
    lines = [json.loads(line) for file in (tmp_path / "run" / "logs").iterdir() for line in file.open()]
    failed = [line for line in lines if line["event"] == "gpu_out_of_memory"]
    assert bool(failed) == (kind != "assertion")
    assert {line["tried_bytes"] for line in failed} <= {1 << 50}
    assert {line["source"] for line in lines if line["event"] == "error"} <= {"nvml"}, "a stand-in has no NVML"


CUDA_ONLY = [
    (seam.module, name)
    for seam in SEAMS
    for name in seam.names
    if seam.module.startswith("torch._C") and re.match(r"_(cuda_|dump_)", name)
]


@pytest.mark.parametrize(("module", "name"), CUDA_ONLY)
def test_a_private_name_of_this_build_is_there(module, name):
    """The newest version may have another one. Then it stands beside this in the table of seams."""
    assert hasattr(importlib.import_module(module), name)
