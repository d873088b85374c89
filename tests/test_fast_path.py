"""The fast path of the hooks: when it is enabled, what disables it, and what brings it back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.hooks import tracker as f
from tests.data_sets import Numbers

PACKAGE = Path(telemetry.__file__).parent


class Recorder:
    """A snapshot that waits for its steps."""

    def boundary(self, ended, *, opens):
        return False

    def interrupt(self, ended, why):
        return False


class Clock:
    """A clock of the GPU that times nothing."""

    failed = False

    def epoch_boundary(self):
        pass

    def step_ended(self):
        pass

    def worked(self):
        pass

    def batch_arrived(self, start, end):
        pass


@pytest.fixture
def tracker(observed):
    return observed.tracker


@pytest.fixture
def loop(tracker):
    """An iterator for which the fast path is enabled."""
    iterator = iter(DataLoader(Numbers(100)))
    next(iterator), next(iterator)
    assert tracker.fast_path_iterator_id == id(iterator)
    assert tracker.fast_path.disabled_by is None
    return iterator


def test_the_second_batch_in_a_row_enables_it(tracker):
    iterator = iter(DataLoader(Numbers(5)))
    assert tracker.fast_path.disabled_by == f.LOOP_CHANGED
    next(iterator)
    assert tracker.fast_path_iterator_id == 0
    next(iterator)
    assert tracker.fast_path_iterator_id == id(iterator)


@pytest.mark.parametrize("reason", [f.SNAPSHOT, f.GPU_CLOCK])
def test_it_is_back_one_batch_after_the_reason_has_gone(tracker, loop, reason):
    name, value = {f.SNAPSHOT: ("recorder", Recorder()), f.GPU_CLOCK: ("gpu", Clock())}[reason]
    setattr(tracker, name, value)
    tracker.fast_path.disable(reason)
    for _ in range(3):
        next(loop)
        assert tracker.fast_path_iterator_id == 0
        assert tracker.fast_path.disabled_by == reason
        assert tracker.fast_path.steady_iterator_id == id(loop), "its batches are ordinary ones all the same"
    setattr(tracker, name, None)
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_nvtx_ranges_keep_it_off(tracker, loop):
    tracker.profiler_ranges.nvtx = True
    tracker.fast_path.disable(f.NVTX)
    next(loop), next(loop)
    assert tracker.fast_path.disabled_by == f.NVTX


def test_a_timed_batch_disables_it_for_one_batch(tracker, loop):
    tracker.time_next_batch()
    assert tracker.fast_path.disabled_by == f.TIMED_BATCH
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_it_stays_off_until_all_wanted_waits_are_timed(tracker, loop):
    tracker.sampler_timer.wanted = 3
    tracker.fast_path.disable(f.TIMED_BATCH)
    next(loop), next(loop)
    assert tracker.fast_path.disabled_by == f.TIMED_BATCH
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_the_loop_that_a_phase_interrupted_goes_on_with_it(tracker, loop):
    before = tracker.scopes.enter_phase("checkpoint")
    assert tracker.fast_path.disabled_by == f.LOOP_CHANGED
    tracker.scopes.exit_phase("checkpoint", before, before.at)
    assert tracker.fast_path_iterator_id == id(loop)


@pytest.mark.parametrize("change", ["step", "evaluation", "iteration", "end", "other loader"])
def test_a_change_of_the_loop_disables_it(tracker, loop, change):
    if change == "step":
        tracker.scopes.enter_step()
    elif change == "evaluation":
        with torch.no_grad():
            next(loop)
    elif change == "iteration":
        iter(DataLoader(Numbers(2)))
    elif change == "end":
        list(loop)
    else:
        next(iter(DataLoader(Numbers(2))))
    assert tracker.fast_path_iterator_id == 0
    assert tracker.fast_path.disabled_by == f.LOOP_CHANGED
    assert tracker.fast_path.steady_iterator_id == 0


def test_batches_that_come_back_enable_it_again(tracker, loop):
    tracker.follow_optimizer()
    assert tracker.fast_path.disabled_by == f.BATCHES_UNSEEN
    next(loop)
    assert tracker.fast_path_iterator_id == id(loop)


def test_nothing_enables_it_once_the_hooks_are_detached(tracker, loop):
    tracker.detach()
    next(loop), next(loop)
    assert tracker.fast_path.disabled_by == f.STOPPED


def test_it_has_one_owner():
    writers = set()
    for path in PACKAGE.rglob("*.py"):
        for cls in ast.walk(ast.parse(path.read_text())):
            if isinstance(cls, ast.ClassDef):
                for node in ast.walk(cls):
                    if isinstance(node, ast.Attribute) and node.attr == "fast_path_iterator_id":
                        if isinstance(node.ctx, ast.Store):
                            writers.add(cls.name)
    assert writers == {"FastPath", "StepState"}, "only FastPath, and the initial value"
