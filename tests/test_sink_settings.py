"""The settings of the sinks, and what a process with sinks says, loads and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import telemetry
from telemetry.agent.figures import FigureOutput
from telemetry.config import Config
from telemetry.sinks import make
from telemetry.util.errors import ErrorLog
from telemetry.util.processes import identify

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        ("", ()),
        ("none", ()),
        ("wandb", ("wandb",)),
        (" MLflow , tensorboard,wandb,mlflow", ("mlflow", "tensorboard", "wandb")),
    ],
)
def test_setting_is_a_list(value, parsed):
    assert Config.load({"sinks": value}, {}).sinks == parsed
    assert Config.load({}, {"TELEMETRY_SINKS": value}).sinks == parsed


@pytest.mark.parametrize("value", ["comet", "wandb,neptune", "none,wandb", 3, [["wandb"]]])
def test_setting_names_what_is_allowed(value):
    with pytest.raises(telemetry.SettingError, match="tensorboard, wandb, mlflow"):
        Config.load({"sinks": value}, {})


def test_ranks_are_rank_0_or_all():
    assert Config.load({"sink_ranks": 0}, {}).sink_ranks == "0"
    with pytest.raises(telemetry.SettingError, match="0 | all"):
        Config.load({"sink_ranks": "1"}, {})


def run_with(folder: Path, **variables: str) -> tuple[str, list[dict]]:
    """Start and stop an agent in a process of its own. Returns stderr and the log."""
    code = "import sys, telemetry; telemetry.start(sys.argv[1], port='off'); telemetry.stop()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / "run")],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (log,) = (folder / "run" / "logs").iterdir()
    return done.stderr, [json.loads(line) for line in log.read_text().splitlines()]


def test_missing_package_is_said_in_the_start_line_and_the_log(tmp_path):
    (tmp_path / "wandb").mkdir()  # W&B makes such a folder: it is no package
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in {'mlflow', 'tensorboard'} else find(name, *a)\n"
    )
    err, lines = run_with(
        tmp_path,
        TELEMETRY_SINKS="tensorboard,wandb,mlflow",
        PYTHONPATH=os.pathsep.join([str(tmp_path / "blocker"), str(tmp_path), str(ROOT)]),
    )
    (start,) = err.splitlines()
    errors = {line["message"] for line in lines if line["event"] == "error" and line["source"] == "sinks"}
    for name in ("tensorboard", "mlflow"):
        assert f"no {name} (the package is not installed)" in start
        assert f"{name}: the package is not installed; no figures are written there" in errors
    (end,) = [line for line in lines if line["event"] == "run_end"]
    assert end["errors_total"]["sinks"] >= 2


def test_folder_named_like_a_package_is_none(tmp_path, monkeypatch):
    (tmp_path / "folderonly").mkdir()
    (tmp_path / "realpackage").mkdir()
    (tmp_path / "realpackage" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not make._is_installed("folderonly")
    assert make._is_installed("realpackage")


LOADED = (
    "import sys, telemetry; telemetry.start(sys.argv[1], port='off'); print([m for m in sys.modules if 'sinks' in m])"
)


def test_without_sinks_nothing_of_them_is_loaded(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_trial_of_tune_has_no_sinks(tmp_path, monkeypatch):
    config = Config.load({"sinks": "wandb"}, {})
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    said = []
    for trial in (False, True):
        if trial:
            monkeypatch.setenv("TELEMETRY_TUNE_TRIAL", "plan.json")
        output = FigureOutput(config, identify("run", None, {}), None, ErrorLog(), None)
        output.start(tmp_path)
        said.append(output.said)
    assert said == [", figures to wandb", ""]


def test_rank_that_does_not_write_loads_nothing(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TELEMETRY_SINKS": "tensorboard",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert "tensorboard" not in done.stderr


FAKE = """
import json, sys, threading, time, types
import torch, telemetry
from telemetry.util.threads import named
from torch.utils.data import DataLoader

class Run:
    id = "x"
    summary = {}
    def define_metric(self, *args, **kwargs): pass
    def log(self, values, commit):
        rows.append((named(threading.get_ident()), commit, values))

rows = []
sys.modules["wandb"] = types.SimpleNamespace(run=Run(), __spec__=None)
interval = float(sys.argv[3])
telemetry.start(sys.argv[1], port="off", interval_seconds=0.1, log_interval_seconds=interval, sinks="wandb",
                sink_ranks=sys.argv[2], start_line=False)
for epoch in range(200):
    for _ in DataLoader(torch.zeros(30, 1)):
        time.sleep(0.01)
    if rows or interval < 1:  # the first window of a run is a short one
        break
if interval > 1:
    for _ in DataLoader(torch.zeros(30, 1)):
        pass
telemetry.stop()
print(json.dumps(rows))
"""


def rows_of_rank(folder: Path, rank: int, ranks: str, interval: float = 0.1) -> list:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    done = subprocess.run(
        [sys.executable, "-c", FAKE, str(folder), ranks, str(interval)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rows_are_written_off_the_training_thread_with_the_last_window(tmp_path):
    rows = rows_of_rank(tmp_path, 0, "0")
    assert {(thread, commit) for thread, commit, _ in rows} == {("telemetry-sinks", False)}
    assert rows[-1][2]["telemetry/steps_total"] == rows[-1][2]["telemetry/step"] == 30


def test_other_ranks_write_only_if_asked(tmp_path):
    assert rows_of_rank(tmp_path / "a", 1, "0") == []
    rows = rows_of_rank(tmp_path / "b", 1, "all")
    assert rows[-1][2]["telemetry/rank-1/steps_total"] == 30


def test_what_is_left_at_the_end_has_totals_and_no_rates(tmp_path):
    """The first window of a run is over after a second. The last one has 30 steps that take no time."""
    first, *_, last = [row for _, _, row in rows_of_rank(tmp_path, 0, "0", interval=60.0)]
    assert first["telemetry/steps_per_second"] > 0
    assert last["telemetry/steps_total"] > first["telemetry/steps_total"]
    assert "telemetry/steps_per_second" not in last
