"""Batches and steps of torch's loaders: each batch is counted once, and belongs to the right step."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import telemetry
from telemetry.model.records import COMPUTE, DATA_WAIT, EVALUATION, OTHER
from tests.data_sets import Numbers, Stream

# -- batches of every kind of DataLoader are counted, and belong to the right step -------------------------------------


KINDS = {
    "map, no workers": dict(dataset=Numbers(), batch_size=2),
    "map, fork": dict(dataset=Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"),
    "map, spawn": dict(dataset=Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn"),
    "map, forkserver": dict(dataset=Numbers(), batch_size=2, num_workers=1, multiprocessing_context="forkserver"),
    "map, persistent": dict(dataset=Numbers(), batch_size=2, num_workers=2, persistent_workers=True),
    "map, no batching": dict(dataset=Numbers(6), batch_size=None),
    "iterable, no workers": dict(dataset=Stream(), batch_size=2),
    "iterable, workers": dict(dataset=Stream(), batch_size=2, num_workers=2),
    "iterable, no batching": dict(dataset=Stream(), batch_size=None, num_workers=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_loader_counts(observed, kind):
    loader = DataLoader(**KINDS[kind])
    batches = 0
    for _ in range(2):
        for _ in loader:
            batches += 1
    ledger = observed.read()
    assert len(observed.steps) == ledger.batches == batches > 0
    assert ledger.category == OTHER  # the epoch is over
    assert all(0 <= step.wait_seconds <= step.seconds for step in observed.steps)
    assert ledger.ns[DATA_WAIT] > 0
    assert ledger.ns[EVALUATION] == 0


def test_worker_start_up_and_the_first_batch_are_data_wait(observed):
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=2)
    began = time.perf_counter_ns()
    iterator = iter(loader)
    next(iterator)
    took = time.perf_counter_ns() - began
    ledger = observed.read()
    # The rest is our own bookkeeping and the two lines above.
    assert ledger.ns[DATA_WAIT] > 0.9 * took
    assert ledger.ns[DATA_WAIT] <= took


def test_an_iterator_alive_before_the_start_counts():
    iterator = iter(DataLoader(Numbers(6), batch_size=1))
    next(iterator)
    agent = telemetry.start(port="off", start_line=False, run_dir=None)
    assert len(list(iterator)) == 5
    agent.accounting.update()
    assert agent.accounting.stats.steps == 5


def test_two_loaders_zipped_are_one_step(observed):
    loader = DataLoader(Numbers(5, seconds=0.002), batch_size=1)
    for _ in zip(loader, loader):
        pass
    observed.read()
    assert len(observed.steps) == 5
    assert all(step.wait_seconds >= 0.004 for step in observed.steps)  # both waits belong to it


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


def test_alternating_loaders_with_optimizer_steps_are_separate_steps(observed):
    train = optimizer().step
    iterators = [iter(DataLoader(Numbers(4), batch_size=1)) for _ in range(2)]
    for turn in range(8):
        next(iterators[turn % 2])
        train()
    observed.read()
    assert len(observed.steps) == 7  # and one open
    assert observed.tracker.optimizer_steps == 8


@pytest.mark.parametrize("asks", [False, True])
def test_a_loader_that_joins_in_mid_step_adds_to_that_step(observed, asks):
    """The fast path, which the steps before it took, does not note the optimizer steps at the start of a step."""
    train = optimizer().step
    joins = iter(DataLoader(Numbers(4), batch_size=1))
    for number, _ in enumerate(DataLoader(Numbers(12), batch_size=1)):
        if number == 8:
            if asks:
                observed.tracker.slow_path()
            next(joins)
        train()
    observed.read()
    assert len(observed.steps) == 12


def test_gradient_accumulation_tells_batches_from_optimizer_steps(observed):
    train, since = optimizer().step, []
    for index, _ in enumerate(DataLoader(Numbers(12), batch_size=1)):
        since.append(observed.tracker.batches_since_optimizer)
        if index % 4 == 3:
            train()
    observed.read()
    assert since[4:] == [1, 2, 3, 4] * 2
    assert len(observed.steps) == 12
    assert observed.tracker.optimizer_steps == 3


def test_fetches_on_another_thread_are_no_waits(observed):
    step, ready = optimizer().step, []
    thread = threading.Thread(target=lambda: ready.extend(DataLoader(Numbers(6, seconds=0.005), batch_size=1)))
    thread.start()
    thread.join()
    for _ in ready:
        step()
        time.sleep(0.002)
    ledger = observed.read()
    assert ledger.ns[DATA_WAIT] == 0
    assert len(observed.steps) == 5  # from one optimizer step to the next
    assert ledger.category == COMPUTE


def test_training_on_another_thread_than_the_one_that_started(observed):
    step = optimizer().step

    def train() -> None:
        for _ in DataLoader(Numbers(6), batch_size=1):
            step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    observed.read()
    assert len(observed.steps) >= 5
    followed = observed.tracker.thread, observed.tracker.native_thread
    assert followed == (thread.ident, thread.native_id), "both IDs of the thread"


def test_a_loader_inside_a_dataset_is_part_of_the_outer_wait(observed):
    class Outer(IterableDataset):
        def __iter__(self):
            yield from DataLoader(Numbers(4), batch_size=2)

    assert len(list(DataLoader(Outer(), batch_size=None))) == 2
    observed.read()
    assert len(observed.steps) == 2


def test_what_is_read_of_an_optimizer_s_tensors_runs_no_code_of_the_script(observed):
    """Neither a subclass of tensors nor a mode notices that the agent looks where they are and how often it stepped."""
    calls = []

    class Noted(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            calls.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    noted = Noted(torch.zeros(1))
    noted.grad = torch.ones(1)
    adam = torch.optim.Adam([noted])
    for _ in DataLoader(Numbers(4)):
        adam.step()
    calls.clear()
    observed.read()
    assert calls == []
    assert observed.tracker.trained_on == "cpu"


# -- the start of an iteration, and its end where the loop is left -----------------------------------------------------


BEGIN_SECONDS = 0.3  # longer than any step, also on a busy machine


class SlowToBegin:
    """A batch sampler whose iteration is slow to begin."""

    def __iter__(self):
        time.sleep(BEGIN_SECONDS)
        return iter([[index] for index in range(8)])


def test_an_epoch_left_with_break_closes_its_step(observed):
    loader = DataLoader(Numbers(8), batch_sampler=SlowToBegin())
    for _ in range(3):
        for index, _ in enumerate(loader):
            if index == 1:
                break
    observed.read()
    assert observed.ledger.batches == 6
    assert len(observed.steps) == 5  # the last one is still open
    assert (
        max(step.seconds for step in observed.steps) < BEGIN_SECONDS
    )  # the start of the next epoch is in none of them
    assert observed.ledger.ns[DATA_WAIT] >= 3 * BEGIN_SECONDS * 1e9


def test_the_end_of_workers_that_are_left_with_break_is_data_wait(observed):
    loader = DataLoader(Numbers(64, seconds=0.1), batch_size=1, num_workers=1)
    for _ in loader:
        left = time.perf_counter_ns()
        break
    took = time.perf_counter_ns() - left  # the next fetch, which is in progress, is not cancelled
    observed.read()
    assert observed.ledger.iterations_left == 1
    assert took > 0.05e9
    assert 0.9 * took < observed.ledger.boundary_wait_ns <= took


def test_stopping_workers_in_a_garbage_collection_counts_as_collection(observed):
    loader = DataLoader(Numbers(64, seconds=0.1), batch_size=1, num_workers=1)
    held = [iter(loader)]
    next(held[0])
    held.append(held)
    del held
    before = observed.garbage.ns
    gc.collect()
    observed.read()
    assert observed.garbage.ns - before > 0.05e9
    assert observed.ledger.iterations_left == 0


# -- the fast path of the hooks: when it is on, what sends the next batch to the slow path, and what brings it back ----


def nothing(*_args, **_kwargs):
    return False


RECORDER = SimpleNamespace(boundary=nothing, interrupt=nothing)
"""A snapshot that waits for its steps."""

CLOCK = SimpleNamespace(due=0, failed=False, requested=nothing, worked=nothing, batch_arrived=nothing)
"""A clock of the GPU that is to time the next wait, and does not."""


@pytest.fixture
def tracker(observed):
    return observed.tracker


@pytest.fixture
def loop(tracker):
    """An iterator for which the fast path is on."""
    iterator = iter(DataLoader(Numbers(100)))
    next(iterator), next(iterator)
    assert tracker.fast_path_iterator_id == id(iterator)
    return iterator


@pytest.mark.parametrize(("what", "value"), [("recorder", RECORDER), ("gpu", CLOCK), ("nvtx", True)])
def test_it_is_back_one_batch_after_the_reason_has_gone(tracker, loop, what, value):
    owner = tracker.profiler_ranges if what == "nvtx" else tracker
    setattr(owner, what, value)
    tracker.slow_path()
    for _ in range(3):
        next(loop)
        assert tracker.fast_path_iterator_id == 0
        assert tracker.steady_iterator_id == id(loop), "its batches are ordinary ones all the same"
    setattr(owner, what, None)
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_a_timed_batch_switches_it_off_for_one_batch(tracker, loop):
    tracker.time_next_wait()
    assert tracker.fast_path_iterator_id == 0
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_the_loop_that_a_phase_interrupted_goes_on_with_it(tracker, loop):
    before = tracker.enter_phase("checkpoint")
    assert tracker.fast_path_iterator_id == 0
    tracker.exit_phase("checkpoint", before, before.at)
    assert tracker.fast_path_iterator_id == id(loop)


@pytest.mark.parametrize("change", ["step", "evaluation", "iteration", "end", "other loader"])
def test_a_change_of_the_loop_switches_it_off(tracker, loop, change):
    if change == "step":
        tracker.enter_step()
    elif change == "evaluation":
        with torch.no_grad():
            next(loop)
    elif change == "iteration":
        iter(DataLoader(Numbers(2)))
    elif change == "end":
        list(loop)
    else:
        next(iter(DataLoader(Numbers(2))))
    assert tracker.fast_path_iterator_id == tracker.steady_iterator_id == 0
