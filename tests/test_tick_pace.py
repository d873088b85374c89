"""Which ticks are skipped: every second one of a healthy loop, later four of five, and none of any other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from telemetry.agent.ticks import TickPace
from telemetry.config import Config
from telemetry.records import CATEGORIES
from telemetry.util.clock import NS


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


def after(calm: int) -> Loop:
    """A loop after so many seconds in which nothing changed."""
    loop = Loop()
    for _ in range(calm):
        loop.second()
    return loop


@pytest.mark.parametrize("usual", [{}, {"data_wait": 0.08}], ids=["compute", "a little more wait"])
def test_every_second_tick_of_a_loop_that_goes_on_as_before_and_later_four_of_five(usual):
    assert sorted(after(calm).second(**usual) for calm in (3, 4)) == [False, True]
    assert sorted(after(calm).second() for calm in range(100, 105)) == [False, True, True, True, True]


def test_a_loop_that_has_always_waited_goes_on_as_before():
    loop = Loop()
    assert sum(loop.second(data_wait=0.18) for _ in range(10)) >= 4


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
    loop = after(100)
    assert not all(loop.second(wanted=True) for _ in range(2))


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
    found = [after(calm).second(**trouble) for calm in (3, 4, *range(100, 105))]  # at each place between two ticks
    assert found == [False] * 7


@pytest.mark.parametrize("trouble", [{"steps": 0}, {"busy": True}], ids=["no step", "an open stall"])
def test_no_tick_is_skipped_while_there_is_something_to_follow(trouble):
    loop = after(1)
    assert not any(loop.second(**trouble) for _ in range(6))


@pytest.mark.parametrize(
    ("later", "skipped"),
    [
        ({}, [False, True, True, True, True]),
        ({"data_wait": 0.4}, [False, False, True, True, True]),
    ],
)
def test_a_rise_ends_a_long_calm_unless_it_is_over_at_once(later, skipped):
    loop = after(100)
    assert not loop.second(data_wait=0.4)
    assert sorted(loop.second(**later) for _ in range(5)) == skipped


@pytest.mark.parametrize("trouble", [{"busy": True}, {"steps": 0}], ids=["an open stall", "no step"])
def test_trouble_ends_a_long_calm_and_a_rise_before_it_is_forgotten(trouble):
    loop = after(100)
    loop.second(data_wait=0.4)
    loop.second(**trouble)
    assert sorted(loop.second() for _ in range(4)) == [False, False, True, True]


@pytest.mark.parametrize("interval", [0.1, 0.5, 2.0])
def test_other_intervals_are_kept(interval):
    loop = Loop(interval_seconds=interval)
    assert not any(loop.second(seconds=interval) for _ in range(4))
