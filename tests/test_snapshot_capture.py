"""A recording in a real loop has the right steps, whatever happens in them."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.utils.data import DataLoader

from telemetry.records import OTHER, RECORDED, SKIPPED
from tests.data_sets import Numbers
from tests.snapshot_recording import mark, marks, train


def test_exactly_the_agreed_steps_are_recorded(taken):
    taken.arm(5, 7)
    train(12)
    outcome = taken.outcome()
    assert (outcome.result, outcome.why, outcome.first_step, outcome.last_step) == (RECORDED, None, 5, 7)
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [5, 6, 7]
    assert outcome.pauses.keys() == {"prepare", "start", "stop"}
    assert outcome.thread == threading.get_native_id()
    assert taken.trace["distributedInfo"]["rank"] == 3
    assert taken.trace["telemetry"]["first_step"] == 5


def test_the_pauses_are_in_the_ledger_and_in_no_step(taken, observed):
    taken.arm(5, 7)
    train(12)
    outcome = taken.outcome()
    paused = sum(outcome.pauses.values())
    assert observed.ledger.ns[OTHER] / 1e9 >= paused
    assert observed.tracker.overhead_ns / 1e9 >= paused
    assert len(observed.steps) == 12


def test_the_fast_path_is_back_afterwards(taken, observed):
    iterator = iter(DataLoader(Numbers(20)))
    next(iterator), next(iterator), next(iterator)
    assert observed.tracker.fast_path_iterator_id == id(iterator)
    taken.arm(6, 7)
    assert observed.tracker.fast_path_iterator_id == 0
    for _ in range(6):
        next(iterator)
    assert taken.outcome().result == RECORDED
    assert observed.tracker.fast_path_iterator_id == id(iterator)
    assert observed.tracker.recorder is None


def test_an_epoch_that_ends_in_the_window(taken):
    taken.arm(4, 9)
    for epoch in range(3):
        train(5, 5 * epoch)
    outcome = taken.outcome()
    assert (outcome.first_step, outcome.last_step) == (4, 9)
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_left_with_break(taken, workers):
    taken.arm(3, 5)
    step = 0
    loader = DataLoader(Numbers(9), num_workers=workers, multiprocessing_context="fork" if workers else None)
    for _ in range(3):
        for _ in loader:
            step += 1
            mark(step)
            if step % 3 == 0:
                break
    outcome = taken.outcome()
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [3, 4, 5]


def test_explicit_steps(taken):
    taken.arm(3, 4)
    for step, _ in enumerate(DataLoader(Numbers(8)), 1):
        with telemetry_step(taken):
            mark(step)
    outcome = taken.outcome()
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [3, 4]


@contextlib.contextmanager
def telemetry_step(taken):
    taken.observed.tracker.scopes.enter_step()
    yield
    taken.observed.tracker.scopes.exit_step()


def test_a_loop_without_a_loader_counts_by_its_optimizer(taken):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    taken.arm(3, 4)
    for _ in range(8):
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
    outcome = taken.outcome()
    assert (outcome.result, outcome.first_step, outcome.last_step) == (RECORDED, 3, 4)
    assert taken.steps(outcome) == [3, 4]


@pytest.mark.parametrize("how", ["gradients off", "phase"])
def test_an_evaluation_ends_the_recording_and_keeps_what_there_is(taken, how):
    taken.arm(4, 20)
    train(6)
    if how == "phase":
        before = taken.observed.tracker.scopes.enter_phase("evaluation")
        train(3, 100)
        taken.observed.tracker.scopes.exit_phase("evaluation", before, 0)
    else:
        with torch.no_grad():
            train(3, 100)
    outcome = taken.outcome()
    assert (outcome.result, outcome.first_step, outcome.last_step) == (RECORDED, 4, 6)
    assert "evaluation" in outcome.why
    assert marks(taken.events(outcome)) == [4, 5, 6]


def test_a_checkpoint_is_carried(taken, tmp_path):
    taken.arm(2, 4)
    for step, _ in enumerate(DataLoader(Numbers(6)), 1):
        mark(step)
        if step == 3:
            torch.save({}, tmp_path / "checkpoint")
    assert marks(taken.events(taken.outcome())) == [2, 3, 4]


def test_a_recording_that_takes_too_long_is_cut_at_the_next_boundary(taken):
    taken.capture._most_ns = 0
    taken.arm(3, 9)
    train(12)
    outcome = taken.outcome()
    assert (outcome.result, outcome.first_step, outcome.last_step) == (RECORDED, 3, 3)
    assert "cut short" in outcome.why
    assert marks(taken.events(outcome)) == [3]


def test_a_rank_that_is_past_the_step_skips_it(taken):
    loader = iter(DataLoader(Numbers(12)))
    for _ in range(6):
        next(loader)
    taken.arm(5, 7)
    next(loader)
    assert taken.outcome().result == SKIPPED
    assert not autograd_profiler._is_profiler_enabled


def test_the_end_of_the_run_keeps_what_was_recorded(taken):
    taken.arm(3, 50)
    train(6)
    taken.observed.tracker.boundaries.interrupt("the end of the run")
    outcome = taken.outcome()
    assert (outcome.result, outcome.last_step) == (RECORDED, 6)
