"""The sinks: their settings, their thread with sinks that fail, block or have nothing to write into, and a process with them.

The libraries themselves are tested in tests/frameworks/test_sinks.py.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

import telemetry
from telemetry.config import SINKS, Config
from telemetry.safety import threads
from telemetry.safety.errors import ErrorLog
from telemetry.sinks.output import MAX_ITEMS, FigureOutput
from telemetry.sinks.writers import MlflowSink, SinkItem, SinkWaits, WandbSink
from telemetry.util.clock import NS, WallClock
from telemetry.util.identity import identify
from tests.running_agent import wait_for

ROOT = Path(__file__).parents[1]


class Recorder:
    """A sink that keeps what it is given. ``error``: raised instead. ``answer``: waited for."""

    gather_seconds = 0.0

    def __init__(self, name: str = "recorder") -> None:
        self.name = name
        self.error: BaseException | None = None
        self.written: list[int] = []
        self.tries = 0
        self.entered, self.answer = threading.Event(), threading.Event()
        self.answer.set()

    def write(self, items):
        self.tries += 1
        self.entered.set()
        self.answer.wait(60)
        if self.error is not None:
            raise self.error
        self.written += [item.step for item in items]


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def move(self, seconds: float) -> None:
        self.ns += int(seconds * NS)


class Sinks:
    """Three recorders behind the agent's output. Each offer is a stall, which comes with a step."""

    def __init__(self, monkeypatch) -> None:
        self.clock = Clock()
        self.errors = ErrorLog(mono_ns=lambda: 10**12 * len(self.said))  # it tells each message anew
        self.said: list[str] = []
        self.sink, self.other, self.third = self.all = [Recorder(), Recorder("other"), Recorder("third")]
        recorders = dict(zip(SINKS, self.all, strict=True))
        monkeypatch.setattr("telemetry.sinks.output.make_sink", lambda name, _run_dir: recorders[name])
        self.output = FigureOutput(
            Config.load({"sinks": ",".join(SINKS)}, {}), identify("run", None, {}),
            self.errors, WallClock(), mono_ns=self.clock,
        )  # fmt: skip
        self.output.start(Path())

    def offer(self, step: int) -> None:
        self.output.newest = {"steps_total": float(step)}
        stall = {"exposed_wait_ratio": None, "advice": [], "cause": "unknown", "first_step": step}
        self.output.stall_opened(types.SimpleNamespace(**stall))

    def news(self) -> list[str]:
        self.output.note_news()
        self.said += (new := [note.message for note in self.errors.take_notes()])
        return new

    @property
    def failures(self) -> int:
        return self.errors.counts.get("sinks", 0)


@pytest.fixture
def sinks(monkeypatch):
    made = Sinks(monkeypatch)
    yield made
    made.output.end()
    for sink in made.all:
        sink.answer.set()
    made.output.wait(20)
    assert "telemetry-sinks" not in threads.running()


# -- their thread ------------------------------------------------------------------------------------------------------


def test_failed_items_are_written_in_their_order_after_a_pause_that_doubles_up_to_a_longest(sinks):
    """Whatever it raises, the other sinks are written."""
    sinks.sink.error = OSError(errno.EHOSTUNREACH, "http://me:secret@host")
    pause, expected = 5.0, []
    for tries in range(1, 10):
        sinks.offer(tries)
        wait_for(lambda: sinks.sink.tries == tries)
        assert wait_for(sinks.news)[0].startswith("recorder: OSError: No route to host, at test_sinks.py:")
        assert sinks.failures == tries
        sinks.clock.move(pause - 0.1)
        sinks.offer(10 * tries)  # wakes the thread, which writes into the sinks in their order
        wait_for(lambda: 10 * tries in sinks.third.written)
        assert sinks.sink.tries == tries, "it is too early"
        sinks.clock.move(0.2)
        pause = min(2 * pause, 300.0)
        expected += [tries, 10 * tries]
    sinks.sink.error = SystemExit(3)
    sinks.clock.move(pause)
    sinks.offer(4)
    assert wait_for(sinks.news)[0].startswith("recorder: SystemExit, at test_sinks.py:")
    sinks.sink.error = None
    sinks.clock.move(pause)
    sinks.offer(5)
    wait_for(lambda: len(sinks.sink.written) == 20)
    assert sinks.sink.written == [*expected, 4, 5]
    assert wait_for(sinks.news) == ["recorder: works again"]
    assert sinks.failures == 10


def test_items_are_gathered_and_written_together(sinks):
    sinks.sink.gather_seconds = 25.0
    for step in range(4):
        sinks.offer(step)
        wait_for(lambda: step in sinks.third.written)
        assert sinks.sink.written == [0], "then it is too early"
        sinks.clock.move(8)
    sinks.clock.move(1)
    sinks.offer(4)
    wait_for(lambda: sinks.sink.written == [0, 1, 2, 3, 4])
    assert sinks.sink.tries == 2


