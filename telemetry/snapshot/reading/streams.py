"""What the streams of the device do over the trace, as Holistic Trace Analysis defines it.

Its definitions are kept to the letter, rounding included: where timestamps carry fractions of a microsecond, starts
are rounded up and ends down, and kernels launched in the last marked step are left out, for they may be torn.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, Final

from telemetry.snapshot.reading.events import KERNEL, MEMCPY, MEMSET, NOTHING
from telemetry.snapshot.reading.intervals import intersection, length, union
from telemetry.snapshot.reading.names import STEP, is_communication, is_compute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.snapshot.reading.events import Events
    from telemetry.snapshot.reading.intervals import Interval

_LAUNCH_DELAY_US: Final = 30.0
"""A gap shorter than this between two kernels that wait for nothing is what launching them back to back takes."""

_HOST_SIDE_SYNC: Final = ("Event Sync", "Context Sync")
"""Device events although they are on no stream."""


@dataclass(frozen=True, slots=True)
class Temporal:
    """Shares of the time from the first device event to the end of the last; None where there is none."""

    idle_ratio: float | None
    compute_ratio: float | None
    non_compute_ratio: float | None


@dataclass(frozen=True, slots=True)
class Idle:
    """Why a stream was idle between its kernels: shares of its idle time; None where it never was."""

    stream: int
    host_wait_ratio: float | None
    kernel_wait_ratio: float | None
    other_ratio: float | None


@dataclass(frozen=True, slots=True)
class _Kept:
    """The device events that count: their places in the columns of the trace, their starts and their ends."""

    places: array[int]
    start: array[float]
    end: array[float]

    def of(self, chosen: Sequence[bool], names: Sequence[int]) -> list[Interval]:
        """The sorted intervals of those whose names are chosen."""
        columns = zip(self.places, self.start, self.end, strict=True)
        return sorted((start, end) for place, start, end in columns if chosen[names[place]])


def measure(events: Events) -> tuple[Temporal, float | None, tuple[Idle, ...]]:
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


def _launches(events: Events) -> dict[int, float]:
    """When the call that launched each correlated event began; of several with one number, the last in the file."""
    calls = events.calls
    starts = (float(ceil(start)) for start in calls.start) if events.fractional else calls.start
    launches = dict(zip(calls.correlation, starts, strict=True))
    launches.pop(NOTHING, None)
    return launches


def _last_step(events: Events) -> float | None:
    """Where the last marked step begins; None with fewer than two different marks: then nothing is left out."""
    traits = events.names.traits
    columns = zip(events.marks.start, events.marks.name, strict=True)
    marks = [(start, name) for start, name in columns if traits[name] & STEP]
    if len({name for _, name in marks}) < 2:
        return None
    last = max(start for start, _ in marks)
    last = last if events.last_gpu_step is None else max(last, events.last_gpu_step)
    return float(ceil(last)) if events.fractional else last


def _kept(events: Events, launches: dict[int, float], until: float | None) -> _Kept:
    """Events on a stream that a call launched before the last step; all of them where none is left out."""
    host_side = {events.names.ids.get(name, NOTHING) for name in _HOST_SIDE_SYNC}
    fractional, work = events.fractional, events.work
    kept = _Kept(array("q"), array("d"), array("d"))
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


def _merged(intervals: Sequence[Interval]) -> tuple[float, float, float] | None:
    """First start, last end and covered time of sorted intervals. One that rounding turned around counts negative."""
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


def _temporal(events: Sequence[Interval], compute: Sequence[Interval]) -> Temporal:
    merged, computing = _merged(events), _merged(compute)
    if merged is None or merged[1] <= merged[0]:
        return Temporal(None, None, None)
    first, last, covered = merged
    whole = last - first
    busy = computing[2] if computing else 0.0
    return Temporal((whole - covered) / whole, busy / whole, (covered - busy) / whole)


def _overlap(collectives: Sequence[Interval], compute: Sequence[Interval]) -> float | None:
    communication = union(collectives)
    whole = length(communication)
    return length(intersection(communication, union(compute))) / whole if whole > 0 else None


def _idle(events: Events, kept: _Kept, launches: dict[int, float], until: float | None) -> list[Idle]:
    work = events.work
    streams: dict[int, list[tuple[float, float, int]]] = {}
    for place, start, end in zip(kept.places, kept.start, kept.end, strict=True):
        if work.kind[place] in {KERNEL, MEMCPY, MEMSET}:
            streams.setdefault(work.stream[place], []).append((start, end, work.correlation[place]))
    found: list[Idle] = []
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
        found.append(Idle(stream, *shares))
    return found
