"""Where each step begins and ends, and what it consists of, as TensorBoard's PyTorch profiler defines it.

That tool does not know what newer versions of torch write. There its definitions are kept, and its figures differ:
``cuda_runtime`` calls are runtime calls, a user annotation ``enumerate(DataLoader)#…`` is the wait for a batch, a NCCL
kernel is communication even without an external id, and a step's annotation on the device is not a second step.

Sets of times are sorted lists of disjoint intervals ``(start, end)``. All functions expect and return such lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, Final, TypeAlias

from telemetry.trace.events import (
    COMMUNICATION,
    KERNEL,
    LOADER,
    MEMCPY,
    MEMSET,
    NOTHING,
    STEP,
    is_communication,
    step_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.trace.events import DeviceWork, RuntimeCalls, Spans, TraceEvents

TimeRange: TypeAlias = tuple[float, float]
Intervals: TypeAlias = list[TimeRange]

SECONDS_PER_US: Final = 1e-6
"""Times of a trace are microseconds, figures are seconds."""

_PORTION: Final = 1 << 16
_MUCH_SHORTER: Final = 16
"""If a list is this many times shorter than the other, its intervals are searched there by bisection."""


def union(intervals: Iterable[TimeRange]) -> Intervals:
    """The union of any intervals, in any order. Intervals that touch become one.

    The input is read in portions, so that nested operators are never all in memory at once.
    """
    left = iter(intervals)
    merged: Intervals = []
    while portion := list(islice(left, max(_PORTION, len(merged)))):
        portion += merged
        portion.sort()
        merged = _join(portion)
        portion.clear()
    return merged


def _join(intervals: Intervals) -> Intervals:
    """The union of sorted intervals. An unchanged interval stays the same object: there may be millions."""
    merged: Intervals = []
    first = intervals[0]
    end = first[1]
    for span in intervals:
        if span[0] > end:
            merged.append(first if first[1] == end else (first[0], end))
            first = span
            end = span[1]
        elif span[1] > end:
            end = span[1]
    merged.append((first[0], end))
    return merged


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The times that are in both."""
    if len(one) > len(other):
        one, other = other, one
    if _MUCH_SHORTER * len(one) < len(other):
        return [span for start, end in one for span in within(other, start, end)]
    return split(other, one)[0]


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The times in the first that are not in the second."""
    return split(one, other)[1]


def split(one: Intervals, other: Intervals) -> tuple[Intervals, Intervals]:
    """The times in the first that are in the second, and those that are not."""
    common: Intervals = []
    rest: Intervals = []
    at, count = 0, len(other)
    for begin, end in one:
        start = begin
        while at < count and other[at][1] <= start:
            at += 1
        while at < count:
            left, right = other[at]
            if left >= end:
                break
            if left > start:
                rest.append((start, left))
                start = left
            if right >= end:
                common.append((start, end))
                start = end
                break
            common.append(other[at] if start == left else (start, right))
            start = right
            at += 1
        if start < end:
            rest.append((start, end))
    return common, rest


def within(intervals: Intervals, start: float, end: float) -> Intervals:
    """The times from ``start`` to ``end``. Takes as long as the result is, not the list."""
    if end <= start:
        return []
    first = max(0, bisect_left(intervals, (start, start)) - 1)
    found: Intervals = []
    for i in range(first, len(intervals)):
        left, right = intervals[i]
        if left >= end:
            break
        if right > start:
            found.append((max(left, start), min(right, end)))
    return found


def holds(intervals: Intervals, time: float) -> bool:
    """Whether a time is in the set."""
    at = bisect_right(intervals, (time, float("inf"))) - 1
    return at >= 0 and time <= intervals[at][1]


def length(intervals: Iterable[TimeRange]) -> float:
    """The sum of the lengths of the intervals."""
    return sum(end - start for start, end in intervals)


CATEGORIES: Final = (
    "Kernel",
    "Memcpy",
    "Memset",
    "Communication",
    "Runtime",
    "DataLoader",
    "CPU Exec",
    "Other",
)
"""The categories by priority: each time counts for the first one that covers it. Other is the rest of the step."""

_TORN: Final = 0.8
"""If the last step has fewer device events than this share of the step before, the recording ended within it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A step: its number, start and end in microseconds on the trace's clock."""

    number: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TraceSteps:
    """The steps of a trace.

    Attributes:
        spans: the steps with the work that they launched on the device.
        host: the same steps on the host only, where the calls are made.
        marked: whether the trace has annotations of steps; otherwise all of it is one step.
        dropped: how many steps at the end are left out because part of their device events is missing.
    """

    spans: tuple[Span, ...]
    host: tuple[Span, ...]
    marked: bool
    dropped: int

    @property
    def intervals(self) -> Intervals:
        """The times of all steps."""
        return union((span.start, span.end) for span in self.spans)

    @property
    def length(self) -> float:
        """The sum of their lengths, microseconds."""
        return sum(span.end - span.start for span in self.spans)


