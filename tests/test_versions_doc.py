"""The table of versions shows what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict

from tests.matrix.__main__ import PAGE, RESULTS, Result, table


def test_the_table_of_versions_is_that_of_the_results():
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text()


def test_a_row_names_the_commit_it_was_measured_on():
    recorded = asdict(Result("3.12", "2.9.1", 9, 0, (), 60, commit="0123abc"))
    before = asdict(Result("3.13", "2.9.1", 9, 0, (), 60))
    *_, first, second = table([recorded, before]).splitlines()
    assert first == "| 3.12 | 2.9.1 | 0123abc | 9 | 0 | 0 | 0 |"
    assert second == "| 3.13 | 2.9.1 | - | 9 | 0 | 0 | 0 |"
