"""Samples of threads: how much time each stands for, what the thread did, in workers and in this process; the GIL."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import zlib
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import telemetry
from telemetry.agent.agent import Agent
from telemetry.diagnosis.hot_lines import line_shares
from telemetry.safety import gil, threads
from telemetry.safety.gil import GilTurns, SwitchInterval
from telemetry.sources.sampler import Sampler
from telemetry.util import sampling
from telemetry.util.clock import NS, now_ns
from telemetry.util.profiles import FETCH, StackProfile
from telemetry.util.sampling import SampleClock
from telemetry.util.stacks import Spot
from tests.running_agent import wait_for
from tests.sampled_thread import in_a_step, often, sampled

MS = 1_000_000
NUMBERS = [(i * 7919) % 1000003 for i in range(400_000)]
NOISE = bytes(i * 7919 % 64 for i in range(200_000))


# -- a thread of which everything is known -----------------------------------------------------------------------------

HOLDS, RELEASES, WAITS, QUEUES = "holds the GIL", "computes without it", "waits", "has no core"


class Host:
    """A thread that goes through the same moments again and again, each of so many ms, and one that samples it."""

    def __init__(self, patch: pytest.MonkeyPatch, moments: list[tuple[str, float]]) -> None:
        self.moments = [(kind, int(ms * MS)) for kind, ms in moments]
        self.round = sum(ns for _, ns in self.moments)
        self.now = 1000 * self.round
        self.waits = self.cost = 0
        self.late = int  # ns for which the sampling thread has no core after a sleep
        self.sample_cost = 20_000
        self.seen = 0
        patch.setattr(sampling, "now_ns", lambda: self.now)
        patch.setattr(sampling, "cpu_ns", lambda _thread: self.cpu())
        patch.setattr(sampling, "thread_waits", lambda: self.waits)
        patch.setattr(sampling, "thread_time_ns", lambda: self.cost)
        patch.setattr(sampling, "is_running", lambda _thread: self.moments[self.seen][0] == QUEUES)
        patch.setattr(sampling, "stack_of", self.look)
        self.clock = SampleClock(self.sleep)

    def place(self) -> tuple[int, int]:
        """The moment, and how much of it is left."""
        at = self.now % self.round
        for number, (_, ns) in enumerate(self.moments):
            if at < ns:
                return number, ns - at
            at -= ns
        raise AssertionError

    def cpu(self) -> int:
        rounds, at = divmod(self.now, self.round)
        used = 0
        for kind, ns in self.moments:
            if kind in {HOLDS, RELEASES}:
                used += rounds * ns + min(ns, at)
            at = max(0, at - ns)
        return used

    def sleep(self, seconds: float) -> None:
        self.now, self.waits = self.now + int(seconds * NS) + self.late(), self.waits + 1
        self.seen, left = self.place()
        if self.moments[self.seen][0] == HOLDS:
            self.now, self.waits = self.now + left, self.waits + 1

    def look(self, _ident: int, _until: object) -> tuple[Spot, ...]:
        self.now += 20_000
        self.cost += self.sample_cost
        return (Spot("", self.seen, "", ""),)

    def sample(self, mean_seconds: float = 0.02, max_share: float = 1.0) -> sampling.Sample:
        self.clock.draw(mean_seconds, max_share)
        while not self.clock.wait(0, 1.0):
            pass
        self.clock.wait_until_due(0)
        return self.clock.take(0, 0)


SHOWN = {HOLDS: (False, True), RELEASES: (False, False), WAITS: (True, False), QUEUES: (False, False)}
"""Of each kind of moment: whether the thread is blocked, and whether it held the GIL for which another waited."""


@given(st.lists(st.tuples(st.sampled_from([*SHOWN]), st.floats(1, 60)), min_size=2, max_size=6), st.floats(0, 4))
@settings(max_examples=10, derandomize=True, phases=[Phase.generate])
def test_samples_stand_for_the_time_of_each_moment(moments, late_ms):
    """Also of C calls that hold the GIL, in which no sample can be taken, and if the sampling thread gets no core."""
    times: Counter[int | str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        host = Host(patch, moments)
        host.clock._random.seed(1)
        host.late = lambda chance=Random(2): int(chance.expovariate(1) * late_ms * MS)
        for _ in range(3000):
            sample = host.sample()
            number = sample.stack[0].line
            times[number] += sample.wall_ns
            times["right"] += sample.wall_ns * ((sample.blocked, sample.held) == SHOWN[moments[number][0]])
    whole = sum(times[number] for number in range(len(moments)))
    for number, (_, ns) in enumerate(host.moments):
        assert times[number] / whole == pytest.approx(ns / host.round, abs=0.05)
    assert times["right"] > 0.9 * whole, "some looks take until the next moment"


def test_samples_become_rarer_if_they_cost_too_much(monkeypatch):
    """10 ms of CPU each, of which they may take a fifth of a core; and then nearly nothing."""
    host = Host(monkeypatch, [(WAITS, 50)])
    host.sample_cost = 10 * MS
    costly = [host.sample(0.001, 0.2).wall_ns for _ in range(200)][-1]
    assert costly == pytest.approx(50 * MS, rel=0.1)
    host.sample_cost = 0
    assert [host.sample(0.001, 0.2).wall_ns for _ in range(200)][-1] == 1 * MS


def test_a_process_that_was_stopped_counts_for_no_line(monkeypatch):
    host = Host(monkeypatch, [(HOLDS, 3_600_000)])
    assert host.sample().wall_ns < 60 * NS


# -- a real thread -----------------------------------------------------------------------------------------------------


def holds() -> None:
    sorted(NUMBERS[:100_000])


def computes() -> None:
    zlib.compress(NOISE)


def rests() -> None:
    time.sleep(0.006)


def test_the_time_of_a_real_thread_is_in_its_functions():
    """Against its own timers: of a call that holds the GIL, one that releases it, and one that waits."""
    spent, over = Counter(), threading.Event()

    def run() -> None:
        while not over.is_set():
            for work in (holds, computes, rests):
                start = now_ns()
                work()
                spent[work.__name__] += now_ns() - start

    thread = threading.Thread(target=run)
    thread.start()
    clock, samples = SampleClock(time.sleep), 0
    times, blocked, held = Counter(), Counter(), Counter()
    while samples < 500:
        clock.draw(0.005, 1.0)
        clock.wait(thread.native_id, 1.0)
        clock.wait_until_due(thread.native_id)
        sample = clock.take(thread.ident, thread.native_id)
        name = next((spot.function for spot in sample.stack if spot.function in spent), "")
        samples += bool(name)
        times[name] += sample.wall_ns
        blocked[name] += sample.wall_ns * sample.blocked
        held[name] += sample.wall_ns * sample.held
    over.set()
    thread.join()
    for name, ns in spent.items():
        assert times[name] / times.total() == pytest.approx(ns / spent.total(), abs=0.1), (times, spent)
    assert max(blocked["holds"] / times["holds"], blocked["computes"] / times["computes"]) < 0.3
    assert held["holds"] > 0.5 * times["holds"]


# -- workers -----------------------------------------------------------------------------------------------------------


class Planted(Dataset):
    """Each batch: a long C call that holds the GIL, a short wait; the switch interval, and names of our threads."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[float | str, ...]:
        sorted(NUMBERS)  # planted
        time.sleep(0.001)
        return (sys.getswitchinterval(), *threads.running())


