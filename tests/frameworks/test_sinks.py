"""The sinks, with the real packages: TensorBoard's own reader, W&B offline, MLflow on a local store."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.sinks.writers import SinkItem
from tests.faults.processes import events, log_lines
from tests.frameworks.test_frameworks import SCRIPTS, needs, start

pytestmark = pytest.mark.frameworks

EVERY, STEPS = 7, 60
ROWS = [step for step in range(STEPS) if step % EVERY == 0]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run with all sinks, and the same script without telemetry."""
    needs("tensorboard", "wandb", "mlflow")
    folder = tmp_path_factory.mktemp("sinks")
    settings = {
        "TELEMETRY_SINKS": "tensorboard,wandb,mlflow",
        "TELEMETRY_LOG_INTERVAL_SECONDS": "0.1",
        "TELEMETRY_STALL_WINDOW_SECONDS": "1",
        "WANDB_SILENT": "true",
    }
    script = str(SCRIPTS / "sinks_loop.py")
    (folder / "bare").mkdir()
    commands = {
        "bare": [script, str(folder / "bare")],
        "run": ["-m", "telemetry", "run", "--run-dir", str(folder / "run"), script, str(folder)],
    }
    processes = {name: start(command, **settings) for name, command in commands.items()}
    found = {"folder": folder}
    for name, process in processes.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-4000:]
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
        found[name] = json.loads(line.removeprefix("RESULT "))
        found[f"{name} err"] = err
    found["log"] = log_lines(folder / "run")
    return found


def windows(done):
    return [line for line in done["log"] if line["event"] == "window"]


def test_start_line_names_the_sinks(done):
    assert "figures to tensorboard, wandb, mlflow" in done["run err"].splitlines()[0]


def test_no_sink_has_failed(done):
    (end,) = [line for line in done["log"] if line["event"] == "run_end"]
    assert "sinks" not in end["errors_total"], [line for line in done["log"] if line["event"] == "error"]


def test_tensorboard_reads_every_window(done):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (done["folder"] / "run" / "tensorboard").iterdir()
    assert folder.name == "rank-0"
    assert len(list(folder.iterdir())) == 1, "the forked child has written no file of its own"
    shown = EventAccumulator(str(folder))
    shown.Reload()
    steps = shown.Scalars("telemetry/steps_total")
    assert [event.step for event in steps] == [line["steps_total"] for line in windows(done)]
    assert [event.value for event in steps] == [line["steps_total"] for line in windows(done)]
    waits = [event.value for event in shown.Scalars("telemetry/exposed_wait_ratio")]
    logged = [line["exposed_wait_ratio"] for line in windows(done) if line["exposed_wait_ratio"] is not None]
    assert waits == pytest.approx(logged, abs=1e-5), "what was not measured is absent"
    assert {f"telemetry/{name}" for name in done["run"]["figures"]} <= set(shown.Tags()["scalars"])
    stalls = [line for line in done["log"] if line["event"] == "stall_open"]
    texts = [event.tensor_proto.string_val[0].decode() for event in shown.Tensors("telemetry/stalls")]
    assert [text.split()[1] for text in texts] == [line["cause"] for line in stalls] != []


def records(content: bytes):
    """The records of a W&B file: LevelDB's log format, in blocks of 32 KiB, after a head of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # a whole record, or its last part
            yield parts
            parts = b""


def wandb_rows(folder: Path) -> list[dict]:
    """The history of an offline run, as W&B stores it."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                row[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            rows.append(row | {"_step": record.history.step.num})
    return rows


def test_wandb_rows_of_the_script_are_unchanged(done):
    bare, ours = wandb_rows(done["folder"] / "bare"), wandb_rows(done["folder"])
    own = [{key: row[key] for key in ("_step", "loss", "rate") if key in row} for row in ours]
    assert own == [{"_step": step, "loss": step, "rate": 0.1} for step in ROWS]
    assert own == [{key: row[key] for key in ("_step", "loss", "rate")} for row in bare]
    assert not [key for row in bare for key in row if key.startswith("telemetry/")]


