"""Files of tests start in an order in which the last ones are short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.start_order import LONG, start_order

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", LONG)
def test_a_long_file_is_there_and_starts_before_a_short_one(name):
    files = [path for path in HERE.rglob("test_*.py") if path.relative_to(HERE).as_posix().startswith(name)]
    assert files, "it has another name now"
    for path in files:
        assert start_order(f"tests/{path.relative_to(HERE)}") < start_order("tests/test_start_order.py")