PLANTED_LINE = Planted.__getitem__.__code__.co_firstlineno + 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_is_asked_tells_its_line(observed, method):
    batches = iter(DataLoader(Planted(), batch_size=None, num_workers=1, multiprocessing_context=method))
    (loader,) = observed.tracker.loaders.live()
    usual = next(batches)
    assert "telemetry-lines" not in usual
    assert loader.block.sampled() == []

    def lines_of(session: int):
        assert next(batches)
        return [
            (found.began_ns, lines)
            for found in loader.block.sampled()
            if found.session == session and (lines := line_shares(StackProfile.unpacked(found.content), FETCH))
        ]

    loader.block.ask_samples(1, now_ns() + 600 * NS)
    ((began, (first, *_)),) = wait_for(lambda: lines_of(1), 60)
    assert (first.file, first.line, first.calls) == (__file__, PLANTED_LINE, None)
    assert first.share > 0.5
    assert "telemetry-lines" in next(batches)
    loader.block.ask_samples(2, now_ns() + 600 * NS)
    ((later, _),) = wait_for(lambda: lines_of(2), 60)
    assert later > began, "a new request forgets the one before"
    loader.block.ask_samples(2, 1)
    wait_for(lambda: next(batches) == usual, 60)


# -- the training thread, and others -----------------------------------------------------------------------------------


