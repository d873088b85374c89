"""Training loops of real frameworks: steps as they count them, the right cause, and loaders that stay what they are.

Each script runs under ``telemetry run`` and, at the same time, bare. Data and models are made on the spot.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults import processes as faults

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
REQUIRED = os.environ.get("TELEMETRY_TEST_REQUIRE_FRAMEWORKS") == "1"


@dataclass(frozen=True)
class Case:
    """A script, what it needs, and what is to be said of it.

    Attributes:
        cause: of the stall that costs most.
        evaluates, saves: whether the ledger has to show evaluations and checkpoints.
    """

    script: str
    package: str
    cause: str
    workers: int = 0
    evaluates: bool = False
    saves: bool = False


OWN, IO = "loader_on_training_thread", "workers_io_bound"

CASES = {
    "transformers, workers": Case("transformers_trainer", "transformers", IO, 1, True, True),
    "lightning, workers": Case("lightning_trainer", "lightning", IO, 1, True, True),
    "accelerate": Case("accelerate_loop", "accelerate", OWN, 0, True, True),
    "accelerate, workers": Case("accelerate_loop", "accelerate", IO, 1, True, True),
    "fastai": Case("fastai_learner", "fastai", OWN, 0, True, True),
    "fastai, workers": Case("fastai_learner", "fastai", IO, 1, True, True),
    "monai": Case("monai_loop", "monai", "source_slow", 0, True),
    "monai, workers": Case("monai_loop", "monai", IO, 1, True),
    "ignite, workers": Case("ignite_engine", "ignite", IO, 1, True, True),
    "webdataset, workers": Case("webdataset_loop", "webdataset", IO, 1),
    "datasets, workers": Case("datasets_loop", "datasets", IO, 1),
    "torchdata.nodes": Case("nodes_loop", "torchdata", "source_slow"),
}


@pytest.mark.frameworks
@pytest.mark.parametrize("name", CASES)
def test_framework(tmp_path, name):
    case = CASES[name]
    needs(case.package)
    script = [str(SCRIPTS / f"{case.script}.py"), str(case.workers)]
    attached = start(["-m", "telemetry", "run", "--run-dir", str(tmp_path / "run"), *script])
    bare = start(script)
    seen, expected = result(attached), result(bare)
    report = faults.report(tmp_path / "run")
    (rank,) = report["ranks"]
    assert seen == expected, "what the loop is given is the same, and nothing is left open from epoch to epoch"
    assert seen["steps"] == len(seen["batches"])
    assert rank["steps"] == seen["steps"]
    assert sum(rank["ledger"].values()) == pytest.approx(rank["wall_seconds"], rel=0.01)
    assert bool(rank["ledger"]["evaluation"]) == case.evaluates
    assert bool(rank["ledger"]["checkpoint"]) == case.saves
    assert report["verdict"].startswith("Starved"), report["verdict"]
    lost = {}
    for stall in report["stalls"]:
        for cause, seconds in stall["evidence"]["lost_seconds"].items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    assert max(lost, key=lost.get) == case.cause, (report["verdict"], lost)


# -- counts ------------------------------------------------------------------------------------------------------------

FULL = {"accumulate": 4, "every": 5}
COUNTS = (
    ("transformers", FULL),
    ("transformers", {"accumulate": 2, "stop": 7, "workers": 1}),
    ("lightning", FULL | {"sanity": 2}),
    ("lightning", {"sanity": 2, "epochs": 1}),
    ("lightning", {"stop": 5, "workers": 1}),
    ("accelerate", FULL),
    ("accelerate", {"stop": 5, "workers": 1}),
    ("fastai", {"accumulate": 4}),
    ("ignite", FULL | {"own": True}),
    ("ignite", {"workers": 1}),
    ("monai", FULL),
    ("monai", {"workers": 1}),
    ("webdataset", FULL | {"workers": 1}),
    ("datasets", FULL),
    ("datasets", {"workers": 1}),
    ("nodes", FULL),
)
PACKAGES = {"nodes": "torchdata"}
NO_SAMPLES = {("fastai", 0), ("monai", 0), ("nodes", 0)}
"""Frameworks, and workers, with which nobody but the script knows how large a batch is."""


@pytest.mark.frameworks
@pytest.mark.parametrize(("framework", "options"), COUNTS, ids=str)
def test_steps_and_samples_and_epochs_are_the_framework_s_own(tmp_path, framework, options):
    """With evaluations in mid-epoch, a smaller last batch, and accumulations that are cut off by the end of an epoch."""
    needs(PACKAGES.get(framework, framework))
    script = [str(SCRIPTS / "counts.py"), framework, json.dumps(options)]
    truth = result(start(["-m", "telemetry", "run", "--run-dir", str(tmp_path / "run"), *script]))
    (rank,) = faults.report(tmp_path / "run")["ranks"]
    if (framework, options.get("workers", 0)) in NO_SAMPLES:
        truth["samples"] = None
    said = {name: rank[name] for name in truth} | {"epochs": (rank["epochs"] or {"count": 0})["count"]}
    assert said == truth
    assert bool(rank["ledger"]["evaluation"]) or "stop" in options


def needs(*packages: str) -> None:
    """Skip the test without these packages, or fail it where none may be skipped."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        text = f"{', '.join(missing)}: make test-frameworks installs it"
        pytest.fail(text) if REQUIRED else pytest.skip(text)


def environment(**more: str) -> dict[str, str]:
    settings = {"TELEMETRY_PORT": "off", "TELEMETRY_INTERVAL_SECONDS": "0.1", "OMP_NUM_THREADS": "1"}
    return os.environ | settings | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])} | more


def start(arguments: list[str], **variables: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment(**variables)
    )


def result(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-4000:]
    (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))
