"""Garbage collection is timed where it delays a step."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import threading
import time

import pytest
from faults.processes import wait_for
from torch.utils.data import DataLoader, Dataset

from tests.data_sets import Numbers


def test_a_collection_in_a_step_is_counted(observed):
    gc.collect()
    assert observed.garbage.ns == 0  # starting up
    loop = iter(DataLoader(Numbers(4), batch_size=1))
    next(loop)
    gc.collect()
    assert observed.garbage.ns > 0


def collect_until(done: threading.Event) -> None:
    while True:
        gc.collect()
        if done.is_set():
            break


@pytest.fixture
def elsewhere():
    """Starts a thread that collects garbage, at least once, until it is stopped."""
    done = threading.Event()
    threads = []

    def start():
        threads.append(threading.Thread(target=collect_until, args=[done]))
        threads[-1].start()

    def end():
        done.set()
        for thread in threads:
            thread.join()

    yield start, end
    end()


def test_a_collection_on_another_thread_is_counted_too(observed, elsewhere):
    start, end = elsewhere
    loop = iter(DataLoader(Numbers(4), batch_size=1))
    next(loop)
    before = observed.garbage.ns
    start()
    end()  # this thread waits meanwhile
    assert observed.garbage.ns > before


def test_what_the_training_thread_computes_meanwhile_is_not_lost_time(observed, elsewhere):
    start, end = elsewhere
    loop = iter(DataLoader(Numbers(4), batch_size=1))
    next(loop)
    before, began, ran = observed.garbage.ns, time.perf_counter_ns(), time.thread_time_ns()
    start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the GIL
    counted = observed.garbage.ns - before
    not_run = time.perf_counter_ns() - began - (time.thread_time_ns() - ran)
    assert counted <= not_run + 10e6  # the clocks are not read at the same moments


class Held(Dataset):
    """Its second item waits."""

    def __init__(self) -> None:
        self.released = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index:
            self.released.wait()
        return index


def test_a_collection_elsewhere_during_a_wait_for_workers_costs_nothing(observed):
    data = Held()
    loop = iter(DataLoader(data, batch_size=1, num_workers=1, multiprocessing_context="fork"))
    next(loop)
    counted = []

    def collect_meanwhile():
        wait_for(lambda: observed.tracker.waiting_since, "the batch is waited for")
        before = observed.garbage.ns
        gc.collect()
        counted.append(observed.garbage.ns - before)
        data.released.set()

    thread = threading.Thread(target=collect_meanwhile)
    thread.start()
    next(loop)
    thread.join()
    assert counted == [0]


def test_detaching_removes_the_callback(observed):
    callbacks = list(gc.callbacks)
    observed.attachment.detach()
    assert len(gc.callbacks) == len(callbacks) - 1
