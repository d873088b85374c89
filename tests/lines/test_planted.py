"""Each script of the campaign has its planted line."""

from __future__ import annotations

import pytest

from tests.lines.__main__ import planted
from tests.lines.planted_kinds import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_planted_line(kind):
    file, line = planted(kind)
    assert file.endswith(".py")
    assert line > 0
