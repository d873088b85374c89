"""A run that is starved names the line, in its log, in the report and as folded stacks."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.agent.line_monitor import LineMonitor
from telemetry.diagnosis.hot_lines import MIN_SAMPLES
from telemetry.diagnosis.stalls import DetectedStall
from telemetry.log.lines import StragglerCodeLine
from telemetry.safety.errors import ErrorLog
from telemetry.sources.sampler import Sampler
from telemetry.util.clock import NS, now_ns
from telemetry.util.profiles import StackProfile
from tests.data_sets import Numbers
from tests.running_agent import wait_for
from tests.sampled_thread import in_a_step, often
from tests.slice_cases import a_slice
from tests.slices import evidence_over

ENOUGH = 30
"""So many samples are enough for a line that has most of the time."""

NUMBERS = [(i * 7919) % 1000003 for i in range(100_000)]


class Slow(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


SLOW_LINE = Slow.__getitem__.__code__.co_firstlineno + 1


class SlowSampler:
    def __iter__(self):
        while True:
            sorted(NUMBERS)
            yield 1


SAMPLER_LINE = SlowSampler.__iter__.__code__.co_firstlineno + 2


def stream():
    while True:
        sorted(NUMBERS)
        yield 0


STREAM_LINE = stream.__code__.co_firstlineno + 2


def save():
    with telemetry.phase("checkpoint"):
        sorted(NUMBERS)


SAVE_LINE = save.__code__.co_firstlineno + 2


def clean_up():
    gc.collect(), gc.collect(), gc.collect(), gc.collect()
    time.sleep(0.001)  # takes several times as long while others use the cores


CLEAN_LINE = clean_up.__code__.co_firstlineno + 1


def loader(data=None, **settings) -> DataLoader:
    return DataLoader(data or Numbers(1 << 40), batch_size=None, **settings)


RUNS = {
    "worker": (lambda: loader(Slow(1 << 40), num_workers=1), int, "workers_io_bound", "fetch", SLOW_LINE),
    "main": (lambda: loader(Slow(1 << 40)), int, "loader_on_training_thread", "wait", SLOW_LINE),
    "sampler": (
        lambda: loader(sampler=SlowSampler(), num_workers=1), int, "loader_on_training_thread", "sampler", SAMPLER_LINE,
    ),
    "watched": (lambda: telemetry.watch(stream()), int, "source_slow", "wait", STREAM_LINE),
    "checkpoint": (loader, save, "checkpoint", "checkpoint", SAVE_LINE),
    "gc": (loader, clean_up, "gc_pause", "step", CLEAN_LINE),
}  # fmt: skip


def samples_of(agent) -> int:
    """How many samples there are of the open stall."""
    own = sum(profile.samples for profile in (agent._sampler.stall or {}).values())
    blocks = [handle.block for handle in agent.tracker.loaders.live() if handle.block is not None]
    return own + sum(StackProfile.unpacked(found.content).samples for block in blocks for found in block.sampled())


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("kind", RUNS)
def test_a_starved_run_names_its_line(tmp_path, kind):
    batches, step, cause, of, line = RUNS[kind]
    heap = [[number] for number in range(100_000)]  # what a collection goes through
    agent = telemetry.start(tmp_path, port="off", interval_seconds=0.5, stall_window_seconds=2, start_line=False)
    interval, until = sys.getswitchinterval(), now_ns() + 120 * NS
    try:
        for number, _ in enumerate(batches()):
            step()
            assert now_ns() < until, "hardly a sample was taken"
            if number % 10 == 9 and samples_of(agent) >= ENOUGH:
                break
    finally:
        telemetry.stop()
    assert sys.getswitchinterval() == interval
    assert heap
    told = subprocess.run(
        [sys.executable, "-m", "telemetry", "report", str(tmp_path), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    report = json.loads(told.stdout)
    (stall,) = report["stalls"]
    first = stall["evidence"]["lines"][0]
    assert (stall["cause"], stall["evidence"]["lines_of"]) == (cause, of)
    assert (first["file"], first["line"]) == (__file__, line)
    assert set(first) == {"file", "line", "function", "calls", "share_ratio"}
    assert first["share_ratio"] > 0.6
    assert f"test_lines_run.py:{line}" in report["verdict"]
    removed, halved = [each for each in stall["advice"] if f"test_lines_run.py:{line}" in each["action"]]
    assert removed["predicted_speedup"] > halved["predicted_speedup"] > 1
    (profile,) = (tmp_path / "profiles").iterdir()
    assert profile.name.startswith("rank-0.")
    assert f"test_lines_run.py:{line})" in profile.read_text()
    assert all(row.rpartition(" ")[2].isdigit() for row in profile.read_text().splitlines())


def test_a_run_without_a_stall_is_hardly_sampled(tmp_path):
    agent = telemetry.start(tmp_path, port="off", interval_seconds=0.1, stall_window_seconds=1, start_line=False)
    try:
        began = now_ns()
        for _ in loader(num_workers=1):
            time.sleep(0.005)  # the training
            if now_ns() - began > 3 * NS:
                break
            assert agent._sampler.stall is None
            assert not samples_of(agent), "its workers are not"
    finally:
        telemetry.stop()
    assert sum(profile.samples for profile in agent._sampler.run.values()) < 40
    assert not (tmp_path / "profiles").exists()


# -- when a stall is sampled -------------------------------------------------------------------------------------------


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """A monitor of lines, the sampler that it tells what to do, and what it has logged. This thread is in a step."""
    often(monkeypatch)
    tracker, logged = in_a_step(), []
    sampler = Sampler(tracker, time.sleep)
    event_log = SimpleNamespace(write=logged.append, identity=SimpleNamespace(rank=3, pid=1))
    monitor = LineMonitor(tracker, sampler, tmp_path / "profiles", ErrorLog(), event_log)
    yield SimpleNamespace(monitor=monitor, sampler=sampler, tracker=tracker, logged=logged)
    monitor.close()


def sample(followed, number: int) -> None:
    before = followed.sampler.seen.step

    def enough():
        followed.sampler.wait(0.1)
        return followed.sampler.steps.samples >= number

    wait_for(enough)
    assert followed.sampler.seen.step > before


def a_stall(cause: str) -> DetectedStall:
    return DetectedStall(cause, 0, {cause: 1.0}, 1.0, None, evidence_over([a_slice()]))


def test_a_rank_that_holds_the_others_up_logs_the_lines_of_its_steps(followed):
    monitor, sampler = followed.monitor, followed.sampler
    monitor.tick(None)
    assert sampler.stall is None
    assert not monitor.tick(None, holds_others_up=True)
    assert sampler.wanted.kinds == {"step"}
    sample(followed, 2 * MIN_SAMPLES)
    monitor._session -= 60 * NS  # it has gone on for a minute
    monitor.tick(None, holds_others_up=True)
    (line,) = followed.logged
    assert isinstance(line, StragglerCodeLine)
    assert line.evidence.lines_of == "step"
    assert "of each step of rank 3 is" in line.evidence.line_verdict
    monitor.tick(None)
    assert (sampler.stall, sampler.wanted.kinds) == (None, frozenset())


def test_a_stall_with_few_samples_is_sampled_for_longer(followed):
    """Until a line can be named: its lines are logged then. After ten minutes it is sampled as seldom as any other."""
    monitor, sampler, stall = followed.monitor, followed.sampler, a_stall("host_bound")
    assert not monitor.tick(stall)
    monitor._session -= 100 * NS  # not in the first ten seconds of a minute
    assert not monitor.tick(stall), "there is no line to log"
    assert sampler.wanted.kinds
    monitor._session -= 600 * NS
    assert not monitor.tick(stall)
    assert not sampler.wanted.kinds
    monitor._session += 600 * NS
    monitor.tick(stall)
    sample(followed, 2 * MIN_SAMPLES)
    assert monitor.tick(stall), "the line is logged as soon as it is known"
    assert not sampler.wanted.kinds
    assert monitor.lines_of(stall).code.lines


@pytest.mark.parametrize(
    ("cause", "kinds", "asked"), [("host_bound", {"step"}, False), ("uneven_batches", set(), True)]
)
def test_what_is_sampled_in_stalls_that_no_run_above_has(observed, followed, cause, kinds, asked):
    """The training thread's steps if the device waits for it, and the fetches of workers if these are uneven."""
    batches = iter(loader(num_workers=1))
    (handle,) = observed.tracker.loaders.live()
    followed.tracker.loaders.register(batches, handle.block)
    followed.monitor.tick(a_stall(cause))
    assert followed.sampler.wanted.kinds == kinds
    assert (handle.block.counters(0).sample_until_ns > now_ns()) == asked
