"""What the streams of the device do over the trace, exactly as Holistic Trace Analysis defines it.

That includes its rounding: if timestamps have fractions of a microsecond, starts are rounded up and ends down. Kernels
that were launched in the last marked step are left out, because some of them may be missing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, Final

from telemetry.trace.event_names import STEP, is_communication, is_compute
from telemetry.trace.intervals import intersection, length, union
from telemetry.trace.trace_events import KERNEL, MEMCPY, MEMSET, NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.trace.intervals import TimeRange
    from telemetry.trace.trace_events import TraceEvents

_LAUNCH_DELAY_US: Final = 30.0
"""A shorter gap between two kernels that were launched in time is the cost of starting the next one."""

_HOST_SIDE_SYNC: Final = ("Event Sync", "Context Sync")
"""These count as device events, although they are on no stream."""


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
class _KeptKernels:
    """The device events that count: their rows in the columns of the trace, and their rounded starts and ends."""

    places: array[int]
    start: array[float]
    end: array[float]

    def of(self, chosen: Sequence[bool], names: Sequence[int]) -> list[TimeRange]:
        """The sorted intervals of the events with chosen names."""
        columns = zip(self.places, self.start, self.end, strict=True)
        return sorted((start, end) for place, start, end in columns if chosen[names[place]])


def measure(events: TraceEvents) -> tuple[TemporalBreakdown, float | None, tuple[StreamIdle, ...]]:
    """The temporal breakdown, the share of communication that computation overlaps, and the idle time by stream."""
    launches = _launches(events)
    until = _last_step(events)
    kept = _kept(events, launches, until)
    idle = _idle(events, kept, launches, until)
    names, used = events.names, events.work.name
    compute = kept.of([is_compute(names[number]) for number in range(len(names))], used)
    temporal = _temporal(sorted(zip(kept.start, kept.end, strict=True)), compute)
    communication = kept.of([is_communication(names[number]) for number in range(len(names))], used)
    return temporal, _overlap(communication, compute), tuple(idle)


def _launches(events: TraceEvents) -> dict[int, float]:
    """Start of the call that launched each device event, by correlation id; for duplicates the last in the file."""
    calls = events.calls
    starts = (float(ceil(start)) for start in calls.start) if events.fractional else calls.start
    launches = dict(zip(calls.correlation, starts, strict=True))
    launches.pop(NOTHING, None)
    return launches


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


def _kept(events: TraceEvents, launches: dict[int, float], until: float | None) -> _KeptKernels:
    """Events on a stream that were launched before the last step; all events if no step is left out."""
    host_side = {events.names.ids.get(name, NOTHING) for name in _HOST_SIDE_SYNC}
    fractional, work = events.fractional, events.work
    kept = _KeptKernels(array("q"), array("d"), array("d"))
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
        kept.places.append(place)
        kept.start.append(begin)
        kept.end.append(end)
    return kept


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


def _temporal(events: Sequence[TimeRange], compute: Sequence[TimeRange]) -> TemporalBreakdown:
    merged, computing = _merged(events), _merged(compute)
    if merged is None or merged[1] <= merged[0]:
        return TemporalBreakdown(None, None, None)
    first, last, covered = merged
    whole = last - first
    busy = computing[2] if computing else 0.0
    return TemporalBreakdown((whole - covered) / whole, busy / whole, (covered - busy) / whole)


def _overlap(collectives: Sequence[TimeRange], compute: Sequence[TimeRange]) -> float | None:
    communication = union(collectives)
    whole = length(communication)
    return length(intersection(communication, union(compute))) / whole if whole > 0 else None


def _idle(events: TraceEvents, kept: _KeptKernels, launches: dict[int, float], until: float | None) -> list[StreamIdle]:
    work = events.work
    streams: dict[int, list[tuple[float, float, int]]] = {}
    for place, start, end in zip(kept.places, kept.start, kept.end, strict=True):
        if work.kind[place] in {KERNEL, MEMCPY, MEMSET}:
            streams.setdefault(work.stream[place], []).append((start, end, work.correlation[place]))
    found: list[StreamIdle] = []
    for stream, members in sorted(streams.items()):
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
