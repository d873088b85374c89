"""The long tables: operators and kernels by their time, copies by kind, and calls that wait for the device.

An operator launched a device event if it has the event's external id, or if the launch was called in it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from telemetry.trace.events import (
    ELIGIBLE,
    KERNEL,
    MEMCPY,
    NOTHING,
    converts_layout,
    copy_kind,
    is_blocking,
    uses_tensor_cores,
)
from telemetry.trace.steps import SECONDS_PER_US

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.trace.events import Spans, TraceEvents
    from telemetry.trace.steps import TraceSteps

Moment: TypeAlias = tuple[int, float]
"""A thread and a time on it."""

_Nested: TypeAlias = tuple[float, float, int]
"""Start, negated end, and name. So a parent sorts before its children."""

_NONE: Final = (NOTHING, NOTHING)
_MAX_ROWS: Final = 50


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


@dataclass(frozen=True, slots=True)
class DeviceWait:
    """One call that waits.

    Attributes:
        start, end: microseconds, on the host.
        name: name of the call, such as ``cudaStreamSynchronize``.
        operator: the innermost operator around it; ``within``: the outermost; ``call_site``: the user's line. None if
            the trace does not tell.
        to_device: whether it waits for a copy to the device.
    """

    start: float
    end: float
    name: str
    operator: str | None
    within: str | None
    call_site: str | None
    to_device: bool


def device_waits(events: TraceEvents, steps: TraceSteps) -> list[DeviceWait]:
    """All waits within the steps, by their start."""
    names, calls, operators = events.names, events.calls, events.operators
    blocking = {number for number, name in enumerate(names) if is_blocking(name)}
    first, last = steps.host[0].start, steps.host[-1].end
    chosen = [i for i, name in enumerate(calls.name) if name in blocking and first <= calls.start[i] < last]
    chosen.sort(key=calls.start.__getitem__)
    moments = [(calls.thread[i], calls.start[i]) for i in chosen]
    around = enclosing(operators, moments)
    frames = enclosing(events.frames, moments)
    ids = {calls.external[i] for i in chosen} - {NOTHING, 0}
    by_id = {e: n for e, n in zip(operators.external, operators.name, strict=True) if e in ids} if ids else {}
    to_device = _copied_to_device(events)
    found: list[DeviceWait] = []
    for i, moment in zip(chosen, moments, strict=True):
        external = calls.external[i]
        inner, outer = around.get(moment) or (by_id.get(external, NOTHING),) * 2
        site = names.get(frames.get(moment, (NOTHING, NOTHING))[0]) or events.call_sites.get(external)
        end = calls.start[i] + calls.duration[i]
        name = names[calls.name[i]]
        found.append(
            DeviceWait(calls.start[i], end, name, names.get(inner), names.get(outer), site, external in to_device)
        )
    return found


def _copied_to_device(events: TraceEvents) -> set[int]:
    """External ids of the operators that copied from the host to the device."""
    names, work = events.names, events.work
    copies = {number for number, name in enumerate(names) if copy_kind(name)[0] == "HtoD"}
    columns = zip(work.external, work.name, work.kind, strict=True)
    return {external for external, name, kind in columns if kind == MEMCPY and external > 0 and name in copies}


@dataclass(frozen=True, slots=True)
class Operator:
    """What one operator cost over the trace.

    Attributes:
        name, calls: its name, and how often it ran.
        device_seconds: time of the kernels and copies that it launched itself, without those of operators inside it.
        device_ratio: their share of all device time; None without any device time.
        host_seconds: time on the host without the operators inside it, summed over threads.
        tensor_core_eligible: whether tensor cores can do its work.
        tensor_core_ratio: the share of its kernel time that uses tensor cores; None without kernels.
    """

    name: str
    calls: int
    device_seconds: float
    device_ratio: float | None
    host_seconds: float
    tensor_core_eligible: bool
    tensor_core_ratio: float | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """All runs of one kernel. Occupancy and blocks per SM are weighted by time; None if the trace does not tell."""

    name: str
    calls: int
    device_seconds: float
    device_ratio: float
    mean_seconds: float
    tensor_core: bool
    layout_conversion: bool
    occupancy_ratio: float | None
    blocks_per_sm: float | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies of one kind: HtoD, DtoH, DtoD or PtoP. Fields that the trace does not tell are None."""

    kind: str
    pageable: bool | None
    calls: int
    seconds: float
    bytes: int | None
    bandwidth_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class Synchronization:
    """Calls within the steps that wait for the device, grouped by where they come from.

    Attributes:
        name: name of the call, such as ``cudaStreamSynchronize``.
        operator: the innermost operator around it; ``within``: the outermost; ``call_site``: the user's line. None if
            the trace does not tell.
        calls, seconds: how many there were, and how long the host waited in them.
        to_device: whether they wait for copies to the device.
    """

    name: str
    operator: str | None
    within: str | None
    call_site: str | None
    calls: int
    seconds: float
    to_device: bool


