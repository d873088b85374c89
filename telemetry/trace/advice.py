"""Changes that a trace suggests, and the share of the step that each could save. Each needs a reason in the trace.

A time is exposed while no kernel runs: only that can be saved.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.trace.events import (
    ELIGIBLE,
    KERNEL,
    LAYOUT,
    LOADER,
    MEMCPY,
    MEMSET,
    NOTHING,
    TENSOR_CORE,
    ZERO_GRAD,
    copy_kind,
)
from telemetry.trace.records import LoadingSuggestion, Suggestion
from telemetry.trace.steps import SECONDS_PER_US, difference, holds, intersection, length, union
from telemetry.util.text import milliseconds, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from telemetry.trace.events import TraceEvents
    from telemetry.trace.steps import Intervals, TimeRange, TraceSteps
    from telemetry.trace.tables import DeviceWait

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
_FLOATS: Final = ("['float'", "['double'")


class Hardware(NamedTuple):
    """The device that the trace is from. Figures that the trace does not contain are None."""

    compute_major: int | None
    memory_bytes: int | None
    reserved_bytes: int | None


class Advisor:
    """Looks in a trace for time that could be saved.

    Args:
        events: the events of the trace.
        steps: its steps; their length is above 0.
        parts: the times of each category, which do not overlap.
        average: shares of the average step by category.
        hardware: the device of the trace.
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
        self._all = steps.intervals
        self._whole = steps.length
        self._parts = parts
        self._average = average
        self._hardware = hardware
        self._free = difference(self._all, union([*parts["Kernel"], *parts["Communication"]]))

    def advise(
        self, owner: Sequence[int], waits: Sequence[DeviceWait], gaps: Sequence[Sequence[TimeRange]]
    ) -> tuple[Suggestion, ...]:
        """All changes for which this trace has a reason, the change that saves most first.

        Args:
            owner: number of the operator's name, for each device event.
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
            *self._waiting([wait for wait in waits if not wait.to_device]),
        ]
        worth = [each for each in found if each.share_ratio >= _MIN_SHARE]
        return tuple(sorted(worth, key=lambda each: -each.share_ratio))

    def _during(self, moments: Iterable[TimeRange], times: Intervals) -> float:
        return length(intersection(union(moments), times))

    def _a_step(self, microseconds: float) -> str:
        return milliseconds(microseconds * SECONDS_PER_US / len(self._steps.spans))

    def _loading(self) -> Iterator[Suggestion]:
        share, loaders = self._average["DataLoader"], self._events.named(LOADER)
        if share < _MIN_LOADING_SHARE or not loaders:
            return
        waits = f"{self._a_step(share * self._whole)} of every {self._a_step(self._whole)} are spent in next()"
        if any("_SingleProcessDataLoaderIter" in self._events.names[loader] for loader in loaders):
            workers = max(2, math.ceil(share / max(1e-3, 1 - share) / _MAX_WORKER_LOAD))
            action = f"load batches in worker processes: DataLoader(num_workers={workers})"
            yield LoadingSuggestion(action, f"the training thread loads each batch itself: {waits}", share)
        else:
            action = (
                "give the DataLoader more workers or cheaper transforms; persistent_workers=True if epochs are short"
            )
            yield LoadingSuggestion(action, f"the workers do not keep up: {waits}", share)

    def _copying(self, waits: Sequence[DeviceWait]) -> Iterator[Suggestion]:
        events, count = self._events, len(self._steps.spans)
        spans: dict[bool, list[TimeRange]] = {True: [], False: []}  # by whether the memory is pageable
        sizes = {True: 0, False: 0}
        floats = 0
        made: dict[int, tuple[float, bool]] = {}
        for work in events.work:
            if work.kind != MEMCPY or not self._steps.hold(work.start):
                continue
            direction, of_pageable = copy_kind(events.names[work.name])
            if direction == "HtoD":
                made[work.correlation] = (work.start - work.took, bool(of_pageable))
                size = max(0, int(work.first))
                sizes[bool(of_pageable)] += size
                floats += size if events.input_types.get(work.external, "").startswith(_FLOATS) else 0
                spans[bool(of_pageable)].append(work.span)
        made.pop(NOTHING, None)
        # The calls stage pageable memory. Their time long before the copy does not count.
        for start, took, correlation, _, _, _ in events.calls.plain():
            if correlation in made:
                (earliest, staged), end = made[correlation], start + took
                spans[staged].append((min(max(start, earliest), end), end))
        calls = [(wait.start, wait.end) for wait in waits if wait.to_device]
        if sizes[True]:
            pageable = self._during([*spans[True], *calls], self._free)
            because = (
                f"{_megabytes(sizes[True] / count)} a step are copied to the GPU from pageable memory, and "
                f"no kernel runs for {self._a_step(pageable)} of that"
            )
            action = "pin batches and copy them with non_blocking=True: DataLoader(pin_memory=True)"
            yield Suggestion(action, because, pageable / self._whole)
        elif calls:
            waited = self._during(calls, self._free)
            because = (
                f"the host waits for the end of pinned copies {len(calls) / count:.1f} times a step, "
                f"{self._a_step(waited)} of it with no kernel running"
            )
            action = "copy with .to(device, non_blocking=True): the batch is pinned already"
            yield Suggestion(action, because, waited / self._whole)
        if floats and floats > sum(sizes.values()) / 2:
            copying = self._during([*spans[True], *spans[False]], self._free)
            because = (
                f"{_megabytes(floats / count)} of floats a step are copied to the GPU, and no kernel runs "
                f"for {self._a_step(copying)} of that; as uint8 they are a quarter"
            )
            action = "send uint8 and convert on the GPU, if these are images"
            yield Suggestion(action, because, _UINT8_SAVES * (copying / self._whole))

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
        """Kernels that change layouts, and kernels that do not use tensor cores although they could."""
        traits = self._events.traits
        layout: list[TimeRange] = []
        eligible: list[TimeRange] = []
        for work, operator in zip(self._events.work, owner, strict=True):
            if work.kind != KERNEL or not self._steps.hold(work.start):
                continue
            if traits[work.name] & LAYOUT:
                layout.append(work.span)
            elif operator != NOTHING and traits[operator] & ELIGIBLE and not traits[work.name] & TENSOR_CORE:
                eligible.append(work.span)
        capability = self._hardware.compute_major or 0
        slow = self._during(eligible, self._all)
        if slow and capability >= _FIRST_WITH_TENSOR_CORES:
            because = (
                f"{percent(slow / length(self._parts['Kernel']), 0)} of the kernel time is in convolutions and matrix "
                "products that tensor cores can do, and does not use them; there half precision is taken to be twice "
                "as fast"
            )
            action = "use mixed precision: torch.autocast"
            if capability > _FIRST_WITH_TENSOR_CORES:
                action += ', or torch.set_float32_matmul_precision("high")'
            yield Suggestion(action, because, _HALF_PRECISION_SAVES * (slow / self._whole))
        if layout:
            took = self._during(layout, self._all)
            because = (
                f"{len(layout) / len(self._steps.spans):.0f} kernels a step do nothing but change the layout of "
                f"tensors, {self._a_step(took)}"
            )
            action = "keep model and batch in channels_last: .to(memory_format=torch.channels_last)"
            yield Suggestion(action, because, took / self._whole)

    def _launching(self, gaps: Sequence[Sequence[TimeRange]]) -> Iterator[Suggestion]:
        idle = self._during((gap for stretch in gaps for gap in stretch), self._all)
        if idle:
            because = f"the GPU often idles while the host launches kernels one by one: {self._a_step(idle)} a step"
            yield Suggestion("compile the model (torch.compile) or use CUDA graphs", because, idle / self._whole)

    def _gradients(self) -> Iterator[Suggestion]:
        """The clearing of the gradients, on the host and on the device, if it launches something."""
        by_thread: dict[int, list[TimeRange]] = {}
        for mark in self._events.marks:
            if self._events.traits[mark.name] & ZERO_GRAD:
                by_thread.setdefault(mark.thread, []).append(mark.span)
        host = {thread: union(spans) for thread, spans in by_thread.items()}
        inside = {
            correlation
            for start, _, correlation, _, _, thread in self._events.calls.plain()
            if thread in host and holds(host[thread], start)
        } - {NOTHING}
        launched = (work for work in self._events.work if work.correlation in inside and work.kind in {KERNEL, MEMSET})
        device = [work.span for work in launched]
        if device:
            clearing = self._during((span for spans in host.values() for span in spans), self._free)
            clearing += self._during(device, self._parts["Kernel"])
            because = (
                f"clearing the gradients launches {len(device) / len(self._steps.spans):.0f} kernels a step and takes "
                f"{self._a_step(clearing)}"
            )
            yield Suggestion("optimizer.zero_grad(set_to_none=True)", because, clearing / self._whole)

    def _waiting(self, waits: Sequence[DeviceWait]) -> Iterator[Suggestion]:
        """Idle time of the device right after a call that waited for it, because no other work was queued."""
        device = union(span for name in ("Kernel", "Memcpy", "Memset", "Communication") for span in self._parts[name])
        idle = difference(difference(self._all, device), self._parts["DataLoader"])
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
            yield Suggestion(action, because, drained / self._whole)


def _megabytes(size: float) -> str:
    """Bytes as ``12.3 MB`` (10**6), so that several in one sentence can be compared."""
    return f"{size / 1e6:.1f} MB"
