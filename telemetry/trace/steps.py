"""The steps of a trace, their parts, and the use of the device.

The breakdown of a step and `usage` are those of TensorBoard's PyTorch profiler. It does not support what newer versions
of torch write. There its definitions are kept, and its figures differ: ``cuda_runtime`` calls are runtime calls, a user
annotation ``enumerate(DataLoader)#…`` is the wait for a batch, a NCCL kernel is communication even without an external
id, and a step's annotation on the device is not a second step.

`streams` is over the trace, as Holistic Trace Analysis defines it, with its rounding: starts are rounded up to whole
microseconds and ends down. Kernels that were launched in the last marked step are left out there: some may be missing.

Sets of times are sorted lists of disjoint intervals ``(start, end)``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from msgspec import Struct

from telemetry.trace import names
from telemetry.trace.events import KERNEL, MEMCPY, MEMSET, NOTHING, ON_STREAM

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.trace.events import DeviceEvent, HostEvent, TraceEvents

TimeRange: TypeAlias = tuple[float, float]
Intervals: TypeAlias = list[TimeRange]

SECONDS_PER_US: Final = 1e-6
"""Times of a trace are microseconds, figures are seconds."""


# -- sets of times -------------------------------------------------------------------------------------------------


def union(intervals: Iterable[TimeRange]) -> Intervals:
    """The union of any intervals, in any order. Intervals that touch become one."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if not found or start > found[-1][1]:
            found.append((start, end))
        elif end > found[-1][1]:
            found[-1] = found[-1][0], end
    return found


def split(one: Intervals, other: Intervals) -> tuple[Intervals, Intervals]:
    """The times of the first set that are in the second, and those that are not."""
    common: Intervals = []
    rest: Intervals = []
    at = 0
    for span in one:
        start, end = span
        while at < len(other) and other[at][1] <= start:
            at += 1
        for index in range(at, len(other)):
            left, right = other[index]
            if left >= end:
                break
            if left > start:
                rest.append((start, left))
            common.append((max(left, start), min(right, end)))
            start = right
        if start < end:
            rest.append((start, end))
    return common, rest


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The times that are in both sets."""
    return split(one, other)[0]


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The times in the first that are not in the second."""
    return split(one, other)[1]


def within(intervals: Intervals, start: float, end: float) -> Intervals:
    """The times from ``start`` to ``end``. The duration of the call depends on the result, not on the list."""
    first = max(0, bisect_left(intervals, (start, start)) - 1)
    return intersection(intervals[first : bisect_left(intervals, (end, end))], [(start, end)])


def length(intervals: Iterable[TimeRange]) -> float:
    """The sum of the lengths of the intervals."""
    return sum(end - start for start, end in intervals)


# -- the steps -----------------------------------------------------------------------------------------------------

_TORN: Final = 0.8
"""If the last step has fewer device events than this share of the step before, the recording ended within it."""


class Span(NamedTuple):
    """A step: its number, start and end in microseconds on the trace's clock."""

    number: int
    start: float
    end: float


class TraceStep(Struct, frozen=True):
    """One step: its number, its seconds, and its seconds by category, which add up to it."""

    step: int
    seconds: float
    categories: dict[str, float]


@dataclass(frozen=True, slots=True)
class TraceSteps:
    """The steps of a trace.

    Attributes:
        spans: the steps with the work that they launched on the device.
        host: the same steps on the host only, where the calls are made.
        marked: whether the trace has annotations of steps; otherwise all of it is one step.
        dropped: number of steps at the end that are left out because part of their device events is missing.
    """

    spans: list[Span]
    host: list[Span]
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
    host = [Span(number, *mark.span) for mark in events.marks if (number := names.step_number(mark.name)) is not None]
    marked = bool(host)
    if not marked:
        sources: list[Sequence[HostEvent | DeviceEvent]] = [events.operators, events.marks, events.calls, events.work]
        found = next(filter(None, sources), [])
        first, last = min((e.start for e in found), default=0.0), max((e.end for e in found), default=0.0)
        if first == last:
            return None
        host = [Span(0, first, last)]
    spans, dropped = _with_device(events, host)
    return TraceSteps(spans, host[: len(spans)], marked, dropped)


