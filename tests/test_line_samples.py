"""Sampling the line: in the workers of a DataLoader, on threads that fetch, and the switch interval meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
from torch.utils.data import DataLoader, Dataset

from telemetry.attach.worker_block import WorkerBlock
from telemetry.attach.worker_probe import WorkerProbe
from telemetry.collect.line_sampler import FETCH, LineSampler
from telemetry.core import sample_times
from telemetry.core.stack_profile import StackProfile
from telemetry.core.switch_interval import SWITCH_SECONDS, restore_switch_interval, shorten_switch_interval
from telemetry.diagnosis import lines as work
from telemetry.diagnosis.lines import line_shares
from telemetry.util import threads
from telemetry.util.clock import NS, now_ns
from tests.running_agent import wait_for

# -- in the workers ----------------------------------------------------------------------------------------------


NUMBERS = [(i * 7919) % 1000003 for i in range(400_000)]


class Planted(Dataset):
    """Each batch: a long C call that holds the GIL, a short wait, and the names of our threads in the worker."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[str, ...]:
        sorted(NUMBERS)  # planted
        time.sleep(0.001)
        return tuple(threads.running())


class Planted2(Planted):
    """The same in another class, whose interval is told too."""

    def __getitem__(self, index: int) -> float:
        super().__getitem__(index)
        return sys.getswitchinterval()


class Short(Dataset):
    """Fetches of 2 ms, which tell the switch interval."""

    def __len__(self) -> int:
        return 1_000_000

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
    assert "telemetry-lines" not in next(batches)
    assert block.sampled() == []
    session = now_ns()
    block.ask_samples(session, session + 600 * NS)

    def enough():
        next(batches)
        return [
            lines
            for found in block.sampled()
            if found.session == session and (lines := line_shares(StackProfile.unpacked(found.content), work.FETCH))
        ]

    ((first, *_),) = wait_for(enough, 60)
    assert (first.file, first.line, first.calls) == (__file__, PLANTED_LINE, None)
    assert first.share > 0.5
    wait_for(lambda: "telemetry-lines" in next(batches))
    block.ask_samples(session, 1)
    wait_for(lambda: "telemetry-lines" not in next(batches))


def test_workers_that_are_not_asked_do_nothing():
    block = WorkerBlock(2)
    batches = iter(loader_of(block, "fork", Planted()))
    seen = {name for _ in range(20) for name in next(batches)}
    assert "telemetry-lines" not in seen
    assert block.sampled() == []


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


def test_the_switch_interval_of_a_worker_is_restored():
    block = WorkerBlock(1)
    batches = iter(loader_of(block, "fork", Planted2()))
    usual = next(batches)
    block.ask_samples(1, now_ns() + 600 * NS)
    wait_for(lambda: next(batches) == pytest.approx(SWITCH_SECONDS))
    block.ask_samples(1, 1)
    wait_for(lambda: next(batches) == usual)


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
            lines
            for found in block.sampled()
            if (lines := line_shares(StackProfile.unpacked(found.content), work.FETCH))
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
    times = sample_times.SampleTimes(0.01)
    at_once, late = times.weight_ns(5 * NS, 5 * NS), times.weight_ns(5 * NS, 5 * NS + NS // 4)
    assert at_once == NS // 100
    assert late == at_once + NS // 4
    assert times.weight_ns(0, 3600 * NS) < 60 * NS  # the process was stopped


def test_a_worker_with_many_fetches_per_second_is_sampled_in_bursts():
    """The rest makes up for the part of the time: fetches that are sampled are about as many as with few per second."""
    for rate, part in ((5, 1.0), (12.5, 1.0), (25, 0.5), (125, 0.1), (1000, 0.1)):
        times = sample_times.SampleTimes(0.01)
        bursts = sample_times.SampleBursts(times, 0, 7)
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
    times = sample_times.SampleTimes(0.01)
    gaps = [times.gap() for _ in range(20_000)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.01, rel=0.05)
    assert len(set(gaps)) > 19_000


def test_gaps_grow_until_samples_cost_less_than_1_percent(monkeypatch):
    """Samples of 1 ms of CPU, and then of 0.01 ms."""
    spent = iter([*range(0, 101_000_000, 1_000_000), *range(100_010_000, 2_000_000_000, 10_000)])
    monkeypatch.setattr(sample_times, "thread_time_ns", lambda: next(spent))
    times = sample_times.SampleTimes(0.01)
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
    sampler = LineSampler(lambda: threading.get_ident(), lambda: None)
    sampler.want(frozenset({FETCH}))

    def lines():
        due = now_ns()
        time.sleep(sampler.gap())
        sampler.sample(due)
        return line_shares(sampler.profiles.get(FETCH, StackProfile()), work.FETCH)

    try:
        first = wait_for(lines)[0]
    finally:
        sampler.want(frozenset())
        over.set()
        thread.join()
    assert (first.file, first.line) == (__file__, PLANTED_LINE)


def test_nothing_is_sampled_that_is_not_wanted():
    sampler = LineSampler(threading.get_ident, lambda: work.STEP)
    assert sampler.gap() == float("inf")
    sampler.want(frozenset({work.WAIT}))
    sampler.sample(now_ns())
    sampler.want(frozenset())
    sampler.sample(now_ns())
    assert sampler.profiles == {}
