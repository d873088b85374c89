"""What the training thread does itself inside ``next()`` while workers fetch: the sampler, garbage collections."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref

import pytest
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loader

from tests.data_sets import Numbers
from tests.tracebacks import FRAMES_STAY

SLEEP = 0.004


class Slow:
    """A batch sampler that is slow for every batch, or at the start of an epoch.

    ``seen``: for each batch, whether something of ours stood in the iterator's ``__dict__`` as it was drawn.
    """

    def __init__(self, batches=12, *, each=SLEEP, start=0.0, fails_at=None, collects=False):
        self.batches, self.each, self.start, self.fails_at, self.collects = batches, each, start, fails_at, collects
        self.iterator = lambda: None
        self.seen = []

    def __iter__(self):
        if self.start:
            time.sleep(self.start)
            return iter([[number] for number in range(self.batches)])
        return self._each()

    def _each(self):
        for number in range(self.batches):
            time.sleep(self.each)
            if self.collects:
                gc.collect()
            if number == self.fails_at:
                raise KeyError(number)
            self.seen.append("_next_index" in vars(self.iterator() or self))
            yield [number]

    def __len__(self):
        return self.batches


def loader(sampler, **settings):
    return DataLoader(Numbers(100), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork", **settings)


def begin(batches, sampler):
    iterator = iter(batches)
    sampler.iterator = weakref.ref(iterator)
    next(iterator)
    return iterator


def test_the_sampler_is_timed_for_as_many_batches_as_wanted(observed):
    sampler = Slow()
    iterator = begin(loader(sampler), sampler)
    next(iterator)
    before = len(sampler.seen)
    inside = observed.tracker.sampler_timer
    assert (inside.batches, inside.sampler_ns) == (0, 0)
    observed.tracker.time_next_batch(3)
    for _ in range(6):
        next(iterator)
        assert "_next_index" not in vars(iterator), "our callable is removed between batches"
    assert inside.batches == 3
    assert inside.sampler_ns >= 3 * SLEEP * 1e9
    assert 0 < inside.sampler_cpu_ns < inside.sampler_ns
    assert inside.receiving_cpu_ns > 0
    assert sampler.seen[before:] == [True] * 3 + [False] * 3
    assert observed.tracker.fast_path_iterator_id == id(iterator), "the fast path again"
    observed.read()


@pytest.mark.parametrize("persistent", [False, True])
def test_the_sampler_is_timed_where_every_later_epoch_begins(observed, persistent):
    sampler = Slow(6)
    batches = loader(sampler, prefetch_factor=3, persistent_workers=persistent)
    inside = observed.tracker.sampler_timer
    list(batches)
    assert inside.boundary_sampler_ns == 0, "the start of the run does not count"
    list(batches)
    assert inside.boundary_sampler_ns >= 4 * SLEEP * 1e9, (
        "the three that are prefetched, and the next for the first batch"
    )
    observed.read()
    assert observed.ledger.boundary_wait_ns >= inside.boundary_sampler_ns


@pytest.mark.parametrize("persistent", [False, True])
def test_what_the_sampler_does_in_its_own_start_is_counted(observed, persistent):
    sampler = Slow(6, start=0.02)
    batches = loader(sampler, persistent_workers=persistent)
    list(batches)
    list(batches)
    starts = 1 if persistent else 2  # torch calls iter(sampler) twice for a new iterator
    assert observed.tracker.sampler_timer.boundary_sampler_ns >= starts * 0.02e9
    observed.check_sum()


@pytest.mark.parametrize("timed", [False, True])
def test_what_the_sampler_raises_arrives_as_it_would(observed, timed):
    sampler = Slow(fails_at=5)
    iterator = begin(loader(sampler, prefetch_factor=1), sampler)
    if timed:
        observed.tracker.time_next_batch(20)
    with pytest.raises(KeyError) as caught:
        list(iterator)
    files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
    assert FRAMES_STAY or not any("telemetry/attach" in file for file in files), files
    assert "_next_index" not in vars(iterator)
    observed.read()


def test_another_thread_that_reads_the_loader_is_not_timed(observed):
    sampler = Slow()
    iterator = begin(loader(sampler), sampler)
    observed.tracker.time_next_batch(2)
    thread = threading.Thread(target=lambda: [next(iterator) for _ in range(3)])
    thread.start()
    thread.join()
    assert observed.tracker.sampler_timer.batches == 0
    next(iterator)
    assert observed.tracker.sampler_timer.batches == 1


def test_a_timed_iterator_is_freed_when_it_is_released(observed):
    sampler = Slow()
    iterator = begin(loader(sampler), sampler)
    observed.tracker.time_next_batch(2)
    next(iterator)
    (worker,) = iterator._workers
    gone = sampler.iterator
    gc.disable()
    try:
        del iterator
        assert gone() is None
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_collections_in_the_sampler_are_no_time_of_the_sampler(observed, small_heap):
    sampler = Slow(collects=True)
    iterator = begin(loader(sampler), sampler)
    observed.tracker.time_next_batch(20)
    inside = observed.tracker.sampler_timer
    before, took = observed.garbage.ns, time.perf_counter_ns()
    for _ in range(5):
        next(iterator)
    took = time.perf_counter_ns() - took
    garbage = observed.garbage
    assert 0 < garbage.wait_ns <= garbage.ns - before
    assert garbage.boundary_wait_ns == 0
    assert inside.sampler_ns + garbage.wait_ns <= took


def test_collections_where_an_epoch_begins_are_counted(observed, small_heap):
    sampler = Slow(6, collects=True)
    batches = loader(sampler)
    list(batches)
    first = observed.garbage
    assert first.boundary_wait_ns == 0
    before, in_first = first.ns, first.wait_ns
    assert before >= in_first > 0
    list(batches)
    both = observed.garbage
    assert both.boundary_wait_ns > 0
    assert both.ns - before >= both.boundary_wait_ns + both.wait_ns - in_first


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_is_timed_too_and_keeps_its_state(observed):
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = Slow()
    batches = StatefulDataLoader(Numbers(100), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork")
    iterator = begin(batches, sampler)
    observed.tracker.time_next_batch(2)
    assert [next(iterator).tolist() for _ in range(3)] == [[1], [2], [3]]
    assert observed.tracker.sampler_timer.batches == 2
    state = batches.state_dict()
    again = StatefulDataLoader(Numbers(100), batch_sampler=Slow(), num_workers=1, multiprocessing_context="fork")
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == [4]


def test_detaching_puts_the_iterators_back(observed):
    base, workers = torch_loader._BaseDataLoaderIter, torch_loader._MultiProcessingDataLoaderIter
    places = [(base, "__init__"), (base, "_reset"), (workers, "_reset")]
    assert all(hasattr(vars(owner)[name], "__wrapped__") for owner, name in places)
    observed.attachment.detach()
    assert not any(hasattr(vars(owner)[name], "__wrapped__") for owner, name in places)
