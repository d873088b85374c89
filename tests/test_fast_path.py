"""The fast path of the hooks: when it is on, what sends the next batch to the slow path, and what brings it back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data_sets import Numbers


def nothing(*_args, **_kwargs):
    return False


RECORDER = SimpleNamespace(boundary=nothing, interrupt=nothing)
"""A snapshot that waits for its steps."""

CLOCK = SimpleNamespace(failed=False, epoch_boundary=nothing, step_ended=nothing, worked=nothing, batch_arrived=nothing)
"""A clock of the GPU that times nothing."""


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


def test_the_second_batch_in_a_row_switches_it_on(tracker):
    iterator = iter(DataLoader(Numbers(5)))
    next(iterator)
    assert tracker.fast_path_iterator_id == 0
    next(iterator)
    assert tracker.fast_path_iterator_id == id(iterator)


@pytest.mark.parametrize(("name", "value"), [("recorder", RECORDER), ("gpu", CLOCK)])
def test_it_is_back_one_batch_after_the_reason_has_gone(tracker, loop, name, value):
    setattr(tracker, name, value)
    tracker.slow_path()
    for _ in range(3):
        next(loop)
        assert tracker.fast_path_iterator_id == 0
        assert tracker.steady_iterator_id == id(loop), "its batches are ordinary ones all the same"
    setattr(tracker, name, None)
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_nvtx_ranges_keep_it_off(tracker, loop):
    tracker.profiler_ranges.nvtx = True
    tracker.slow_path()
    next(loop), next(loop)
    assert tracker.fast_path_iterator_id == 0


def test_a_timed_batch_switches_it_off_for_one_batch(tracker, loop):
    tracker.time_next_batch()
    assert tracker.fast_path_iterator_id == 0
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_it_stays_off_until_all_wanted_waits_are_timed(tracker, loop):
    tracker.sampler_timer.wanted = 3
    tracker.slow_path()
    next(loop), next(loop)
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


def test_batches_that_come_back_switch_it_on_again(tracker, loop):
    tracker.follow_optimizer()
    assert tracker.fast_path_iterator_id == 0
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_nothing_switches_it_on_once_the_hooks_are_detached(tracker, loop):
    tracker.detach()
    next(loop), next(loop)
    assert tracker.fast_path_iterator_id == 0
