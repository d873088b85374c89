"""The DataLoader workers: what they count, what is said of them, and batches matched with their fetches."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from telemetry.model.records import FETCH_BUCKETS
from telemetry.safety.processes import read_schedule
from telemetry.seams.loaders import Arrival
from telemetry.seams.worker import _SpawnedLoop
from telemetry.seams.worker_block import RECENT, WorkerBlock, WorkerCounters
from telemetry.sources.workers import Fetches, WorkersSource
from telemetry.util.clock import now_ns
from tests.data_sets import Numbers
from tests.running_agent import wait_for

# -- in the workers ----------------------------------------------------------------------------------------------------


def note_worker(path, worker_id: int) -> None:
    with open(path, "a") as file:
        file.write(f"{worker_id} {torch.utils.data.get_worker_info().num_workers}\n")


class HalfSpinning(Numbers):
    """Half of the time of a sample is CPU, the other half sleep."""

    def __getitem__(self, index):
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        time.sleep(self.seconds)
        return index


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
    (entry,) = observed.tracker.loaders.live()
    return entry.block.read()


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_fetches_are_timed_whatever_the_start_method(observed, tmp_path, context):
    init = functools.partial(note_worker, tmp_path / "seen")
    data = HalfSpinning(12, 0.005)
    loader = DataLoader(data, batch_size=2, num_workers=2, worker_init_fn=init, multiprocessing_context=context)
    iterator = iter(loader)
    assert [batch.tolist() for batch in iterator] == [[i, i + 1] for i in range(0, 12, 2)]
    read = counters(observed)
    assert [(c.worker, c.pid) for c in read] == [(n, w.pid) for n, w in enumerate(iterator._workers)]
    for c in read:
        assert (c.fetches, c.ended, c.epoch, sum(c.histogram), c.fetching_since_ns) == (3, 3, 1, 3, 0)
        assert c.wall_ns >= 3 * 2 * 0.010e9
        spans = list(zip(c.recent_started_ns, c.recent_finished_ns, strict=True))[: c.ended]
        assert sum(end - start for start, end in spans) == c.wall_ns
    assert sorted((tmp_path / "seen").read_text().splitlines()) == ["0 2", "1 2"]
    assert loader.worker_init_fn is iterator._worker_init_fn is init
    observed.check_sum()


def test_persistent_workers_count_on_over_their_epochs(observed):
    loader = DataLoader(Numbers(8), batch_size=1, num_workers=2, persistent_workers=True)
    for epoch in (1, 2, 3):
        list(loader)
        read = counters(observed)
        assert [c.epoch for c in read] == [epoch, epoch]
        assert [c.ended - c.epoch_began[c.epoch % len(c.epoch_began)] for c in read] == [4, 4]
        assert sum(c.fetches for c in read) == 8 * epoch


def telemetry_descriptors() -> list[str]:
    """What this process has open of ours."""
    gc.collect()
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if "telemetry" in name]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_killed_worker_leaves_its_counts_and_nothing_open(observed, context):
    iterator = iter(DataLoader(Numbers(100), batch_size=1, num_workers=1, multiprocessing_context=context))
    next(iterator)
    (worker,) = iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(iterator)
    assert counters(observed)[0].fetches >= 1
    assert telemetry_descriptors() == ["/memfd:telemetry-workers (deleted)"] * (context == "spawn")
    del iterator, worker
    gc.collect()
    list(observed.tracker.loaders.take_retired())
    for _ in range(2):
        observed.read()  # what the ring has of it
    assert telemetry_descriptors() == []


def test_a_block_that_is_another_process_s_is_not_touched(tmp_path):
    """The owner may have another file under the descriptor's number by the time a spawned worker opens it."""
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(1 << 20))
    block, newer = WorkerBlock(2).by_file(), WorkerBlock(2).by_file()
    workers, owner, number, identity = block.address
    with victim.open("r+b") as file:
        for who, what in ((owner, file.fileno()), (owner, newer.address[2]), (2**22 + 5, number)):
            assert _SpawnedLoop("builtins:dict", (workers, who, what, identity))(worker_id=0) == {"worker_id": 0}
    assert not any(victim.read_bytes())
    assert block.read() == newer.read() == ()
    WorkerBlock.opened(block.address).counters(0).pid = 1
    assert block.counters(0).pid == 1


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


def settings_of(observed, loader: DataLoader) -> dict:
    iterator = iter(loader)
    next(iterator)
    return observed.tracker.loaders.newest().settings


