"""A run that is starved names the line, in its log, in the report and as folded stacks."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, Dataset

import telemetry
from telemetry.agent.lines import LineMonitor
from telemetry.diagnosis.lines import MIN_SAMPLES
from telemetry.diagnosis.stalls import DetectedStall
from telemetry.hooks.ring import S_COMPUTE, Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.hooks.worker_block import WorkerBlock
from telemetry.log_lines import StragglerCodeLine
from telemetry.util.clock import NS, now_ns
from telemetry.util.errors import ErrorLog
from telemetry.util.profiles import STEP, StackProfile
from tests.slice_cases import a_slice
from tests.slices import evidence_over

ENOUGH = 30
"""So many samples are enough for a line that has most of the time."""

NUMBERS = [(i * 7919) % 1000003 for i in range(100_000)]


class Slow(Dataset):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


SLOW_LINE = Slow.__getitem__.__code__.co_firstlineno + 1


class SlowSampler:
    def __iter__(self):
        index = 0
        while True:
            sorted(NUMBERS)
            index += 1
            yield index


SAMPLER_LINE = SlowSampler.__iter__.__code__.co_firstlineno + 3


class Ready(Dataset):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


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


def samples_of(agent) -> int:
    """How many samples there are of the open stall."""
    own = sum(profile.samples for profile in agent._line_monitor.sampler.profiles.values())
    blocks = [handle.block for handle in agent.tracker.loaders.live() if handle.block is not None]
    return own + sum(StackProfile.unpacked(found.content).samples for block in blocks for found in block.sampled())


@pytest.fixture
def heap(small_heap):
    """What a collection goes through."""
    return [[number] for number in range(100_000)]


RUNS = {
    "worker": (lambda: DataLoader(Slow(), batch_size=None, num_workers=1), "workers_io_bound", "fetch", SLOW_LINE),
    "main": (lambda: DataLoader(Slow(), batch_size=None), "loader_on_training_thread", "wait", SLOW_LINE),
    "sampler": (
        lambda: DataLoader(Ready(), batch_size=None, sampler=SlowSampler(), num_workers=1),
        "loader_on_training_thread",
        "sampler",
        SAMPLER_LINE,
    ),
    "watched": (lambda: telemetry.watch(stream()), "source_slow", "wait", STREAM_LINE),
    "checkpoint": (lambda: DataLoader(Ready(), batch_size=None), "checkpoint", "checkpoint", SAVE_LINE),
    "gc": (lambda: DataLoader(Ready(), batch_size=None), "gc_pause", "step", CLEAN_LINE),
}
IN_EACH_STEP = {"checkpoint": save, "gc": clean_up}


@pytest.mark.usefixtures("heap")
@pytest.mark.parametrize("kind", RUNS)
def test_a_starved_run_names_its_line(tmp_path, kind):
    batches, cause, of, line = RUNS[kind]
    agent = telemetry.start(tmp_path, port="off", interval_seconds=0.5, stall_window_seconds=2, start_line=False)
    interval, until = sys.getswitchinterval(), now_ns() + 120 * NS
    try:
        for number, _ in enumerate(batches()):
            IN_EACH_STEP.get(kind, int)()
            assert now_ns() < until, "hardly a sample was taken"
            if number % 10 == 9 and samples_of(agent) >= ENOUGH:
                break
            assert agent._line_monitor.sampler.sampling or agent._stall_monitor.active_cause or not samples_of(agent)
    finally:
        telemetry.stop()
    assert sys.getswitchinterval() == interval
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


def test_a_run_without_a_stall_takes_no_sample(tmp_path):
    agent = telemetry.start(tmp_path, port="off", interval_seconds=0.1, stall_window_seconds=1, start_line=False)
    try:
        for number, _ in enumerate(DataLoader(Ready(), batch_size=None, num_workers=1)):
            time.sleep(0.005)  # the training
            if number == 300:
                break
            assert not agent._line_monitor.sampler.sampling
            assert not samples_of(agent)
    finally:
        telemetry.stop()
    assert not (tmp_path / "profiles").exists()


def logging(rank: int, logged: list):
    """As much of `EventLog` as is used."""
    return SimpleNamespace(write=logged.append, identity=SimpleNamespace(rank=rank, pid=1))


def test_a_rank_that_holds_the_others_up_logs_the_lines_of_its_steps(tmp_path):
    tracker, logged = StepTracker(Ring()), []
    monitor = LineMonitor(tracker, tmp_path / "profiles", ErrorLog(), logging(3, logged))
    monitor.tick(None)
    assert not monitor.sampler.sampling
    try:
        assert not monitor.tick(None, holds_others_up=True)
        assert monitor.sampler.sampling
        tracker.category = S_COMPUTE
        for _ in range(2 * MIN_SAMPLES):
            monitor.sampler.sample(now_ns())
        monitor._session -= 60 * NS  # it has gone on for a minute
        monitor.tick(None, holds_others_up=True)
    finally:
        monitor.close()
    (line,) = logged
    assert isinstance(line, StragglerCodeLine)
    assert line.evidence["lines_of"] == "step"
    assert "of each step of rank 3 is" in line.evidence["line_verdict"]
    assert not monitor.sampler.sampling


def test_a_stall_with_few_samples_is_sampled_for_longer(tmp_path):
    """Until a line can be named: its lines are logged then. After ten minutes it is sampled as seldom as any other."""
    tracker = StepTracker(Ring())
    monitor = LineMonitor(tracker, tmp_path, ErrorLog(), logging(0, []))
    tracker.category = S_COMPUTE
    stall = DetectedStall("host_bound", 0, {"host_bound": 1.0}, 1.0, None, evidence_over([a_slice()]))
    try:
        assert not monitor.tick(stall)
        monitor._session -= 100 * NS  # not in the first ten seconds of a minute
        assert not monitor.tick(stall), "there is no line to log"
        assert monitor.sampler.sampling
        monitor._session -= 600 * NS
        assert not monitor.tick(stall)
        assert not monitor.sampler.sampling
        monitor._session += 600 * NS
        monitor.tick(stall)
        for _ in range(2 * MIN_SAMPLES):
            monitor.sampler.sample(now_ns())
        assert monitor.tick(stall), "the line is logged as soon as it is known"
        assert not monitor.sampler.sampling
        assert monitor.lines_of(stall).lines
    finally:
        monitor.close()


@pytest.mark.parametrize(("cause", "kinds", "asked"), [("host_bound", {STEP}, False), ("uneven_batches", set(), True)])
def test_what_is_sampled_in_stalls_that_no_run_above_has(tmp_path, cause, kinds, asked):
    """The training thread's steps if the device waits for it, and the fetches of workers if these are uneven."""
    tracker, block = StepTracker(Ring()), WorkerBlock(1)
    iterator = iter(DataLoader(Ready(), batch_size=None, num_workers=1))
    tracker.loaders.register(iterator, block)
    monitor = LineMonitor(tracker, tmp_path, ErrorLog(), logging(0, []))
    tracker.category = S_COMPUTE
    try:
        monitor.tick(DetectedStall(cause, 0, {cause: 1.0}, 1.0, None, evidence_over([a_slice()])))
        monitor.sampler.sample(now_ns())
        assert monitor.sampler.profiles.keys() == kinds
        assert (block.counters(0).sample_until_ns > now_ns()) == asked
    finally:
        monitor.close()
