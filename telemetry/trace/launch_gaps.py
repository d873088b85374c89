"""Stretches in which the device repeatedly waits for the host to launch the next kernel."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.trace.intervals import SECONDS_PER_US, TimeRange, length
from telemetry.trace.trace_events import KERNEL, MEMCPY, MEMSET, NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.trace.step_breakdown import TraceSteps
    from telemetry.trace.trace_events import TraceEvents

_MIN_LAUNCHES: Final = 20
"""A stretch has at least this many launches in a row that the device waited for."""

_MAX_GAP_US: Final = 500.0
"""In a longer gap the host did something else than to launch."""


_UNKNOWN: Final = float("-inf")
_CALL_US: Final = 5.0
"""What a launch takes on the host. A launch that began so shortly before the device became idle was late, too."""


@dataclass(frozen=True, slots=True)
class LaunchBoundStretch:
    """One stretch.

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


@dataclass(frozen=True, slots=True)
class LaunchBound:
    """All stretches, the longest idle time first, and the times in which the device was idle in them."""

    stretches: tuple[LaunchBoundStretch, ...]
    gaps: tuple[TimeRange, ...]


def find(events: TraceEvents, steps: TraceSteps) -> LaunchBound:
    """The launch-bound stretches of the steps."""
    first, last = steps.spans[0].start, steps.spans[-1].end
    launched = dict(zip(events.calls.correlation, events.calls.start, strict=True))
    launched.pop(NOTHING, None)
    work = events.work
    columns = zip(work.start, work.duration, work.correlation, work.kind, strict=True)
    ordered = sorted(
        (start, start + took, launched.get(correlation, _UNKNOWN))
        for start, took, correlation, kind in columns
        if kind in {KERNEL, MEMCPY, MEMSET} and first <= start < last
    )
    run: list[TimeRange] = []
    runs: list[list[TimeRange]] = []
    busy_until: float | None = None
    for start, end, call in ordered:
        if busy_until is not None and start > busy_until:
            if start - busy_until <= _MAX_GAP_US and call > busy_until - _CALL_US:
                run.append((busy_until, start))
            else:
                runs.append(run)
                run = []
        busy_until = end if busy_until is None else max(busy_until, end)
    runs.append(run)
    bound = [run for run in runs if len(run) >= _MIN_LAUNCHES]
    starts = [span.start for span in steps.spans]
    stretches = sorted((_stretch(run, steps, starts) for run in bound), key=lambda s: -s.seconds * s.idle_ratio)
    return LaunchBound(tuple(stretches), tuple(gap for run in bound for gap in run))


def _stretch(run: Sequence[TimeRange], steps: TraceSteps, starts: Sequence[float]) -> LaunchBoundStretch:
    span = steps.spans[max(0, bisect_right(starts, run[0][0]) - 1)]
    whole = run[-1][1] - run[0][0]
    idle = length(run) / whole if whole else 0.0
    return LaunchBoundStretch(
        span.number, (run[0][0] - span.start) * SECONDS_PER_US, whole * SECONDS_PER_US, idle, len(run)
    )
