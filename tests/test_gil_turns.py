"""When the agent shortens the switch interval: after a long wait for the GIL, and only while that helps."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest

import telemetry
from telemetry.agent import gil_turns
from telemetry.agent.gil_turns import GilTurns
from telemetry.core.switch_interval import SWITCH_SECONDS
from telemetry.util.clock import NS, now_ns


class Thread:
    """The agent thread. Its clock, and how often it has waited, are those of the test."""

    def __init__(self):
        self.now, self.waits, self.turns = 1000 * NS, 7, GilTurns()

    def wait(self, seconds, *, wakes):
        self.turns.begin()
        self.now += int(seconds * NS)
        self.waits += wakes
        self.turns.check()

    @property
    def short(self):
        return sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)


@pytest.fixture
def thread(monkeypatch):
    usual, thread = sys.getswitchinterval(), Thread()
    monkeypatch.setattr(gil_turns, "now_ns", lambda: thread.now)
    monkeypatch.setattr(gil_turns, "thread_waits", lambda: thread.waits)
    yield thread
    thread.turns.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_a_long_wait_for_the_gil_shortens_the_interval_for_a_while(thread):
    thread.wait(0.1, wakes=30)
    assert not thread.short, "other threads had their turns"
    thread.wait(2, wakes=500)
    assert thread.short
    for _ in range(55):
        thread.wait(1, wakes=10)
        assert thread.short
    for _ in range(10):
        thread.wait(1, wakes=10)
    assert not thread.short


def test_who_needs_it_again_has_it_for_longer(thread):
    thread.wait(2, wakes=500)
    thread.wait(61, wakes=10)
    assert not thread.short
    thread.wait(2, wakes=500)
    thread.wait(61, wakes=10)
    assert thread.short
    thread.wait(60, wakes=10)
    assert not thread.short


def test_a_hung_file_system_is_no_wait_for_the_gil(thread):
    thread.wait(30, wakes=1)
    assert not thread.short


def test_where_it_does_not_help_it_is_not_tried_again_for_an_hour(thread):
    """C calls of seconds hold the GIL."""
    thread.wait(2, wakes=500)
    thread.wait(2, wakes=4000)
    assert not thread.short
    for _ in range(30):
        thread.wait(100, wakes=4000)
        assert not thread.short
    thread.wait(700, wakes=10)
    thread.wait(2, wakes=500)
    assert thread.short


def test_beside_many_threads_it_stays(thread):
    """Each of them waits for the others, and with a short interval they would take turns ten times as often."""
    over = threading.Event()
    others = [threading.Thread(target=over.wait) for _ in range(8)]
    for other in others:
        other.start()
    thread.wait(2, wakes=500)
    over.set()
    for other in others:
        other.join()
    assert not thread.short
    thread.wait(2, wakes=500)
    assert thread.short


def test_a_sleep_is_not_counted(thread):
    """The stamp at which the sleep ends is said beforehand."""
    thread.turns.begin(thread.now + 10 * NS)
    thread.now += 10 * NS
    thread.waits += 500
    thread.turns.check()
    assert not thread.short


def test_the_agent_says_how_late_its_thread_is(tmp_path, monkeypatch):
    """Its clock goes forward by two seconds at each look, in which the thread has waited a hundred times."""
    looks, told = itertools.count(), threading.Event()
    monkeypatch.setattr(gil_turns, "now_ns", lambda: now_ns() + 2 * NS * next(looks))
    monkeypatch.setattr(gil_turns, "thread_waits", lambda: 100 * next(looks))
    monkeypatch.setattr(gil_turns, "shorten_switch_interval", lambda _: told.set())
    telemetry.start(tmp_path, port="off", start_line=False)
    try:
        assert told.wait(60)
    finally:
        telemetry.stop()
