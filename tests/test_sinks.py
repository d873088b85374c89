"""The sinks: their settings, their thread with sinks that fail, block or have nothing to write into, and a process with them.

The libraries themselves are tested in tests/frameworks/test_sinks.py.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

import telemetry
from telemetry.agent import figures
from telemetry.agent.figures import FigureOutput
from telemetry.config import Config
from telemetry.sinks import thread as sink_thread
from telemetry.sinks.thread import MAX_ITEMS, SinkItem, SinkThread, SinkWaits
from telemetry.sinks.trackers import MlflowSink, WandbSink
from telemetry.util.clock import NS
from telemetry.util.errors import ErrorLog
from telemetry.util.processes import identify
from tests.running_agent import wait_for

ROOT = Path(__file__).parents[1]


class Recorder:
    """A sink that keeps what it is given. ``error``: raised instead. ``answer``: waited for."""

    name = "recorder"
    gather_seconds = 0.0

    def __init__(self, error: BaseException | None = None, *, blocked: bool = False) -> None:
        self.error = error
        self.written: list[int] = []
        self.tries = self.forgotten = 0
        self.entered, self.answer, self.closed = threading.Event(), threading.Event(), threading.Event()
        if not blocked:
            self.answer.set()

    def write(self, items):
        self.tries += 1
        self.entered.set()
        self.answer.wait(60)
        if self.error is not None:
            raise self.error
        self.written += [item.step for item in items]

    def close(self):
        self.closed.set()

    def forget(self):
        self.forgotten += 1


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def started():
    """Makes threads, and ends them."""
    threads = []

    def start(*sinks, clock=None) -> SinkThread:
        threads.append(SinkThread(sinks, clock or Clock()))
        return threads[-1]

    yield start
    for thread in threads:
        thread.end()
        assert thread.wait(20)


def item(step: int, rank: int = 0, *, several: bool = False) -> SinkItem:
    return SinkItem(step, 1.0, rank, several, {"steps_total": float(step)})


def news_of(thread) -> list:
    found = []
    wait_for(lambda: found.extend(thread.take_news()) or found)
    return found


# -- their thread ------------------------------------------------------------------------------------------------------


def test_failed_items_are_written_in_their_order_after_a_pause_that_doubles_up_to_a_longest(started):
    """Whatever it raises, the other sinks are written."""
    sink, other, clock = Recorder(OSError(errno.EHOSTUNREACH, "http://me:secret@host")), Recorder(), Clock()
    thread = started(sink, other, clock=clock)
    pause, expected = sink_thread._FIRST_PAUSE_SECONDS, []
    for tries in range(1, 10):
        thread.offer(item(tries))
        wait_for(lambda: sink.tries == tries)
        ((told, failures),) = news_of(thread)
        assert failures == 1
        assert told.startswith("recorder: OSError: No route to host, at test_sinks.py:")
        clock.ns += int((pause - 0.1) * NS)
        thread.offer(item(10 * tries))  # wakes the thread, which writes into the sinks in their order
        wait_for(lambda: 10 * tries in other.written)
        assert not thread.take_news()
        assert sink.tries == tries, "it is too early"
        clock.ns += int(0.2 * NS)
        pause = min(2 * pause, sink_thread._LONGEST_PAUSE_SECONDS)
        expected += [tries, 10 * tries]
    sink.error = SystemExit(3)
    clock.ns += int(pause * NS)
    thread.offer(item(4))
    assert news_of(thread)[0][0].startswith("recorder: SystemExit, at test_sinks.py:")
    sink.error = None
    clock.ns += int(pause * NS)
    thread.offer(item(5))
    wait_for(lambda: len(sink.written) == 20)
    assert sink.written == [*expected, 4, 5]
    assert news_of(thread) == [("recorder: works again", 0)]


def test_items_are_gathered_and_written_together(started):
    sink, other, clock = Recorder(), Recorder(), Clock()
    sink.gather_seconds = 25.0
    thread = started(sink, other, clock=clock)
    for step in range(3):
        thread.offer(item(step))
        wait_for(lambda: step in other.written)
        assert sink.tries == 0, "it is too early"
        clock.ns += 10 * NS
    thread.offer(item(3))
    wait_for(lambda: sink.written == [0, 1, 2, 3])
    assert sink.tries == 1


def test_too_many_items_drop_the_oldest_and_count_them(started):
    sink = Recorder(blocked=True)
    thread = started(sink)
    thread.offer(item(0))
    assert sink.entered.wait(20)
    for step in range(1, MAX_ITEMS + 6):
        thread.offer(item(step))
    assert thread.take_news() == [("recorder: the oldest figures are dropped", 1)] * 5
    sink.answer.set()
    wait_for(lambda: len(sink.written) == MAX_ITEMS + 1)
    assert sink.written == [0, *range(6, MAX_ITEMS + 6)]


def test_sink_without_a_run_says_so_once(started):
    sink = Recorder(SinkWaits("no active run yet"))
    thread = started(sink)
    for step in range(3):
        thread.offer(item(step))
        wait_for(lambda: sink.tries == step + 1)
    assert news_of(thread) == [("recorder: no active run yet", 0)]
    sink.error = None
    thread.offer(item(7))
    wait_for(lambda: sink.written == [7])  # not what was measured before there was a run
    assert not thread.take_news()


def test_end_writes_what_is_left_in_spite_of_the_pause_and_is_not_held_up_by_a_blocked_sink():
    sink = Recorder(OSError("down"))
    thread = SinkThread([sink], Clock())
    thread.offer(item(1))
    wait_for(lambda: sink.tries == 1)
    sink.error = None
    sink.answer.clear()
    thread.offer(item(2))
    thread.end()
    assert not thread.wait(0.05)
    sink.answer.set()
    assert thread.wait(20)
    assert sink.written == [1, 2]
    assert sink.closed.is_set()


def test_child_closes_without_writing():
    sink = Recorder()
    SinkThread([sink], Clock()).after_fork_in_child()
    assert (sink.forgotten, sink.tries, sink.closed.is_set()) == (1, 0, False)


# -- trackers ----------------------------------------------------------------------------------------------------------


def test_a_tracker_waits_for_the_scripts_import_and_says_when_its_run_has_ended(monkeypatch):
    for module in (None, types.ModuleType("half_imported")):
        for name, sink in (("wandb", WandbSink()), ("mlflow", MlflowSink())):
            monkeypatch.setitem(sys.modules, name, module)
            with pytest.raises(SinkWaits):
                sink.write([item(1)])
    logged = []
    run = types.SimpleNamespace(
        id="x", summary={}, define_metric=lambda *_, **__: None, log=lambda row, commit: logged.append(row)
    )
    module = types.SimpleNamespace(run=run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = WandbSink()
    sink.write([item(1)])
    assert len(logged) == 1
    module.run = None
    with pytest.raises(SinkWaits, match="the W&B run has ended"):
        sink.write([item(2)])


def test_the_step_axis_goes_on_over_the_attempts_of_a_run(tmp_path, monkeypatch):
    """An active run of W&B or MLflow may be resumed: its curve must not begin again."""
    recorder, last = Recorder(), []
    monkeypatch.setattr(figures, "make_sinks", lambda _names, _run_dir: ([recorder], {}))
    for _ in range(3):
        telemetry.start(tmp_path, port="off", sinks="tensorboard", interval_seconds=0.1, start_line=False)
        for _ in telemetry.watch(range(20)):
            telemetry.step()
        telemetry.stop()
        last.append(recorder.written[-1])
    assert last[0] > 0
    assert last == [last[0], 2 * last[0], 3 * last[0]]
    assert recorder.written == sorted(recorder.written)


# -- settings, and a process with sinks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
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


def process(code: str, *arguments: object, rank: int | None = None, path: tuple = (), **variables: str):
    """Run a script. Returns its output and what it wrote to stderr."""
    ranks = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    paths = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths} | ranks | variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


LOADED = (
    "import sys, telemetry; telemetry.start(sys.argv[1], port='off'); print([m for m in sys.modules if 'sinks' in m])"
)


def test_missing_package_is_said_in_the_start_line_and_the_log(tmp_path):
    (tmp_path / "wandb").mkdir()  # W&B makes such a folder: it is no package
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in {'mlflow', 'tensorboard'} else find(name, *a)\n"
    )
    _, err = process(
        f"{LOADED}; telemetry.stop()", tmp_path / "run",
        path=(tmp_path / "blocker", tmp_path), TELEMETRY_SINKS="tensorboard,wandb,mlflow",
    )  # fmt: skip
    (log,) = (tmp_path / "run" / "logs").iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (start,) = err.splitlines()
    errors = {line["message"] for line in lines if line["event"] == "error" and line["source"] == "sinks"}
    for name in ("tensorboard", "mlflow", *(() if figures.is_installed("wandb") else ("wandb",))):
        assert f"no {name} (the package is not installed)" in start
        assert f"{name}: the package is not installed; no figures are written there" in errors
    assert lines[-1]["errors_total"]["sinks"] >= 2


@pytest.mark.parametrize(("rank", "sinks"), [(None, "none"), (1, "tensorboard")])
def test_a_rank_that_does_not_write_loads_nothing(tmp_path, rank, sinks):
    out, err = process(LOADED, tmp_path, rank=rank, TELEMETRY_SINKS=sinks)
    assert out.strip() == "[]"
    assert "tensorboard" not in err


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
    return json.loads(process(FAKE, folder, ranks, interval, rank=rank)[0])


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
