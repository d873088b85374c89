"""What to change, and the share of the step that it could save. Each change needs a reason that this trace shows.

A time is exposed while no kernel runs: only that can be saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.trace.events import (
    ELIGIBLE,
    KERNEL,
    LOADER,
    MEMCPY,
    MEMSET,
    NOTHING,
    ZERO_GRAD,
    converts_layout,
    copy_kind,
    uses_tensor_cores,
)
from telemetry.trace.steps import SECONDS_PER_US, difference, holds, intersection, length, union
from telemetry.util.text import megabytes, milliseconds, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from telemetry.trace.events import TraceEvents
    from telemetry.trace.operators import DeviceWait
    from telemetry.trace.steps import Intervals, TimeRange, TraceSteps

_MIN_SHARE: Final = 0.005
"""A change that saves less than this share of the step is not worth a person's time."""

_MIN_LOADING_SHARE: Final = 0.02
_HALF_PRECISION_SAVES: Final = 0.5
"""The share of a kernel's time that half precision saves on tensor cores. A low estimate: their peak is 8 times as
fast."""

_UINT8_SAVES: Final = 0.75
"""The share of a float32 tensor's bytes that uint8 saves."""

_FIRST_WITH_TENSOR_CORES: Final = 7
_MAX_MEMORY_USED: Final = 0.5
_USABLE_MEMORY: Final = 0.9
_MAX_BATCH_FACTOR: Final = 4.0
_MAX_WORKER_LOAD: Final = 0.8
_SINGLE_PROCESS: Final = "_SingleProcessDataLoaderIter"
_FLOATS: Final = ("['float'", "['double'")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change.

    Attributes:
        action: what to do.
        because: what this trace shows.
        share_ratio: the share of the average step that this change alone could save, at most.
    """

    action: str
    because: str
    share_ratio: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the trace tells about the device; None where it does not tell."""

    compute_major: int | None
    memory_bytes: int | None
    reserved_bytes: int | None


