"""The table of versions shows what was measured."""

from __future__ import annotations

import json

from tests.matrix.__main__ import PAGE, RESULTS, table


def test_the_table_of_versions_is_that_of_the_results():
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text()
