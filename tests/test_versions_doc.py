"""The table of versions shows what was measured, and what is missing to measure it is said."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.matrix.__main__ import PAGE, RESULTS, Result, prepare, table


def test_the_table_of_versions_is_that_of_the_results():
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text()


def test_a_row_names_the_commit_it_was_measured_on():
    recorded = asdict(Result("3.12", "2.9.1", 9, 0, (), 60, commit="0123abc"))
    before = asdict(Result("3.13", "2.9.1", 9, 0, (), 60))
    *_, first, second = table([recorded, before]).splitlines()
    assert first == "| 3.12 | 2.9.1 | 0123abc | 9 | 0 | 0 | 0 |"
    assert second == "| 3.13 | 2.9.1 | - | 9 | 0 | 0 | 0 |"


def test_a_python_that_cannot_be_had_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"no Python 3\.99: .* that needs (root|debootstrap, .*apt-get install)"):
        prepare("3.99", "2.4.1")
