"""Batches matched with their fetches: slack, late or moved, and what waits behind a slow worker."""

from __future__ import annotations

import itertools
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from telemetry.collect.batch_matching import Fetches
from telemetry.core.worker_records import FETCH_BUCKETS, Arrival, WorkerCounters
from telemetry.util.clock import now_ns
from tests.data_sets import Numbers


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
    (loader,) = observed.tracker.sources.live() or observed.tracker.sources.take_retired()
    return loader


def deliveries(observed):
    loader = handle(observed)
    observed.read()
    return Fetches(loader.block.read(), len(loader.pids)).deliveries(loader.arrivals)


def test_a_batch_that_lay_ready_has_slack_and_is_not_waited_for(observed):
    iterator = iter(DataLoader(Numbers(4), batch_size=1, num_workers=2, prefetch_factor=2))
    next(iterator)
    while sum(c.ended for c in handle(observed).block.read()) < 4:
        time.sleep(0.001)
    ready = now_ns()
    time.sleep(0.05)
    asked = now_ns()
    assert len(list(iterator)) == 3
    found = deliveries(observed)
    assert found.batches == 3  # the first of the epoch has nothing to say
    assert found.slack_seconds >= 3 * (asked - ready) / 1e9
    assert (found.fetch_wait_seconds, found.head_of_line_wait_seconds, found.head_of_line_worker_seconds) == (0, 0, {})


def test_a_slow_fetch_is_late_and_blocks_those_behind_it(observed):
    for _ in DataLoader(Uneven(16, 0.1), batch_size=1, num_workers=2, prefetch_factor=2):
        pass
    found = deliveries(observed)
    assert found.batches == 15
    assert 0.2 < found.fetch_wait_seconds
    assert found.fetch_wait_seconds > found.transfer_wait_seconds
    assert 0.6 * found.fetch_wait_seconds < found.head_of_line_wait_seconds <= found.fetch_wait_seconds
    assert max(found.head_of_line_worker_seconds, key=found.head_of_line_worker_seconds.get) == 0


def test_what_takes_long_to_move_is_not_late(observed):
    for _ in DataLoader(
        Heavy(8), num_workers=1, prefetch_factor=4, collate_fn=lambda batch: batch[0], multiprocessing_context="fork"
    ):
        pass
    found = deliveries(observed)
    assert found.batches == 7
    assert found.transfer_wait_seconds > 2 * found.fetch_wait_seconds


@pytest.mark.parametrize("persistent", [True, False])
def test_epochs_are_told_apart(observed, persistent):
    loader = DataLoader(Numbers(6), batch_size=1, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        for _ in loader:
            pass
        if not persistent:
            assert deliveries(observed).batches == 5
    if persistent:
        assert deliveries(observed).batches == 15


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
    assert deliveries(observed).batches == 7


def test_workers_that_end_one_by_one_are_not_mistaken(observed):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range((3, 30)[get_worker_info().id]))

    for _ in DataLoader(Stream(), batch_size=1, num_workers=2, multiprocessing_context="fork"):
        pass
    assert deliveries(observed).batches == 5  # 0 to 5 were dealt in turn, without the first


def test_what_waits_behind_a_worker_is_seen_as_it_waits(observed, tmp_path):
    pipe = tmp_path / "go"
    os.mkfifo(pipe)

    class Waiting(Numbers):
        def __getitem__(self, index):
            if index == 2:  # the second of worker 0
                with open(pipe) as file:
                    file.read()
            return index

    iterator = iter(
        DataLoader(Waiting(8), batch_size=1, num_workers=2, prefetch_factor=2, multiprocessing_context="fork")
    )
    next(iterator), next(iterator)
    loader = handle(observed)
    with open(pipe, "w"):
        while (counters := loader.block.read())[1].ended < 3:
            time.sleep(0.001)
        observed.read()
        blocked = Fetches(counters, 2).blocked(loader.epoch, loader.delivered, now_ns())
        assert (blocked.batches, blocked.worker) == (2, 0)
        assert blocked.seconds > 0
    next(iterator)
    observed.read()
    assert Fetches(loader.block.read(), 2).blocked(loader.epoch, loader.delivered, now_ns()) is None


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
        assert (found.batches, found.from_busy) == (3, 3)
        assert 0 < found.transfer_wait_busy_worker_seconds == found.transfer_wait_seconds
        handle(observed).arrivals.clear()
    block = handle(observed).block
    while block.read()[0].ended < 8:
        time.sleep(0.001)
    for _ in range(4):
        next(iterator)
    found = deliveries(observed)
    assert (found.batches, found.from_busy, found.transfer_wait_busy_worker_seconds) == (4, 0, 0.0)
    assert found.transfer_wait_seconds > 0


@pytest.mark.parametrize(("took", "long"), [([10, 10, 10, 10], 0), ([10, 10, 90, 10], 5), ([10, 25, 10, 10], 0)])
def test_a_wait_behind_a_long_fetch_differs_from_a_usual_wait(took, long):
    """Each is asked for 1 s after its fetch has ended, and is 5 s in coming, while the worker fetches the next."""
    ends = list(itertools.accumulate(took, initial=100))[1:]
    starts = [end - seconds for end, seconds in zip(ends, took, strict=True)]

    def ns(seconds):
        return tuple(int(at * 1e9) for at in seconds + [0] * (64 - len(seconds)))

    worker = WorkerCounters(
        worker=0, pid=1, tid=1, fetches=4, wall_ns=sum(took) * 10**9, fetching_since_ns=0, epoch=1, ended=4,
        epoch_began=(0,) * 8, histogram=(), recent_started_ns=ns(starts), recent_finished_ns=ns(ends),
    )  # fmt: skip
    arrivals = [Arrival(1, n, int((ends[n] + 1) * 1e9), int((ends[n] + 6) * 1e9)) for n in range(1, 4)]
    found = Fetches([worker], 1).deliveries(arrivals)
    assert (found.transfer_wait_seconds, found.from_busy, found.transfer_wait_busy_worker_seconds) == (15, 2, 10)
    assert found.transfer_wait_long_fetch_seconds == long


@pytest.mark.parametrize(("since", "long"), [(111, 5), (125, 0)])
def test_a_fetch_in_progress_is_long_by_what_it_has_taken_so_far(since, long):
    """Two of 10 s each are over; the second's batch is there at 150 s."""
    worker = WorkerCounters(
        worker=0, pid=1, tid=1, fetches=2, wall_ns=20 * 10**9, fetching_since_ns=since * 10**9, epoch=1, ended=2,
        epoch_began=(0,) * 8, histogram=(), recent_started_ns=(90 * 10**9, 100 * 10**9, *[0] * 62),
        recent_finished_ns=(100 * 10**9, 110 * 10**9, *[0] * 62),
    )  # fmt: skip
    found = Fetches([worker], 1).deliveries([Arrival(1, 1, 145 * 10**9, 150 * 10**9)])
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
        min(found.slack_seconds, found.fetch_wait_seconds, found.transfer_wait_seconds, found.head_of_line_wait_seconds)
        >= 0
    )
    assert found.head_of_line_wait_seconds <= found.fetch_wait_seconds + 1e-9
    assert (
        0
        <= found.transfer_wait_long_fetch_seconds
        <= found.transfer_wait_busy_worker_seconds
        <= found.transfer_wait_seconds
    )
    assert 0 <= found.from_busy <= found.batches
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