def _with_device(events: TraceEvents, host: list[Span]) -> tuple[list[Span], int]:
    """The steps, each until the device has finished what it launched, and the number of steps dropped at the end.

    A step begins where the one before it ends. The first step begins after the device has finished earlier work.
    """
    starts = [span.start for span in host]
    first, last = [float("inf")] * len(host), [float("-inf")] * len(host)
    count = [0] * len(host)
    before: list[float] = []  # ends of work that was launched outside of the steps
    for work in events.work:
        if work.kind not in ON_STREAM:
            continue
        at = -1 if work.call is None else bisect_right(starts, work.call.start) - 1
        if at < 0 or work.call is None or work.call.end > host[at].end:
            before.append(work.end)
            continue
        first[at] = min(first[at], work.start)
        last[at] = max(last[at], work.end)
        count[at] += 1
    if not any(count):
        return host, 0
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


def categorize(events: TraceEvents, steps: TraceSteps) -> dict[str, Intervals]:
    """The times of the steps by category. Each time counts for the first that covers it; Other is the rest."""
    collectives = [mark for mark in events.marks if names.is_collective(mark.name)]
    ids = {mark.external for mark in collectives} - {NOTHING}

    def communicates(work: DeviceEvent) -> bool:
        return names.is_collective_kernel(work.name) or work.external in ids

    kernels = [work for work in events.work if work.kind == KERNEL]
    talking = (kernel.span for kernel in kernels if communicates(kernel))
    operators = (op for op in events.operators if not (names.is_collective(op.name) or names.is_loader(op.name)))
    left = steps.intervals
    parts: dict[str, Intervals] = {}
    for category, times in (
        ("Kernel", (kernel.span for kernel in kernels if not communicates(kernel))),
        ("Memcpy", (work.span for work in events.work if work.kind == MEMCPY)),
        ("Memset", (work.span for work in events.work if work.kind == MEMSET)),
        ("Communication", [*(mark.span for mark in collectives), *talking]),
        ("Runtime", (call.span for call in events.calls)),
        ("DataLoader", (mark.span for mark in events.marks if names.is_loader(mark.name))),
        ("CPU Exec", (operator.span for operator in operators)),
    ):
        parts[category], left = split(left, union(times))
    return parts | {"Other": left}


def breakdown(steps: TraceSteps, parts: dict[str, Intervals]) -> list[TraceStep]:
    """Each step by category."""
    return [
        TraceStep(
            span.number,
            (span.end - span.start) * SECONDS_PER_US,
            {name: length(within(times, span.start, span.end)) * SECONDS_PER_US for name, times in parts.items()},
        )
        for span in steps.spans
    ]


class Average(Struct, frozen=True):
    """The mean step: its seconds, and the share of each category."""

    seconds: float
    categories: dict[str, float]


def average_of(steps: list[TraceStep]) -> Average:
    """The mean of steps whose length is above 0."""
    whole = sum(step.seconds for step in steps)
    shares = {name: sum(step.categories[name] for step in steps) / whole for name in steps[0].categories}
    return Average(whole / len(steps), shares)


# -- the use of the device -----------------------------------------------------------------------------------------


class GpuUsage(Struct, frozen=True):
    """Averages over the devices that ran kernels.

    Attributes:
        utilization_ratio: share of the time from the first step to the last in which any kernel ran.
        sm_efficiency_ratio: share of the multiprocessors that had a block, over the same time. It is taken from the
            blocks per SM, at most 1 at any time.
        occupancy_ratio: estimated achieved occupancy of the kernels, weighted by their time.
        tensor_core_ratio: share of the kernel time in kernels that use tensor cores, by their names.
    """

    utilization_ratio: float | None = None
    sm_efficiency_ratio: float | None = None
    occupancy_ratio: float | None = None
    tensor_core_ratio: float | None = None


