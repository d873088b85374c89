"""Which ticks are skipped: three of four of a loop that goes on as before, and none of any other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from telemetry.config import Config
from telemetry.loop.tick_pace import TickPace
from telemetry.model.records import CATEGORIES
from telemetry.util.clock import NS


class Loop:
    """A training loop, as the ledger has it, and the pace of its agent."""

    def __init__(self, calm: int = 0, **settings: float) -> None:
        self.ledger = SimpleNamespace(at_ns=0, ns=dict.fromkeys(CATEGORIES, 0))
        self.steps_total = 0
        self.pace = TickPace(Config(**settings), self)
        for _ in range(calm):
            self.second()

    def second(self, *, steps: int = 10, busy: bool = False, seconds: float = 1.0, **spent: float) -> bool:
        """Whether the tick after a second is skipped; what is not spent otherwise is compute."""
        self.ledger.at_ns += int(seconds * NS)
        for category, share in {**spent, "compute": seconds - sum(spent.values())}.items():
            self.ledger.ns[category] += int(share * NS)
        self.steps_total += steps
        return self.pace.skips(busy=busy)


@pytest.mark.parametrize("usual", [{}, {"data_wait": 0.08}, {"data_wait": 0.4}], ids=["compute", "a wait", "starved"])
def test_three_of_four_ticks_of_a_loop_that_goes_on_as_before(usual):
    loop = Loop()
    loop.second(**usual)
    assert sorted(loop.second(**usual) for _ in range(8)) == [False] * 2 + [True] * 6
    assert loop.pace.intervals == 4


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({"stall_window_seconds": 5.0}, 3),
        ({"stall_window_seconds": 2.0}, 2),
        ({"stall_window_seconds": 1.0}, 1),
        ({"interval_seconds": 0.1}, 4),
        ({"interval_seconds": 2.0}, 1),
    ],
)
def test_a_window_has_at_least_two_ticks_and_a_scrape_is_never_old(settings, every):
    loop, seconds = Loop(**settings), settings.get("interval_seconds", 1.0)
    taken = [tick for tick in range(24) if not loop.second(seconds=seconds)]
    assert {later - before for before, later in zip(taken, taken[1:], strict=False)} == {every}


TROUBLE = {
    "data_wait": {"data_wait": 0.12},
    "other": {"other": 0.12},
    "evaluation": {"evaluation": 0.3},
    "checkpoint": {"checkpoint": 0.3},
    "startup": {"startup": 1.0},
    "no step": {"steps": 0},
    "an open stall": {"busy": True},
    "a suspended machine": {"seconds": 5.0},
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE)
def test_the_tick_in_which_trouble_begins_is_not_skipped(trouble):
    assert [Loop(calm).second(**trouble) for calm in range(3, 7)] == [False] * 4, "at each place between two ticks"


@pytest.mark.parametrize("trouble", ["no step", "an open stall"])
def test_no_tick_is_skipped_while_there_is_something_to_follow(trouble):
    loop = Loop(calm=3)
    assert not any(loop.second(**TROUBLE[trouble]) for _ in range(6))