def test_wandb_rows_have_the_figures(done):
    with_figures = [row for row in wandb_rows(done["folder"]) if "telemetry/step" in row]
    assert len(with_figures) >= len(ROWS) - 2
    for row in with_figures:
        assert row["telemetry/steps_total"] == row["telemetry/step"] <= row["_step"] + EVERY, (
            "with the row of the script that follows"
        )
    assert any(row["telemetry/steps_per_second"] > 0 for row in with_figures)


def test_mlflow_has_every_window_in_the_scripts_run(done):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{done['folder']}/mlflow.db")
    run_id = done["run"]["mlflow"]
    history = client.get_metric_history(run_id, "telemetry/steps_total")
    logged = {line["steps_total"] for line in windows(done)}
    assert {metric.value for metric in history} <= logged
    assert max(metric.value for metric in history) == STEPS
    assert all(metric.value == metric.step for metric in history)
    assert [m.step for m in client.get_metric_history(run_id, "loss")] == ROWS
    assert client.get_run(run_id).data.tags["telemetry/last_stall"].startswith("stall ")
    assert [run.info.run_id for run in client.search_runs(["0"])] == [run_id]


SERVICE_DOWN = """
import os, sys, time, mlflow, torch, telemetry
from torch.utils.data import DataLoader
folder = sys.argv[1]
os.environ |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
telemetry.start(folder + "/run", sinks="mlflow,tensorboard", port="off", interval_seconds=0.1, log_interval_seconds=0.1)
mlflow.start_run()
mlflow.set_tracking_uri("http://127.0.0.1:9")  # nobody listens on discard
for _ in DataLoader(torch.zeros(100, 1)):
    time.sleep(0.01)
began = time.monotonic()
telemetry.stop()
print(time.monotonic() - began)
"""


def test_service_that_is_down(tmp_path, done):
    """Training goes on, the failures are in the log, the other sink has everything, and the end is not held up."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = subprocess.run(
        [sys.executable, "-c", SERVICE_DOWN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert float(result.stdout.split()[-1]) < 10
    failed = events(tmp_path / "run", "error", source="sinks")
    assert 1 <= failed[-1]["errors_total"] <= 3, "it is tried again after seconds, not with every window"
    assert any("mlflow: " in line["message"] for line in failed)
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "rank-0"))
    shown.Reload()
    assert shown.Scalars("telemetry/steps_total")[-1].value == 100


# -- TensorBoard's file -------------------------------------------------------------------------------------------------


@pytest.fixture
def tensorboard_sink(tmp_path):
    needs("tensorboard")
    from telemetry.sinks.writers import TensorBoardSink

    return TensorBoardSink(tmp_path / "tensorboard")


def item(step: int) -> SinkItem:
    return SinkItem(step, 1e9, 0, "telemetry", {"steps_total": float(step)}, "")


def steps_in(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    return [event.step for event in shown.Scalars("telemetry/steps_total")]


def test_no_file_is_open_between_two_writes_and_one_that_is_deleted_comes_back(tmp_path, tensorboard_sink):
    """A script may close all descriptors, as a daemon does. Its next file, a checkpoint, would get the number."""
    tensorboard_sink.write([item(1)])
    assert not [n for n in os.listdir("/proc/self/fd") if "tfevents" in str(Path(f"/proc/self/fd/{n}").resolve())]
    shutil.rmtree(tmp_path / "tensorboard")
    tensorboard_sink.write([item(2)])
    assert steps_in(tmp_path / "tensorboard" / "rank-0") == [2]


def test_a_full_disk_leaves_no_half_record_and_makes_no_folder_for_each_try(tmp_path, tensorboard_sink, monkeypatch):
    write = os.write
    tensorboard_sink.write([item(1)])
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, content: write(file, content[:9]))
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                tensorboard_sink.write([item(2)])
    tensorboard_sink.write([item(2)])
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()] == ["rank-0"]
    assert steps_in(tmp_path / "tensorboard" / "rank-0") == [1, 2]


def test_a_process_that_comes_later_has_a_folder_of_its_own(tmp_path, tensorboard_sink):
    tensorboard_sink.write([item(1)])
    type(tensorboard_sink)(tmp_path / "tensorboard").write([item(2)])
    assert steps_in(tmp_path / "tensorboard" / "rank-0.2") == [2]