@pytest.fixture
def _often(monkeypatch):
    often(monkeypatch)


def sample_until(made: Sampler, true, seconds: float = 60):
    """Take samples on this thread until something is true."""

    def found():
        made.wait(0.05)
        return true()

    return wait_for(found, seconds)


@pytest.fixture
def thread():
    """Starts a thread that calls a function again and again, until the test ends."""
    over, started = threading.Event(), []

    def run(work) -> None:
        torch.set_num_threads(1)
        while not over.is_set():
            work()

    def start(work, name: str = "busy") -> threading.Thread:
        started.append(threading.Thread(target=run, args=(work,), name=name))
        started[-1].start()
        return started[-1]

    yield start
    over.set()
    for one in started:
        one.join()


def backward() -> None:
    a = torch.rand(500, 500, requires_grad=True)
    (a @ a @ a).sum().backward()


@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize(("device", "waits"), [(None, False), (0, True)])
def test_a_backward_pass_that_computes_waits_for_no_other_rank(thread, device, waits):
    """On a host. With a device its thread may spin on a core while the others are waited for."""
    made = Sampler(in_a_step(thread(backward), device=device), time.sleep)
    made.wanted.ranks = True
    sample_until(made, lambda: made.seen.samples >= 40)
    place = f"backward (test_sampling.py:{backward.__code__.co_firstlineno + 2})"
    assert made.take_place() == place
    assert (made.seen.in_sync > made.seen.samples / 4) is waits
    assert made.take_place() is None, "since the last call"


@pytest.mark.usefixtures("_often")
def test_threads_that_fetch_are_sampled_as_workers(thread):
    """As the workers of a loader that uses threads, or that reads ahead."""
    batches = iter(DataLoader(Planted(), batch_size=None))
    thread(lambda: next(batches))
    made = Sampler(in_a_step(), time.sleep)
    made.begin_stall()
    made.wanted.kinds = frozenset({FETCH})
    first, *_ = sample_until(made, lambda: line_shares(made.stall.get(FETCH, StackProfile()), FETCH))
    assert (first.file, first.line) == (__file__, PLANTED_LINE)


@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize(
    ("work", "enough"),
    [
        (lambda: sum(range(1000)), lambda one: one.free >= 20 and one.without_gil <= one.free / 2),
        (computes, lambda one: one.without_gil >= 3),
    ],
    ids=["holds the GIL", "computes without it"],
)
def test_another_thread_that_is_often_on_a_core_is_found(thread, work, enough):
    thread(work)
    with sampled(in_a_step()) as made:
        wait_for(lambda: any(map(enough, made.threads.found.values())), 60)
    (found,) = made.threads.found.values()
    assert found.name == "busy"


@pytest.mark.usefixtures("_often")
def test_outside_of_the_training_loop_nothing_is_kept():
    tracker = in_a_step()
    with sampled(tracker) as made:
        wait_for(lambda: made.steps.samples)
        tracker.detach()
        before = made.seen.step
        time.sleep(0.1)
    assert made.seen.step < 1.5 * before + 0.05 * NS


# -- the switch interval -----------------------------------------------------------------------------------------------


def about(seconds: float):
    return pytest.approx(seconds, abs=2e-6)


@pytest.fixture
def usual():
    before = sys.getswitchinterval()
    yield before
    gil.switch_interval.restore()
    sys.setswitchinterval(before)


def burst(interval: SwitchInterval, inside) -> None:
    interval.shorten()
    assert sys.getswitchinterval() < 0.001
    inside()
    interval.restore()