def operators(events: TraceEvents, owner: Sequence[int]) -> list[Operator]:
    """The operators that took longest, by device time and then by host time."""
    names = events.names
    own, calls = self_times(events.operators, len(names))
    device, kernel, tensor = ([0.0] * len(names) for _ in range(3))
    uses = [uses_tensor_cores(name) for name in names]
    whole = 0.0
    work = events.work
    for took, kernel_name, kind, name in zip(work.duration, work.name, work.kind, owner, strict=True):
        whole += took
        if name == NOTHING:
            continue
        device[name] += took
        if kind == KERNEL:
            kernel[name] += took
            tensor[name] += took if uses[kernel_name] else 0.0
    wanted = [n for n in range(len(names)) if calls[n]]
    wanted.sort(key=lambda n: (-device[n], -own[n]))
    return [
        Operator(
            names[n],
            calls[n],
            device[n] * SECONDS_PER_US,
            device[n] / whole if whole else None,
            own[n] * SECONDS_PER_US,
            bool(names.traits[n] & ELIGIBLE),
            tensor[n] / kernel[n] if kernel[n] else None,
        )
        for n in wanted[:_MAX_ROWS]
    ]


def kernels(events: TraceEvents) -> list[Kernel]:
    """The kernels that took longest."""
    groups = _by_name(events)
    whole = sum(seconds for _, seconds, *_ in groups.values())
    most = sorted(groups.items(), key=lambda item: -item[1][1])[:_MAX_ROWS]
    return [
        Kernel(
            events.names[number],
            int(calls),
            took * SECONDS_PER_US,
            took / whole if whole else 0.0,
            took / calls * SECONDS_PER_US,
            uses_tensor_cores(events.names[number]),
            converts_layout(events.names[number]),
            occupancy / occupancy_time / 100 if occupancy_time else None,
            blocks / blocks_time if blocks_time else None,
        )
        for number, (calls, took, blocks, blocks_time, occupancy, occupancy_time) in most
    ]


def copies(events: TraceEvents) -> list[Copy]:
    """All copies by kind and by whether the host memory is pageable, the longest first."""
    groups: dict[tuple[str, bool | None], list[tuple[float, float]]] = {}
    work = events.work
    for took, size, name, kind in zip(work.duration, work.first, work.name, work.kind, strict=True):
        if kind == MEMCPY:
            groups.setdefault(copy_kind(events.names[name]), []).append((took, size))
    found = []
    for (direction, pageable), members in groups.items():
        seconds = sum(took for took, _ in members) * SECONDS_PER_US
        total = None if any(size < 0 for _, size in members) else int(sum(size for _, size in members))
        speed = total / seconds if total is not None and seconds else None
        found.append(Copy(direction, pageable, len(members), seconds, total, speed))
    return sorted(found, key=lambda copy: -copy.seconds)


def synchronizations(waits: Sequence[DeviceWait]) -> list[Synchronization]:
    """The groups of waits that took longest."""
    groups: dict[tuple[str, str | None, str | None, str | None, bool], tuple[int, float]] = {}
    for wait in waits:
        key = (wait.name, wait.operator, wait.within, wait.call_site, wait.to_device)
        count, seconds = groups.get(key, (0, 0.0))
        groups[key] = (count + 1, seconds + (wait.end - wait.start) * SECONDS_PER_US)
    found = [
        Synchronization(name, inside, within, site, count, seconds, copying)
        for (name, inside, within, site, copying), (count, seconds) in groups.items()
    ]
    return sorted(found, key=lambda each: -each.seconds)[:_MAX_ROWS]


def _by_name(events: TraceEvents) -> dict[int, list[float]]:
    """Sums by kernel: calls, time, blocks x time and the time with blocks known, and the same for occupancy."""
    groups: dict[int, list[float]] = {}
    work = events.work
    columns = zip(work.duration, work.first, work.second, work.name, work.kind, strict=True)
    for took, blocks, occupancy, name, kind in columns:
        if kind != KERNEL:
            continue
        sums = groups.setdefault(name, [0.0] * 6)
        sums[0] += 1
        sums[1] += took
        if blocks > 0:
            sums[2] += blocks * took
            sums[3] += took
        if occupancy >= 0:
            sums[4] += occupancy * took
            sums[5] += took
    return groups
