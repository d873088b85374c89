"""Samples of threads: when they are taken, for which line they count, in workers and in this process; turns of the GIL."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import telemetry
from telemetry.agent.accounting import Accounting
from telemetry.agent.ticks import BetweenTicks
from telemetry.config import Config
from telemetry.diagnosis.lines import line_shares
from telemetry.hooks import ring, worker_lines
from telemetry.hooks.ring import Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.hooks.worker import WorkerProbe
from telemetry.hooks.worker_block import WorkerBlock
from telemetry.hooks.worker_lines import SampleBursts, WorkerSampler
from telemetry.sources.lines import LineSampler, StepSampler, ThreadSampler
from telemetry.sources.proc import is_running
from telemetry.util import gil, sample_times, threads
from telemetry.util.clock import NS, now_ns
from telemetry.util.errors import ErrorLog
from telemetry.util.gil import SWITCH_SECONDS, GilTurns, restore_switch_interval, shorten_switch_interval, thread_waits
from telemetry.util.profiles import FETCH, LATE_WAITS, STEP, WAIT, AttributedSamples, StackProfile
from telemetry.util.sample_times import FIRST_SAMPLES, MAX_SHARE, SampleTimes
from telemetry.util.stacks import Spot
from tests.running_agent import at_work, wait_for

NUMBERS = [(i * 7919) % 1000003 for i in range(400_000)]


class Planted(Dataset):
    """Each batch: a long C call that holds the GIL, a short wait, the switch interval and the names of our threads."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[float | str, ...]:
        sorted(NUMBERS)  # planted
        time.sleep(0.001)
        return (sys.getswitchinterval(), *threads.running())


class Short(Planted):
    """Fetches of 2 ms, which tell the switch interval."""

    def __getitem__(self, index: int) -> float:
        time.sleep(0.002)  # planted
        return sys.getswitchinterval()


SHORT_LINE = Short.__getitem__.__code__.co_firstlineno + 1
PLANTED_LINE = Planted.__getitem__.__code__.co_firstlineno + 1


def loader_of(block: WorkerBlock, method: str, data: Dataset) -> DataLoader:
    probe = WorkerProbe(None, block)
    return DataLoader(
        data, batch_size=None, num_workers=block.workers, worker_init_fn=probe, multiprocessing_context=method
    )


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_that_is_asked_tells_its_line(method):
    block = WorkerBlock(1)
    batches = iter(loader_of(block, method, Planted()))
    usual, *running = next(batches)
    assert "telemetry-lines" not in running
    assert block.sampled() == []
    session = now_ns()
    block.ask_samples(session, session + 600 * NS)

    def enough():
        next(batches)
        return [
            lines
            for found in block.sampled()
            if found.session == session and (lines := line_shares(StackProfile.unpacked(found.content), FETCH))
        ]

    ((first, *_),) = wait_for(enough, 60)
    assert (first.file, first.line, first.calls) == (__file__, PLANTED_LINE, None)
    assert first.share > 0.5
    wait_for(lambda: next(batches)[0] == pytest.approx(SWITCH_SECONDS))
    assert "telemetry-lines" in next(batches)
    block.ask_samples(session, 1)
    wait_for(lambda: next(batches) == [usual, *running])


def test_a_new_session_forgets_the_one_before():
    block = WorkerBlock(1)
    batches = iter(loader_of(block, "fork", Planted()))

    def sampled_in(session):
        next(batches)
        return [found for found in block.sampled() if found.session == session]

    block.ask_samples(1, now_ns() + 600 * NS)
    (first,) = wait_for(lambda: sampled_in(1))
    block.ask_samples(2, now_ns() + 600 * NS)
    (second,) = wait_for(lambda: sampled_in(2))
    assert second.began_ns > first.began_ns
    assert second.pid == first.pid


