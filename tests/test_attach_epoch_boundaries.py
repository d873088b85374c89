"""The start of an iteration, and its end where the loop is left."""

from __future__ import annotations

import gc
import time

import torch
from torch.utils.data import DataLoader

from telemetry.records import DATA_WAIT, EVALUATION
from tests.data_sets import Numbers

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


def test_each_first_batch_asked_for_alone_is_an_epoch_boundary(observed):
    loader = DataLoader(Numbers(64), batch_size=1, num_workers=1)
    began = time.perf_counter_ns()
    for _ in range(4):
        next(iter(loader))
    took = time.perf_counter_ns() - began
    observed.read()
    assert (observed.ledger.batches, observed.ledger.epoch_boundaries, observed.ledger.iterations_left) == (
        4,
        3,
        4,
    )  # the first began the run
    assert observed.ledger.ns[DATA_WAIT] > 0.9 * took
    assert len(observed.steps) == 3
    assert all(step.wait_seconds > 0.9 * step.seconds for step in observed.steps)


def test_the_end_of_the_workers_of_an_evaluation_is_evaluation(observed):
    loader = DataLoader(Numbers(64, seconds=0.1), batch_size=1, num_workers=1)
    with torch.no_grad():
        for _ in loader:
            break
    next(iter(DataLoader(Numbers(8))))
    observed.read()
    assert observed.ledger.ns[EVALUATION] > 0.1e9
    assert observed.ledger.ns[DATA_WAIT] < 0.05e9
    assert (observed.ledger.epoch_boundaries, observed.ledger.iterations_left) == (0, 0)


def test_one_batch_of_another_loader_is_an_epoch_boundary_of_its_own(observed):
    iterator = iter(DataLoader(Numbers(64, seconds=0.05), batch_size=1))
    other = DataLoader(Numbers(4), batch_size=1, num_workers=1)
    for _ in range(3):
        next(iterator)
        began = time.perf_counter_ns()
        next(iter(other))
        took = time.perf_counter_ns() - began
    next(iterator)
    observed.read()
    assert (observed.ledger.epoch_boundaries, observed.ledger.iterations_left) == (3, 3)
    assert observed.ledger.boundary_wait_ns > 0.5 * took
    assert observed.ledger.ns[DATA_WAIT] - observed.ledger.boundary_wait_ns > 4 * 0.05e9  # the ordinary ones


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