def test_whether_a_loader_is_used_again_and_how_its_workers_share(observed):
    loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context="fork")
    first, second = settings_of(observed, loader), settings_of(observed, loader)
    spawned = settings_of(observed, DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn"))
    assert [each["loader_used_again"] for each in (first, second, spawned)] == [False, True, False]
    assert first["sharing_strategy"] == torch.multiprocessing.get_sharing_strategy()
    assert "sharing_strategy" not in spawned, "they do not inherit it"


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
    found = {len(handle.pids): handle for handle in observed.tracker.loaders.live()}
    assert set(found) == {1, 3}
    for workers, name in ((1, "one"), (3, "three")):
        counted = {counter.pid for counter in found[workers].block.read()}
        assert counted == {worker.pid for worker in made[name]._workers}


# -- how busy, on what -------------------------------------------------------------------------------------------------


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
    return WorkersSource(observed.tracker.loaders)


def fetch_on(source, iterator, batches: int):
    source.read()
    for _ in range(batches):
        next(iterator)
    return source.read()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("dataset", "what"), [(Sleeping(400), "blocked"), (Spinning(400), "running")])
def test_where_the_time_of_the_workers_goes(source, dataset, what, known):
    """Also of a worker that is read once: those of short epochs end before the next reading."""
    iterator = iter(DataLoader(dataset, batch_size=1, num_workers=1, prefetch_factor=8))
    next(iterator)
    if known:
        source.read()
    for _ in range(30 if known else 90):  # the start of the worker is part of its CPU time
        next(iterator)
    sample = source.read()
    assert sample.workers == 1
    assert sample.busy_ratio > 0.5  # nobody takes the batches slower than they come
    on_a_core = sample.cpu_ratio + sample.runnable_ratio
    assert (sample.blocked_ratio > on_a_core) == (what == "blocked")
    assert sample.busy_ratio == pytest.approx(on_a_core + sample.blocked_ratio, abs=0.1)
    assert sample.resident_memory_bytes > 10 << 20
    ((fetches, seconds),) = sample.fetched.values()
    assert fetches >= 30
    assert seconds >= 0.02 * fetches


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


@pytest.mark.parametrize("taken", [1, 5])
def test_workers_with_nothing_to_do_are_idle_and_batches_lie_ready(source, observed, taken):
    iterator = iter(DataLoader(Numbers(100), batch_size=1, num_workers=2, prefetch_factor=3))
    for _ in range(taken):
        next(iterator)
    observed.read()
    wait_for(lambda: source.read().ready_batches == 2 * 3)
    time.sleep(0.3)
    sample = source.read()
    assert sample.busy_ratio < 0.1
    assert (sample.ready_batches, sample.fetching_seconds) == (2 * 3, 0)


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
    assert sample.read_bytes_per_second < 1e6, "nothing is read from storage"


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
    assert 0.1 < sample.deliveries.head_of_line_seconds <= sample.deliveries.fetch_wait_seconds
    assert (sample.head_of_line_batches, sample.head_of_line_worker) == (0, None)
    wait_for(lambda: tick().fetches_total == 3 + 8)
    began = now_ns()
    time.sleep(0.2)
    asked = now_ns()
    next(iterator)
    assert tick().slack_seconds >= (asked - began) / 1e9  # how long it lay there
    assert tick().slack_seconds is None  # nothing was taken since


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
    sample = wait_for(lambda: (s := agent._collectors.samples.workers) and s.cpu_ratio is not None and s)
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
    assert sample.cpu_ratio > 0.1  # of its own thread it would be some hundredths


def test_batches_out_of_turn_are_not_matched_later_either(observed, source):
    """One worker of two has ended: each batch is the other's, whichever fetch its number would be of."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range((3, 300)[get_worker_info().id]))

    for number, _ in enumerate(DataLoader(Stream(), batch_size=1, num_workers=2, multiprocessing_context="fork")):
        if not number % 2:
            observed.read()
            matched = source.read().deliveries.matched
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
    monkeypatch.setattr("telemetry.safety.processes.read_small", lambda path: text.encode())
    assert (read_schedule(1, 1) is not None) is known


# -- batches and their fetches -----------------------------------------------------------------------------------------


class Uneven(Numbers):
    """Every fourth sample is slow: with two workers all of them are worker 0's."""

    def __getitem__(self, index):
        if index and index % 4 == 0:
            time.sleep(self.seconds)
        return index


class Heavy(Numbers):
    """Nothing to fetch and much to move: half a million objects that the training thread has to unpickle."""

    def __getitem__(self, index):
        return self.ready

    def __init__(self, count):
        super().__init__(count)
        self.ready = [str(i) for i in range(200_000)]


def handle(observed):
    (loader,) = observed.tracker.loaders.live() or observed.tracker.loaders.take_retired()
    return loader


