"""Which line a sample counts for: the one that held the GIL, or the one that the thread had reached meanwhile."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from telemetry.agent.agent import BetweenTicks
from telemetry.attach import worker_line_sampler
from telemetry.collect.line_sampler import LineSampler
from telemetry.core.sample_attribution import LATE_WAITS, AttributedSamples, thread_waits
from telemetry.util import threads
from telemetry.util.clock import NS, now_ns
from telemetry.util.errors import ErrorLog
from telemetry.util.stacks import Spot
from tests.running_agent import wait_for

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


def test_a_line_that_waits_gives_late_samples_back_to_the_call():
    """A call of 24 ms, and then 15 ms of sleep. Another thread got the GIL first in a third of the cases."""
    assert sampled((1, 10, 100, 13), (2, 90, 50, 13)) == {1: 10 * 10 + 150 * 23, 2: 900}


def test_two_calls_that_hold_the_gil_get_their_parts():
    assert sampled((1, 5, 60, 13), (2, 3, 30, 13), (3, 200, 30, 13)) == {1: 50 + 80 * 23, 2: 30 + 40 * 23, 3: 2000}


def test_the_next_line_of_the_function_is_no_call_that_holds_it():
    """It is the first at which Python looks whether another thread waits."""
    assert sampled((1, 5, 100, 13), (2, 1, 20, 13), (3, 50, 0, 0)) == {1: 50 + 120 * 23, 2: 10, 3: 500}
    shorter_call = ((1, 5, 100, 13), (2, 10, 20, 4))
    assert sampled(*shorter_call) == {1: 50 + 100 * 23, 2: 100 + 20 * 14}


def test_the_next_line_may_have_waited_for_others_as_well():
    """Most of its late samples are a little late, and some as late as the call."""
    assert sampled((1, 1, 60, 18), (2, 2, 2, 18), (2, 0, 4, 2)) == {1: 10 + 62 * 28, 2: 20 + 4 * 12}


def test_the_next_line_may_be_a_shorter_call():
    """Then its longest samples stay there: nothing tells whose they are."""
    assert sampled((1, 1, 60, 18), (2, 1, 2, 18), (2, 0, 20, 6)) == {1: 10 + 60 * 28, 2: 10 + 2 * 28 + 20 * 16}


def test_python_code_that_is_late_since_others_wait_too_keeps_its_samples():
    assert sampled((1, 5, 60, 13), (2, 100, 30, 2)) == {1: 50 + 60 * 23, 2: 1000 + 30 * 12}


@pytest.mark.parametrize("lines", [((1, 100, 20, 5), (2, 90, 50, 13)), ((1, 100, 0, 0), (2, 90, 2, 13))])
def test_without_a_call_that_holds_it_each_line_keeps_its_samples(lines):
    assert sampled(*lines) == {line: in_time * 10 + late * (10 + delay) for line, in_time, late, delay in lines}


def test_of_too_many_stacks_no_sample_is_lost():
    assert len(sampled(*((line, 1, 0, 0) for line in range(700)))) == 500


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


def test_samples_that_waited_count_for_the_code_that_made_them_wait():
    """Lines 1 and 2 are Python code, line 3 is a read behind them."""
    assert in_turns((1, 0, 30), (2, 1, 10), (3, 100, 8)) == {1: 300 + 60, 2: 110 + 20, 3: 1000}


@pytest.mark.parametrize(
    "lines",
    [((1, 0, 30), (2, 100, 40)), ((1, 20, 10), (2, 100, 8)), ((1, 0, 3), (2, 100, 8))],
    ids=["both hold the GIL at times", "neither holds it most of the time", "too few samples"],
)
def test_else_samples_that_waited_stay_where_they_are(lines):
    assert in_turns(*lines) == {line: GAP_MS * (free + waited) for line, free, waited in lines}


def test_code_that_is_not_on_a_core_does_not_hold_the_gil():
    """It waits, perhaps for the thread that does."""
    assert in_turns((1, 0, 30), (2, 100, 8), on_core=0.1) == {1: 300, 2: 1080}


def test_code_gets_at_most_half_of_its_time_back():
    """Then another thread may be what the samples waited for."""
    assert in_turns((1, 0, 10), (2, 100, 20)) == {1: 150, 2: 1150}
    assert in_turns((1, 0, 10), (2, 0, 90), (3, 400, 90)) == {1: 150, 2: 1350, 3: 4900 - 500}


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
    waited, fetches, over = [], set(), threading.Event()

    class Recording(AttributedSamples):
        def add(self, stack, wall_ns, cpu_ns, *, delay_ns, waits, fetch) -> None:
            waited.append(waits)
            fetches.add(fetch)

    class Area:
        def write(self, *profile) -> None:
            pass

    monkeypatch.setattr(worker_line_sampler, "AttributedSamples", Recording)
    monkeypatch.setattr(worker_line_sampler, "fetch_part", lambda stack: stack)
    until = now_ns() + 600 * NS
    worker_line_sampler.WorkerSampler(lambda: (1, 1 if over.is_set() else until), lambda: True, Area()).ask()
    (thread,) = [each for each in threads._running.values() if each.name == "telemetry-lines"]
    try:
        wait_for(lambda: sorted(numbers) and max(waited, default=0) >= LATE_WAITS, 60)
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive()
    assert fetches == {1}, "the first one since samples were asked for"


# -- on the agent thread -----------------------------------------------------------------------------------------


def test_what_holds_up_another_wake_up_counts_as_well():
    """The agent thread has more to do than sample. What is due then may be as late as a sample."""
    sampler = LineSampler(threading.get_ident, lambda: "step")
    sampler.late(now_ns() - NS)
    assert sampler.profiles == {}
    sampler.want(frozenset({"step"}))
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


class NeverDue(LineSampler):
    """Samples are due in a thousand seconds. Tells how late the agent thread was with anything else."""

    def __init__(self) -> None:
        super().__init__(threading.get_ident, lambda: None)
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
    BetweenTicks(1.0, Often(), Threads(), lines, errors).wait_until(ends, alone=alone)
    assert errors.counts == {}
    assert ends - 3 * MS < lines.due[-1] < ends + 10 * NS, "the next wake-up would be due at most 3 ms later"
    assert (len(lines.due) > 1) is not alone
