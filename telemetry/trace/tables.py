"""The long tables: operators and kernels by their time, copies by kind, and calls that wait for the device.

An operator launched a device event if it has the event's external id, or if the launch was called in it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from telemetry.trace.events import BLOCKING, ELIGIBLE, KERNEL, LAYOUT, MEMCPY, NOTHING, TENSOR_CORE, copy_kind
from telemetry.trace.records import Copy, Kernel, Operator, Synchronization
from telemetry.trace.steps import SECONDS_PER_US

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.trace.events import HostEvent, Rows, TraceEvents
    from telemetry.trace.steps import TraceSteps

Moment: TypeAlias = tuple[int, float]
"""A thread and a time on it."""

_NONE: Final = (NOTHING, NOTHING)
_MAX_ROWS: Final = 50


def owners(events: TraceEvents) -> array[int]:
    """For each device event, the operator that launched it, as the number of its name; -1 if none did."""
    wanted = {work.external for work in events.work} - {NOTHING}
    by_id = {external: name for _, _, _, external, name, _ in events.operators.plain() if external in wanted}
    lost = {work.correlation for work in events.work if work.external not in by_id} - {NOTHING}
    launches = {id_: (thread, start) for start, _, id_, _, _, thread in events.calls.plain() if id_ in lost}
    around = _enclosing(events.operators, launches.values())
    found = array("i")
    for work in events.work:
        name = by_id.get(work.external, NOTHING)
        if name == NOTHING and work.correlation in launches:
            name = around.get(launches[work.correlation], _NONE)[0]
        found.append(name)
    return found


def _enclosing(rows: Rows[HostEvent], moments: Iterable[Moment]) -> dict[Moment, tuple[int, int]]:
    """The innermost and the outermost host event around each moment on its thread, as numbers of their names."""
    times: dict[int, list[float]] = {}
    for thread, time in sorted(moments):
        times.setdefault(thread, []).append(time)
    if not times:
        return {}
    # Start, negated end, and name: so a parent sorts before its children.
    candidates: dict[int, list[tuple[float, float, int]]] = {thread: [] for thread in times}
    for start, took, _, _, name, thread in rows.plain():
        inside = times.get(thread)
        if inside is not None:
            at = bisect_left(inside, start)
            if at < len(inside) and inside[at] <= start + took:
                candidates[thread].append((start, -start - took, name))
    found: dict[Moment, tuple[int, int]] = {}
    for thread, on_thread in times.items():
        events = sorted(candidates.pop(thread))
        stack: list[tuple[float, int]] = []
        at = 0
        for time in on_thread:
            while at < len(events) and events[at][0] <= time:
                start, minus_end, name = events[at]
                while stack and stack[-1][0] < start:
                    stack.pop()
                stack.append((-minus_end, name))
                at += 1
            while stack and stack[-1][0] < time:
                stack.pop()
            if stack:
                found[thread, time] = (stack[-1][1], stack[0][1])
    return found


def _self_times(rows: Rows[HostEvent], names: int) -> tuple[list[float], list[int]]:
    """Self time of host events, in microseconds without the events inside them, and their count; both by name."""
    by_thread: dict[int, list[tuple[float, float, int]]] = {}
    for start, took, _, _, name, thread in rows.plain():
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


def operators(events: TraceEvents, owner: Sequence[int]) -> list[Operator]:
    """The operators that took longest, by device time and then by host time. ``owner``: result of `owners`."""
    names, traits = events.names, events.traits
    own, calls = _self_times(events.operators, len(names))
    device, kernel, tensor = ([0.0] * len(names) for _ in range(3))
    whole = 0.0
    for work, name in zip(events.work, owner, strict=True):
        whole += work.took
        if name == NOTHING:
            continue
        device[name] += work.took
        if work.kind == KERNEL:
            kernel[name] += work.took
            tensor[name] += work.took if traits[work.name] & TENSOR_CORE else 0.0
    wanted = [n for n in range(len(names)) if calls[n]]
    wanted.sort(key=lambda n: (-device[n], -own[n]))
    return [
        Operator(
            names[n],
            calls[n],
            device[n] * SECONDS_PER_US,
            device[n] / whole if whole else None,
            own[n] * SECONDS_PER_US,
            bool(traits[n] & ELIGIBLE),
            tensor[n] / kernel[n] if kernel[n] else None,
        )
        for n in wanted[:_MAX_ROWS]
    ]


def kernels(events: TraceEvents) -> list[Kernel]:
    """The kernels that took longest."""
    # By name: calls, time, blocks x time and the time with blocks known, and the same for occupancy.
    groups: dict[int, list[float]] = {}
    for work in events.work:
        if work.kind != KERNEL:
            continue
        sums = groups.setdefault(work.name, [0.0] * 6)
        sums[0] += 1
        sums[1] += work.took
        if work.first > 0:
            sums[2] += work.first * work.took
            sums[3] += work.took
        if work.second >= 0:
            sums[4] += work.second * work.took
            sums[5] += work.took
    whole = sum(sums[1] for sums in groups.values())
    most = sorted(groups.items(), key=lambda item: -item[1][1])[:_MAX_ROWS]
    return [
        Kernel(
            events.names[number],
            int(calls),
            took * SECONDS_PER_US,
            took / whole if whole else 0.0,
            took / calls * SECONDS_PER_US,
            bool(events.traits[number] & TENSOR_CORE),
            bool(events.traits[number] & LAYOUT),
            occupancy / occupancy_time / 100 if occupancy_time else None,
            blocks / blocks_time if blocks_time else None,
        )
        for number, (calls, took, blocks, blocks_time, occupancy, occupancy_time) in most
    ]


def copies(events: TraceEvents) -> list[Copy]:
    """All copies by kind and by whether the host memory is pageable, the longest first."""
    groups: dict[tuple[str, bool | None], list[tuple[float, float]]] = {}
    for work in events.work:
        if work.kind == MEMCPY:
            groups.setdefault(copy_kind(events.names[work.name]), []).append((work.took, work.first))
    found = []
    for (direction, pageable), members in groups.items():
        seconds = sum(took for took, _ in members) * SECONDS_PER_US
        total = None if any(size < 0 for _, size in members) else int(sum(size for _, size in members))
        speed = total / seconds if total is not None and seconds else None
        found.append(Copy(direction, pageable, len(members), seconds, total, speed))
    return sorted(found, key=lambda copy: -copy.seconds)


class DeviceWait(NamedTuple):
    """One call that waits for the device: start and end on the host in microseconds; the other fields as in a group."""

    start: float
    end: float
    name: str
    operator: str | None
    within: str | None
    call_site: str | None
    to_device: bool


def device_waits(events: TraceEvents, steps: TraceSteps) -> list[DeviceWait]:
    """All waits within the steps, by their start."""
    blocking, (first, last) = events.named(BLOCKING), (steps.host[0].start, steps.host[-1].end)
    calls = [call for call in events.calls if call.name in blocking and first <= call.start < last]
    calls.sort(key=lambda call: call.start)
    moments = [(call.thread, call.start) for call in calls]
    around, frames = _enclosing(events.operators, moments), _enclosing(events.frames, moments)
    ids = {call.external for call in calls} - {NOTHING, 0}
    by_id = (
        {external: name for _, _, _, external, name, _ in events.operators.plain() if external in ids} if ids else {}
    )
    to_device = {
        work.external
        for work in events.work
        if work.kind == MEMCPY and work.external > 0 and copy_kind(events.names[work.name])[0] == "HtoD"
    }
    found: list[DeviceWait] = []
    for call, moment in zip(calls, moments, strict=True):
        inner, outer = around.get(moment) or (by_id.get(call.external, NOTHING),) * 2
        site = events.name_of(frames.get(moment, _NONE)[0]) or events.call_sites.get(call.external)
        name, copying = events.names[call.name], call.external in to_device
        found.append(DeviceWait(*call.span, name, events.name_of(inner), events.name_of(outer), site, copying))
    return found


def synchronizations(waits: Sequence[DeviceWait]) -> list[Synchronization]:
    """The groups of waits that took longest."""
    groups: dict[tuple[str, str | None, str | None, str | None, bool], tuple[int, float]] = {}
    for start, end, name, inside, within, site, copying in waits:
        origin = (name, inside, within, site, copying)
        count, seconds = groups.get(origin, (0, 0.0))
        groups[origin] = (count + 1, seconds + (end - start) * SECONDS_PER_US)
    found = [
        Synchronization(name, inside, within, site, count, seconds, copying)
        for (name, inside, within, site, copying), (count, seconds) in groups.items()
    ]
    return sorted(found, key=lambda each: -each.seconds)[:_MAX_ROWS]
