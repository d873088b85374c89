"""What the training thread does itself inside `next()`: the sampler, garbage collections, freeing a batch."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import OrderedDict, UserDict, deque

import pytest
import torch
from faults.processes import wait_for
from torch.utils.data import DataLoader, Dataset

from telemetry.hooks import timers
from telemetry.hooks.ring import STEP, Ring
from telemetry.hooks.timers import BatchRelease
from telemetry.util.clock import now_ns
from tests.data_sets import Numbers
from tests.tracebacks import FRAMES_STAY

# -- what the training thread does itself inside ``next()`` while workers fetch: the sampler, garbage collections ------


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


# -- garbage collection is timed where it delays a step ----------------------------------------------------------------


def test_a_collection_in_a_step_is_counted(observed):
    gc.collect()
    assert observed.garbage.ns == 0  # starting up
    loop = iter(DataLoader(Numbers(4), batch_size=1))
    next(loop)
    gc.collect()
    assert observed.garbage.ns > 0


def test_what_the_callback_costs_is_counted_once(observed):
    cost = observed.garbage.cost_ns
    gc.disable()
    try:
        start = time.perf_counter_ns()
        for _ in range(20):
            gc.collect()
        took = time.perf_counter_ns() - start
        counted = observed.garbage.cost_ns - cost
        assert 0 < counted < took
        assert observed.garbage.cost_ns - cost == counted
    finally:
        gc.enable()


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


@pytest.fixture
def many_collections(monkeypatch):
    """Any rate of collections is too high for all of them to be timed."""
    monkeypatch.setattr(timers, "_MANY", 1e-6)
    monkeypatch.setattr(timers, "_MAX_IN_A_ROW", 2)
    monkeypatch.setattr(timers, "_MIN_READING_SECONDS", 0)


def test_of_many_collections_some_are_timed_and_all_are_counted(small_heap, observed, many_collections):
    loop, callbacks = iter(DataLoader(Numbers(4), batch_size=1)), len(gc.callbacks)
    next(loop)

    def lost(times: int, generation: int) -> int:
        before = observed.tracker.garbage.ns
        gc.disable()  # no others
        for _ in range(times):
            gc.collect(generation)
        after = observed.garbage.ns
        gc.enable()
        return after - before

    lost(1, generation=0)
    while not observed.garbage.timing:  # what was before is read
        pass
    timed = lost(10, generation=0)
    assert timed > 0
    assert len(gc.callbacks) == callbacks - 1
    assert lost(20, generation=0) == pytest.approx(2 * timed, abs=1)
    assert lost(5, generation=2) == 0, "no full one was timed yet"
    assert len(gc.callbacks) == callbacks
    assert lost(0, generation=2) == 0
    assert len(gc.callbacks) == callbacks, "until a full one is timed"
    full = lost(1, generation=2)
    assert full > timed / 10
    assert len(gc.callbacks) == callbacks - 1
    assert lost(3, generation=2) == pytest.approx(3 * full, abs=1)
    assert observed.tracker.garbage.cost_ns > 0
    observed.attachment.detach()
    assert len(gc.callbacks) == callbacks - 1
    lost(1, generation=2)
    assert len(gc.callbacks) == callbacks - 1


def test_a_callback_of_the_script_s_is_never_left_out(observed, many_collections):
    """A collection that goes through the list leaves one out if another is removed before it."""
    theirs = []
    gc.callbacks.append(lambda *_: theirs.append(list(gc.callbacks)))
    try:
        gc.collect()
        assert observed.garbage.timing
    finally:
        gc.callbacks.pop()
    gc.collect()
    assert not observed.garbage.timing
    assert len(theirs[0]) == len(theirs[-1])


# -- how long it takes to free a batch when the next one takes its place -----------------------------------------------


TOOK = 0.02


class SlowToFree:
    """SlowToFree to be freed."""

    def __del__(self):
        time.sleep(TOOK)


def in_the_middle(samples):
    return [torch.zeros(1), SlowToFree(), torch.zeros(1)]


def in_a_dict(samples):
    return UserDict(first=torch.zeros(1), slow=SlowToFree(), last=(torch.zeros(1), torch.zeros(1)))


def train(tracker, batches):
    """Eight slow steps; every batch that can be followed is."""
    for batch in batches:
        assert batch is not None
        tracker.time_next_batch()
        time.sleep(TOOK)


def also_the_newest(tracker):
    """Stands for a tick after which another batch has come."""
    tracker.batch_release.follow(None)
    tracker.batch_release.read()
    return tracker.batch_release


def collated(collate):
    return DataLoader(Numbers(8), batch_size=1, num_workers=1, collate_fn=collate, multiprocessing_context="fork")


@pytest.mark.parametrize("collate", [in_the_middle, in_a_dict])
@pytest.mark.parametrize("around", [iter, enumerate, lambda batches: (batch for batch in batches)])
def test_freeing_a_batch_is_timed(observed, collate, around):
    train(observed.tracker, around(collated(collate)))
    release = also_the_newest(observed.tracker)
    assert release.freed >= 3  # enumerate keeps every other one for a step more
    assert release.ns >= release.freed * TOOK * 1e9
    assert observed.errors == []


def kept(tracker, batches):
    everything = []
    for batch in batches:
        everything.append(batch)
        tracker.time_next_batch()
    return everything


def replaced(tracker, batches):
    """As a copy on another device does."""
    for batch in batches:
        time.sleep(TOOK)
        batch = torch.ones(1)
        tracker.time_next_batch()
    return batch


def kept_for_a_step(tracker, batches):
    last = None
    for batch in batches:
        time.sleep(TOOK)
        last = batch
        tracker.time_next_batch()
    return last


def used_where_it_is_asked_for(tracker, batches):
    def use(batch):
        tracker.time_next_batch()
        time.sleep(TOOK)

    for _ in range(8):
        use(next(batches))


@pytest.mark.parametrize("loop", [kept, replaced, kept_for_a_step, used_where_it_is_asked_for])
def test_a_batch_that_is_freed_otherwise_is_not_counted(observed, loop):
    """The time in which it was used does not count."""
    held = loop(observed.tracker, iter(collated(in_the_middle)))
    assert also_the_newest(observed.tracker).freed == 0
    del held


def test_a_batch_that_outlives_the_interpreter_is_not_counted(tmp_path):
    """There is no current statement then."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, telemetry, torch\n"
        "from torch.utils.data import DataLoader\n"
        "agent = telemetry.start(port='off', start_line=False)\n"
        "for batch in DataLoader(torch.zeros(3, 1), num_workers=1, multiprocessing_context='fork'):\n"
        "    agent.tracker.time_next_batch()\n"
        "del agent, telemetry, torch, DataLoader\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


