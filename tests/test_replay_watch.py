"""Replay among the first steps of a process, from their waits and compute alone."""

from __future__ import annotations

import pytest

from telemetry.agent.restarts import ReplayWatch
from telemetry.records import Step

STEP, DRAWN = (0.001, 0.1), (0.02, 0.0005)
"""Wait and compute: of a step that trains, and of a batch that is thrown away."""


def steps(*kinds: tuple[float, float]) -> list[Step]:
    return [Step(wait + compute, wait, number) for number, (wait, compute) in enumerate(kinds)]


def watch(*ticks: tuple[list[Step], int]) -> ReplayWatch:
    found = ReplayWatch()
    drawn = 0
    for closed, optimizer_steps in ticks:
        drawn += len(closed)
        found.add(closed, optimizer_steps)
        found.settle(optimizer_steps, 0.0, most=drawn - optimizer_steps)
    assert found.settled
    return found


def test_batches_before_the_first_new_step_are_a_replay():
    found = watch((steps(*[DRAWN] * 100), 0), (steps(*[DRAWN] * 7, *[STEP] * 5), 5))
    assert found.batches == 107
    assert found.seconds == pytest.approx(107 * 0.0205)
    assert found.wait_seconds == pytest.approx(107 * 0.02)


@pytest.mark.parametrize("held_up", [(0.02, 0.02), (0.02, 0.03)])
def test_a_batch_that_a_busy_machine_holds_up_is_replay_like_the_others(held_up):
    before = [DRAWN] * 50 + [held_up] + [DRAWN] * 49
    found = watch((steps(*before), 0), (steps(*[DRAWN] * 3, held_up, *[DRAWN] * 3, *[STEP] * 5), 5))
    assert found.batches == 107


def test_a_training_that_begins_has_no_replay():
    assert watch((steps(*[STEP] * 9), 9)).batches == 0


def test_accumulated_gradients_are_no_replay():
    found = watch((steps(*[STEP] * 7), 0), (steps(*[STEP] * 33), 5))
    assert found.batches == 0


def test_steps_that_become_longer_are_no_replay():
    """Each had its step of the optimizer, however short it was."""
    found = watch((steps(*[DRAWN] * 9, *[STEP] * 9), 18))
    assert found.batches == 0


def test_one_long_step_does_not_make_accumulated_gradients_a_replay():
    found = ReplayWatch()
    found.add(steps(*[DRAWN] * 7), 0)
    found.add(steps(*[DRAWN] * 8, STEP), 2)
    found.settle(2, 0.0, most=14)
    assert not found.settled
    found.add(steps(*[DRAWN] * 24), 5)
    found.settle(5, 0.0, most=35)
    assert found.settled
    assert found.batches == 0


def test_the_end_decides_with_what_there_is():
    found = ReplayWatch()
    found.add(steps(*[DRAWN] * 40), 0)
    found.add(steps(*[STEP] * 3), 3)
    found.settle(3, 0.0, most=40)
    assert not found.settled
    found.settle(3, 0.0, most=40, ended=True)
    assert found.settled
    assert found.batches == 40


def test_no_more_than_were_drawn_without_a_step():
    found = watch((steps(*[DRAWN] * 40), 0), (steps(*[DRAWN] * 4, *[STEP] * 5), 9))
    assert found.batches == 40


def test_accumulated_gradients_after_a_replay_are_not_part_of_it():
    found = watch((steps(*[DRAWN] * 40, *[STEP] * 3), 0), (steps(*[STEP] * 17), 5))
    assert found.batches == 40
