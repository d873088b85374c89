"""Inside the workers: every fetch is counted, and nothing else changes."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from telemetry.attach.worker_block import WorkerBlock
from telemetry.attach.worker_probe import WorkerProbe
from telemetry.core.worker_records import FETCH_BUCKETS
from tests.data_sets import Numbers, Stream
from tests.tracebacks import traceback_of


def note_worker(path, worker_id: int) -> None:
    with open(path, "a") as file:
        file.write(f"{worker_id} {torch.utils.data.get_worker_info().num_workers}\n")


def fail(worker_id: int) -> None:
    raise KeyError(f"worker {worker_id} cannot begin")


class Spinning(Numbers):
    """Half of the time of a sample is CPU, the other half sleep."""

    def __getitem__(self, index):
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        time.sleep(self.seconds)
        return index


class Reading(list):
    """Paths; a sample is the length of what is in the file."""

    def __getitem__(self, index):
        return len(super().__getitem__(index).read_text())


class Together:
    """Batches of one; its iterator is made in the constructor of the loader's, which then waits for another."""

    def __init__(self, meeting: threading.Barrier) -> None:
        self.meeting = meeting

    def __iter__(self):
        self.meeting.wait(60)
        return iter([[0], [1]])

    def __len__(self) -> int:
        return 2


def counters(observed):
    (entry,) = observed.tracker.sources.live()
    return entry.block.read()


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_fetches_are_counted_whatever_the_start_method(observed, context):
    iterator = iter(DataLoader(Spinning(12, 0.005), batch_size=2, num_workers=2, multiprocessing_context=context))
    assert [next(iterator).tolist() for _ in range(6)] == [[i, i + 1] for i in range(0, 12, 2)]
    read = counters(observed)
    assert [c.worker for c in read] == [0, 1]
    assert [c.pid for c in read] == [w.pid for w in iterator._workers]
    assert sum(c.fetches for c in read) == 6
    for c in read:
        assert c.fetches == c.ended == 3
        assert c.epoch == 1
        assert c.wall_ns >= 3 * 2 * 0.010e9
        assert sum(c.histogram) == 3
        assert c.fetching_since_ns == 0
        assert 0 < max(c.recent_finished_ns) <= time.perf_counter_ns()
        spans = list(zip(c.recent_started_ns, c.recent_finished_ns, strict=True))[: c.ended]
        assert sum(end - start for start, end in spans) == c.wall_ns
    observed.check_sum()


def test_a_fetch_in_progress_is_seen(observed, tmp_path):
    pipe = tmp_path / "go"
    os.mkfifo(pipe)
    iterator = iter(DataLoader(Reading([pipe]), batch_size=None, num_workers=1))
    before = time.perf_counter_ns()
    with open(pipe, "w") as file:  # opens when the worker does
        (c,) = counters(observed)
        assert 0 < c.fetching_since_ns <= time.perf_counter_ns()
        assert c.fetches == 0
        file.write("abc")
    assert next(iterator) == 3
    (c,) = counters(observed)
    assert (c.fetches, c.fetching_since_ns) == (1, 0)
    assert max(c.recent_finished_ns) > before


def test_persistent_workers_count_on_over_their_epochs(observed):
    loader = DataLoader(Numbers(8), batch_size=1, num_workers=2, persistent_workers=True)
    for epoch in (1, 2, 3):
        list(loader)
        read = counters(observed)
        assert [c.epoch for c in read] == [epoch, epoch]
        assert [c.ended - c.epoch_began[c.epoch % len(c.epoch_began)] for c in read] == [4, 4]
        assert sum(c.fetches for c in read) == 8 * epoch


def test_iterable_datasets_count_what_they_delivered(observed):
    iterator = iter(DataLoader(Stream(), batch_size=2, num_workers=2))
    assert len([*iterator]) == 6
    assert sum(c.fetches for c in counters(observed)) == 6


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_users_own_init_function_runs(observed, tmp_path, context):
    init = functools.partial(note_worker, tmp_path / "seen")
    loader = DataLoader(Numbers(4), num_workers=2, worker_init_fn=init, multiprocessing_context=context)
    iterator = iter(loader)
    list(iterator)
    assert sorted((tmp_path / "seen").read_text().splitlines()) == ["0 2", "1 2"]
    assert loader.worker_init_fn is init
    assert iterator._worker_init_fn is init
    assert sum(c.fetches for c in counters(observed)) == 4


FAILING = {
    "init": lambda: list(DataLoader(Numbers(2), num_workers=1, worker_init_fn=fail)),
    "fetch": lambda: list(DataLoader(Numbers(2, fail_at=1), num_workers=1)),
    "pickle": lambda: iter(
        DataLoader(Numbers(2), num_workers=1, worker_init_fn=lambda _: 0, multiprocessing_context="spawn")
    ),
    "start": lambda: iter(DataLoader(Numbers(2), num_workers=1, multiprocessing_context="fork", prefetch_factor=-1)),
}


