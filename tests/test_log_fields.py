"""The samples of an interval as one line of the log."""

from __future__ import annotations

import dataclasses

from telemetry.publish.log_fields import mean_of
from tests.slice_cases import IDLE


def test_numbers_are_averaged_and_names_are_not():
    """Between worker 0 and worker 4 there is no worker 2."""
    samples = [
        dataclasses.replace(
            IDLE, busy_ratio=busy, head_of_line_worker=worker, head_of_line_since_seconds=since, fetches_total=fetches
        )
        for busy, worker, since, fetches in ((0.2, 0, 9.0, 10), (0.4, 4, 1.0, 20), (0.6, None, None, 30))
    ]
    line = mean_of(samples)
    assert (line["busy_ratio"], line["fetches_total"]) == (0.4, 30)
    assert (line["head_of_line_worker"], line["head_of_line_since_seconds"]) == (4, 1.0)
    assert mean_of([IDLE])["head_of_line_worker"] is None
