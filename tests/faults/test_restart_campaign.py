"""A short run of the campaign of restarts: killed at random moments, started again, and compared with its own stamps.

It evaluates, and in its first and its third attempt a fetch hangs.
"""

from __future__ import annotations

import json
import random

from .restart_campaign import compared, one_attempt, until
from .restarting_jobs import RestartingJob


def test_a_run_that_is_killed_at_random_moments(tmp_path):
    job, chosen = RestartingJob(tmp_path), random.Random("a short run")
    for end in ("checkpoint", "restore", "step"):
        one_attempt(job, end, chosen)
    until(job, 50)
    one_attempt(job, "finish", chosen)
    found = compared(job)
    assert found.ends, found.detail
    assert found.positions, found.detail
    assert found.steps_right == found.attempts == 4, found.detail
    assert all(abs(off) < 0.02 for off in (*found.off.values(), found.wall_off, found.ettr_off)), found.detail
    books = json.loads(found.detail)["books"]
    for category in ("evaluation", "stuck"):
        assert books[category] > 0
        assert abs(found.off[category]) < 0.01, found.detail
