"""What advice goes by: how much of the steps each avoidable thing takes while no kernel runs beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.snapshot.reading.events import KERNEL, MEMCPY, MEMSET, NOTHING
from telemetry.snapshot.reading.intervals import Interval, Intervals, difference, holds, intersection, length, union
from telemetry.snapshot.reading.names import ELIGIBLE, LOADER, ZERO_GRAD, converts_layout, copy_kind, uses_tensor_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.snapshot.reading.events import Events
    from telemetry.snapshot.reading.steps import Steps
    from telemetry.snapshot.reading.waits import Wait

_SINGLE_PROCESS: Final = "_SingleProcessDataLoaderIter"
_FLOATS: Final = ("['float'", "['double'")


@dataclass(frozen=True, slots=True)
class Facts:
    """Times are µs over all steps.

    Attributes:
        steps: the length of all steps; ``count``: how many.
        single_process: whether batches are loaded on the training thread; None where none is loaded in the trace.
        copying: exposed time of copies to the device and of the calls that make them.
        copied_bytes, float_bytes, pageable_bytes: to the device; of these, tensors of floats, and from pageable memory.
        pageable: the exposed time of the pageable ones.
        copy_waits: exposed time of waiting for a pinned copy to end; ``copy_wait_calls``: how often.
        zero_grad: exposed time of clearing gradients on the host, and what it launches; ``zero_grad_launches``.
        layout: exposed kernel time of layout conversions; ``layout_calls``.
        eligible: kernel time that tensor cores could do and do not; ``kernel``: all kernel time.
        drained: time the device idled because a call waited for it to end, outside of loading; ``drain_calls``,
            ``drain_origin``: how many, and the operator or line that most of it comes from.
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


def gather(
    events: Events,
    steps: Steps,
    *,
    parts: dict[str, Intervals],
    owner: Sequence[int],
    waits: Sequence[Wait],
    gaps: Sequence[Interval],
) -> Facts:
    """The facts of a trace.

    Args:
        events: of the trace.
        steps: of the trace.
        parts: the moments of each category, none in two.
        owner: the operator's name behind each device event.
        waits: calls that wait for the device.
        gaps: in which the device waited for launches.
    """
    times = _Times(events, steps, owner, waits)
    busy = union([*parts["Kernel"], *parts["Communication"]])
    free = difference(steps.intervals, busy)

    def exposed(moments: list[Interval]) -> float:
        return length(intersection(union(moments), free))

    zero = _zero_grad(events)
    drained, drain_calls, origin = _drains(waits, steps, parts)
    return Facts(
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
    """The moments of copies to the device, of layout conversions, and of kernels that tensor cores could do."""

    def __init__(self, events: Events, steps: Steps, owner: Sequence[int], waits: Sequence[Wait]) -> None:
        self.copies: list[Interval] = []
        self.pageable: list[Interval] = []
        self.waits: list[Interval] = []
        self.layout: list[Interval] = []
        self.eligible: list[Interval] = []
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

    def _copy(self, span: Interval, size: int, types: str, pageable: bool | None) -> None:  # noqa: FBT001
        self.copies.append(span)
        self.copied_bytes += size
        self.float_bytes += size if types.startswith(_FLOATS) else 0
        if pageable:
            self.pageable.append(span)
            self.pageable_bytes += size

    def _calls(self, events: Events, copied: dict[int, tuple[float, bool]]) -> None:
        """The calls that copy: a pageable copy is staged in them. What they took long before it is not its price."""
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


def _zero_grad(events: Events) -> _ZeroGrad:
    """Clearing the gradients, on the host and on the device: nothing where it only drops them."""
    traits = events.names.traits
    ranges: dict[int, list[Interval]] = {}
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


def _drains(waits: Sequence[Wait], steps: Steps, parts: dict[str, Intervals]) -> tuple[float, int, str | None]:
    """Idle time of the device right after a call that waited for it: the host had nothing queued behind."""
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
            at += 1  # an idle time is lost once
    return lost, calls, max(by_origin, key=lambda each: by_origin[each]) if by_origin else None


def _single_process(events: Events) -> bool | None:
    traits, names = events.names.traits, events.names
    loaders = [names[number] for number in range(len(names)) if traits[number] & LOADER]
    return any(_SINGLE_PROCESS in name for name in loaders) if loaders else None