def test_a_worker_of_short_fetches_rests_most_of_the_time():
    """With the switch interval of the process, which costs least. Its line is told nevertheless."""
    block = WorkerBlock(1)
    batches = iter(loader_of(block, "fork", Short()))
    usual = next(batches)
    block.ask_samples(1, now_ns() + 600 * NS)
    intervals = []

    def named():
        intervals.append(next(batches))
        return [
            lines for found in block.sampled() if (lines := line_shares(StackProfile.unpacked(found.content), FETCH))
        ]

    ((first, *_),) = wait_for(named, 60)
    assert (first.file, first.line) == (__file__, SHORT_LINE)
    assert min(intervals) == pytest.approx(SWITCH_SECONDS)
    assert intervals.count(usual) > len(intervals) / 2


# -- the switch interval, in a process ---------------------------------------------------------------------------


@pytest.fixture
def interval():
    before = sys.getswitchinterval()
    yield before
    restore_switch_interval("lines")
    sys.setswitchinterval(before)


def test_an_interval_that_other_code_has_set_stays(interval):
    shorten_switch_interval("lines")
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    sys.setswitchinterval(2 * interval)
    restore_switch_interval("lines")
    assert sys.getswitchinterval() == pytest.approx(2 * interval)


def test_the_interval_stays_short_while_somebody_needs_it(interval):
    shorten_switch_interval("lines")
    shorten_switch_interval("agent")
    restore_switch_interval("lines")
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    restore_switch_interval("agent")
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_forked_child_has_the_usual_interval(interval):
    shorten_switch_interval("lines")
    pid = os.fork()
    if not pid:
        os._exit(0 if abs(sys.getswitchinterval() - interval) < 1e-6 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_sample_that_a_c_call_delayed_stands_for_the_delay_too():
    times = SampleTimes(0.01)
    at_once, late = times.weight_ns(5 * NS, 5 * NS), times.weight_ns(5 * NS, 5 * NS + NS // 4)
    assert at_once == NS // 100
    assert late == at_once + NS // 4
    assert times.weight_ns(0, 3600 * NS) < 60 * NS  # the process was stopped


def test_a_worker_with_many_fetches_per_second_is_sampled_in_bursts():
    """The rest makes up for the part of the time: fetches that are sampled are about as many as with few per second."""
    for rate, part in ((5, 1.0), (12.5, 1.0), (25, 0.5), (125, 0.1), (1000, 0.1)):
        times = SampleTimes(0.01)
        bursts = SampleBursts(times, 0, 7)
        bursts.begin(2 * NS, 7 + 2 * rate)
        assert times.max_share == MAX_SHARE, "unless these are its first samples"
        times.samples, times.part = FIRST_SAMPLES, 1.0
        bursts = SampleBursts(times, 0, 7)
        usual, share = times.weight_ns(0, 0), times.max_share
        assert bursts.rest(NS // 100) is None
        assert bursts.rest(NS // 5) == 0, "the rate is not known yet"
        bursts.begin(2 * NS, 7 + 2 * rate)
        assert times.part == pytest.approx(part)
        assert times.weight_ns(0, 0) == pytest.approx(usual / part)
        assert bursts.rest(2 * NS + NS // 100) is None
        rests = [bursts.rest(2 * NS + NS // 10) for _ in range(1000)]
        assert sum(rests) / len(rests) == pytest.approx(0.1 / part - 0.1, rel=0.1)
        assert (len(set(rests)) > 900) == (part < 1)
        assert times.max_share + part * rate * 0.0004 < 0.01 or rate > 125
        assert times.max_share <= share
        bursts.begin(3 * NS, 7 + 3 * rate)
        assert times.part == pytest.approx(part)
        bursts.begin(3 * NS + NS // 10, 7 + 3 * rate)
        assert times.part == pytest.approx(part, rel=0.05), "a moment without a fetch changes it by little"


def test_gaps_are_random_and_their_mean_is_the_weight():
    times = SampleTimes(0.01)
    gaps = [times.gap() for _ in range(20_000)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.01, rel=0.05)
    assert len(set(gaps)) > 19_000


def test_gaps_grow_until_samples_cost_less_than_1_percent(monkeypatch):
    """Samples of 1 ms of CPU, and then of 0.01 ms."""
    spent = iter([*range(0, 101_000_000, 1_000_000), *range(100_010_000, 2_000_000_000, 10_000)])
    monkeypatch.setattr(sample_times, "thread_time_ns", lambda: next(spent))
    times = SampleTimes(0.01)
    for _ in range(100):
        times.taken()
    mean = times.weight_ns(0, 0) / NS
    assert 0.1 < mean < 1  # less than 1 % of a core, and not much less
    gaps = [times.gap() for _ in range(20_000)]
    assert sum(gaps) / len(gaps) == pytest.approx(mean, rel=0.05)
    for _ in range(50_000):
        times.taken()
    assert times.weight_ns(0, 0) < NS * mean / 10  # the samples have become cheap
    assert times.weight_ns(0, 0) >= NS / 100


# -- on the agent thread -----------------------------------------------------------------------------------------


def test_threads_that_fetch_are_sampled_as_workers():
    """As the workers of a loader that uses threads, or that reads ahead."""
    over = threading.Event()

    def read_ahead() -> None:
        for _ in DataLoader(Planted(), batch_size=None):
            if over.is_set():
                return

    thread = threading.Thread(target=read_ahead)
    thread.start()
    sampler = LineSampler(at_work(stepping=False))
    sampler.want(frozenset({FETCH}))

    def lines():
        due = now_ns()
        time.sleep(sampler.gap())
        sampler.sample(due)
        return line_shares(sampler.profiles.get(FETCH, StackProfile()), FETCH)

    try:
        first = wait_for(lines, 60)[0]
    finally:
        sampler.want(frozenset())
        over.set()
        thread.join()
    assert (first.file, first.line) == (__file__, PLANTED_LINE)


# -- which line --------------------------------------------------------------------------------------------------------

MS = 1_000_000
GAP_MS = 10


def stack(line: int) -> tuple[Spot, ...]:
    return (Spot("/home/me/train.py", line, "item", "__main__"),)


def sampled(*lines: tuple[int, int, int, int]) -> dict[int, int]:
    """Milliseconds of each line, given (line, samples in time, late samples, ms that these are late in the mean)."""
    samples = AttributedSamples()
    for line, in_time, late, delay in lines:
        for _ in range(in_time):
            samples.add(stack(line), GAP_MS * MS, 0, delay_ns=MS // 10, waits=1, fetch=1)
        for _ in range(late):
            samples.add(stack(line), (GAP_MS + delay) * MS, 0, delay_ns=delay * MS, waits=LATE_WAITS, fetch=1)
    profile = samples.profile()
    assert profile.samples == sum(in_time + late for _, in_time, late, _ in lines)
    return {spot.line: wall // MS for (spot,), (wall, *_) in profile.times.items()}


# The call of line 1 takes 24 ms. Late samples of other lines count for it where they may have waited for it.
LATE = {
    "a line that waits, 15 ms: another thread got the GIL first in a third of the cases": (
        ((1, 10, 100, 13), (2, 90, 50, 13)),
        {1: 10 * 10 + 150 * 23, 2: 900},
    ),
    "two calls get their parts": (
        ((1, 5, 60, 13), (2, 3, 30, 13), (3, 200, 30, 13)),
        {1: 50 + 80 * 23, 2: 30 + 40 * 23, 3: 2000},
    ),
    "the next line of the function: the first at which Python looks whether another thread waits": (
        ((1, 5, 100, 13), (2, 1, 20, 13), (3, 50, 0, 0)),
        {1: 50 + 120 * 23, 2: 10, 3: 500},
    ),
    "the next line is a shorter call": (
        ((1, 5, 100, 13), (2, 10, 20, 4)),
        {1: 50 + 100 * 23, 2: 100 + 20 * 14},
    ),
    "the next line is mostly a little late, and at times as late as the call": (
        ((1, 1, 60, 18), (2, 2, 2, 18), (2, 0, 4, 2)),
        {1: 10 + 62 * 28, 2: 20 + 4 * 12},
    ),
    "the next line is a shorter call, some of whose samples are as late: nothing tells whose they are": (
        ((1, 1, 60, 18), (2, 1, 2, 18), (2, 0, 20, 6)),
        {1: 10 + 60 * 28, 2: 10 + 2 * 28 + 20 * 16},
    ),
    "Python code that is late since others wait, too": (
        ((1, 5, 60, 13), (2, 100, 30, 2)),
        {1: 50 + 60 * 23, 2: 1000 + 30 * 12},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), LATE.values(), ids=LATE)
def test_late_samples_count_for_the_call_that_held_the_gil(lines, expected):
    assert sampled(*lines) == expected


def test_the_line_behind_a_call_of_another_function_gets_none_of_its_time():
    """The call takes 24 ms. Where its samples are seen does not depend on how late they are."""
    call = Spot("train.py", 9, "decode", "m"), Spot("train.py", 3, "item", "m")
    behind, waits = (Spot("train.py", 4, "item", "m"),), (Spot("train.py", 5, "item", "m"),)
    samples = AttributedSamples()
    for seen, rounds in ((call, 12), (behind, 3), (waits, 5)):
        for delay in range(2, 24, 2):
            for _ in range(rounds):
                wall = (GAP_MS + delay) * MS
                samples.add(seen, wall, wall, delay_ns=delay * MS, waits=2 * delay, fetch=1)
    for _ in range(100):
        samples.add(waits, GAP_MS * MS, 0, delay_ns=0, waits=0, fetch=1)
    times = {seen: time.wall_ns // MS for seen, time in samples.profile().times.items()}
    assert times[waits] == pytest.approx(100 * GAP_MS, rel=0.02)
    assert times[behind] < GAP_MS
    assert times[call] == pytest.approx(20 * sum(GAP_MS + delay for delay in range(2, 24, 2)), rel=0.01)


def test_a_call_that_is_not_on_the_next_line_keeps_its_time():
    """Every third item is packed, too, in a call as long as the first."""
    call = Spot("train.py", 9, "decode", "m"), Spot("train.py", 3, "item", "m")
    behind, rarer = (Spot("train.py", 4, "item", "m"),), (Spot("train.py", 8, "item", "m"),)
    samples = AttributedSamples()
    for seen, rounds in ((call, 12), (behind, 2), (rarer, 4)):
        for delay in range(2, 24, 2):
            for _ in range(rounds):
                wall = (GAP_MS + delay) * MS
                samples.add(seen, wall, wall, delay_ns=delay * MS, waits=2 * delay, fetch=1)
    once = sum(GAP_MS + delay for delay in range(2, 24, 2))
    times = {seen: time.wall_ns / MS / once for seen, time in samples.profile().times.items()}
    assert times == {
        call: pytest.approx(13.5, rel=0.01),
        behind: pytest.approx(0, abs=0.1),
        rarer: pytest.approx(4.5, rel=0.01),
    }


@pytest.mark.parametrize("lines", [((1, 100, 20, 5), (2, 90, 50, 13)), ((1, 100, 0, 0), (2, 90, 2, 13))])
def test_without_a_call_that_holds_it_each_line_keeps_its_samples(lines):
    assert sampled(*lines) == {line: in_time * 10 + late * (10 + delay) for line, in_time, late, delay in lines}


def test_a_line_that_waits_gets_no_cpu_time_of_the_line_before_it():
    """In each fetch line 1 computes for 10 ms, and line 2 waits for 30."""
    samples = AttributedSamples()
    for fetch in range(20):
        for line, on_core in ((1, 0.2), (1, 1.0), (2, 0.8), (2, 0.0), (2, 0.0)):
            cpu_ns = int(on_core * GAP_MS * MS)
            samples.add(stack(line), GAP_MS * MS, cpu_ns, delay_ns=0, waits=0, fetch=fetch)
    assert samples.profile().times == {stack(1): (400 * MS, 400 * MS, 0), stack(2): (600 * MS, 0, 0)}


def test_python_code_that_others_wait_for_is_on_a_core():
    samples = AttributedSamples()
    for fetch in range(20):
        samples.add(stack(1), GAP_MS * MS, 4 * MS, delay_ns=0, waits=1, fetch=fetch)
    assert samples.profile().times == {stack(1): (200 * MS, 200 * MS, 200 * MS)}


def test_the_first_sample_of_a_fetch_says_nothing_about_its_line():
    """The CPU time before it is that of the fetch before."""
    samples = AttributedSamples()
    for fetch in range(20):
        samples.add(stack(1), GAP_MS * MS, 4 * MS, delay_ns=0, waits=0, fetch=fetch)
    assert samples.profile().times == {stack(1): (200 * MS, 80 * MS, 0)}, "as long as nothing else tells"
    for fetch in range(20, 25):
        samples.add(stack(1), GAP_MS * MS, 4 * MS, delay_ns=0, waits=0, fetch=fetch)
        samples.add(stack(1), GAP_MS * MS, 0, delay_ns=0, waits=0, fetch=fetch)
    assert samples.profile().times == {stack(1): (300 * MS, 0, 0)}


def in_turns(*lines: tuple[int, int, int], on_core: float = 0.5) -> dict[int, int]:
    """Milliseconds of each line, given (line, samples that did not wait for the GIL, samples that did)."""
    samples = AttributedSamples()
    for line, free, waited in lines:
        for waits in (*[0] * free, *[1] * waited):
            samples.add(stack(line), GAP_MS * MS, int(on_core * GAP_MS * MS), delay_ns=0, waits=waits, fetch=1)
    return {spot.line: wall // MS for (spot,), (wall, *_) in samples.profile().times.items()}


# Line 1 is Python code, the last line a read behind it.
TURNS = {
    "for the code that made them wait": (((1, 0, 30), (2, 1, 10), (3, 100, 8)), {1: 300 + 60, 2: 110 + 20, 3: 1000}),
    "at most half of its time": (((1, 0, 10), (2, 100, 20)), {1: 150, 2: 1150}),
    "at most half of its time, of each": (((1, 0, 10), (2, 0, 90), (3, 400, 90)), {1: 150, 2: 1350, 3: 4900 - 500}),
    "not if both hold the GIL at times": (((1, 0, 30), (2, 100, 40)), {1: 300, 2: 1400}),
    "not if neither holds it most of the time": (((1, 20, 10), (2, 100, 8)), {1: 300, 2: 1080}),
    "not from too few samples": (((1, 0, 3), (2, 100, 8)), {1: 30, 2: 1080}),
}


@pytest.mark.parametrize(("lines", "expected"), TURNS.values(), ids=TURNS)
def test_samples_that_waited_their_turn_count(lines, expected):
    assert in_turns(*lines) == expected


def test_code_that_is_not_on_a_core_does_not_hold_the_gil():
    """It waits, perhaps for the thread that does."""
    assert in_turns((1, 0, 30), (2, 100, 8), on_core=0.1) == {1: 300, 2: 1080}


def test_a_line_that_waits_for_who_holds_the_gil_does_not_hold_it():
    """Line 1 computes for 8 ms, and others hold the GIL while line 2 waits for them for 8 ms."""
    samples = AttributedSamples()
    for fetch in range(40):
        for line, on_core in ((1, 1.0), (2, 0.7), (2, 0.0)):
            cpu_ns = int(on_core * GAP_MS * MS)
            samples.add(stack(line), GAP_MS * MS, cpu_ns, delay_ns=0, waits=1, fetch=fetch)
    assert samples.profile().times[stack(2)] == (800 * MS, 0, 0)


def test_a_call_that_is_sampled_late_holds_the_gil():
    samples = AttributedSamples()
    for waits in (1, *[LATE_WAITS] * 9, *[0] * 10):
        late = waits == LATE_WAITS
        samples.add(stack(1 if waits else 2), GAP_MS * MS, GAP_MS * MS, delay_ns=20 * MS * late, waits=waits, fetch=1)
    assert {spot.line: time.gil_ns // MS for (spot,), time in samples.profile().times.items()} == {1: 100, 2: 0}


def test_waits_of_a_thread_are_counted():
    before = thread_waits()
    for _ in range(5):
        time.sleep(0.001)
    assert thread_waits() - before >= 5


def test_a_worker_notices_that_a_call_held_the_gil(monkeypatch):
    numbers = [(i * 7919) % 1000003 for i in range(400_000)]
    waited, fetches = [], set()

    class Recording(AttributedSamples):
        def add(self, stack, wall_ns, cpu_ns, *, delay_ns, waits, fetch) -> None:
            waited.append(waits)
            fetches.add(fetch)

    monkeypatch.setattr(worker_lines, "AttributedSamples", Recording)
    monkeypatch.setattr(worker_lines, "fetch_part", lambda stack: stack)
    block = WorkerBlock(1)
    block.ask_samples(1, now_ns() + 600 * NS)
    block.counters(0).fetching_since_ns = 1
    WorkerSampler(block, 0).ask()
    (thread,) = [each for each in threads._running.values() if each.name == "telemetry-lines"]
    try:
        wait_for(lambda: sorted(numbers) and max(waited, default=0) >= LATE_WAITS, 60)
    finally:
        block.ask_samples(1, 1)
        thread.join(60)
    assert not thread.is_alive()
    assert fetches == {1}, "the first one since samples were asked for"


# -- on the agent thread -----------------------------------------------------------------------------------------


def test_what_holds_up_another_wake_up_counts_as_well():
    """The agent thread has more to do than sample. What is due then may be as late as a sample."""
    sampler = LineSampler(at_work())
    sampler.late(now_ns() - NS)
    sampler.sample(now_ns())
    assert sampler.gap() == float("inf")
    sampler.want(frozenset({WAIT}))
    sampler.sample(now_ns())
    assert sampler.profiles == {}, "nothing is sampled that is not wanted"
    sampler.want(frozenset({STEP}))
    try:
        sampler.late(now_ns())
        assert sampler.profiles == {}
        sampler.late(now_ns() - NS)
        ((seen, (wall, *_)),) = sampler.profiles["step"].times.items()
        assert sampler.profiles["step"].samples == 0
    finally:
        sampler.want(frozenset())
    assert sys._getframe().f_code.co_name in {spot.function for spot in seen}
    assert NS <= wall < 2 * NS


def test_what_other_wake_ups_cost_makes_samples_no_rarer(monkeypatch):
    spent = SimpleNamespace(ns=0)
    monkeypatch.setattr(sample_times, "thread_time_ns", lambda: spent.ns)
    sampler = LineSampler(at_work())
    sampler.want(frozenset({STEP}))
    try:
        usual = sampler._times.weight_ns(0, 0)
        for _ in range(10):
            sampler.gap()
            spent.ns += 50 * MS
            sampler.late(now_ns() - NS)
        sampler.gap()
        spent.ns += MS // 10
        sampler.sample(now_ns())
        assert sampler._times.weight_ns(0, 0) == usual
        sampler.gap()
        spent.ns += 50 * MS
        sampler.sample(now_ns())
        assert sampler._times.weight_ns(0, 0) > usual
    finally:
        sampler.want(frozenset())


class NeverDue(LineSampler):
    """Samples are due in a thousand seconds. Tells how late the agent thread was with anything else."""

    def __init__(self) -> None:
        super().__init__(at_work())
        self.due: list[int] = []

    def gap(self) -> float:
        return 1000.0

    def late(self, due_ns: int) -> None:
        self.due.append(due_ns)


@pytest.mark.parametrize("alone", [True, False])
def test_the_end_of_a_wait_may_be_late_as_well(alone):
    lines, errors = NeverDue(), ErrorLog()

    class Often:
        sample_seconds = 0.002

    class Threads:
        def sample(self) -> None:
            pass

    ends = now_ns() + NS // 5
    steps = StepSampler(StepTracker(Ring()))
    between = BetweenTicks(1.0, Often(), Threads(), lines, steps=steps, errors=errors, turns=GilTurns())
    between.wait_until(ends, alone=alone)
    assert errors.counts == {}
    assert ends - 3 * MS < lines.due[-1] < ends + 10 * NS, "the next wake-up would be due at most 3 ms later"
    assert (len(lines.due) > 1) is not alone


# -- the training thread -----------------------------------------------------------------------------------------------


class Backward:
    """A thread that goes back through large products until it is told to end."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        torch.set_num_threads(1)
        while not self.over.is_set():
            a = torch.rand(700, 700, requires_grad=True)
            loss = (a @ a @ a).sum()
            loss.backward()


@pytest.fixture
def backward():
    made = Backward()
    yield made
    made.over.set()
    made.thread.join()


def seen(sampler: ThreadSampler, what) -> bool:
    sampler.sample()
    return what(sampler.take())


def test_a_backward_pass_that_computes_waits_for_no_other_rank(backward):
    sampler = ThreadSampler(at_work(backward.thread))
    line = Backward.run.__code__.co_firstlineno + 5
    place = f"run (test_sampling.py:{line})"
    assert wait_for(lambda: seen(sampler, lambda now: (now.in_sync, now.where) == (0, place)))


def test_a_backward_pass_that_is_on_no_core_waits_for_the_others(backward):
    sampler = ThreadSampler(at_work(backward.thread, device=0))  # there it may spin on a core
    assert wait_for(lambda: seen(sampler, lambda now: now.in_sync == 1))


def test_a_thread_that_waits_is_not_running():
    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    try:
        assert wait_for(lambda: not is_running(waiting.native_id))
    finally:
        over.set()
        waiting.join()
    assert wait_for(lambda: not is_running(waiting.native_id))  # it is gone


# -- turns of the GIL --------------------------------------------------------------------------------------------------


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
        return abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6


@pytest.fixture
def thread(monkeypatch):
    usual, thread = sys.getswitchinterval(), Thread()
    monkeypatch.setattr(gil, "now_ns", lambda: thread.now)
    monkeypatch.setattr(gil, "thread_waits", lambda: thread.waits)
    yield thread
    thread.turns.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


LATE_AGAIN = [(2, 500, True), (61, 10, False), (2, 500, True), (61, 10, True), (60, 10, False)]
NO_HELP = [(2, 500, True), (2, 4000, False), *[(100, 4000, False)] * 30, (700, 10, False), (2, 500, True)]


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([(0.1, 30, False)], id="other threads had their turns"),
        pytest.param([(30, 1, False)], id="a hung file system is no wait for the GIL"),
        pytest.param([(2, 500, True), *[(1, 10, True)] * 55, *[(1, 10, None)] * 9, (1, 10, False)], id="for a while"),
        pytest.param(LATE_AGAIN, id="for longer if it is needed again"),
        pytest.param(NO_HELP, id="C calls of seconds hold the GIL: not again for an hour"),
    ],
)
def test_a_long_wait_for_the_gil_shortens_the_interval(thread, moments):
    """Moments: how long a piece of work took, how often the thread woke meanwhile, and whether it is short then."""
    for seconds, wakes, short in moments:
        thread.wait(seconds, wakes=wakes)
        assert short is None or thread.short is short, (seconds, wakes)


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


def test_it_is_looked_at_while_spans_are_counted(thread, monkeypatch):
    """Until then each chunk takes 0.2 s, in which the thread wakes 20 times."""
    tracker = StepTracker(Ring())
    for number in range(500):
        tracker.ring.push(number, number + 1, ring.STEP)

    def turn(_):
        thread.now += 0 if thread.short else NS // 5
        thread.waits += 20

    monkeypatch.setattr("telemetry.agent.accounting.sleep", turn)
    accounting = Accounting(tracker, SimpleNamespace(clock=None), Config(), ErrorLog(), now_ns())
    thread.turns = accounting.turns
    thread.turns.begin()
    accounting.update()
    assert thread.short


def test_the_agent_says_how_late_its_thread_is(tmp_path, monkeypatch):
    """Its clock goes forward by two seconds at each look, in which the thread has waited a hundred times."""
    looks, told = itertools.count(), threading.Event()
    monkeypatch.setattr(gil, "now_ns", lambda: now_ns() + 2 * NS * next(looks))
    monkeypatch.setattr(gil, "thread_waits", lambda: 100 * next(looks))
    monkeypatch.setattr(gil, "shorten_switch_interval", lambda _: told.set())
    telemetry.start(tmp_path, port="off", start_line=False)
    try:
        assert told.wait(60)
    finally:
        telemetry.stop()
