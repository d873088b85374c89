"""How long it takes to free a batch when the next one takes its place."""

import functools
import itertools
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, UserDict, deque

import pytest
import torch
from torch.utils.data import DataLoader

from telemetry.hooks.ring import STEP, Ring
from telemetry.hooks.timers import BatchRelease
from telemetry.util.clock import now_ns
from tests.data_sets import Numbers

TOOK = 0.02


class Slow:
    """Slow to be freed."""

    def __del__(self):
        time.sleep(TOOK)


def in_the_middle(samples):
    return [torch.zeros(1), Slow(), torch.zeros(1)]


def in_a_dict(samples):
    return UserDict(first=torch.zeros(1), slow=Slow(), last=(torch.zeros(1), torch.zeros(1)))


def large(samples):
    return torch.zeros(100)


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


def loader(collate):
    return DataLoader(Numbers(8), batch_size=1, num_workers=1, collate_fn=collate, multiprocessing_context="fork")


@pytest.mark.parametrize("collate", [in_the_middle, in_a_dict])
@pytest.mark.parametrize("around", [iter, enumerate, lambda batches: (batch for batch in batches)])
def test_freeing_a_batch_is_timed(observed, collate, around):
    train(observed.tracker, around(loader(collate)))
    release = also_the_newest(observed.tracker)
    assert release.freed >= 3  # enumerate keeps every other one for a step more
    assert release.ns >= release.freed * TOOK * 1e9
    assert observed.errors == []


@pytest.mark.parametrize("around", [iter, enumerate])
def test_a_batch_of_one_tensor_is_freed_at_once(observed, around):
    """Batches that enumerate keeps for a step are freed later, and are not counted."""
    train(observed.tracker, around(loader(large)))
    release = also_the_newest(observed.tracker)
    assert release.freed >= 3
    assert release.ns < release.freed * TOOK * 1e9 / 4


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
    held = loop(observed.tracker, iter(loader(in_the_middle)))
    assert also_the_newest(observed.tracker).freed == 0
    del held


def test_a_batch_that_another_thread_frees_is_not_counted(observed):
    """In the same statement, after the next batch has come. Such a thread may have no Python frame."""

    def ask(clear=False):
        held.clear() if clear else held.append(next(batches))

    tracker, batches, held = observed.tracker, iter(loader(in_the_middle)), []
    for _ in range(3):
        tracker.time_next_batch()
        ask()
        ask()
        thread = threading.Thread(target=ask, args=(True,))
        thread.start()
        thread.join()
    assert also_the_newest(tracker).freed == 0


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


def test_batches_of_the_training_thread_s_own_are_not_followed(observed):
    train(observed.tracker, DataLoader(Numbers(8), batch_size=1, collate_fn=in_the_middle))
    assert not observed.tracker.batch_release.wanted
    assert also_the_newest(observed.tracker).freed == 0


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