def test_no_burst_leaves_its_interval_behind(usual):
    """Neither if the script reads, sets or restores the interval during it, nor if it restores ours later."""
    interval, read = SwitchInterval(), []
    burst(interval, lambda: read.append(sys.getswitchinterval()))
    assert sys.getswitchinterval() == about(usual)
    burst(interval, lambda: sys.setswitchinterval(2 * usual))
    assert sys.getswitchinterval() == about(2 * usual), "it is the script's own"
    burst(interval, lambda: (sys.setswitchinterval(0.1), sys.setswitchinterval(read[0])))
    assert sys.getswitchinterval() == about(2 * usual)
    for heal in (interval.restore, lambda: burst(interval, int)):
        sys.setswitchinterval(read[0])
        heal()
        assert sys.getswitchinterval() == about(2 * usual), "of before"
    sys.setswitchinterval(1e-5)
    interval.shorten()
    assert sys.getswitchinterval() == about(1e-5), "it is short enough"


def test_a_script_that_saves_and_restores_the_interval_keeps_it(tmp_path, monkeypatch, usual):
    """All the time, beside a real agent, so also during its bursts."""
    often(monkeypatch)
    telemetry.start(tmp_path, port="off", start_line=False, interval_seconds=0.1)
    read, end = set(), time.monotonic() + 60
    for _ in DataLoader(range(1_000_000_000), batch_size=None):
        before = sys.getswitchinterval()
        sys.setswitchinterval(0.01)
        sum(range(2_000))
        sys.setswitchinterval(before)
        read.add(before)
        if len(read) > 1 or time.monotonic() > end:
            break
    telemetry.stop()
    assert len(read) == 2, "also the short one"
    assert sys.getswitchinterval() == about(usual)


def test_a_forked_child_has_the_usual_interval(usual):
    gil.switch_interval.shorten()
    pid = os.fork()
    if not pid:
        os._exit(0 if abs(sys.getswitchinterval() - usual) < 1e-6 else 1)
    assert os.waitpid(pid, 0)[1] == 0


# -- turns of the GIL --------------------------------------------------------------------------------------------------


def test_waits_of_a_thread_are_counted():
    before = gil.thread_waits()
    for _ in range(5):
        time.sleep(0.001)
    assert gil.thread_waits() - before >= 5


@pytest.fixture
def turns(monkeypatch, usual):
    """The turns of an agent thread. Its clock, and how often it has waited, are those of the test."""
    made = SimpleNamespace(now=1000 * NS, waits=7, turns=GilTurns())
    monkeypatch.setattr(gil, "now_ns", lambda: made.now)
    monkeypatch.setattr(gil, "thread_waits", lambda: made.waits)

    def work(seconds: float, waits: int) -> bool:
        """A part of a tick. Returns whether the interval is short after it."""
        made.now, made.waits = made.now + int(seconds * NS), made.waits + waits
        made.turns.check()
        return sys.getswitchinterval() < usual / 2

    return made.turns, work


def test_a_tick_that_waits_long_for_the_gil_shortens_the_interval(turns):
    turns, work = turns
    short = []
    for parts in (
        [(0.1, 30), (30, 1)],  # other threads had their turns; a hung file system is no wait for the GIL
        [(2, 500), (0.1, 1)],
        [(0.1, 1)],  # it has no need any more
        [(0.1, 1)],
    ):
        turns.tick_begins()
        turns.begin()
        short.append([work(*part) for part in parts])
        turns.tick_ends()
        assert sys.getswitchinterval() == about(0.005), "between two ticks it is the script's own"
    assert short == [[False, False], [True, True], [True], [False]]


def test_a_sleep_is_not_counted(turns):
    """The stamp at which the sleep ends is said beforehand."""
    turns, work = turns
    turns.begin(1010 * NS)
    assert not work(10, 500)


def test_an_agent_that_is_late_has_a_short_interval_in_its_tick(tmp_path, monkeypatch, usual):
    """Its clock goes forward by two seconds at each look, in which the thread has waited a hundred times."""
    looks, short = itertools.count(), threading.Event()
    monkeypatch.setattr(gil, "now_ns", lambda: now_ns() + 2 * NS * next(looks))
    monkeypatch.setattr(gil, "thread_waits", lambda: 100 * next(looks))
    monkeypatch.setattr(Agent, "_diagnose", lambda _: sys.getswitchinterval() < usual / 2 and short.set())
    telemetry.start(tmp_path, port="off", start_line=False)
    assert short.wait(60)
    telemetry.stop()
    assert sys.getswitchinterval() == about(usual)
