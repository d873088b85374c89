"""Stretches in which the device waits for the host to launch the next kernel, and the next, and the next."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.snapshot.reading.events import KERNEL, MEMCPY, MEMSET, NOTHING
from telemetry.snapshot.reading.intervals import Interval, length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.snapshot.reading.events import Events
    from telemetry.snapshot.reading.steps import Steps

_S: Final = 1e-6
_FEWEST: Final = 20
"""A stretch has at least so many launches one after the other that the device waited for."""

_LONGEST_GAP_US: Final = 500.0
"""A longer gap is not the price of a launch: the host did something else."""


_UNKNOWN: Final = float("-inf")
_CALL_US: Final = 5.0
"""What a launch takes on the host: one that began so shortly before the device ran dry came too late as well."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One stretch.

    Attributes:
        step: number of the step it begins in.
        offset_seconds: from the start of that step.
        seconds: how long it is; ``idle_ratio``: the share of it in which nothing ran on any stream.
        launches: how many times the device ran dry and then got work.
    """

    step: int
    offset_seconds: float
    seconds: float
    idle_ratio: float
    launches: int


@dataclass(frozen=True, slots=True)
class LaunchBound:
    """All stretches, the longest idle time first, and the moments in which the device idled in them."""

    stretches: tuple[Stretch, ...]
    gaps: tuple[Interval, ...]


def find(events: Events, steps: Steps) -> LaunchBound:
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
    run: list[Interval] = []
    runs: list[list[Interval]] = []
    busy_until: float | None = None
    for start, end, call in ordered:
        if busy_until is not None and start > busy_until:
            if start - busy_until <= _LONGEST_GAP_US and call > busy_until - _CALL_US:
                run.append((busy_until, start))
            else:
                runs.append(run)
                run = []
        busy_until = end if busy_until is None else max(busy_until, end)
    runs.append(run)
    bound = [run for run in runs if len(run) >= _FEWEST]
    starts = [span.start for span in steps.spans]
    stretches = sorted((_stretch(run, steps, starts) for run in bound), key=lambda s: -s.seconds * s.idle_ratio)
    return LaunchBound(tuple(stretches), tuple(gap for run in bound for gap in run))


def _stretch(run: Sequence[Interval], steps: Steps, starts: Sequence[float]) -> Stretch:
    span = steps.spans[max(0, bisect_right(starts, run[0][0]) - 1)]
    whole = run[-1][1] - run[0][0]
    idle = length(run) / whole if whole else 0.0
    return Stretch(span.number, (run[0][0] - span.start) * _S, whole * _S, idle, len(run))
