"""What a run leaves on the disk has no secret of the user's, and is read by nobody whom the umask keeps out."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from telemetry.config import Config
from tests.faults.processes import events

SECRET = "hunter2-7f3a"
ADDRESS = f"https://me:{SECRET}@hooks.example/{SECRET}"

SCRIPT = f"""
import errno, functools, sys, threading, types
from pathlib import Path
sys.modules["mlflow"] = mlflow = types.ModuleType("mlflow")

class Tracking:
    class fluent:
        def _get_latest_active_run():
            raise RuntimeError("API request to {ADDRESS} failed")

mlflow.tracking = Tracking

import telemetry, torch
from torch.utils.data import DataLoader
from tests.data_sets import Numbers

class Rows(Numbers):
    def __repr__(self):
        return "Rows({ADDRESS})"

class Upload:
    @property
    def upload_completion(self):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "{ADDRESS}")

torch.save = lambda state, path: Upload()

told = threading.Event()
def notify(address, stall, *, token):
    told.set()
    raise RuntimeError(f"POST {{address}} with {{token}}: 403")

telemetry.start(
    "run", port=0, sinks="mlflow", on_stall=functools.partial(notify, "{ADDRESS}", token="{SECRET}"),
    interval_seconds=0.1, log_interval_seconds=0.2, stall_window_seconds=1,
)
rows = Rows(100_000, seconds=0.01)
for _ in DataLoader(rows, batch_size=1):
    if told.is_set() and list(Path("run").glob("profiles/*")):
        break
torch.save({{}}, "{ADDRESS}")
(target,) = Path("run", "targets").iterdir()
print(f"{{target.stat().st_mode:o}}")
raise ValueError(f"cannot read {ADDRESS}: {{rows!r}}")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run whose callback, sink, data and arguments have a secret, with its page."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "train.py").write_text(SCRIPT)
    env = {"PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).parents[1]), "WEBHOOK": ADDRESS, "API_KEY": SECRET}
    arguments = [f"--api-key={SECRET}", "--data", ADDRESS]
    how = {"cwd": folder, "env": env, "umask": 0o077, "capture_output": True, "text": True, "timeout": 180}
    ended = subprocess.run([sys.executable, "train.py", *arguments], **how)
    assert f"\nValueError: cannot read {ADDRESS}" in ended.stderr, ended.stderr
    assert ended.stdout == "100644\n", "Prometheus runs as another user: it may read its target file"
    subprocess.run([sys.executable, "-m", "telemetry", "report", "run", "--html", "run/page.html"], check=True, **how)
    return folder / "run"


def test_no_file_has_the_secret(run):
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []


def test_the_log_tells_what_failed_and_where(run):
    (head,) = events(run, "run_start")
    assert head["settings"]["on_stall"] == "__main__.notify"
    said = {line["source"]: line["message"] for line in events(run, "error")}
    for source, kind in (
        ("on_stall", "RuntimeError"),
        ("sinks", "mlflow: RuntimeError"),
        ("hook", "ConnectionRefusedError: Connection refused"),
    ):
        told, _, line = said[source].rpartition(", at train.py:")
        assert told == kind
        assert "raise" in SCRIPT.splitlines()[int(line) - 1]
    (end,) = events(run, "run_end")
    assert end["exception"] == "ValueError"


def test_the_umask_holds(run):
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} >= {"logs", "profiles", "attempts"}
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []


class Notifier:
    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, stall: dict) -> None: ...

    def tell(self, stall: dict) -> None: ...

    def __repr__(self) -> str:
        return f"Notifier({self.token})"


@pytest.mark.parametrize(
    ("callback", "shown"),
    [
        (partial(partial(print, SECRET), SECRET), "builtins.print"),
        (Notifier(SECRET), f"{__name__}.Notifier"),
        (Notifier(SECRET).tell, f"{__name__}.Notifier.tell"),
        ([SECRET].append, "list.append"),
        ("mypackage.alerts.notify", "mypackage.alerts.notify"),
        (None, None),
    ],
    ids=["partial", "object", "method", "method of a list", "dotted name", "none"],
)
def test_a_callback_is_shown_by_its_name(callback, shown):
    assert Config.load({"on_stall": callback}, {}).as_log_fields()["on_stall"] == shown
