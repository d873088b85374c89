"""How well the devices were used, what their streams do, and where they wait for the host to launch a kernel.

`usage` is over the steps, as TensorBoard's PyTorch profiler estimates it. `streams` is over the trace, exactly as
Holistic Trace Analysis defines it, with its rounding: if timestamps have fractions of a microsecond, starts are rounded
up and ends down. Kernels that were launched in the last marked step are left out there: some may be missing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, Final, TypeAlias

from telemetry.trace.events import (
    KERNEL,
    MEMCPY,
    MEMSET,
    NOTHING,
    STEP,
    is_communication,
    is_compute,
    uses_tensor_cores,
)
from telemetry.trace.steps import SECONDS_PER_US, TimeRange, intersection, length, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.trace.events import DeviceWork, TraceEvents
    from telemetry.trace.steps import TraceSteps

_Kernel: TypeAlias = tuple[float, float, float]
"""Start, end, and blocks per SM: -1 if the trace does not tell."""

_NO_BLOCKS: Final = 1e-9
"""A sum below this is zero, apart from rounding."""

_LAUNCH_DELAY_US: Final = 30.0
"""A shorter gap between two kernels that were launched in time is the cost of starting the next one."""

_HOST_SIDE_SYNC: Final = ("Event Sync", "Context Sync")
"""These count as device events, although they are on no stream."""

_MIN_LAUNCHES: Final = 20
"""A launch-bound stretch has at least this many launches in a row that the device waited for."""

_MAX_GAP_US: Final = 500.0
"""In a longer gap the host did something else than to launch."""

_CALL_US: Final = 5.0
"""What a launch takes on the host. A launch that began so shortly before the device became idle was late, too."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Averages over the devices that ran kernels, 0 to 1; None if the trace does not tell.

    Attributes:
        utilization_ratio: share of the time from the first step to the last in which any kernel ran.
        sm_efficiency_ratio: share of the multiprocessors that had a block, over the same time. It is taken from the
            blocks per SM, at most 1 at any time.
        occupancy_ratio: estimated achieved occupancy of the kernels, weighted by their time.
        tensor_core_ratio: share of the kernel time in kernels that use tensor cores, by their names.
    """

    utilization_ratio: float | None
    sm_efficiency_ratio: float | None
    occupancy_ratio: float | None
    tensor_core_ratio: float | None


@dataclass(frozen=True, slots=True)
class TemporalBreakdown:
    """Shares of the time from the first device event to the end of the last; None without device events."""

    idle_ratio: float | None
    compute_ratio: float | None
    non_compute_ratio: float | None


@dataclass(frozen=True, slots=True)
class StreamIdle:
    """Why a stream was idle between its kernels: shares of its idle time; None if it never was."""

    stream: int
    host_wait_ratio: float | None
    kernel_wait_ratio: float | None
    other_ratio: float | None


@dataclass(frozen=True, slots=True)
class LaunchBoundStretch:
    """A stretch in which the device repeatedly waits for the host to launch the next kernel.

    Attributes:
        step: number of the step in which it begins.
        offset_seconds: time from the start of that step.
        seconds: its length; ``idle_ratio``: the share of it in which nothing ran on any stream.
        launches: how many times the device became idle and then got work.
    """

    step: int
    offset_seconds: float
    seconds: float
    idle_ratio: float
    launches: int


def main_device(events: TraceEvents) -> int | None:
    """The number of the device that most work ran on; None if no work ran on a device."""
    busy: dict[int, float] = {}
    for took, device in zip(events.work.duration, events.work.device, strict=True):
        busy[device] = busy.get(device, 0.0) + took
    return max(busy, key=lambda number: busy[number]) if busy else None


def is_amd(events: TraceEvents) -> bool:
    """Whether the trace is of AMD's runtime. The names of AMD's kernels do not tell about matrix cores."""
    return any(name.startswith("hip") for name in events.names)


def usage(events: TraceEvents, steps: TraceSteps) -> GpuUsage:
    """The averages over all devices of the trace."""
    start, end = steps.spans[0].start, steps.spans[-1].end
    work = events.work
    on_device: dict[int, list[int]] = {}
    for place, (device, kind) in enumerate(zip(work.device, work.kind, strict=True)):
        if kind == KERNEL:
            on_device.setdefault(device, []).append(place)
    if not on_device or end <= start:
        return GpuUsage(None, None, None, None)
    each = [_busy(work, places, start, end) for places in on_device.values()]
    return GpuUsage(
        _mean([ran for ran, _ in each]),
        _mean([efficiency for _, efficiency in each]),
        _mean([_occupancy(work, places, start, end) for places in on_device.values()]),
        None if is_amd(events) else _tensor_cores(events),
    )


def _busy(work: DeviceWork, places: Sequence[int], start: float, end: float) -> tuple[float, float | None]:
    """Utilisation and SM efficiency of one device. Overlapping kernels form a group; most groups have one kernel."""
    starts, took, blocks = work.start, work.duration, work.first
    kernels = sorted((starts[place], starts[place] + took[place], blocks[place]) for place in places)
    ran = efficient = 0.0
    group: list[_Kernel] = []
    reach = float("-inf")
    for kernel in [*kernels, (float("inf"), float("inf"), 0.0)]:
        if kernel[0] < reach:
            group.append(kernel)
            reach = max(reach, kernel[1])
            continue
        if group:
            ran += max(0.0, min(reach, end) - max(group[0][0], start))
            efficient += _efficient(group, start, end)
        group = [kernel]
        reach = kernel[1]
    known = any(kernel[2] > 0 for kernel in kernels)
    return ran / (end - start), efficient / (end - start) if known else None


def _efficient(group: Sequence[_Kernel], start: float, end: float) -> float:
    """The time of overlapping kernels, weighted at each moment by the sum of their blocks per SM, at most 1."""
    if len(group) == 1:
        begin, stop, blocks = group[0]
        inside = min(stop, end) - max(begin, start)
        return inside * min(blocks, 1.0) if inside > 0 and blocks > 0 else 0.0
    changes = [(begin, blocks) for begin, _, blocks in group if blocks > 0]
    changes += [(stop, -blocks) for _, stop, blocks in group if blocks > 0]
    changes.sort()
    weighted = together = last = 0.0
    for time, change in changes:
        inside = min(time, end) - max(last, start)
        if together > _NO_BLOCKS and inside > 0:
            weighted += inside * min(together, 1.0)
        last, together = time, together + change
    return weighted


def _occupancy(work: DeviceWork, places: Sequence[int], start: float, end: float) -> float | None:
    whole = weighted = 0.0
    for place in places:
        inside = min(work.start[place] + work.duration[place], end) - max(work.start[place], start)
        if work.second[place] >= 0 and inside > 0:
            whole += inside
            weighted += inside * work.second[place]
    return weighted / whole / 100 if whole else None


def _tensor_cores(events: TraceEvents) -> float | None:
    uses = [uses_tensor_cores(name) for name in events.names]
    whole = tensor = 0.0
    for took, name, kind in zip(events.work.duration, events.work.name, events.work.kind, strict=True):
        if kind == KERNEL:
            whole += took
            tensor += took if uses[name] else 0.0
    return tensor / whole if whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def streams(events: TraceEvents) -> tuple[TemporalBreakdown, float | None, tuple[StreamIdle, ...]]:
    """The temporal breakdown, the share of communication that computation overlaps, and the idle time by stream."""
    calls = events.calls
    starts = (float(ceil(start)) for start in calls.start) if events.fractional else calls.start
    launches = dict(zip(calls.correlation, starts, strict=True))  # for duplicates the last in the file
    launches.pop(NOTHING, None)
    until = _last_step(events)
    kept = _kept(events, launches, until)
    idle = _idle(events.work, zip(*kept, strict=True), launches, until)
    used = events.work.name
    computes, talks = ([test(name) for name in events.names] for test in (is_compute, is_communication))
    compute = sorted((start, end) for place, start, end in zip(*kept, strict=True) if computes[used[place]])
    communication = union((start, end) for place, start, end in zip(*kept, strict=True) if talks[used[place]])
    temporal = _temporal(sorted(zip(*kept[1:], strict=True)), compute)
    whole = length(communication)
    overlap = length(intersection(communication, union(compute))) / whole if whole > 0 else None
    return temporal, overlap, tuple(idle)


def _last_step(events: TraceEvents) -> float | None:
    """Where the last marked step begins; None with fewer than two marked steps. Then nothing is left out."""
    traits = events.names.traits
    columns = zip(events.marks.start, events.marks.name, strict=True)
    marks = [(start, name) for start, name in columns if traits[name] & STEP]
    if len({name for _, name in marks}) < 2:
        return None
    last = max(start for start, _ in marks)
    last = last if events.last_gpu_step is None else max(last, events.last_gpu_step)
    return float(ceil(last)) if events.fractional else last


def _kept(
    events: TraceEvents, launches: dict[int, float], until: float | None
) -> tuple[array[int], array[float], array[float]]:
    """Rows, rounded starts and rounded ends of the events on a stream that were launched before the last step."""
    host_side = {events.names.ids.get(name, NOTHING) for name in _HOST_SIDE_SYNC}
    fractional, work = events.fractional, events.work
    places, starts, ends = array("q"), array("d"), array("d")
    columns = zip(work.start, work.duration, work.correlation, work.name, work.stream, strict=True)
    for place, (start, took, correlation, name, stream) in enumerate(columns):
        if stream == NOTHING:
            continue
        begin, end = (ceil(start), floor(start + took)) if fractional else (start, start + took)
        if until is not None:
            on_device = (stream >= 0 and correlation >= 0) or name in host_side
            launched = launches.get(correlation) if on_device else begin
            if launched is None or launched >= until:
                continue
        places.append(place)
        starts.append(begin)
        ends.append(end)
    return places, starts, ends


def _temporal(events: Sequence[TimeRange], compute: Sequence[TimeRange]) -> TemporalBreakdown:
    merged, computing = _merged(events), _merged(compute)
    if merged is None or merged[1] <= merged[0]:
        return TemporalBreakdown(None, None, None)
    first, last, covered = merged
    whole = last - first
    busy = computing[2] if computing else 0.0
    return TemporalBreakdown((whole - covered) / whole, busy / whole, (covered - busy) / whole)


def _merged(intervals: Sequence[TimeRange]) -> tuple[float, float, float] | None:
    """First start, last end and covered time of sorted intervals. One that rounding reverses counts negative."""
    if not intervals:
        return None
    start, reach = intervals[0]
    end = reach
    covered = 0.0
    for left, right in intervals:
        if left > reach:
            covered += end - start
            start = left
            end = right
        elif right > end:
            end = right
        reach = max(reach, right)
    return intervals[0][0], end, covered + end - start


def _idle(
    work: DeviceWork, kept: Iterable[tuple[int, float, float]], launches: dict[int, float], until: float | None
) -> list[StreamIdle]:
    on_stream: dict[int, list[tuple[float, float, int]]] = {}
    for place, start, end in kept:
        if work.kind[place] in {KERNEL, MEMCPY, MEMSET}:
            on_stream.setdefault(work.stream[place], []).append((start, end, work.correlation[place]))
    found: list[StreamIdle] = []
    for stream, members in sorted(on_stream.items()):
        members.sort()
        host = kernel = other = 0.0
        for (_, dry, _), (start, _, correlation) in pairwise(members):
            gap = start - dry
            launched = launches.get(correlation)
            if launched is not None and launched > dry and (until is None or launched < until):
                host += gap
            elif gap < _LAUNCH_DELAY_US:
                kernel += gap
            else:
                other += gap
        whole = host + kernel + other
        shares = (host / whole, kernel / whole, other / whole) if whole > 0 else (None, None, None)
        found.append(StreamIdle(stream, *shares))
    return found


def launch_gaps(events: TraceEvents, steps: TraceSteps) -> list[list[TimeRange]]:
    """The times in which the device waited for a launch, by launch-bound stretch."""
    first, last = steps.spans[0].start, steps.spans[-1].end
    launched = dict(zip(events.calls.correlation, events.calls.start, strict=True))
    launched.pop(NOTHING, None)
    work = events.work
    columns = zip(work.start, work.duration, work.correlation, work.kind, strict=True)
    ordered = sorted(
        (start, start + took, launched.get(correlation, float("-inf")))
        for start, took, correlation, kind in columns
        if kind in {KERNEL, MEMCPY, MEMSET} and first <= start < last
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
