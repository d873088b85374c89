"""Whose late samples are: of a line that held the GIL, or of the line that the thread had reached meanwhile."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from telemetry.agent.between_ticks import BetweenTicks
from telemetry.attach import worker_line_sampler
from telemetry.collect.line_sampler import LineSampler
from telemetry.core.clock import NS, now_ns
from telemetry.core.errors import ErrorLog
from telemetry.core.late_samples import LATE_WAITS, LateSamples, thread_waits
from telemetry.core.stacks import Spot
from tests.running_agent import wait_for

MS = 1_000_000
GAP_MS = 10


def stack(line: int) -> tuple[Spot, ...]:
    return (Spot("/home/me/train.py", line, "item", "__main__"),)


def sampled(*lines: tuple[int, int, int, int]) -> dict[int, int]:
    """Milliseconds of each line, given (line, samples in time, late samples, ms that these are late in the mean)."""
    samples = LateSamples()
    for line, in_time, late, delay in lines:
        for _ in range(in_time):
            samples.add(stack(line), GAP_MS * MS, 0, delay_ns=MS // 10, waits=1)
        for _ in range(late):
            samples.add(stack(line), (GAP_MS + delay) * MS, 0, delay_ns=delay * MS, waits=LATE_WAITS)
    profile = samples.profile()
    assert profile.samples == sum(in_time + late for _, in_time, late, _ in lines)
    return {spot.line: wall // MS for (spot,), (wall, _) in profile.times.items()}


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


def test_python_code_that_is_late_since_others_wait_too_keeps_its_samples():
    assert sampled((1, 5, 60, 13), (2, 100, 30, 2)) == {1: 50 + 60 * 23, 2: 1000 + 30 * 12}


@pytest.mark.parametrize("lines", [((1, 100, 20, 5), (2, 90, 50, 13)), ((1, 100, 0, 0), (2, 90, 2, 13))])
def test_without_a_call_that_holds_it_each_line_keeps_its_samples(lines):
    assert sampled(*lines) == {line: in_time * 10 + late * (10 + delay) for line, in_time, late, delay in lines}


def test_of_too_many_stacks_no_sample_is_lost():
    assert len(sampled(*((line, 1, 0, 0) for line in range(700)))) == 500


def test_waits_of_a_thread_are_counted():
    before = thread_waits()
    for _ in range(5):
        time.sleep(0.001)
    assert thread_waits() - before >= 5


def test_a_worker_notices_that_a_call_held_the_gil(monkeypatch):
    numbers = [(i * 7919) % 1000003 for i in range(400_000)]
    waited, over = [], threading.Event()

    class Recording(LateSamples):
        def add(self, stack, wall_ns, cpu_ns, *, delay_ns, waits) -> None:
            waited.append(waits)

    class Area:
        def write(self, *profile) -> None:
            pass

    monkeypatch.setattr(worker_line_sampler, "LateSamples", Recording)
    monkeypatch.setattr(worker_line_sampler, "fetch_part", lambda stack: stack)
    until = now_ns() + 600 * NS
    worker_line_sampler.WorkerSampler(lambda: (1, 1 if over.is_set() else until), lambda: True, Area()).ask()
    (thread,) = [each for each in threading.enumerate() if each.name == "telemetry-lines"]
    try:
        wait_for(lambda: sorted(numbers) and max(waited, default=0) >= LATE_WAITS, 60)
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive()


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
        ((seen, (wall, _)),) = sampler.profiles["step"].times.items()
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

    ends = now_ns() + NS // 50
    BetweenTicks(1.0, Often(), Threads(), lines, errors).wait_until(ends, alone=alone)
    assert errors.counts == {}
    assert ends - 1000 <= lines.due[-1] < ends + 10 * NS
    assert (len(lines.due) > 1) is not alone