def deliveries(observed):
    loader = handle(observed)
    observed.read()
    return Fetches(loader.block.read(), len(loader.pids)).deliveries(loader.arrivals)


def test_a_slow_fetch_is_late_and_blocks_those_behind_it(observed):
    for _ in DataLoader(Uneven(16, 0.1), batch_size=1, num_workers=2, prefetch_factor=2):
        pass
    found = deliveries(observed)
    assert found.matched == 15
    assert 0.2 < found.fetch_wait_seconds
    assert found.fetch_wait_seconds > found.transfer_wait_seconds
    assert 0.6 * found.fetch_wait_seconds < found.head_of_line_seconds <= found.fetch_wait_seconds


def test_what_takes_long_to_move_is_not_late(observed):
    for _ in DataLoader(
        Heavy(8), num_workers=1, prefetch_factor=4, collate_fn=lambda batch: batch[0], multiprocessing_context="fork"
    ):
        pass
    found = deliveries(observed)
    assert found.matched == 7
    assert found.transfer_wait_seconds > 2 * found.fetch_wait_seconds


@pytest.mark.parametrize("persistent", [True, False])
def test_epochs_are_told_apart(observed, persistent):
    loader = DataLoader(Numbers(6), batch_size=1, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        for _ in loader:
            pass
        if not persistent:
            assert deliveries(observed).matched == 5
    if persistent:
        assert deliveries(observed).matched == 15


def test_an_epoch_left_early_does_not_shift_the_numbers(observed):
    loader = DataLoader(Numbers(64), batch_size=1, num_workers=2, persistent_workers=True)
    for _, _ in zip(range(3), loader):
        pass
    for _, _ in zip(range(3), loader):
        pass
    loader = handle(observed)
    observed.read()
    fetches = Fetches(loader.block.read(), 2)
    arrivals = [a for a in loader.arrivals if a.epoch == 2]
    assert [a.number for a in arrivals] == [0, 1, 2]
    first = [a for a in loader.arrivals if a.epoch == 1]
    for arrival in arrivals:  # each was fetched after the first epoch had been left
        assert first[-1].arrived_ns < fetches.finished_ns(2, arrival.number) <= arrival.arrived_ns


def test_a_batch_that_raised_has_its_number(observed):
    class Faulty(Numbers):
        def __getitem__(self, index):
            if index == 3:
                raise KeyError(index)
            return index

    iterator = iter(DataLoader(Faulty(8), batch_size=1, num_workers=2, multiprocessing_context="fork"))
    raised = 0
    while True:
        try:
            next(iterator)
        except KeyError:
            raised += 1
        except StopIteration:
            break
    assert raised == 1
    assert deliveries(observed).matched == 7


def test_transfers_from_busy_and_idle_workers_are_told_apart(observed, tmp_path):
    pipe = tmp_path / "go"
    os.mkfifo(pipe)

    class Waiting(Numbers):
        def __getitem__(self, index):
            if index == 4:
                with open(pipe) as file:
                    file.read()
            return index

    iterator = iter(
        DataLoader(Waiting(8), batch_size=1, num_workers=1, prefetch_factor=8, multiprocessing_context="fork")
    )
    with open(pipe, "w"):  # as soon as it is open for reading, the worker is in its fifth fetch
        for _ in range(4):
            next(iterator)
        found = deliveries(observed)
        assert (found.matched, found.from_busy) == (3, 3)
        assert 0 < found.transfer_wait_busy_worker_seconds == found.transfer_wait_seconds
        handle(observed).arrivals.clear()
    block = handle(observed).block
    while block.read()[0].ended < 8:
        time.sleep(0.001)
    for _ in range(4):
        next(iterator)
    found = deliveries(observed)
    assert (found.matched, found.from_busy, found.transfer_wait_busy_worker_seconds) == (4, 0, 0.0)
    assert found.transfer_wait_seconds > 0


def a_worker(starts, ends, fetching_since=0):
    """A worker whose fetches began and ended at these seconds."""

    def ns(seconds):
        return tuple(int(at * 1e9) for at in seconds + [0] * (RECENT - len(seconds)))

    wall = sum(end - start for start, end in zip(starts, ends, strict=True))
    return WorkerCounters(
        worker=0, pid=1, tid=1, fetches=len(ends), wall_ns=wall * 10**9, fetching_since_ns=fetching_since * 10**9,
        epoch=1, ended=len(ends), recent_started_ns=ns(starts), recent_finished_ns=ns(ends),
    )  # fmt: skip


def arrival(number, requested, arrived):
    return Arrival(1, number, requested * 10**9, arrived * 10**9)


@pytest.mark.parametrize(("took", "long"), [([10, 10, 10, 10], 0), ([10, 10, 90, 10], 5), ([10, 25, 10, 10], 0)])
def test_a_wait_behind_a_long_fetch_differs_from_a_usual_wait(took, long):
    """Each is asked for 1 s after its fetch has ended, and is 5 s in coming, while the worker fetches the next."""
    *starts, _ = itertools.accumulate(took, initial=100)
    ends = [start + seconds for start, seconds in zip(starts, took, strict=True)]
    found = Fetches([a_worker(starts, ends)], 1).deliveries(arrival(n, ends[n] + 1, ends[n] + 6) for n in range(1, 4))
    assert (found.transfer_wait_seconds, found.from_busy, found.transfer_wait_busy_worker_seconds) == (15, 2, 10)
    assert found.transfer_wait_long_fetch_seconds == long


@pytest.mark.parametrize(("since", "long"), [(111, 5), (125, 0)])
def test_a_fetch_in_progress_is_long_by_what_it_has_taken_so_far(since, long):
    """Two of 10 s each are over; the second's batch is there at 150 s."""
    found = Fetches([a_worker([90, 100], [100, 110], since)], 1).deliveries([arrival(1, 145, 150)])
    assert (found.transfer_wait_busy_worker_seconds, found.transfer_wait_long_fetch_seconds) == (5, long)


stamps = st.integers(0, 1 << 62)
counts = st.integers(0, 200)


@given(
    st.lists(
        st.builds(
            WorkerCounters,
            worker=st.integers(0, 3),
            pid=counts,
            tid=counts,
            fetches=counts,
            wall_ns=stamps,
            fetching_since_ns=stamps,
            epoch=st.integers(0, 20),
            ended=counts,
            epoch_began=st.tuples(*[counts] * 8),
            histogram=st.just((0,) * (len(FETCH_BUCKETS) + 1)),
            recent_started_ns=st.tuples(*[stamps] * 64),
            recent_finished_ns=st.tuples(*[stamps] * 64),
        ),
        max_size=4,
    ),
    st.lists(st.builds(Arrival, epoch=st.integers(0, 20), number=counts, requested_ns=stamps, arrived_ns=stamps)),
)
def test_whatever_the_workers_have_written_down_nothing_is_negative(counters, arrivals):
    arrivals = [a for a in arrivals if a.requested_ns <= a.arrived_ns]
    fetches = Fetches(counters, 4)
    found = fetches.deliveries(arrivals)
    assert (
        min(found.slack_seconds, found.fetch_wait_seconds, found.transfer_wait_seconds, found.head_of_line_seconds) >= 0
    )
    assert found.head_of_line_seconds <= found.fetch_wait_seconds + 1e-9
    assert (
        0
        <= found.transfer_wait_long_fetch_seconds
        <= found.transfer_wait_busy_worker_seconds
        <= found.transfer_wait_seconds
    )
    assert 0 <= found.from_busy <= found.matched
    waited = sum(a.arrived_ns - a.requested_ns for a in arrivals) / 1e9
    assert found.fetch_wait_seconds + found.transfer_wait_seconds <= waited * (1 + 1e-9)
    fetches.blocked(3, 7, 1 << 62)


def test_of_two_loaders_the_one_waited_for_is_the_source(observed):
    fast = DataLoader(Numbers(12), batch_size=1)
    slow = DataLoader(Numbers(12, 0.01), batch_size=1, num_workers=1)
    for _ in zip(fast, slow):
        pass
    observed.read()
    assert observed.waited_for == "workers"
    for _ in zip(DataLoader(Numbers(40, 0.02), batch_size=1), DataLoader(Numbers(40), batch_size=1, num_workers=1)):
        pass
    observed.read()
    assert observed.waited_for == "training_thread"


def test_a_batch_that_joins_a_step_is_no_edge_of_an_epoch(observed):
    for _ in zip(DataLoader(Numbers(12), batch_size=1), DataLoader(Numbers(12, 0.01), batch_size=1, num_workers=1)):
        pass
    ledger = observed.read()
    assert ledger.epoch_boundaries == 1  # the end
    assert ledger.boundary_wait_ns < 0.5 * ledger.ns["data_wait"]


def test_the_wait_for_the_first_batch_of_a_run_is_counted_by_itself(observed):
    loader = DataLoader(Numbers(4), batch_size=1, num_workers=1)
    list(loader)
    first = observed.read().first_wait_ns
    assert first > 0
    list(loader)
    ledger = observed.read()
    assert ledger.first_wait_ns == first
    assert ledger.boundary_wait_ns > 0
