"""The use of the devices, the work of their streams, and their waits for the host to launch a kernel.

`usage` is over the steps, as TensorBoard's PyTorch profiler estimates it. `streams` is over the trace, exactly as
Holistic Trace Analysis defines it, with its rounding: if timestamps have fractions of a microsecond, starts are rounded
up and ends down. Kernels that were launched in the last marked step are left out there: some may be missing.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, Final

from telemetry.trace.events import COLLECTIVE, COMPUTE, KERNEL, MEMCPY, MEMSET, NOTHING, STEP, TENSOR_CORE
from telemetry.trace.records import GpuUsage, LaunchBoundStretch, StreamIdle, TemporalBreakdown
from telemetry.trace.steps import SECONDS_PER_US, TimeRange, intersection, length, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.trace.events import TraceEvents
    from telemetry.trace.steps import TraceSteps

_NO_BLOCKS: Final = 1e-9
"""A smaller sum is zero, apart from rounding."""

_LAUNCH_DELAY_US: Final = 30.0
"""A shorter gap between two kernels that were launched in time is the cost of starting the next one."""

_HOST_SIDE_SYNC: Final = ("Event Sync", "Context Sync")
"""These count as device events, although they are on no stream."""

_MIN_LAUNCHES: Final = 20
"""A launch-bound stretch has at least this many launches in a row that the device waited for."""

_MAX_GAP_US: Final = 500.0
"""In a longer gap the host was busy with something else than launching."""

_CALL_US: Final = 5.0
"""Duration of a launch on the host. A launch that began so shortly before the device became idle was late, too."""


def main_device(events: TraceEvents) -> int | None:
    """The number of the device that most work ran on; None if no work ran on a device."""
    busy: dict[int, float] = {}
    for work in events.work:
        busy[work.device] = busy.get(work.device, 0.0) + work.took
    return max(busy, key=lambda number: busy[number]) if busy else None


def usage(events: TraceEvents, steps: TraceSteps) -> GpuUsage:
    """The averages over all devices of the trace."""
    first, last = steps.spans[0].start, steps.spans[-1].end
    kernels: dict[int, list[tuple[float, float, float]]] = {}
    occupied: dict[int, tuple[float, float]] = {}
    whole = tensor = 0.0
    for work in events.work:
        if work.kind == KERNEL:
            start, end = work.span
            kernels.setdefault(work.device, []).append((start, end, work.first))
            whole += work.took
            tensor += work.took if events.traits[work.name] & TENSOR_CORE else 0.0
            inside = min(end, last) - max(start, first)
            if work.second >= 0 and inside > 0:
                time, weighted = occupied.get(work.device, (0.0, 0.0))
                occupied[work.device] = time + inside, weighted + inside * work.second
    if not kernels or last <= first:
        return GpuUsage()
    busy = [_busy(each, first, last) for each in kernels.values()]
    return GpuUsage(
        _mean([ran for ran, _ in busy]),
        _mean([efficiency for _, efficiency in busy if efficiency is not None]),
        _mean([weighted / time / 100 for time, weighted in occupied.values()]),
        None if events.is_amd or not whole else tensor / whole,
    )


def _busy(kernels: Iterable[tuple[float, float, float]], first: float, last: float) -> tuple[float, float | None]:
    """Utilisation and SM efficiency of one device, from the start, end and blocks per SM of its kernels.

    At each moment the efficiency is the sum of the blocks of the kernels that run, at most 1.
    """
    changes: list[tuple[float, int, float]] = []
    for start, end, blocks in kernels:
        if end > start:
            changes += (start, 1, max(0.0, blocks)), (end, -1, -max(0.0, blocks))
    changes.sort()
    ran = efficient = group = together = began = before = 0.0
    running = 0
    for time, change, blocks in changes:
        inside = min(time, last) - max(before, first)
        if together > _NO_BLOCKS and inside > 0:
            group += inside * min(together, 1.0)
        began = began if running else time
        running, together, before = running + change, together + blocks, time
        if not running:
            ran += max(0.0, min(time, last) - max(began, first))
            efficient, group, together = efficient + group, 0.0, 0.0
    known = any(blocks > 0 for _, _, blocks in kernels)
    return ran / (last - first), efficient / (last - first) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def streams(events: TraceEvents) -> tuple[TemporalBreakdown, float | None, tuple[StreamIdle, ...]]:
    """The temporal breakdown, the share of communication that computation overlaps, and the idle time by stream."""
    up, down = (ceil, floor) if events.fractional else (float, float)
    launches = {id_: float(up(start)) for start, _, id_, _, _, _ in events.calls.plain()}  # of duplicates the last
    launches.pop(NOTHING, None)
    until = _last_step(events)
    everything: list[TimeRange] = []
    compute: list[TimeRange] = []
    communication: list[TimeRange] = []
    on_stream: dict[int, list[tuple[float, float, int]]] = {}
    for work in events.work:
        if work.stream == NOTHING:
            continue
        span = start, end = float(up(work.start)), float(down(work.span[1]))
        if until is not None:
            on_device = (work.stream >= 0 and work.correlation >= 0) or events.names[work.name] in _HOST_SIDE_SYNC
            launched = launches.get(work.correlation) if on_device else start
            if launched is None or launched >= until:
                continue
        everything.append(span)
        if events.traits[work.name] & COMPUTE:
            compute.append(span)
        if events.traits[work.name] & COLLECTIVE:
            communication.append(span)
        if work.kind in {KERNEL, MEMCPY, MEMSET}:
            on_stream.setdefault(work.stream, []).append((start, end, work.correlation))
    temporal = _temporal(everything, compute)
    talking = union(communication)
    whole = length(talking)
    overlap = length(intersection(talking, union(compute))) / whole if whole > 0 else None
    return temporal, overlap, tuple(_idle(stream, on_stream[stream], launches, until) for stream in sorted(on_stream))


def _last_step(events: TraceEvents) -> float | None:
    """Where the last marked step begins; None with fewer than two marked steps. Then nothing is left out."""
    marks = [mark for mark in events.marks if events.traits[mark.name] & STEP]
    if len({mark.name for mark in marks}) < 2:
        return None
    last = max(mark.start for mark in marks)
    last = last if events.last_gpu_step is None else max(last, events.last_gpu_step)
    return float(ceil(last)) if events.fractional else last


def _temporal(everything: list[TimeRange], compute: list[TimeRange]) -> TemporalBreakdown:
    if not everything:
        return TemporalBreakdown()
    first, last = min(start for start, _ in everything), max(end for _, end in everything)
    whole, covered, busy = last - first, _covered(everything), _covered(compute)
    if whole <= 0:
        return TemporalBreakdown()
    return TemporalBreakdown((whole - covered) / whole, busy / whole, (covered - busy) / whole)


def _covered(intervals: list[TimeRange]) -> float:
    """The time that any intervals cover. An interval that rounding has reversed counts negative."""
    covered, start, end, reach = 0.0, 0.0, 0.0, float("-inf")
    for left, right in sorted(intervals):
        if left > reach:
            covered += end - start
            start, end = left, right
        else:
            end = max(end, right)
        reach = max(reach, right)
    return covered + end - start


def _idle(
    stream: int, work: list[tuple[float, float, int]], launches: dict[int, float], until: float | None
) -> StreamIdle:
    """Why one stream was idle. ``work``: start, end and correlation of its events."""
    host = kernel = other = 0.0
    for (_, dry, _), (start, _, correlation) in pairwise(sorted(work)):
        gap = start - dry
        launched = launches.get(correlation)
        if launched is not None and launched > dry and (until is None or launched < until):
            host += gap
        elif gap < _LAUNCH_DELAY_US:
            kernel += gap
        else:
            other += gap
    whole = host + kernel + other
    return StreamIdle(stream, host / whole, kernel / whole, other / whole) if whole > 0 else StreamIdle(stream)


def launch_gaps(events: TraceEvents, steps: TraceSteps) -> list[list[TimeRange]]:
    """The times in which the device waited for a launch, by launch-bound stretch."""
    launched = {correlation: start for start, _, correlation, _, _, _ in events.calls.plain()}
    launched.pop(NOTHING, None)
    ordered = sorted(
        (*work.span, launched.get(work.correlation, float("-inf")))
        for work in events.work
        if work.kind in {KERNEL, MEMCPY, MEMSET} and steps.hold(work.start)
    )
    runs: list[list[TimeRange]] = [[]]
    busy_until = ordered[0][0] if ordered else 0.0
    for start, end, call in ordered:
        if start > busy_until:
            if start - busy_until <= _MAX_GAP_US and call > busy_until - _CALL_US:
                runs[-1].append((busy_until, start))
            else:
                runs.append([])
        busy_until = max(busy_until, end)
    return [run for run in runs if len(run) >= _MIN_LAUNCHES]


def launch_bound(gaps: Sequence[Sequence[TimeRange]], steps: TraceSteps) -> list[LaunchBoundStretch]:
    """The stretches of `launch_gaps`, the longest idle time first."""
    starts = [span.start for span in steps.spans]
    found = []
    for run in gaps:
        span = steps.spans[max(0, bisect_right(starts, run[0][0]) - 1)]
        whole, offset = run[-1][1] - run[0][0], run[0][0] - span.start
        idle = length(run) / whole if whole else 0.0
        found.append(LaunchBoundStretch(span.number, offset * SECONDS_PER_US, whole * SECONDS_PER_US, idle, len(run)))
    return sorted(found, key=lambda each: -each.seconds * each.idle_ratio)
