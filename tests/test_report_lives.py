"""Which lives of a run the verdict is about."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telemetry.report.lives import current
from telemetry.report.load import ProcessLog

MINUTES = st.integers(0, 20).map(lambda minute: f"2026-01-01T00:{minute:02d}:00.000Z")


@st.composite
def lives(draw):
    started, newest = sorted((draw(MINUTES), draw(MINUTES)))
    head = {"started": started, "world_size": draw(st.integers(0, 4))}
    return ProcessLog(rank=draw(st.integers(0, 4)), pid=1, head=head, last_time=newest)


def replaces(new, old):
    if new.started <= old.last_time:
        return False
    return new.rank == old.rank or 0 < new.head["world_size"] <= old.rank


@given(st.lists(lives(), max_size=12))
def test_a_life_counts_until_another_takes_its_place(processes):
    """A later one of its rank does, and so does a later job that has no such rank any more."""
    expected = [old for old in processes if not any(replaces(new, old) for new in processes)]
    assert [id(each) for each in current(processes)] == [id(each) for each in expected]
