"""Which operator launched a device event: by the external id, or by the operator in which the launch was called."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, TypeAlias

from telemetry.trace.trace_events import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.trace.trace_events import Spans, TraceEvents

Moment: TypeAlias = tuple[int, float]
"""A thread and a time on it."""

_Nested: TypeAlias = tuple[float, float, int]
"""Start, negated end, and name. So a parent sorts before its children."""

_NONE: Final = (NOTHING, NOTHING)


def owners(events: TraceEvents) -> array[int]:
    """For each device event, the number of the name of the operator that launched it; -1 without one."""
    work, calls, operators = events.work, events.calls, events.operators
    wanted = set(work.external)
    wanted.discard(NOTHING)
    columns = zip(operators.external, operators.name, strict=True)
    by_id = {external: name for external, name in columns if external in wanted}
    ids = zip(work.correlation, work.external, strict=True)
    lost = {correlation for correlation, external in ids if external not in by_id}
    lost.discard(NOTHING)
    launches = {
        correlation: (thread, start)
        for correlation, thread, start in zip(calls.correlation, calls.thread, calls.start, strict=True)
        if correlation in lost
    }
    around = enclosing(operators, launches.values()) if launches else {}
    found = array("i")
    for correlation, external in zip(work.correlation, work.external, strict=True):
        name = by_id.get(external, NOTHING)
        if name == NOTHING and correlation in launches:
            name = around.get(launches[correlation], _NONE)[0]
        found.append(name)
    return found


def enclosing(rows: Spans, moments: Iterable[Moment]) -> dict[Moment, tuple[int, int]]:
    """The innermost and the outermost host event around each moment on its thread, as numbers of their names.

    Args:
        rows: the host events.
        moments: the moments, in any order.
    """
    times: dict[int, list[float]] = {}
    for thread, time in moments:
        times.setdefault(thread, []).append(time)
    for on_thread in times.values():
        on_thread.sort()
    candidates: dict[int, list[_Nested]] = {thread: [] for thread in times}
    if not times:
        return {}
    for start, took, name, thread in zip(rows.start, rows.duration, rows.name, rows.thread, strict=True):
        inside = times.get(thread)
        if inside is not None:
            at = bisect_left(inside, start)
            if at < len(inside) and inside[at] <= start + took:
                candidates[thread].append((start, -start - took, name))
    found: dict[Moment, tuple[int, int]] = {}
    for thread, on_thread in times.items():
        candidates[thread].sort()
        _sweep(thread, on_thread, candidates.pop(thread), found)
    return found


def _sweep(thread: int, times: Sequence[float], rows: Sequence[_Nested], found: dict[Moment, tuple[int, int]]) -> None:
    stack: list[tuple[float, int]] = []
    at = 0
    for time in times:
        while at < len(rows) and rows[at][0] <= time:
            start, minus_end, name = rows[at]
            while stack and stack[-1][0] < start:
                stack.pop()
            stack.append((-minus_end, name))
            at += 1
        while stack and stack[-1][0] < time:
            stack.pop()
        if stack:
            found[thread, time] = (stack[-1][1], stack[0][1])


def self_times(rows: Spans, names: int) -> tuple[list[float], list[int]]:
    """Self time of host events, in microseconds without the events inside them, and their count; both by name.

    Args:
        rows: the host events.
        names: how many names there are.
    """
    by_thread: dict[int, list[_Nested]] = {}
    for start, took, name, thread in zip(rows.start, rows.duration, rows.name, rows.thread, strict=True):
        by_thread.setdefault(thread, []).append((start, -start - took, name))
    own, calls = [0.0] * names, [0] * names
    while by_thread:
        _, on_thread = by_thread.popitem()
        on_thread.sort()
        stack: list[tuple[float, int]] = []
        for start, minus_end, name in on_thread:
            end = -minus_end
            while stack and stack[-1][0] <= start:
                stack.pop()
            if stack:
                own[stack[-1][1]] -= min(end, stack[-1][0]) - start
            own[name] += end - start
            calls[name] += 1
            stack.append((end, name))
    return own, calls
