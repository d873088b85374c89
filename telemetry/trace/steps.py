"""The bounds of each step, and its parts, as TensorBoard's PyTorch profiler defines them.

That tool does not support what newer versions of torch write. There its definitions are kept, and its figures differ:
``cuda_runtime`` calls are runtime calls, a user annotation ``enumerate(DataLoader)#…`` is the wait for a batch, a NCCL
kernel is communication even without an external id, and a step's annotation on the device is not a second step.

Sets of times are sorted lists of disjoint intervals ``(start, end)``. All functions expect and return such lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from telemetry.trace.events import (
    COLLECTIVE,
    COMMUNICATION,
    KERNEL,
    LOADER,
    MEMCPY,
    MEMSET,
    NOTHING,
    STEP,
    step_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.trace.events import Rows, TraceEvents

TimeRange: TypeAlias = tuple[float, float]
Intervals: TypeAlias = list[TimeRange]

SECONDS_PER_US: Final = 1e-6
"""Times of a trace are microseconds, figures are seconds."""

_PORTION: Final = 1 << 16


def union(intervals: Iterable[TimeRange]) -> Intervals:
    """The union of any intervals, in any order. Intervals that touch become one.

    The input is read in portions, so that nested operators are never all in memory at once.
    """
    left = iter(intervals)
    merged: Intervals = []
    while portion := list(islice(left, max(_PORTION, len(merged)))):
        portion += merged
        portion.sort()
        merged = []
        first = portion[0]
        end = first[1]
        for span in portion:
            if span[0] > end:
                merged.append(first if first[1] == end else (first[0], end))  # mostly the same object
                first = span
                end = span[1]
            elif span[1] > end:
                end = span[1]
        merged.append((first[0], end))
        portion.clear()
    return merged


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The times that are in both sets."""
    return split(one, other)[0]


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The times in the first that are not in the second."""
    return split(one, other)[1]


def split(one: Intervals, other: Intervals) -> tuple[Intervals, Intervals]:
    """The times of the first set that are in the second, and those that are not."""
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
    """The times from ``start`` to ``end``. The duration of the call depends on the result, not on the list."""
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


CATEGORIES: Final = ("Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other")
"""The categories by priority: each time counts for the first one that covers it. Other is the rest of the step."""

_TORN: Final = 0.8
"""If the last step has fewer device events than this share of the step before, the recording ended within it."""


class Span(NamedTuple):
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
        dropped: number of steps at the end that are left out because part of their device events is missing.
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
        """The sum of the lengths of the steps, microseconds."""
        return sum(span.end - span.start for span in self.spans)

    def hold(self, time: float) -> bool:
        """Whether a time is between the start of the first step and the end of the last, device work included."""
        return self.spans[0].start <= time < self.spans[-1].end


def find_steps(events: TraceEvents) -> TraceSteps | None:
    """The steps, or the whole trace as one step if no step is marked; None if no event has a duration."""
    steps = events.named(STEP)
    host = [
        Span(step_number(events.names[mark.name]), *mark.span)
        for mark in sorted(events.marks)  # by their start
        if mark.name in steps
    ]
    marked = bool(host)
    if not marked:
        sources: list[Rows[Any]] = [events.operators, events.marks, events.calls, events.work]
        spans = [row.span for row in next((rows for rows in sources if len(rows)), ())]
        if not spans:
            return None
        host = [Span(0, min(start for start, _ in spans), max(end for _, end in spans))]
    with_device, torn = _with_device(events, host)
    return TraceSteps(tuple(with_device), tuple(host[: len(with_device)]), marked, torn)


def categorize(events: TraceEvents, steps: TraceSteps) -> dict[str, Intervals]:
    """The times of the steps by category."""
    traits = events.traits
    found: dict[str, Iterable[TimeRange]] = {
        "Runtime": ((start, start + took) for start, took, _, _, _, _ in events.calls.plain()),
        "DataLoader": (mark.span for mark in events.marks if traits[mark.name] & LOADER),
        "CPU Exec": (
            (start, start + took)
            for start, took, _, _, name, _ in events.operators.plain()
            if not traits[name] & (COMMUNICATION | LOADER)
        ),
    }
    collectives = [mark for mark in events.marks if traits[mark.name] & COMMUNICATION]
    ids = {mark.external for mark in collectives} - {NOTHING}
    kernels: list[TimeRange] = []
    communication = [mark.span for mark in collectives]
    copies: dict[int, list[TimeRange]] = {MEMCPY: [], MEMSET: []}
    for work in events.work:
        if work.kind == KERNEL:
            collective = traits[work.name] & COLLECTIVE or work.external in ids
            (communication if collective else kernels).append(work.span)
        elif work.kind in copies:
            copies[work.kind].append(work.span)
    found |= {"Kernel": kernels, "Memcpy": copies[MEMCPY], "Memset": copies[MEMSET], "Communication": communication}
    parts: dict[str, Intervals] = {}
    left = steps.intervals
    for category in CATEGORIES[:-1]:
        parts[category], left = split(left, union(found.pop(category)))
    return parts | {CATEGORIES[-1]: left}


def breakdown(steps: TraceSteps, parts: dict[str, Intervals]) -> list[dict[str, float]]:
    """Microseconds of each step by category."""
    return [
        {category: length(within(intervals, span.start, span.end)) for category, intervals in parts.items()}
        for span in steps.spans
    ]


def _with_device(events: TraceEvents, host: Sequence[Span]) -> tuple[list[Span], int]:
    """The steps, each until the device has finished what it launched, and the number of steps dropped at the end.

    A step begins where the one before it ends. The first step begins after the device has finished earlier work.
    """
    starts = [span.start for span in host]
    launched_in: dict[int, int] = {}
    for start, took, correlation, _, _, _ in events.calls.plain():
        step = bisect_right(starts, start) - 1
        if correlation >= 0 and step >= 0 and start + took <= host[step].end:
            launched_in[correlation] = step
    first = [float("inf")] * len(host)
    last = [float("-inf")] * len(host)
    count = [0] * len(host)
    before: list[float] = []  # ends of work that was launched outside of the steps
    for work in events.work:
        if work.kind not in {KERNEL, MEMCPY, MEMSET}:
            continue
        at = launched_in.get(work.correlation)
        start, end = work.span
        if at is None:
            before.append(end)
            continue
        first[at] = min(first[at], start)
        last[at] = max(last[at], end)
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