@pytest.mark.parametrize("what", FAILING)
def test_tracebacks_from_workers_stay_as_they_were(observed, what):
    attached = traceback_of(FAILING[what])
    observed.attachment.detach()
    assert attached == traceback_of(FAILING[what])


def test_a_killed_worker_leaves_its_last_counts_and_nothing_else(observed):
    before = set(os.listdir("/proc/self/fd"))
    iterator = iter(DataLoader(Numbers(100), batch_size=1, num_workers=1, prefetch_factor=2))
    next(iterator)
    (worker,) = iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(iterator)
    assert counters(observed)[0].fetches >= 1
    del iterator, worker
    gc.collect()
    assert not observed.tracker.sources.live()
    list(observed.tracker.sources.take_retired())
    observed.read()  # what the ring has of it
    gc.collect()
    left = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in set(os.listdir("/proc/self/fd")) - before
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    assert not [name for name in left if "telemetry" in name]


def test_a_block_that_is_another_process_s_is_not_touched(tmp_path):
    """The owner may have another file under the descriptor number by the time a spawned worker opens it."""
    victim = tmp_path / "victim"
    block, newer = WorkerBlock(2), WorkerBlock(2)
    victim.write_bytes(bytes(len(newer.words) * 8))
    workers, owner, number, identity = block.__getstate__()
    with victim.open("r+b") as file:
        for who, what in ((owner, file.fileno()), (owner, newer.__getstate__()[2]), (2**22 + 5, number)):
            probe = WorkerProbe.__new__(WorkerProbe)
            probe.__setstate__((None, (workers, who, what, identity)))
            probe(0)
    assert not any(victim.read_bytes())
    assert block.read() == newer.read() == ()
    same = WorkerBlock.__new__(WorkerBlock)
    same.__setstate__((workers, owner, number, identity))
    same.words[0] = 1
    assert block.words[0] == 1


class Cleaned(IterableDataset):
    """Writes a file when its iterator cleans up."""

    def __init__(self, file):
        self.file = file

    def __iter__(self):
        try:
            yield from range(1000)
        finally:
            self.file.write_text("cleaned")


def test_an_iterable_data_set_that_is_left_cleans_up_in_its_worker(observed, tmp_path):
    """The probe must not keep the iterator alive when the worker ends."""
    loader = DataLoader(Cleaned(tmp_path / "done"), batch_size=1, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    iterator._shutdown_workers()
    assert (tmp_path / "done").read_text() == "cleaned"


def test_the_bucket_is_found_from_the_highest_bit():
    for seconds in (0.0, 0.0005, 0.00104, 0.0011, 0.5, 1.0, 60.0, 1000.0):
        bucket = min((int(seconds * 1e9) >> 20).bit_length(), len(FETCH_BUCKETS))
        assert bucket == sum(seconds > bound for bound in FETCH_BUCKETS)


def test_a_new_loader_per_epoch_differs_from_one_that_is_reused(observed):
    def used_again(loader):
        iterator = iter(loader)
        next(iterator)
        return observed.tracker.sources.newest().settings["loader_used_again"]

    loader = DataLoader(Numbers(4), num_workers=1)
    assert not used_again(loader)
    assert used_again(loader)
    assert not used_again(DataLoader(Numbers(4), num_workers=1))


def test_a_sharing_strategy_is_known_of_workers_that_inherit_it(observed):
    def strategy(start_method):
        iterator = iter(DataLoader(Numbers(4), num_workers=1, multiprocessing_context=start_method))
        next(iterator)
        return observed.tracker.sources.newest().settings.get("sharing_strategy")

    assert strategy("fork") == torch.multiprocessing.get_sharing_strategy()
    assert strategy("spawn") is None
    assert strategy("forkserver") is None


def test_one_fetch_of_each_loader_of_a_step_is_timed(observed):
    """The next fetch alone would mostly be that of the loader after the slowest one."""
    for _ in zip(DataLoader(Numbers(8), batch_size=1), DataLoader(Numbers(8, seconds=0.02), batch_size=1)):
        observed.tracker.time_next_batch()
    tracker = observed.tracker
    assert tracker.timed_fetch_ns >= 6 * 0.02e9
    assert tracker.timed_fetch_cpu_ns < 0.5 * tracker.timed_fetch_ns


def test_two_iterators_made_at_once_keep_their_own_counters(observed):
    """Both constructors run, on two threads, before either of them has started a worker."""
    meeting, made = threading.Barrier(2), {}

    def make(name: str, workers: int) -> None:
        made[name] = iter(DataLoader(Numbers(2), batch_sampler=Together(meeting), num_workers=workers))

    threads = [threading.Thread(target=make, args=case) for case in (("one", 1), ("three", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for iterator in made.values():
        assert [batch.tolist() for batch in iterator] == [[0], [1]]
    found = {len(handle.pids): handle for handle in observed.tracker.sources.live()}
    assert set(found) == {1, 3}
    for workers, name in ((1, "one"), (3, "three")):
        counted = {counter.pid for counter in found[workers].block.read()}
        assert counted == {worker.pid for worker in made[name]._workers}
