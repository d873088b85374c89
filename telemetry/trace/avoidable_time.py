"""Time that could be avoided: how long copies, synchronisations and others take while no kernel runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.trace.event_names import ELIGIBLE, LOADER, ZERO_GRAD, converts_layout, copy_kind, uses_tensor_cores
from telemetry.trace.intervals import Intervals, TimeRange, difference, holds, intersection, length, union
from telemetry.trace.trace_events import KERNEL, MEMCPY, MEMSET, NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.trace.device_waits import DeviceWait
    from telemetry.trace.step_breakdown import TraceSteps
    from telemetry.trace.trace_events import TraceEvents

_SINGLE_PROCESS: Final = "_SingleProcessDataLoaderIter"
_FLOATS: Final = ("['float'", "['double'")


@dataclass(frozen=True, slots=True)
class AvoidableTime:
    """Avoidable time over all steps, microseconds. A time is exposed while no kernel runs.

    Attributes:
        steps: length of all steps; ``count``: how many there are.
        single_process: whether the training thread loads the batches; None if the trace shows no loading.
        copying: exposed time of copies to the device and of the calls that make them.
        copied_bytes: bytes of these copies.
        float_bytes, pageable_bytes: those that are tensors of floats, and those from pageable memory.
        pageable: exposed time of copies from pageable memory.
        copy_waits: exposed time of waiting for pinned copies; ``copy_wait_calls``: how often.
        zero_grad: exposed time of clearing gradients, on the host and on the device; ``zero_grad_launches``: launches.
        layout: time of kernels that convert layouts; ``layout_calls``: how many.
        eligible: time of kernels whose work tensor cores could do, and do not; ``kernel``: of all kernels.
        drained: time that the device was idle after a call that waited for it, outside of loading; ``drain_calls``:
            how many; ``drain_origin``: the operator or line that most of it comes from.
        launch: idle time in launch-bound stretches.
    """

    steps: float
    count: int
    single_process: bool | None
    copying: float
    copied_bytes: int
    float_bytes: int
    pageable_bytes: int
    pageable: float
    copy_waits: float
    copy_wait_calls: int
    zero_grad: float
    zero_grad_launches: int
    layout: float
    layout_calls: int
    eligible: float
    kernel: float
    drained: float
    drain_calls: int
    drain_origin: str | None
    launch: float


def measure(
    events: TraceEvents,
    steps: TraceSteps,
    *,
    parts: dict[str, Intervals],
    owner: Sequence[int],
    waits: Sequence[DeviceWait],
    gaps: Sequence[TimeRange],
) -> AvoidableTime:
    """Measure the avoidable time of a trace.

    Args:
        events: its events.
        steps: its steps.
        parts: the times of each category; no time is in two.
        owner: for each device event, the number of the operator's name.
        waits: calls that wait for the device.
        gaps: times in which the device waited for a launch.
    """
    times = _Times(events, steps, owner, waits)
    busy = union([*parts["Kernel"], *parts["Communication"]])
    free = difference(steps.intervals, busy)

    def exposed(moments: list[TimeRange]) -> float:
        return length(intersection(union(moments), free))

    zero = _zero_grad(events)
    drained, drain_calls, origin = _drains(waits, steps, parts)
    return AvoidableTime(
        steps=steps.length,
        count=len(steps.spans),
        single_process=_single_process(events),
        copying=exposed(times.copies),
        copied_bytes=times.copied_bytes,
        float_bytes=times.float_bytes,
        pageable_bytes=times.pageable_bytes,
        pageable=exposed(times.pageable),
        copy_waits=exposed(times.waits),
        copy_wait_calls=len(times.waits),
        zero_grad=exposed(zero.host) + length(intersection(zero.device, parts["Kernel"])),
        zero_grad_launches=zero.launches,
        layout=length(intersection(union(times.layout), steps.intervals)),
        layout_calls=len(times.layout),
        eligible=length(intersection(union(times.eligible), steps.intervals)),
        kernel=length(parts["Kernel"]),
        drained=drained,
        drain_calls=drain_calls,
        drain_origin=origin,
        launch=length(intersection(steps.intervals, union(gaps))),
    )


class _Times:
    """The times of copies to the device, of layout conversions, and of kernels whose work tensor cores could do."""

    def __init__(
        self, events: TraceEvents, steps: TraceSteps, owner: Sequence[int], waits: Sequence[DeviceWait]
    ) -> None:
        self.copies: list[TimeRange] = []
        self.pageable: list[TimeRange] = []
        self.waits: list[TimeRange] = []
        self.layout: list[TimeRange] = []
        self.eligible: list[TimeRange] = []
        self.copied_bytes = self.float_bytes = self.pageable_bytes = 0
        copied: dict[int, tuple[float, bool]] = {}
        names = events.names
        layout = [converts_layout(names[n]) for n in range(len(names))]
        tensor = [uses_tensor_cores(names[n]) for n in range(len(names))]
        first, last = steps.spans[0].start, steps.spans[-1].end
        could = [bool(trait & ELIGIBLE) for trait in names.traits]
        work = events.work
        columns = zip(work.start, work.duration, work.name, work.kind, owner, range(len(owner)), strict=True)
        for start, took, name, kind, operator, i in columns:
            if not first <= start < last:
                continue
            span = (start, start + took)
            if kind == MEMCPY:
                direction, pageable = copy_kind(names[name])
                if direction == "HtoD":
                    copied[work.correlation[i]] = (start - took, bool(pageable))
                    types = events.input_types.get(work.external[i], "")
                    self._copy(span, max(0, int(work.first[i])), types, pageable)
            elif kind == KERNEL and layout[name]:
                self.layout.append(span)
            elif kind == KERNEL and operator != NOTHING and could[operator] and not tensor[name]:
                self.eligible.append(span)
        self._calls(events, copied)
        for wait in waits:
            if wait.to_device:
                (self.pageable if self.pageable_bytes else self.waits).append((wait.start, wait.end))

    def _copy(self, span: TimeRange, size: int, types: str, pageable: bool | None) -> None:  # noqa: FBT001
        self.copies.append(span)
        self.copied_bytes += size
        self.float_bytes += size if types.startswith(_FLOATS) else 0
        if pageable:
            self.pageable.append(span)
            self.pageable_bytes += size

    def _calls(self, events: TraceEvents, copied: dict[int, tuple[float, bool]]) -> None:
        """Add the calls that copy, because they stage pageable memory. Time long before the copy does not count."""
        copied.pop(NOTHING, None)
        calls = events.calls
        for start, took, correlation in zip(calls.start, calls.duration, calls.correlation, strict=True):
            if correlation in copied:
                earliest, pageable = copied[correlation]
                span = (min(max(start, earliest), start + took), start + took)
                self.copies.append(span)
                if pageable:
                    self.pageable.append(span)


@dataclass(frozen=True, slots=True)
class _ZeroGrad:
    host: Intervals
    device: Intervals
    launches: int


def _zero_grad(events: TraceEvents) -> _ZeroGrad:
    """Clearing the gradients, on the host and on the device; empty if it launches nothing."""
    traits = events.names.traits
    ranges: dict[int, list[TimeRange]] = {}
    marks, calls, work = events.marks, events.calls, events.work
    for start, took, name, thread in zip(marks.start, marks.duration, marks.name, marks.thread, strict=True):
        if traits[name] & ZERO_GRAD:
            ranges.setdefault(thread, []).append((start, start + took))
    if not ranges:
        return _ZeroGrad([], [], 0)
    host = {thread: union(spans) for thread, spans in ranges.items()}
    inside = {
        correlation
        for start, correlation, thread in zip(calls.start, calls.correlation, calls.thread, strict=True)
        if thread in host and holds(host[thread], start)
    }
    inside.discard(NOTHING)
    columns = zip(work.start, work.duration, work.correlation, work.kind, strict=True)
    device = [
        (start, start + took)
        for start, took, correlation, kind in columns
        if correlation in inside and kind in {KERNEL, MEMSET}
    ]
    if not device:
        return _ZeroGrad([], [], 0)
    return _ZeroGrad(union(span for spans in host.values() for span in spans), union(device), len(device))


def _drains(
    waits: Sequence[DeviceWait], steps: TraceSteps, parts: dict[str, Intervals]
) -> tuple[float, int, str | None]:
    """Idle time of the device right after a call that waited for it, because no other work was queued."""
    if all(wait.to_device for wait in waits):
        return 0.0, 0, None
    device = union(span for name in ("Kernel", "Memcpy", "Memset", "Communication") for span in parts[name])
    idle = difference(difference(steps.intervals, device), parts["DataLoader"])
    lost, calls, at = 0.0, 0, 0
    by_origin: dict[str, float] = {}
    for wait in waits:
        while at < len(idle) and idle[at][1] <= wait.end:
            at += 1
        if at < len(idle) and idle[at][0] <= wait.end and not wait.to_device:
            dry = idle[at][1] - max(idle[at][0], wait.start)
            lost, calls = lost + dry, calls + 1
            origin = " at ".join(filter(None, (wait.operator or wait.name, wait.call_site)))
            by_origin[origin] = by_origin.get(origin, 0.0) + dry
            at += 1  # so that each idle time is counted once
    return lost, calls, max(by_origin, key=lambda each: by_origin[each]) if by_origin else None


def _single_process(events: TraceEvents) -> bool | None:
    traits, names = events.names.traits, events.names
    loaders = [names[number] for number in range(len(names)) if traits[number] & LOADER]
    return any(_SINGLE_PROCESS in name for name in loaders) if loaders else None
