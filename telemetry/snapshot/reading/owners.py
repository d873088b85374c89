"""Which operator launched what: by the external id where it matches, else by the call that lies within the operator."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, TypeAlias

from telemetry.snapshot.reading.events import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.snapshot.reading.events import Events, HostRow

Moment: TypeAlias = tuple[int, float]
"""A thread and a time on it."""

_Nested: TypeAlias = tuple[float, float, int]
"""Start, minus the end, name: a parent sorts before its children."""

_NONE: Final = (NOTHING, NOTHING)


def owners(events: Events) -> array[int]:
    """The name of the operator behind each device event, in their order; -1 where there is none."""
    wanted = {external for _, _, _, external, *_ in events.devices() if external != NOTHING}
    by_id = {external: name for _, _, external, name, _ in events.operators() if external in wanted}
    lost = {
        correlation
        for _, _, correlation, external, *_ in events.devices()
        if external not in by_id and correlation != NOTHING
    }
    calls = {
        correlation: (thread, start) for start, _, correlation, _, _, thread in events.runtimes() if correlation in lost
    }
    around = enclosing(events.operators(), calls.values()) if calls else {}
    found = array("i")
    for _, _, correlation, external, *_ in events.devices():
        name = by_id.get(external, NOTHING)
        if name == NOTHING and correlation in calls:
            name = around.get(calls[correlation], _NONE)[0]
        found.append(name)
    return found


def enclosing(rows: Iterable[HostRow], moments: Iterable[Moment]) -> dict[Moment, tuple[int, int]]:
    """The innermost and the outermost of some host events around moments on their threads, as ids of names.

    Args:
        rows: the host events, in any order.
        moments: any number, in any order.
    """
    times: dict[int, list[float]] = {}
    for thread, time in moments:
        times.setdefault(thread, []).append(time)
    for on_thread in times.values():
        on_thread.sort()
    candidates: dict[int, list[_Nested]] = {thread: [] for thread in times}
    for start, took, _, name, thread in rows:
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


def self_times(rows: Iterable[HostRow], names: int) -> tuple[list[float], list[int]]:
    """Microseconds that host events took beyond those within them, and how many there were, by name.

    Args:
        rows: of any threads, in any order.
        names: how many names there are.
    """
    by_thread: dict[int, list[_Nested]] = {}
    for start, took, _, name, thread in rows:
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
