"""What the streams of the device do over the trace, as Holistic Trace Analysis defines it.

Its definitions are kept to the letter, rounding included: where timestamps carry fractions of a microsecond, starts
are rounded up and ends down, and kernels launched in the last marked step are left out, for they may be torn.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, Final, TypeAlias

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


_Row: TypeAlias = tuple[float, float, int, int, int, int]
"""Start, end, correlation, name, stream, kind."""


def measure(events: Events) -> tuple[Temporal, float | None, tuple[Idle, ...]]:
    """The temporal breakdown, the share of communication that computation overlaps, and the idle time by stream."""
    launches = _launches(events)
    until = _last_step(events)
    rows = _rows(events, launches, until)
    names = events.names
    computing = [is_compute(names[number]) for number in range(len(names))]
    collective = [is_communication(names[number]) for number in range(len(names))]
    whole = sorted((start, end) for start, end, _, _, stream, _ in rows if stream != NOTHING)
    compute = sorted((start, end) for start, end, _, name, stream, _ in rows if stream != NOTHING and computing[name])
    communication = [(start, end) for start, end, _, name, stream, _ in rows if stream != NOTHING and collective[name]]
    return _temporal(whole, compute), _overlap(communication, compute), tuple(_idle(rows, launches, until))


def _launches(events: Events) -> dict[int, float]:
    """When the call that launched each correlated event began; of several with one number, the last in the file."""
    up = ceil if events.fractional else float
    return {correlation: float(up(start)) for start, _, correlation, *_ in events.runtimes() if correlation != NOTHING}


def _last_step(events: Events) -> float | None:
    """Where the last marked step begins; None with fewer than two different marks: then nothing is left out."""
    traits = events.names.traits
    marks = [(start, name) for start, _, _, name, _ in events.marks() if traits[name] & STEP]
    if len({name for _, name in marks}) < 2:
        return None
    last = max(start for start, _ in marks)
    last = last if events.last_gpu_step is None else max(last, events.last_gpu_step)
    return float(ceil(last)) if events.fractional else last


def _rows(events: Events, launches: dict[int, float], until: float | None) -> list[_Row]:
    """Device events that a call launched before the last step; all of them where none is left out."""
    host_side = {events.names.ids.get(name, NOTHING) for name in _HOST_SIDE_SYNC}
    fractional = events.fractional
    rows: list[_Row] = []
    for start, took, correlation, _, _, _, name, stream, _, kind in events.devices():
        begin, end = start, start + took
        if fractional:
            begin, end = float(ceil(begin)), float(floor(end))
        if until is not None:
            on_device = (stream >= 0 and correlation >= 0) or name in host_side
            launched = launches.get(correlation) if on_device else begin
            if launched is None or launched >= until:
                continue
        rows.append((begin, end, correlation, name, stream, kind))
    return rows


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


def _idle(rows: Sequence[_Row], launches: dict[int, float], until: float | None) -> list[Idle]:
    streams: dict[int, list[tuple[float, float, int]]] = {}
    for start, end, correlation, _, stream, kind in rows:
        if stream != NOTHING and kind in {KERNEL, MEMCPY, MEMSET}:
            streams.setdefault(stream, []).append((start, end, correlation))
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
