"""A job that hangs: the rank, the kind and the line are in the log."""

from __future__ import annotations

import signal

import pytest

from tests.faults.hanging_jobs import HangingJob, line_of

ONE_NODE = ("n1", "n1", "n1")

STANDING = [
    ("fetch", "fetch", "the fetch", "in a fetch"),
    ("compute", "compute", "the compute", "in a step"),
    ("lock", "compute", "the lock", "in a step, waiting for a lock"),
    ("checkpoint", "phase", "the checkpoint", "in a checkpoint"),
    ("left", "rank_left", "after the loop", "out of its training loop, after 12 steps"),
]


@pytest.mark.parametrize(("what", "kind", "line", "doing"), STANDING, ids=[case[0] for case in STANDING])
def test_the_rank_that_stands_elsewhere_is_named_with_its_line(tmp_path, what, kind, line, doing):
    with HangingJob(tmp_path, what, odd=1, nodes=ONE_NODE) as job:
        job.reached()
        said = job.verdict(kind)
    print(said)
    (suspect,) = said["suspects"]
    assert (suspect["rank"], suspect["node"]) == (1, "n1")
    assert suspect["doing"].startswith(doing)
    assert suspect["where"].startswith(f"train.py:{line_of(line)} (")
    (waiting,) = said["waiting"]
    assert waiting["ranks"] == [0, 2]
    assert waiting["collective"] == "all_reduce"
    assert said["verdict"].startswith("ranks 0, 2 have waited in all_reduce #")


SIGNALS = [(signal.SIGKILL, "rank_gone", "gone"), (signal.SIGSTOP, "rank_stopped", "stopped")]