class Advisor:
    """Looks in a trace for time that could be saved.

    Args:
        events: the events of the trace.
        steps: its steps; their length is above 0.
        parts: the times of each category; no time is in two.
        average: shares of the average step by category.
        hardware: the device that it ran on.
    """

    def __init__(
        self,
        events: TraceEvents,
        steps: TraceSteps,
        parts: Mapping[str, Intervals],
        average: Mapping[str, float],
        hardware: Hardware,
    ) -> None:
        self._events = events
        self._steps = steps
        self._parts = parts
        self._average = average
        self._hardware = hardware
        self._free = difference(steps.intervals, union([*parts["Kernel"], *parts["Communication"]]))

    def advise(
        self, owner: Sequence[int], waits: Sequence[DeviceWait], gaps: Sequence[Sequence[TimeRange]]
    ) -> tuple[Suggestion, ...]:
        """All changes that this trace gives a reason for. The change that saves most is first.

        Args:
            owner: for each device event, the number of the operator's name.
            waits: calls that wait for the device.
            gaps: times in which the device waited for a launch, by stretch.
        """
        found = [
            *self._loading(),
            *self._copying(waits),
            *self._batch(),
            *self._kernels(owner),
            *self._launching(gaps),
            *self._gradients(),
            *self._waiting(waits),
        ]
        worth = [each for each in found if each.share_ratio >= _MIN_SHARE]
        return tuple(sorted(worth, key=lambda each: -each.share_ratio))

    def _exposed(self, moments: Sequence[TimeRange]) -> float:
        return length(intersection(union(moments), self._free))

    def _share(self, microseconds: float) -> float:
        return microseconds / self._steps.length

    def _a_step(self, microseconds: float) -> str:
        return milliseconds(microseconds * SECONDS_PER_US / len(self._steps.spans))

    def _loading(self) -> Iterator[Suggestion]:
        share, names = self._average["DataLoader"], self._events.names
        loaders = [name for name, traits in zip(names, names.traits, strict=True) if traits & LOADER]
        if share < _MIN_LOADING_SHARE or not loaders:
            return
        whole = self._steps.length
        waits = f"{self._a_step(share * whole)} of every {self._a_step(whole)} are spent in next()"
        if any(_SINGLE_PROCESS in name for name in loaders):
            workers = max(2, math.ceil(share / max(1e-3, 1 - share) / _MAX_WORKER_LOAD))
            yield Suggestion(
                f"load batches in worker processes: DataLoader(num_workers={workers})",
                f"the training thread loads each batch itself: {waits}",
                share,
            )
        else:
            action = (
                "give the DataLoader more workers or cheaper transforms; persistent_workers=True if epochs are short"
            )
            yield Suggestion(action, f"the workers do not keep up: {waits}", share)

    def _copying(self, waits: Sequence[DeviceWait]) -> Iterator[Suggestion]:
        copies = _Copies(self._events, self._steps)
        count, calls = len(self._steps.spans), [(wait.start, wait.end) for wait in waits if wait.to_device]
        if copies.pageable_bytes:
            pageable = self._exposed([*copies.pageable, *calls])
            because = (
                f"{megabytes(copies.pageable_bytes / count)} a step are copied to the GPU from pageable memory, and "
                f"no kernel runs for {self._a_step(pageable)} of that"
            )
            action = "pin batches and copy them with non_blocking=True: DataLoader(pin_memory=True)"
            yield Suggestion(action, because, self._share(pageable))
        elif calls:
            waited = self._exposed(calls)
            because = (
                f"the host waits for the end of pinned copies {len(calls) / count:.1f} times a step, "
                f"{self._a_step(waited)} of it with no kernel running"
            )
            action = "copy with .to(device, non_blocking=True): the batch is pinned already"
            yield Suggestion(action, because, self._share(waited))
        if copies.bytes and copies.float_bytes > copies.bytes / 2:
            copying = self._exposed(copies.all)
            because = (
                f"{megabytes(copies.float_bytes / count)} of floats a step are copied to the GPU, and no kernel runs "
                f"for {self._a_step(copying)} of that; as uint8 they are a quarter"
            )
            action = "send uint8 and convert on the GPU, if these are images"
            yield Suggestion(action, because, _UINT8_SAVES * self._share(copying))

    def _batch(self) -> Iterator[Suggestion]:
        memory, reserved = self._hardware.memory_bytes, self._hardware.reserved_bytes
        if not memory or not reserved or reserved / memory > _MAX_MEMORY_USED:
            return
        factor = min(_MAX_BATCH_FACTOR, _USABLE_MEMORY * memory / reserved)
        host = self._average["Runtime"] + self._average["CPU Exec"] + self._average["Other"]
        because = (
            f"{percent(1 - reserved / memory, 0)} of the GPU's memory is unused, and for {percent(host, 0)} of the "
            f"step the GPU waits for the host; a batch {factor:.1f} times as large does not wait longer"
        )
        yield Suggestion("use a larger batch", because, host * (1 - 1 / factor))

    def _kernels(self, owner: Sequence[int]) -> Iterator[Suggestion]:
        """Kernels that change layouts, and those whose work tensor cores could do, and do not."""
        names, work, spans = self._events.names, self._events.work, self._steps.spans
        converts = [converts_layout(name) for name in names]
        tensor = [uses_tensor_cores(name) for name in names]
        could = [bool(traits & ELIGIBLE) for traits in names.traits]
        layout: list[TimeRange] = []
        eligible: list[TimeRange] = []
        columns = zip(work.start, work.duration, work.name, work.kind, owner, strict=True)
        for start, took, name, kind, operator in columns:
            if kind != KERNEL or not spans[0].start <= start < spans[-1].end:
                continue
            if converts[name]:
                layout.append((start, start + took))
            elif operator != NOTHING and could[operator] and not tensor[name]:
                eligible.append((start, start + took))
        capability = self._hardware.compute_major or 0
        slow = length(intersection(union(eligible), self._steps.intervals))
        if slow and capability >= _FIRST_WITH_TENSOR_CORES:
            because = (
                f"{percent(slow / length(self._parts['Kernel']), 0)} of the kernel time is in convolutions and matrix "
                "products that tensor cores can do, and does not use them; there half precision is taken to be twice "
                "as fast"
            )
            action = "use mixed precision: torch.autocast"
            if capability > _FIRST_WITH_TENSOR_CORES:
                action += ', or torch.set_float32_matmul_precision("high")'
            yield Suggestion(action, because, _HALF_PRECISION_SAVES * self._share(slow))
        if layout:
            took = length(intersection(union(layout), self._steps.intervals))
            because = (
                f"{len(layout) / len(spans):.0f} kernels a step do nothing but change the layout of tensors, "
                f"{self._a_step(took)}"
            )
            action = "keep model and batch in channels_last: .to(memory_format=torch.channels_last)"
            yield Suggestion(action, because, self._share(took))

    def _launching(self, gaps: Sequence[Sequence[TimeRange]]) -> Iterator[Suggestion]:
        idle = length(intersection(self._steps.intervals, union(gap for stretch in gaps for gap in stretch)))
        if idle:
            because = f"the GPU often idles while the host launches kernels one by one: {self._a_step(idle)} a step"
            yield Suggestion("compile the model (torch.compile) or use CUDA graphs", because, self._share(idle))

    def _gradients(self) -> Iterator[Suggestion]:
        """Clearing the gradients, on the host and on the device, if it launches something."""
        traits = self._events.names.traits
        marks, calls, work = self._events.marks, self._events.calls, self._events.work
        by_thread: dict[int, list[TimeRange]] = {}
        for start, took, name, thread in zip(marks.start, marks.duration, marks.name, marks.thread, strict=True):
            if traits[name] & ZERO_GRAD:
                by_thread.setdefault(thread, []).append((start, start + took))
        host = {thread: union(spans) for thread, spans in by_thread.items()}
        columns = zip(calls.start, calls.correlation, calls.thread, strict=True)
        inside = {each for start, each, thread in columns if thread in host and holds(host[thread], start)} - {NOTHING}
        device = [
            (start, start + took)
            for start, took, each, kind in zip(work.start, work.duration, work.correlation, work.kind, strict=True)
            if each in inside and kind in {KERNEL, MEMSET}
        ]
        if device:
            clearing = self._exposed([span for spans in host.values() for span in spans])
            clearing += length(intersection(union(device), self._parts["Kernel"]))
            because = (
                f"clearing the gradients launches {len(device) / len(self._steps.spans):.0f} kernels a step and takes "
                f"{self._a_step(clearing)}"
            )
            yield Suggestion("optimizer.zero_grad(set_to_none=True)", because, self._share(clearing))

    def _waiting(self, waits: Sequence[DeviceWait]) -> Iterator[Suggestion]:
        """Idle time of the device right after a call that waited for it, because no other work was queued."""
        waits = [wait for wait in waits if not wait.to_device]
        if not waits:
            return
        device = union(span for name in ("Kernel", "Memcpy", "Memset", "Communication") for span in self._parts[name])
        idle = difference(difference(self._steps.intervals, device), self._parts["DataLoader"])
        calls, at = 0, 0
        lost: dict[str, float] = {}
        for wait in waits:
            while at < len(idle) and idle[at][1] <= wait.end:
                at += 1
            if at < len(idle) and idle[at][0] <= wait.end:
                calls += 1
                origin = " at ".join(filter(None, (wait.operator or wait.name, wait.call_site)))
                lost[origin] = lost.get(origin, 0.0) + idle[at][1] - max(idle[at][0], wait.start)
                at += 1  # so that each idle time is counted once
        if calls:
            drained = sum(lost.values())
            because = (
                f"{calls / len(self._steps.spans):.1f} times a step the host waits for the GPU, which then idles for "
                f"{self._a_step(drained)}, most of it from {max(lost, key=lambda origin: lost[origin])}"
            )
            action = "remove a synchronisation: no .item(), .cpu() or print of a tensor in every step"
            yield Suggestion(action, because, self._share(drained))


