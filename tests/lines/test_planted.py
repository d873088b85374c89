"""Each script of the campaign has its planted line, and the campaign says whether its goals are reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lines.__main__ import Outcome, planted, table
from tests.lines.planted_kinds import KINDS

GOOD = Outcome("split", "workers_io_bound", "train.py:1", True, 0.7, 0.71, 1.5, 1.6, 100, 0.3, 0.29)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_planted_line(kind):
    file, line = planted(kind)
    assert file.endswith(".py")
    assert line > 0
    assert (planted(kind, "second") is not None) == (kind == "split")


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, ""),
        ({"right": False}, "0"),
        ({"share": 0.6}, "1"),
        ({"share": None}, "1"),
        ({"second_share": 0.2}, "1"),
        ({"second_share": None, "own_second_share": None}, ""),
        ({"predicted": 2.0}, "2"),
        ({"predicted": None}, ""),
        ({"predicted": 2.0, "predicted_low": 1.5}, ""),
        ({"predicted": 3.0, "predicted_low": 2.0}, "2"),
        ({"predicted": 1.2, "predicted_low": 1.1}, "2"),
    ],
)
def test_the_campaign_fails_if_a_goal_is_missed(changed, missed):
    goals = table({}, [replace(GOOD, **changed)]).goals
    assert "".join(str(number) for number, goal in enumerate(goals) if not goal.met) == missed