@pytest.mark.parametrize("fails", [False, True])
def test_too_many_items_drop_the_oldest_and_count_them(sinks, fails):
    """Of a sink that blocks, while the next one waits, too."""
    sinks.sink.answer.clear()
    sinks.offer(0)
    assert sinks.sink.entered.wait(20)
    for step in range(1, MAX_ITEMS + 6):
        sinks.offer(step)
    assert set(sinks.news()) == {f"{sink.name}: the oldest figures are dropped" for sink in sinks.all}
    assert sinks.failures == 5 + 6 + 6
    sinks.sink.error = OSError() if fails else None
    sinks.sink.answer.set()
    wait_for(lambda: len(sinks.third.written) == MAX_ITEMS)
    assert sinks.third.written == [*range(6, MAX_ITEMS + 6)]
    if fails:
        sinks.sink.error = None
        sinks.clock.move(5)
        sinks.offer(1000)
        wait_for(lambda: len(sinks.sink.written) == MAX_ITEMS)
        assert sinks.sink.written == [*range(7, MAX_ITEMS + 6), 1000]
    else:
        wait_for(lambda: sinks.sink.written == [0, *range(6, MAX_ITEMS + 6)])


def test_sink_without_a_run_says_so_once(sinks):
    sinks.sink.error = SinkWaits("no active run yet")
    for step in range(3):
        sinks.offer(step)
        wait_for(lambda: sinks.third.written[-1:] == [step])
        sinks.news()
    assert sinks.said == ["recorder: no active run yet"]
    assert sinks.failures == 0
    sinks.sink.error = None
    sinks.offer(7)
    wait_for(lambda: sinks.sink.written == [7])  # not what was measured before there was a run
    assert not sinks.news()
    sinks.sink.error = SinkWaits("no active run")
    sinks.offer(8)
    assert wait_for(sinks.news) == ["recorder: no active run"]


def test_end_writes_what_is_left_in_spite_of_the_pause_and_is_not_held_up_by_a_blocked_sink(sinks):
    sinks.sink.error = OSError("down")
    sinks.offer(1)
    wait_for(lambda: sinks.third.written == [1])
    sinks.sink.error = None
    sinks.sink.answer.clear()
    sinks.offer(2)
    sinks.output.end()
    sinks.output.wait(0.05)
    assert "the run has ended, and a sink has not written everything" in sinks.news()
    sinks.sink.answer.set()
    sinks.output.wait(20)
    assert sinks.sink.written == [1, 2]


# -- trackers ----------------------------------------------------------------------------------------------------------


def item(step: int) -> SinkItem:
    return SinkItem(step, 1.0, 0, "telemetry", {"steps_total": float(step)}, "")


def test_a_tracker_waits_for_the_scripts_import_and_for_its_next_run(monkeypatch):
    for module in (None, types.ModuleType("half_imported")):
        for name, sink in (("wandb", WandbSink()), ("mlflow", MlflowSink())):
            monkeypatch.setitem(sys.modules, name, module)
            with pytest.raises(SinkWaits):
                sink.write([item(1)])
    logged, axes = [], []
    run = types.SimpleNamespace(
        id="x",
        summary={},
        define_metric=lambda name, **_: axes.append(name),
        log=lambda row, commit: logged.append(row),
    )
    module = types.SimpleNamespace(run=run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = WandbSink()
    sink.write([item(1)])
    sink.write([item(1)])
    assert len(logged) == 2
    assert axes == ["telemetry/step", "telemetry/*"]
    module.run = None
    with pytest.raises(SinkWaits, match="no active W&B run"):
        sink.write([item(2)])


def test_the_step_axis_goes_on_over_the_attempts_of_a_run(tmp_path, monkeypatch):
    """An active run of W&B or MLflow may be resumed: its curve must not begin again."""
    recorder, last = Recorder(), []
    monkeypatch.setattr("telemetry.sinks.output.make_sink", lambda _name, _run_dir: recorder)
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
        output = FigureOutput(config, identify("run", None, {}), ErrorLog(), None)
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


LOADED = "import sys, telemetry; telemetry.start(sys.argv[1], port='off'); print('tensorboard' in sys.modules)"


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
    for name in ("tensorboard", "mlflow", *(() if importlib.util.find_spec("wandb") else ("wandb",))):
        assert f"no {name} (the package is not installed)" in start
        assert f"{name}: the package is not installed; no figures are written there" in errors
    assert lines[-1]["errors_total"]["sinks"] >= 2


@pytest.mark.parametrize(("rank", "sinks"), [(None, "none"), (1, "tensorboard")])
def test_a_rank_that_does_not_write_loads_nothing(tmp_path, rank, sinks):
    out, err = process(LOADED, tmp_path, rank=rank, TELEMETRY_SINKS=sinks)
    assert out.strip() == "False"
    assert "tensorboard" not in err


FAKE = """
import json, sys, threading, time, types
import torch, telemetry
from telemetry.safety.threads import named
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
