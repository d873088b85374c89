"""Which processes of a run the verdict is about."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telemetry.report.process_log import ProcessLog
from telemetry.report.rank_processes import not_replaced

MINUTES = st.integers(0, 20).map(lambda minute: f"2026-01-01T00:{minute:02d}:00.000Z")


@st.composite
def process_logs(draw):
    started, newest = sorted((draw(MINUTES), draw(MINUTES)))
    head = {"started": started, "world_size": draw(st.integers(0, 4))}
    return ProcessLog(rank=draw(st.integers(0, 4)), pid=1, head=head, last_time=newest)


def replaces(new, old):
    if new.started <= old.last_time:
        return False
    return new.rank == old.rank or 0 < new.head["world_size"] <= old.rank


@given(st.lists(process_logs(), max_size=12))
def test_a_process_counts_until_another_replaces_it(processes):
    """A later one of its rank does. So does any one of a later job that has fewer ranks."""
    expected = [old for old in processes if not any(replaces(new, old) for new in processes)]
    assert [id(each) for each in not_replaced(processes)] == [id(each) for each in expected]
