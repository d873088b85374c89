"""Which ticks are skipped: every second one of a healthy loop, later four of five, and none of any other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from telemetry.agent.agent import TickPace
from telemetry.config import Config
from telemetry.records import CATEGORIES
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from collections.abc import Iterable


class Loop:
    """A training loop, as the ledger has it, and the pace of its agent."""

    def __init__(self, **settings: float) -> None:
        self.ledger = SimpleNamespace(at_ns=0, ns=dict.fromkeys(CATEGORIES, 0))
        self.steps_total = 0
        self.pace = TickPace(Config(**settings), self)

    def second(
        self, *, steps: int = 10, busy: bool = False, wanted: bool = False, seconds: float = 1.0, **spent: float
    ) -> bool:
        """Whether the tick after a second is skipped; what is not spent otherwise is compute."""
        self.ledger.at_ns += int(seconds * NS)
        for category, share in {**spent, "compute": seconds - sum(spent.values())}.items():
            self.ledger.ns[category] += int(share * NS)
        self.steps_total += steps
        return self.pace.skips(busy=busy, wanted=wanted)


SOON, LATER = (3, 4), range(100, 105)
"""Seconds after which something happens. With each of a group, another place between two ticks is tried."""


def skipped_after(trouble: dict, seconds: Iterable[int] = (*SOON, *LATER)) -> list[bool]:
    """Whether the tick is skipped that comes with the trouble, after each of these times without any."""
    found = []
    for before in seconds:
        loop = Loop()
        for _ in range(before):
            loop.second()
        found.append(loop.second(**trouble))
    return found


@pytest.mark.parametrize("usual", [{}, {"data_wait": 0.08}], ids=["compute", "a little more wait"])
def test_every_second_tick_of_a_loop_that_goes_on_as_before(usual):
    assert sorted(skipped_after(usual, SOON)) == [False, True]


def test_four_of_five_ticks_after_a_long_calm():
    assert sorted(skipped_after({}, LATER)) == [False, True, True, True, True]


@pytest.mark.parametrize(("window", "ticks"), [(30.0, 5), (5.0, 3), (2.0, 2), (1.0, 1)])
def test_a_short_window_of_a_stall_has_at_least_two_ticks(window, ticks):
    loop = Loop(stall_window_seconds=window)
    for _ in range(100):
        loop.second()
    taken = [second for second in range(30) if not loop.second()]
    assert {later - before for before, later in itertools.pairwise(taken)} == {ticks}
    assert loop.pace.intervals == ticks
    assert ticks == 1 or (ticks - 1) * 2 <= window


def test_a_line_for_the_log_waits_for_at_most_one_tick():
    loop = Loop()
    for _ in range(100):
        loop.second()
    assert not all(loop.second(wanted=True) for _ in range(2))


def test_a_busy_tick_ends_a_long_calm():
    loop = Loop()
    for _ in range(100):
        loop.second()
    loop.second(busy=True)
    assert sorted(loop.second() for _ in range(4)) == [False, False, True, True]


@pytest.mark.parametrize(
    "trouble",
    [
        {"data_wait": 0.12},
        {"other": 0.12},
        {"evaluation": 0.3},
        {"checkpoint": 0.3},
        {"startup": 1.0},
        {"steps": 0},
        {"busy": True},
        {"seconds": 5.0},
    ],
    ids=lambda trouble: next(iter(trouble)),
)
def test_the_tick_in_which_trouble_begins_is_not_skipped(trouble):
    assert skipped_after(trouble) == [False] * 7


@pytest.mark.parametrize("trouble", [{"steps": 0}, {"busy": True}], ids=["no step", "an open stall"])
def test_no_tick_is_skipped_while_there_is_something_to_follow(trouble):
    loop = Loop()
    loop.second()
    assert not any(loop.second(**trouble) for _ in range(6))


def test_a_loop_that_has_always_waited_goes_on_as_before():
    loop = Loop()
    assert sum(loop.second(data_wait=0.18) for _ in range(10)) >= 4


@pytest.mark.parametrize(
    ("later", "skipped"),
    [({}, [False, True, True, True, True]), ({"data_wait": 0.4}, [False, False, True, True, True])],
)
def test_a_rise_ends_a_long_calm_unless_it_is_over_at_once(later, skipped):
    loop = Loop()
    for _ in range(100):
        loop.second()
    assert not loop.second(data_wait=0.4)
    assert sorted(loop.second(**later) for _ in range(5)) == skipped


def test_a_rise_before_the_loop_stood_still_is_forgotten():
    loop = Loop()
    for _ in range(100):
        loop.second()
    loop.second(data_wait=0.4)
    loop.second(steps=0)
    assert sorted(loop.second() for _ in range(4)) == [False, False, True, True]


@pytest.mark.parametrize("interval", [0.1, 0.5, 2.0])
def test_other_intervals_are_kept(interval):
    loop = Loop(interval_seconds=interval)
    assert not any(loop.second(seconds=interval) for _ in range(4))