def find_steps(events: TraceEvents) -> TraceSteps | None:
    """The steps, or all of the trace as one step if no step is marked; None if no event has a duration."""
    traits, names = events.names.traits, events.names
    columns = zip(events.marks.start, events.marks.duration, events.marks.name, strict=True)
    marks = sorted(mark for mark in columns if traits[mark[2]] & STEP)
    if marks:
        host = [Span(step_number(names[name]) or 0, start, start + took) for start, took, name in marks]
    else:
        extent = _extent(events.operators) or _extent(events.marks) or _extent(events.calls) or _extent(events.work)
        if extent is None:
            return None
        host = [Span(0, *extent)]
    spans, torn = _with_device(events, host)
    return TraceSteps(tuple(spans), tuple(host[: len(spans)]), bool(marks), torn)


def find_categories(events: TraceEvents) -> dict[str, Intervals]:
    """The times of each category but Other. They may overlap."""
    traits, names = events.names.traits, events.names
    found: dict[str, list[TimeRange]] = {category: [] for category in CATEGORIES[:-1]}
    collectives: set[int] = set()
    marks, work, operators = events.marks, events.work, events.operators
    for start, took, external, name in zip(marks.start, marks.duration, marks.external, marks.name, strict=True):
        if traits[name] & COMMUNICATION:
            found["Communication"].append((start, start + took))
            collectives.add(external)
        elif traits[name] & LOADER:
            found["DataLoader"].append((start, start + took))
    collectives.discard(NOTHING)
    collective = [is_communication(name) for name in names]
    by_kind = {KERNEL: found["Kernel"], MEMCPY: found["Memcpy"], MEMSET: found["Memset"]}
    communication = found["Communication"]
    columns = zip(work.start, work.duration, work.external, work.name, work.kind, strict=True)
    for start, took, external, name, kind in columns:
        if kind == KERNEL and (collective[name] or external in collectives):
            communication.append((start, start + took))
        elif kind in by_kind:
            by_kind[kind].append((start, start + took))
    host = [not trait & (COMMUNICATION | LOADER) for trait in traits]
    merged = {category: union(found.pop(category)) for category in CATEGORIES[:-1]}
    merged["Runtime"] = union(zip(events.calls.start, map(add, events.calls.start, events.calls.duration), strict=True))
    merged["CPU Exec"] = union(
        (start, start + took)
        for start, took, name in zip(operators.start, operators.duration, operators.name, strict=True)
        if host[name]
    )
    return merged


def exclusive(steps: TraceSteps, categories: dict[str, Intervals]) -> dict[str, Intervals]:
    """The times of the steps, each in one category. ``categories`` is emptied on the way, because it may be large."""
    left = steps.intervals
    parts: dict[str, Intervals] = {}
    for category in CATEGORIES[:-1]:
        parts[category], left = split(left, categories.pop(category))
    return parts | {CATEGORIES[-1]: left}


def breakdown(steps: TraceSteps, parts: dict[str, Intervals]) -> list[dict[str, float]]:
    """Microseconds of each step by category."""
    return [
        {category: length(within(intervals, span.start, span.end)) for category, intervals in parts.items()}
        for span in steps.spans
    ]


def _extent(rows: DeviceWork | RuntimeCalls | Spans) -> TimeRange | None:
    """From the first start to the last end."""
    return (min(rows.start), max(map(add, rows.start, rows.duration))) if rows.start else None


def _with_device(events: TraceEvents, host: Sequence[Span]) -> tuple[list[Span], int]:
    """The steps, each until the device has finished what it launched, and how many were dropped at the end.

    A step begins where the one before it ends. The first step begins after the device has finished earlier work.
    """
    starts, ends = [span.start for span in host], [span.end for span in host]
    launched_in: dict[int, int] = {}
    calls, work = events.calls, events.work
    for start, took, correlation in zip(calls.start, calls.duration, calls.correlation, strict=True):
        step = bisect_right(starts, start) - 1
        if correlation >= 0 and step >= 0 and start + took <= ends[step]:
            launched_in[correlation] = step
    first = [float("inf")] * len(host)
    last = [float("-inf")] * len(host)
    count = [0] * len(host)
    before: list[float] = []  # ends of work that was launched outside of the steps
    for start, took, correlation, kind in zip(work.start, work.duration, work.correlation, work.kind, strict=True):
        if kind not in {KERNEL, MEMCPY, MEMSET}:
            continue
        at = launched_in.get(correlation)
        if at is None:
            before.append(start + took)
            continue
        first[at] = min(first[at], start)
        last[at] = max(last[at], start + took)
        count[at] += 1
    if not any(count):
        return list(host), 0
    previous = max([host[0].start, *(end for end in before if count[0] and end < first[0])])
    spans: list[Span] = []
    for step, span in enumerate(host):
        start = max(previous, span.start)
        previous = max(start, span.end, last[step])
        spans.append(Span(span.number, start, previous))
    keep = len(spans)
    while keep > 1 and not count[keep - 1]:
        keep -= 1
    if keep > 1 and count[keep - 2] * _TORN > count[keep - 1]:
        keep -= 1
    return spans[:keep], len(spans) - keep
