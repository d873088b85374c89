"""Where each step begins and ends, and what it is made of, as TensorBoard's PyTorch profiler has it.

Where that tool does not know what newer versions of torch write, its definitions are kept and its figures are not:
``cuda_runtime`` calls are runtime calls, a user annotation ``enumerate(DataLoader)#…`` is the wait for a batch, a NCCL
kernel is communication even where no external id says so, and a step's mark on the device is no second step.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Final

from telemetry.snapshot.reading.events import KERNEL, MEMCPY, MEMSET, NOTHING
from telemetry.snapshot.reading.intervals import Interval, Intervals, length, split, union, within
from telemetry.snapshot.reading.names import COMMUNICATION, LOADER, STEP, is_communication, step_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.snapshot.reading.events import Calls, Events, Spans, Work

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
"""A category counts only what none before it covers; Other is the rest of the step."""

_TORN: Final = 0.8
"""A last step with fewer than this share of the device events of the one before lost some to the end of recording."""


@dataclass(frozen=True, slots=True)
class Span:
    """A step on the clock of the trace, µs."""

    number: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a trace.

    Attributes:
        spans: with the work on the device that each launched.
        host: the same on the host alone: where its calls are made.
        marked: whether the trace marks steps; else all of it is one.
        dropped: steps at the end that were left out, for the trace lost part of their device events.
    """

    spans: tuple[Span, ...]
    host: tuple[Span, ...]
    marked: bool
    dropped: int

    @property
    def intervals(self) -> Intervals:
        """The moments of all steps."""
        return union((span.start, span.end) for span in self.spans)

    @property
    def length(self) -> float:
        """The sum of their lengths, µs."""
        return sum(span.end - span.start for span in self.spans)


def find_steps(events: Events) -> Steps | None:
    """The steps, or all of the trace as one where none is marked; None where it has no events with a duration."""
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
    return Steps(tuple(spans), tuple(host[: len(spans)]), bool(marks), torn)


def find_categories(events: Events) -> dict[str, Intervals]:
    """The moments of each category but Other; they may overlap."""
    traits, names = events.names.traits, events.names
    found: dict[str, list[Interval]] = {category: [] for category in CATEGORIES[:-1]}
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


def exclusive(steps: Steps, categories: dict[str, Intervals]) -> dict[str, Intervals]:
    """The moments of the steps, each in one category. What was given is used up: it may be large."""
    left = steps.intervals
    parts: dict[str, Intervals] = {}
    for category in CATEGORIES[:-1]:
        parts[category], left = split(left, categories.pop(category))
    return parts | {CATEGORIES[-1]: left}


def breakdown(steps: Steps, parts: dict[str, Intervals]) -> list[dict[str, float]]:
    """Microseconds of each step by category."""
    return [
        {category: length(within(intervals, span.start, span.end)) for category, intervals in parts.items()}
        for span in steps.spans
    ]


def _extent(rows: Work | Calls | Spans) -> Interval | None:
    """From the first start to the last end."""
    return (min(rows.start), max(map(add, rows.start, rows.duration))) if rows.start else None


def _with_device(events: Events, host: Sequence[Span]) -> tuple[list[Span], int]:
    """Steps that last until the device has done what they launched, and how many were dropped at the end.

    A step begins where the one before it ends. The first begins no earlier than the device ends what was launched
    before it.
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
    before: list[float] = []  # ends of what no step launched
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
