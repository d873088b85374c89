"""A stall of a real loop: in the log, at the endpoint, and in a call of the user's callback."""

from __future__ import annotations

import os
import pdb  # noqa: T100 - a debugger is what is tested
import signal
import threading
import time

import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.config import Config, SettingError
from telemetry.util import threads as own_threads
from tests.data_sets import Numbers
from tests.running_agent import log_lines, scrape, wait_for

HEARD: list[dict] = []


def hear(stall: dict) -> None:
    HEARD.append(stall)


def starve(agent, until) -> None:
    for _ in DataLoader(Numbers(10_000, seconds=0.01), batch_size=1):
        if until():
            return
    raise AssertionError("no stall opened")


def start(tmp_path, **settings):
    defaults = dict(port=0, interval_seconds=0.1, log_interval_seconds=0.2, stall_window_seconds=1, start_line=False)
    return telemetry.start(tmp_path / "run", **defaults | settings)


@pytest.mark.parametrize("callback", [hear, "tests.test_on_stall.hear"], ids=["function", "dotted name"])
def test_a_stall_is_told(tmp_path, callback):
    import tests.test_on_stall as this

    this.HEARD.clear()
    HEARD.clear()
    agent = start(tmp_path, on_stall=callback)
    starve(agent, lambda: HEARD or this.HEARD)
    (stall,) = HEARD or this.HEARD
    assert stall["cause"] == "loader_on_training_thread"
    assert stall["exposed_wait_ratio"] > 0.9
    wait_for(lambda: scrape(agent)["training_stall_active", "loader_on_training_thread"] == 1)
    assert scrape(agent)["training_stalls_total", "loader_on_training_thread"] == 1
    assert scrape(agent)["training_stall_lost_seconds_total", "loader_on_training_thread"] > 0
    telemetry.stop()
    opened, closed = [line for line in log_lines(agent) if line["event"].startswith("stall")]
    assert (opened["event"], closed["event"]) == ("stall_open", "stall_close")
    assert opened["opened"] == closed["opened"] < closed["closed"]
    assert closed["evidence"]["source"] == "training_thread"


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3)], ids=["error", "exit"])
def test_a_callback_that_fails_is_counted_and_nothing_else(tmp_path, error):
    threads = []

    def fail(stall):
        threads.append(own_threads.named(threading.get_ident()))
        raise error

    agent = start(tmp_path, on_stall=fail)
    starve(agent, lambda: agent.errors.counts.get("on_stall"))
    assert agent.errors.counts["on_stall"] == 1
    telemetry.stop()
    events = [line["event"] for line in log_lines(agent)]
    assert events.count("stall_open") == 1
    assert events[-1] == "run_end"
    assert threads == ["telemetry-on-stall"]


@pytest.mark.parametrize("value", ["notdotted", "a b.c", 3, "", "a.b()"])
def test_what_is_no_callback_is_refused(value):
    with pytest.raises(SettingError, match="on_stall"):
        Config.load({"on_stall": value}, {})


def slow_start(worker: int) -> None:
    """Longer than a busy machine takes for anything else here."""
    time.sleep(0.2)


def test_workers_that_are_started_for_every_epoch_are_the_cause(tmp_path):
    heard: list[dict] = []
    start(tmp_path, on_stall=heard.append)
    loader = DataLoader(Numbers(6), batch_size=1, num_workers=2, worker_init_fn=slow_start)
    for _ in range(400):
        for _ in loader:
            pass
        if heard:
            break
    (stall,) = heard
    evidence = stall["evidence"]
    assert stall["cause"] == "worker_startup"
    assert evidence["edges"] >= 2
    assert 0.5 * evidence["wait_seconds"] < evidence["edge_wait_seconds"] <= evidence["wait_seconds"]
    assert stall["advice"][0]["setting"] == "persistent_workers"


def test_a_debugger_s_pause_in_a_fetch_is_no_stall(tmp_path):
    """The batch is waited for as long as a person looks at how it is made."""
    reading, writing = os.pipe()
    debugger = None

    class Looked(Numbers):
        def __getitem__(self, index):
            if index == 200:
                threading.Timer(3.0, lambda: os.write(writing, b"continue\n")).start()
                debugger.set_trace()
            return super().__getitem__(index)

    agent = start(tmp_path, stall_window_seconds=3)
    with open(reading) as commands, open(os.devnull, "w") as nowhere:
        debugger = pdb.Pdb(stdin=commands, stdout=nowhere, nosigint=True, readrc=False)
        debugger.use_rawinput = False
        for _ in DataLoader(Looked(240), batch_size=1):
            time.sleep(0.01)
    os.close(writing)
    telemetry.stop()
    assert [line["event"] for line in log_lines(agent) if line["event"].startswith("stall")] == []


def test_a_callback_that_hangs_holds_nothing_up(tmp_path):
    """The stalls that open meanwhile are told to nobody, and are counted; the run ends without it."""
    release, told = threading.Event(), []

    def hang(stall):
        told.append(stall)
        release.wait(60)

    agent = start(tmp_path, on_stall=hang)
    try:
        starve(agent, lambda: told)
        (thread,) = [t for t in own_threads._running.values() if t.name == "telemetry-on-stall"]
        with open(f"/proc/self/task/{thread.native}/status") as status:
            (blocked,) = [line.split()[1] for line in status if line.startswith("SigBlk")]
        assert int(blocked, 16) >> signal.SIGINT - 1 & 1
        steps, before = agent.accounting.stats.steps, scrape(agent)["training_steps_total",]
        starve(agent, lambda: scrape(agent)["training_steps_total",] > max(steps, before))
        for _ in range(2):
            agent._stall_monitor._callback.tell({"cause": "unknown"})
        assert agent.errors.counts["on_stall"] == 2
        telemetry.stop()
        assert not agent._thread.is_alive()
        lines = log_lines(agent)
        *_, end, waited = lines  # the end of the run is in the log before anything is waited for
        assert (end["event"], end["errors_total"]) == ("run_end", {"on_stall": 2})
        assert "has not returned" in waited["message"]
        said = [line["message"] for line in lines if line["event"] == "error" and line["source"] == "on_stall"]
        assert any("not told of a stall (unknown)" in text for text in said)
        assert len(told) == 1
    finally:
        release.set()
        thread.join()


def test_no_thread_is_made_before_the_first_stall_nor_left_after_the_call(tmp_path):
    agent = start(tmp_path, on_stall=hear)
    names = own_threads.running()
    HEARD.clear()
    starve(agent, lambda: HEARD)
    wait_for(lambda: "telemetry-on-stall" not in own_threads.running())
    assert "telemetry-on-stall" not in names
    telemetry.stop()
