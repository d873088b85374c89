"""Where each step begins and ends, and what it consists of, as TensorBoard's PyTorch profiler defines it.

That tool does not know what newer versions of torch write. There its definitions are kept, and its figures differ:
``cuda_runtime`` calls are runtime calls, a user annotation ``enumerate(DataLoader)#…`` is the wait for a batch, a NCCL
kernel is communication even without an external id, and a step's annotation on the device is not a second step.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Final

from telemetry.trace.event_names import COMMUNICATION, LOADER, STEP, is_communication, step_number
from telemetry.trace.intervals import Intervals, TimeRange, length, split, union, within
from telemetry.trace.trace_events import KERNEL, MEMCPY, MEMSET, NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.trace.trace_events import DeviceWork, RuntimeCalls, Spans, TraceEvents

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
    by_name = [is_communication(names[number]) for number in range(len(names))]
    by_kind = {KERNEL: found["Kernel"], MEMCPY: found["Memcpy"], MEMSET: found["Memset"]}
    communication = found["Communication"]
    columns = zip(work.start, work.duration, work.external, work.name, work.kind, strict=True)
    for start, took, external, name, kind in columns:
        if kind == KERNEL and (by_name[name] or external in collectives):
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