class Interrupted(Exception):
    pass


def test_a_signal_that_comes_while_a_batch_is_freed_is_not_lost():
    """It would be lost in Python code that a weak reference calls."""

    def interrupt(number, frame):
        raise Interrupted

    def deliver():
        for _ in range(3):
            batch = [torch.zeros(1), [float(number) for number in range(300_000)], torch.zeros(1)]
            now = now_ns()
            ring.push(now, now, STEP)
            release.follow(batch)
            yield batch
            del batch

    ring, before = Ring(), signal.signal(signal.SIGALRM, interrupt)
    release = BatchRelease(ring)
    # Raised in C as well, just before the floats are freed.
    alarm = map(signal.setitimer, itertools.repeat(signal.ITIMER_REAL), itertools.repeat(0.0002))
    references = []
    try:
        with pytest.raises(Interrupted):
            for batch in deliver():
                references.append(weakref.ref(batch[-1], functools.partial(next, alarm)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Strange(dict):
    """Raises whatever is called."""

    def values(self):
        raise OSError

    __iter__ = __len__ = __getitem__ = values


def endless():
    batch = []
    batch.append(batch)
    return batch


@pytest.mark.parametrize(
    "batch",
    [
        None, 7, "text", [], (), {}, [[], {}], endless(), Strange(a=Strange(b=1)), OrderedDict(a=torch.zeros(1)),
        deque([1]), {1: "a", 2: torch.zeros(1)}, torch.zeros(2).numpy(), UserDict(), type, object(),
    ],
    ids=lambda batch: type(batch).__name__,
)  # fmt: skip
def test_any_kind_of_batch_can_be_followed(batch):
    release = BatchRelease(Ring())
    for _ in range(3):
        release.follow(batch)
    release.read()
    assert (release.freed, release.ns) == (0, 0)
