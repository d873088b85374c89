"""Where the training thread is, as seen from another one."""

from __future__ import annotations

import threading

import pytest
import torch

from telemetry.collect.thread_sampler import ThreadSampler
from telemetry.sources.proc import is_running
from tests.running_agent import wait_for


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


def sampler_of(backward, running) -> ThreadSampler:
    return ThreadSampler(lambda: backward.thread.ident, lambda: True, running)


def seen(sampler: ThreadSampler, what) -> bool:
    sampler.sample()
    return what(sampler.take())


def test_a_backward_pass_that_computes_waits_for_no_other_rank(backward):
    sampler = sampler_of(backward, lambda: is_running(backward.thread.native_id))
    line = Backward.run.__code__.co_firstlineno + 5
    place = f"run (test_thread_sampler.py:{line})"
    assert wait_for(lambda: seen(sampler, lambda now: (now.in_sync, now.where) == (0, place)))


def test_a_backward_pass_that_is_on_no_core_waits_for_the_others(backward):
    sampler = sampler_of(backward, lambda: False)
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