def usage(events: TraceEvents, steps: TraceSteps) -> GpuUsage:
    """The averages over all devices of the trace, over its steps."""
    first, last = steps.spans[0].start, steps.spans[-1].end
    kernels: dict[int, list[DeviceEvent]] = {}
    for work in events.work:
        if work.kind == KERNEL:
            kernels.setdefault(work.device, []).append(work)
    if not kernels or last <= first:
        return GpuUsage()
    busy = [length(within(union(kernel.span for kernel in each), first, last)) for each in kernels.values()]
    occupancy = [
        weighted_mean((min(k.end, last) - max(k.start, first), k.occupancy) for k in each) for each in kernels.values()
    ]
    return GpuUsage(
        _mean([took / (last - first) for took in busy]),
        _mean([_efficiency(each, first, last) for each in kernels.values() if any(k.blocks for k in each)]),
        _mean([percent / 100 for percent in occupancy if percent is not None]),
        None if events.is_amd else tensor_core_share(kernel for each in kernels.values() for kernel in each),
    )


def tensor_core_share(kernels: Iterable[DeviceEvent]) -> float | None:
    """The share of the time of kernels in those that use tensor cores; None without any."""
    whole = tensor = 0.0
    for kernel in kernels:
        whole += kernel.took
        tensor += kernel.took if names.is_tensor_core(kernel.name) else 0.0
    return tensor / whole if whole else None


def weighted_mean(figures: Iterable[tuple[float, float | None]]) -> float | None:
    """The mean of figures, weighted by time, from pairs of time and figure; None if none is known."""
    known = [(took, figure) for took, figure in figures if figure is not None and took > 0]
    whole = sum(took for took, _ in known)
    return sum(took * figure for took, figure in known) / whole if known else None


def _efficiency(kernels: list[DeviceEvent], first: float, last: float) -> float:
    """SM efficiency of one device: at each moment the sum of the blocks per SM of the kernels that run, at most 1."""
    changes = [(kernel.start, kernel.blocks or 0.0) for kernel in kernels]
    changes += [(kernel.end, -(kernel.blocks or 0.0)) for kernel in kernels]
    efficient = together = before = 0.0
    for time, change in sorted(changes):
        efficient += max(0.0, min(time, last) - max(before, first)) * min(max(together, 0.0), 1.0)
        together, before = together + change, time
    return efficient / (last - first)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# -- the streams ---------------------------------------------------------------------------------------------------

_LAUNCH_DELAY_US: Final = 30.0
"""A shorter gap between two kernels that were launched in time is the cost of starting the next one."""


class TemporalBreakdown(Struct, frozen=True):
    """Shares of the time from the first device event to the end of the last; None without device events."""

    idle_ratio: float | None = None
    compute_ratio: float | None = None
    non_compute_ratio: float | None = None


class StreamIdle(Struct, frozen=True):
    """Why a stream was idle between its kernels: shares of its idle time; None if it never was."""

    stream: int
    host_wait_ratio: float | None = None
    kernel_wait_ratio: float | None = None
    other_ratio: float | None = None


def streams(events: TraceEvents) -> tuple[TemporalBreakdown, float | None, list[StreamIdle]]:
    """The temporal breakdown, the share of communication that computation overlaps, and the idle time by stream."""
    until = _last_step(events)
    kept = [work for work in events.work if work.stream != NOTHING and _launched_before(until, work)]
    busy = length(union(map(_rounded, kept)))
    compute = union(_rounded(work) for work in kept if not names.is_no_compute(work.name))
    communication = union(_rounded(work) for work in kept if names.is_collective_kernel(work.name))
    temporal = TemporalBreakdown()
    if kept and (whole := max(floor(work.end) for work in kept) - ceil(kept[0].start)) > 0:
        computing = length(compute)
        temporal = TemporalBreakdown((whole - busy) / whole, computing / whole, (busy - computing) / whole)
    talking = length(communication)
    overlap = length(intersection(communication, compute)) / talking if talking > 0 else None
    by_stream: dict[int, list[DeviceEvent]] = {}
    for work in kept:
        if work.kind in ON_STREAM:
            by_stream.setdefault(work.stream, []).append(work)
    return temporal, overlap, [_idle(stream, by_stream[stream]) for stream in sorted(by_stream)]


