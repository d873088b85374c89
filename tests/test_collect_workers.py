"""What is said of the workers: how busy, on what, and how many fetches took how long."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from telemetry.collect.worker_source import WorkersSource
from telemetry.sources.proc import read_schedule
from telemetry.util.clock import now_ns
from tests.data_sets import Numbers
from tests.running_agent import wait_for


class Sleeping(Numbers):
    def __getitem__(self, index):
        time.sleep(0.02)
        return index


class Spinning(Numbers):
    def __getitem__(self, index):
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return index


@pytest.fixture
def source(observed):
    sources = observed.tracker.sources
    return WorkersSource(sources.live, sources.take_retired)


def fetch_on(source, iterator, batches: int):
    source.read()
    for _ in range(batches):
        next(iterator)
    return source.read()


def test_no_workers_is_a_reading(source):
    sample = source.read()
    assert (sample.workers, sample.fetches_total, sample.fetch_duration, sample.busy_ratio) == (0, 0, None, None)


@pytest.mark.parametrize(("dataset", "what"), [(Sleeping(400), "blocked"), (Spinning(400), "running")])
def test_where_the_time_of_the_workers_goes(source, dataset, what):
    iterator = iter(DataLoader(dataset, batch_size=1, num_workers=1, prefetch_factor=8))
    next(iterator)
    sample = fetch_on(source, iterator, 30)
    assert sample.workers == 1
    assert sample.busy_ratio > 0.5  # nobody takes the batches slower than they come
    on_a_core = sample.cpu_ratio + sample.runnable_ratio
    assert (sample.blocked_ratio > on_a_core) == (what == "blocked")
    assert sample.busy_ratio == pytest.approx(on_a_core + sample.blocked_ratio, abs=0.1)
    assert sample.resident_memory_bytes > 10 << 20


class InPieces(Numbers):
    def __getitem__(self, index):
        return [torch.zeros(1) for _ in range(200)]


@pytest.mark.parametrize(("dataset", "packs"), [(InPieces(400), True), (Spinning(400), False)])
def test_what_workers_run_to_pack_their_batches_is_no_fetch(source, dataset, packs):
    loader = DataLoader(dataset, batch_size=1, num_workers=1, prefetch_factor=8, collate_fn=list)
    iterator = iter(loader)
    next(iterator)
    sample = fetch_on(source, iterator, 30)
    assert (sample.pickling_ratio > sample.cpu_ratio) == packs


def test_workers_with_nothing_to_do_are_idle(source):
    iterator = iter(DataLoader(Numbers(100), batch_size=1, num_workers=1, prefetch_factor=2))
    next(iterator)
    handle_ready = wait_for(lambda: (s := source.read()).ready_batches == 2 and s)
    time.sleep(0.3)
    sample = source.read()
    assert sample.busy_ratio < 0.1
    assert sample.ready_batches == handle_ready.ready_batches == 2
    assert sample.fetching_seconds == 0


def test_a_fetch_in_progress_counts_as_busy(source):
    iterator = iter(DataLoader(Numbers(4, seconds=60), num_workers=1))
    wait_for(lambda: source.read().fetching_seconds > 0.2)
    time.sleep(0.2)
    sample = source.read()
    assert sample.fetches_total == 0
    assert sample.busy_ratio > 0.8
    del iterator


def on_one_core(worker: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_on_how_many_cores_the_workers_may_run(source):
    free = iter(DataLoader(Numbers(4), num_workers=2))
    next(free)
    assert source.read().allowed_cores == len(os.sched_getaffinity(0))
    del free
    gc.collect()
    held = iter(DataLoader(Numbers(4), num_workers=2, worker_init_fn=on_one_core))
    next(held)
    assert wait_for(lambda: source.read().allowed_cores == 1)


def test_workers_that_share_a_core_are_runnable_but_not_running(source):
    loader = DataLoader(Spinning(400), batch_size=1, num_workers=2, prefetch_factor=8, worker_init_fn=on_one_core)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)  # both have begun
    sample = fetch_on(source, iterator, 30)
    assert sample.busy_ratio > 0.5
    assert sample.runnable_ratio > 0.3  # each of the two has the core half of the time
    assert sample.runnable_ratio > sample.blocked_ratio


class Stored(Numbers):
    """Each sample lies in a file that is not in memory."""

    def __init__(self, size, folder):
        super().__init__(size)
        self.folder = folder

    def __getitem__(self, index):
        with (self.folder / str(index)).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return len(file.read())


def io_lines() -> list[str]:
    """What the kernel says this process has had read from storage, if it tells."""
    io = Path("/proc/self/io")
    return [line for line in io.read_text().splitlines() if line.startswith("read_bytes")] if io.exists() else []


def test_what_workers_read_from_storage(source, tmp_path):
    size, samples = 1 << 20, 20
    for number in range(samples):
        with (tmp_path / str(number)).open("wb") as file:
            file.write(bytes(size))
            os.fsync(file.fileno())
    stored = Stored(samples, tmp_path)
    before = io_lines()
    assert stored[0] == size
    if io_lines() == before:
        pytest.skip("files lie in memory here, or the kernel does not tell what is read from storage")
    iterator = iter(DataLoader(stored, batch_size=1, num_workers=1, persistent_workers=True))
    began = now_ns()
    source.read()  # knows the worker, which has hardly begun
    assert sum(int(batch) for batch in iterator) == size * samples
    sample = source.read()
    read = sample.read_bytes_per_second * (now_ns() - began) / 1e9
    assert 0.5 * size * samples < read < 2 * size * samples


class Arrays(Numbers):
    def __getitem__(self, index):
        return np.zeros(3_000_000, np.uint8)


@pytest.mark.parametrize(("collate", "expected"), [(list, 3_000_000), (torch.utils.data.default_collate, 0)])
def test_what_workers_write_are_batches_that_are_pickled(source, collate, expected):
    """A tensor's bytes lie in shared memory."""
    iterator = iter(DataLoader(Arrays(1000), batch_size=1, num_workers=1, prefetch_factor=2, collate_fn=collate))
    next(iterator)
    before, began = source.read(), now_ns()
    for _ in range(30):
        next(iterator)
    sample = source.read()
    written = sample.written_bytes_per_second * (now_ns() - began) / 1e9
    batches = sample.fetches_total - before.fetches_total
    assert written / batches == pytest.approx(expected, rel=0.2, abs=5000)


