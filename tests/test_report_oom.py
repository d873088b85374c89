"""Who was killed by the OOM killer, in logs written by hand: the counter before a kill, and what others read after it."""

from __future__ import annotations

import pytest

from telemetry.report.goodput import as_job, goodput_of
from telemetry.report.goodput_text import ended_by_oom
from telemetry.report.log_reader import load
from tests.test_report_attempts import LATER, Process

GROUP = dict(memory_group="0123abcd-7", memory_events="/nowhere/memory.events", oom_kills_total=0)


class Counting(Process):
    """A process whose lines have the counter of its cgroup."""

    kills = 0

    def totals(self, seconds, steps):
        return super().totals(seconds, steps) | dict(oom_kills_total=self.kills)

    def counts(self, kills: int) -> Counting:
        self.kills = kills
        return self


def reasons(folder) -> list[tuple[str, str | None]]:
    goodput = goodput_of(load(folder), LATER)
    return [(each["end"], each["reason"]) for each in as_job(load(folder), goodput)["attempts"]]


def test_the_next_attempt_in_the_same_cgroup_tells(tmp_path):
    Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).beat(25).write()
    Counting(tmp_path, begin=30, pid=2, **GROUP | dict(oom_kills_total=1)).counts(1).window(15).end(25)
    assert reasons(tmp_path) == [("killed", "rank 0 killed by the OOM killer"), ("finished", None)]


def test_another_rank_of_the_same_cgroup_tells(tmp_path):
    Counting(tmp_path, 0, begin=0, pid=1, world=2, **GROUP).window(15).beat(25).write()
    peer = Counting(tmp_path, 1, begin=0, pid=2, world=2, **GROUP).window(15).window(25).counts(1)
    peer.end(26.0, exception="RuntimeError", lost_peer=True)
    assert reasons(tmp_path) == [("killed", "rank 0 killed by the OOM killer")]
    text = ended_by_oom(goodput_of(load(tmp_path), LATER))
    assert text.startswith("The run has ended: rank 0 killed by the OOM killer. Raise the memory limit"), text


def test_of_ranks_that_ended_at_once_it_may_have_been_any(tmp_path):
    for rank in range(3):
        Counting(tmp_path, rank, begin=0, pid=1 + rank, world=3, **GROUP).window(15).beat(25).write()
    Counting(tmp_path, begin=30, pid=9, **GROUP | dict(oom_kills_total=1)).counts(1).window(15).end(25)
    assert reasons(tmp_path)[0] == ("killed", "the OOM killer killed 1 of ranks 0-2")


def test_a_counter_that_is_read_much_later_is_a_probable_reason(tmp_path):
    Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).beat(25).write()
    Counting(tmp_path, begin=3600, pid=2, **GROUP | dict(oom_kills_total=1)).counts(1).end(25)
    assert reasons(tmp_path)[0] == ("killed", "rank 0 probably killed by the OOM killer")


NOT_IT = {
    "the counter stands": (GROUP, 0),
    "another cgroup": (GROUP | dict(memory_group="0123abcd-8", oom_kills_total=1), 1),
    "no counter": ({}, None),
}


@pytest.mark.parametrize("why", NOT_IT)
def test_without_evidence_a_kill_has_no_reason(tmp_path, why):
    head, kills = NOT_IT[why]
    Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).beat(25).write()
    later = Counting(tmp_path, begin=30, pid=2, **head)
    later.counts(kills).window(15).end(25)
    assert reasons(tmp_path)[0] == ("killed", None)


def test_a_kill_after_the_process_was_dead_is_not_its_own(tmp_path):
    """Its peer was there for ten more seconds, and only then the OOM killer killed something."""
    Counting(tmp_path, 0, begin=0, pid=1, world=2, **GROUP).window(15).beat(25).write()
    peer = Counting(tmp_path, 1, begin=0, pid=2, world=2, **GROUP).window(15).window(35).counts(1).window(45)
    peer.end(46, exception="RuntimeError", lost_peer=True)
    assert reasons(tmp_path) == [("killed", None)]


def test_an_exception_after_the_oom_killer_killed_a_worker(tmp_path):
    process = Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).window(24).counts(1)
    process.end(25, exception="RuntimeError", lost_peer=False)
    assert reasons(tmp_path) == [("failed", "RuntimeError; the OOM killer killed a process of rank 0")]


def test_an_old_kill_in_the_cgroup_is_not_why_it_failed(tmp_path):
    process = Counting(tmp_path, begin=0, pid=1, **GROUP).window(15).counts(1).window(25)
    process.end(125, exception="RuntimeError", lost_peer=False)
    assert reasons(tmp_path) == [("failed", "RuntimeError")]
