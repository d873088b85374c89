"""The thread of the sinks, with sinks that fail, block and have nothing to write into.

The libraries themselves are tested in tests/frameworks/test_sinks.py.
"""

from __future__ import annotations

import errno
import sys
import threading
import types

import pytest

import telemetry
from telemetry.records import SinkItem
from telemetry.sinks import make
from telemetry.sinks import thread as sink_thread
from telemetry.sinks.thread import MAX_ITEMS, SinkThread, SinkWaits
from telemetry.sinks.trackers import MlflowSink, WandbSink
from telemetry.util.clock import NS
from tests.running_agent import wait_for


class Recorder:
    """A sink that keeps what it is given. ``error``: raised instead."""

    name = "recorder"
    gather_seconds = 0.0

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.written: list[int] = []
        self.tries = 0
        self.closed = threading.Event()
        self.forgotten = 0

    def write(self, items):
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.written += [item.step for item in items]

    def close(self):
        self.closed.set()

    def forget(self):
        self.forgotten += 1


class Blocked(Recorder):
    """A sink whose service does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.answer = threading.Event(), threading.Event()

    def write(self, items):
        self.entered.set()
        self.answer.wait(60)
        super().write(items)


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


def test_items_arrive_in_their_order(started):
    sink = Recorder()
    thread = started(sink)
    for step in range(50):
        thread.offer(item(step))
    wait_for(lambda: len(sink.written) == 50)
    assert sink.written == list(range(50))


def test_failed_items_are_written_after_a_pause_that_doubles(started):
    sink, other, clock = Recorder(OSError(errno.EHOSTUNREACH, "http://me:secret@host")), Recorder(), Clock()
    thread = started(sink, other, clock=clock)
    pause = sink_thread._FIRST_PAUSE_SECONDS
    for tries in range(1, 5):
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
        pause *= 2
    sink.error = None
    thread.offer(item(5))
    wait_for(lambda: len(sink.written) == 9)
    assert sink.written == [1, 10, 2, 20, 3, 30, 4, 40, 5]
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


def test_pause_has_a_longest(started):
    sink, clock = Recorder(OSError("down")), Clock()
    thread = started(sink, clock=clock)
    for tries in range(1, 12):
        thread.offer(item(tries))
        wait_for(lambda: sink.tries == tries)
        news_of(thread)
        clock.ns += int((sink_thread._LONGEST_PAUSE_SECONDS + 1) * NS)


def test_too_many_items_drop_the_oldest_and_count_them(started):
    sink = Blocked()
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


def test_one_failing_sink_leaves_the_others_alone(started):
    bad, good = Recorder(SystemExit(3)), Recorder()
    thread = started(bad, good)
    for step in range(3):
        thread.offer(item(step))
    wait_for(lambda: good.written == [0, 1, 2])
    ((told, _),) = news_of(thread)
    assert told.startswith("recorder: SystemExit, at test_sinks.py:")


def test_end_writes_what_is_left_in_spite_of_the_pause():
    sink = Recorder(OSError("down"))
    thread = SinkThread([sink], Clock())
    thread.offer(item(1))
    wait_for(lambda: sink.tries == 1)
    sink.error = None
    thread.offer(item(2))
    thread.end()
    assert thread.wait(20)
    assert sink.written == [1, 2]
    assert sink.closed.is_set()


def test_end_is_not_held_up_by_a_blocked_sink():
    sink = Blocked()
    thread = SinkThread([sink], Clock())
    thread.offer(item(1))
    assert sink.entered.wait(20)
    thread.end()
    assert not thread.wait(0.05)
    sink.answer.set()
    assert thread.wait(20)


def test_child_closes_without_writing():
    sink = Recorder()
    thread = SinkThread([sink], Clock())
    thread.after_fork_in_child()
    assert (sink.forgotten, sink.tries, sink.closed.is_set()) == (1, 0, False)


def test_several_ranks_have_keys_of_their_own():
    assert item(1).key("steps_total") == "telemetry/steps_total"
    assert item(1, 3, several=True).key("steps_total") == "telemetry/rank-3/steps_total"


def test_libraries_that_the_script_has_not_imported_are_waited_for(monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for sink in (WandbSink(), MlflowSink()):
        with pytest.raises(SinkWaits):
            sink.write([item(1)])
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))  # half imported
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    for sink in (WandbSink(), MlflowSink()):
        with pytest.raises(SinkWaits):
            sink.write([item(1)])


def test_a_run_that_the_script_has_finished_is_said_to_have_ended(monkeypatch):
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
    monkeypatch.setattr(make, "make_sinks", lambda _names, _run_dir: ([recorder], {}))
    for _ in range(3):
        telemetry.start(tmp_path, port="off", sinks="tensorboard", interval_seconds=0.1, start_line=False)
        for _ in telemetry.watch(range(20)):
            telemetry.step()
        telemetry.stop()
        last.append(recorder.written[-1])
    assert last[0] > 0
    assert last == [last[0], 2 * last[0], 3 * last[0]]
    assert recorder.written == sorted(recorder.written)