class Held(Numbers):
    """The third sample is kept back."""

    def __init__(self, size, event):
        super().__init__(size)
        self.event = event

    def __getitem__(self, index):
        if index == 2:
            self.event.wait(60)
        return index


def test_batches_behind_a_slow_worker_and_those_that_lie_ready(source, observed):
    def tick():
        observed.read()
        return source.read()

    event = multiprocessing.Event()
    iterator = iter(DataLoader(Held(40, event), batch_size=1, num_workers=2, prefetch_factor=4))
    for _ in range(2):
        next(iterator)
    sample = wait_for(lambda: (s := tick()).head_of_line_batches == 4 and s)  # 3, 5, 7 and 9 of the other worker
    assert sample.head_of_line_worker == 0
    assert tick().head_of_line_since_seconds > sample.head_of_line_since_seconds > 0
    releasing = threading.Timer(0.2, event.set)
    releasing.start()
    next(iterator)
    releasing.join()
    sample = tick()
    assert 0.1 < sample.deliveries.head_of_line_wait_seconds <= sample.deliveries.fetch_wait_seconds
    assert (sample.head_of_line_batches, sample.head_of_line_worker) == (0, None)
    wait_for(lambda: tick().fetches_total == 3 + 8)
    began = now_ns()
    time.sleep(0.2)
    asked = now_ns()
    next(iterator)
    assert tick().slack_seconds >= (asked - began) / 1e9  # how long it lay there
    assert tick().slack_seconds is None  # nothing was taken since


def test_what_each_worker_has_fetched(source):
    iterator = iter(DataLoader(Sleeping(400), batch_size=1, num_workers=2))
    sample = fetch_on(source, iterator, 12)
    assert len(sample.fetched) == 2
    assert all(fetches >= 5 and seconds >= 0.02 * fetches for fetches, seconds in sample.fetched.values())