class _Copies:
    """Copies to the device within the steps, with the calls that make them, and how many bytes they have."""

    def __init__(self, events: TraceEvents, steps: TraceSteps) -> None:
        self.all: list[TimeRange] = []
        self.pageable: list[TimeRange] = []
        self.bytes = self.float_bytes = self.pageable_bytes = 0
        work, calls = events.work, events.calls
        made: dict[int, tuple[float, bool]] = {}
        columns = zip(work.start, work.duration, work.name, work.kind, strict=True)
        for row, (start, took, name, kind) in enumerate(columns):
            if kind != MEMCPY or not steps.spans[0].start <= start < steps.spans[-1].end:
                continue
            direction, pageable = copy_kind(events.names[name])
            if direction == "HtoD":
                made[work.correlation[row]] = (start - took, bool(pageable))
                size = max(0, int(work.first[row]))
                self.bytes += size
                self.float_bytes += size if events.input_types.get(work.external[row], "").startswith(_FLOATS) else 0
                self.pageable_bytes += size if pageable else 0
                self._add((start, start + took), pageable=bool(pageable))
        made.pop(NOTHING, None)
        # The calls stage pageable memory. Their time long before the copy does not count.
        for start, took, correlation in zip(calls.start, calls.duration, calls.correlation, strict=True):
            if correlation in made:
                earliest, pageable = made[correlation]
                self._add((min(max(start, earliest), start + took), start + took), pageable=pageable)

    def _add(self, span: TimeRange, *, pageable: bool) -> None:
        self.all.append(span)
        if pageable:
            self.pageable.append(span)