def _rounded(work: DeviceEvent) -> TimeRange:
    """The span of an event. If rounding reverses it, its length counts negative."""
    return ceil(work.start), floor(work.end)


def _last_step(events: TraceEvents) -> float | None:
    """Where the last marked step begins; None with fewer than two marked steps. Then nothing is left out."""
    starts = {mark.name: mark.start for mark in events.marks if names.step_number(mark.name) is not None}
    if len(starts) < 2:
        return None
    last = max(starts.values())
    return ceil(last if events.last_gpu_step is None else max(last, events.last_gpu_step))


def _launched_before(until: float | None, work: DeviceEvent) -> bool:
    """Whether an event was launched before a time. It was not if its launch should be in the trace, and is not."""
    if until is None:
        return True
    if work.correlation >= 0:
        return work.call is not None and ceil(work.call.start) < until
    return ceil(work.start) < until


def _idle(stream: int, on_stream: list[DeviceEvent]) -> StreamIdle:
    host = kernel = other = 0.0
    for before, work in pairwise(on_stream):
        dry, start = floor(before.end), ceil(work.start)
        if work.call is not None and ceil(work.call.start) > dry:
            host += start - dry
        elif start - dry < _LAUNCH_DELAY_US:
            kernel += start - dry
        else:
            other += start - dry
    whole = host + kernel + other
    return StreamIdle(stream, host / whole, kernel / whole, other / whole) if whole > 0 else StreamIdle(stream)


# -- waits of the device for the host to launch a kernel -----------------------------------------------------------

_MIN_LAUNCHES: Final = 20
"""A launch-bound stretch has at least this many launches in a row that the device waited for."""

_MAX_GAP_US: Final = 500.0
"""In a longer gap the host was busy with something else than launching."""

_CALL_US: Final = 5.0
"""Duration of a launch on the host. A launch that began so shortly before the device became idle was late, too."""


class LaunchBoundStretch(Struct, frozen=True):
    """A stretch in which the device repeatedly waits for the host to launch the next kernel.

    Attributes:
        step: number of the step in which it begins.
        offset_seconds: time from the start of that step.
        seconds: its length; ``idle_ratio``: the share of it in which nothing ran on any stream.
        launches: number of times that the device became idle and then got work.
    """

    step: int
    offset_seconds: float
    seconds: float
    idle_ratio: float
    launches: int


def launch_bound(events: TraceEvents, steps: TraceSteps) -> list[LaunchBoundStretch]:
    """All such stretches in the steps, the longest idle time first."""
    runs: list[Intervals] = [[]]  # the gaps of each stretch
    busy_until = float("-inf")
    for work in events.work:
        if work.kind not in ON_STREAM or not steps.hold(work.start):
            continue
        if work.start > busy_until:
            late = work.call is not None and work.call.start > busy_until - _CALL_US
            if late and work.start - busy_until <= _MAX_GAP_US:
                runs[-1].append((busy_until, work.start))
            else:
                runs.append([])
        busy_until = max(busy_until, work.end)
    starts = [span.start for span in steps.spans]
    found = []
    for run in runs:
        if len(run) >= _MIN_LAUNCHES:
            start, end = run[0][0], run[-1][1]
            span = steps.spans[max(0, bisect_right(starts, start) - 1)]
            offset, whole = (start - span.start) * SECONDS_PER_US, (end - start) * SECONDS_PER_US
            found.append(LaunchBoundStretch(span.number, offset, whole, length(run) / (end - start), len(run)))
    return sorted(found, key=lambda each: -each.seconds * each.idle_ratio)