def test_fetches_are_counted_over_epochs_also_of_workers_that_are_gone(source, observed):
    loader = DataLoader(Numbers(6), batch_size=2, num_workers=2)
    for epoch in (1, 2, 3):
        list(loader)
        gc.collect()
        sample = source.read()
        assert sample.fetches_total == 3 * epoch
        assert sum(sample.fetch_duration.counts) == 3 * epoch
    assert sample.workers == 0
    assert not source._counted  # nothing is kept of what is gone


def test_workers_begun_before_the_agent_are_seen_from_outside():
    import telemetry

    iterator = iter(DataLoader(Sleeping(40), batch_size=1, num_workers=1))
    agent = telemetry.start(port="off", start_line=False, interval_seconds=0.1)
    next(iterator)
    sample = wait_for(lambda: (s := agent._collectors.newest("workers")) and s.cpu_ratio is not None and s)
    assert sample.workers == 1
    assert (sample.busy_ratio, sample.blocked_ratio, sample.fetch_duration) == (None, None, None)  # not known: not said


def test_idle_evaluation_workers_do_not_dilute_training_workers(source):
    training = DataLoader(Sleeping(400), batch_size=1, num_workers=1, persistent_workers=True, prefetch_factor=8)
    evaluation = DataLoader(Numbers(4), batch_size=1, num_workers=2, persistent_workers=True)
    iterator = iter(training)
    next(iterator)
    with torch.no_grad():
        list(evaluation)
    sample = fetch_on(source, iterator, 20)
    assert (sample.workers, sample.training_workers) == (3, 1)
    assert sample.busy_ratio > 0.5


class OnThreads(Numbers):
    """The worker waits for threads of its own, which hash with the interpreter released."""

    def __getitem__(self, index):
        with ThreadPoolExecutor(1) as pool:
            return index if pool.submit(hashlib.sha256, bytes(20 << 20)).result() else None


class InAProgram(Numbers):
    """The worker waits for a program it has started."""

    def __getitem__(self, index):
        code = "import time\nwhile time.process_time() < 0.05: pass"
        subprocess.run([sys.executable, "-S", "-E", "-c", code], check=True)
        return index


@pytest.mark.parametrize("dataset", [OnThreads(400), InAProgram(400)])
def test_what_a_worker_has_others_compute_is_no_waiting(source, dataset):
    iterator = iter(DataLoader(dataset, batch_size=1, num_workers=1, prefetch_factor=8))
    next(iterator)
    sample = fetch_on(source, iterator, 20)
    assert sample.busy_ratio > 0.5
    assert sample.cpu_ratio > 0.2  # of its own thread it would be some hundredths


def test_batches_out_of_turn_are_not_matched_later_either(observed, source):
    """One worker of two has ended: each batch is the other's, whichever fetch its number would be of."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range((3, 300)[get_worker_info().id]))

    for number, _ in enumerate(DataLoader(Stream(), batch_size=1, num_workers=2, multiprocessing_context="fork")):
        if not number % 2:
            observed.read()
            matched = source.read().deliveries.batches
    assert 0 < matched <= 6


def test_evaluation_workers_never_count_as_training_workers(observed, source):
    """Without persistent_workers the training's workers end with each epoch, and only the evaluation's are alive then."""
    for _ in DataLoader(Numbers(4), batch_size=1, num_workers=1):
        observed.read()
        training = source.read()
    assert training.training_workers == 1
    gc.collect()
    with torch.no_grad():
        evaluation = iter(DataLoader(Numbers(40), batch_size=1, num_workers=1))
        next(evaluation)
        observed.read()
        sample = source.read()
    assert (sample.workers, sample.training_workers) == (1, 0)


@pytest.mark.parametrize(("text", "known"), [("0 0 0", False), ("5 0 1", True), ("", False)])
def test_schedstat_that_is_switched_off_tells_nothing(monkeypatch, text, known):
    monkeypatch.setattr("telemetry.sources.proc.read_small", lambda path: text.encode())
    assert (read_schedule(1, 1) is not None) is known
