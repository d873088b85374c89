"""The thread that reads for `telemetry top`: what it says about a look that takes long, and about one that fails."""

from __future__ import annotations

import queue
import time

import pytest
from top_screens import NOW

from telemetry.top.job_view import JobView
from telemetry.top.live_verdict import GOOD, Verdict
from telemetry.top.poller import ViewPoller
from telemetry.top.rank_row import RankRow

SEEN = JobView(
    Verdict("Healthy.", GOOD), rows=(RankRow(0, "n1", 1, "ok", None, "ok"),), notes=("of the job",), seen=NOW
)


class Source:
    """Gives what it is told to; ``asked`` tells of each look."""

    pause_seconds = 0.0

    def __init__(self):
        self.answers, self.asked = queue.Queue(), queue.Queue()

    def poll(self):
        self.asked.put(1)
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def poller(source):
    made = ViewPoller(source, "Reading")
    made.start()
    yield made
    made.stop()
    source.answers.put(SEEN)
    made._thread.join(60)


def after(source, poller, *answers):
    """The view after these answers: when it asks for the next one, the last is taken."""
    source.asked.get(timeout=60)
    for answer in answers:
        source.answers.put(answer)
        source.asked.get(timeout=60)
    return poller.view()


def test_a_failed_look_is_a_note_on_the_old_view(source, poller):
    shown = after(source, poller, SEEN, ValueError("bad line"), ValueError("bad line"))
    assert shown.rows == SEEN.rows
    assert shown.seen == NOW
    assert shown.notes == ("cannot be read: ValueError: bad line", "of the job")


def test_the_note_goes_with_the_next_look(source, poller):
    assert after(source, poller, SEEN, ValueError("bad line"), SEEN).notes == ("of the job",)


def test_a_failed_first_look_is_a_note(source, poller):
    shown = after(source, poller, ValueError("bad line"))
    assert (shown.verdict.text, shown.notes) == ("Reading", ("cannot be read: ValueError: bad line",))


def test_a_look_is_overdue_well_after_it_was_due(source, monkeypatch):
    clock, rests = [0.0], queue.Queue()
    poller = ViewPoller(source, "Reading")
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(poller._stop, "wait", lambda seconds: rests.put(seconds) or poller.stop())
    poller.start()
    source.asked.get(timeout=60)
    clock[0] = 7.0
    before = time.time()
    source.answers.put(SEEN)
    rest = rests.get(timeout=60)
    poller._thread.join(60)
    assert rest == 35.0
    assert poller.view().overdue >= before + rest + 14.0
