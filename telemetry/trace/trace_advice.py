"""Changes that a trace suggests, and the share of the step that each could save. Each needs a reason in the trace.

A time is exposed while no kernel runs: only that can be saved.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from telemetry.trace import names
from telemetry.trace.events import KERNEL, MEMCPY, MEMSET, enclosing
from telemetry.trace.steps import SECONDS_PER_US, difference, intersection, length, union
from telemetry.util.words import milliseconds, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from telemetry.trace.events import DeviceEvent, TraceEvents
    from telemetry.trace.steps import Average, Intervals, LaunchBoundStretch, TimeRange, TraceSteps
    from telemetry.trace.tables import DeviceWait

_ON_HOST: Final = ("Runtime", "CPU Exec", "Other")
"""The categories in which the device is idle and the host does not wait for a batch."""

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


class Suggestion(Struct, frozen=True):
    """One suggested change. ``share_ratio``: the most that it alone could save, as a share of the average step."""

    action: str
    because: str
    share_ratio: float


class LoadingSuggestion(Suggestion, frozen=True):
    """A suggestion about the DataLoader. A trace shows its waits, but not their cause; the advice of a stall does."""


class Advisor:
    """Looks in a trace for time that could be saved.

    Args:
        events: the events of the trace.
        steps: its steps; their length is above 0.
        parts: the times of each category, which do not overlap.
        average: the mean step.
    """

    def __init__(self, events: TraceEvents, steps: TraceSteps, parts: dict[str, Intervals], average: Average) -> None:
        self._events = events
        self._steps = steps
        self._all = steps.intervals
        self._whole = steps.length
        self._count = len(steps.spans)
        self._parts = parts
        self._average = average.categories
        self._gpu = events.gpu
        self._free = difference(self._all, union([*parts["Kernel"], *parts["Communication"]]))

    def advise(self, waits: list[DeviceWait], stretches: list[LaunchBoundStretch]) -> list[Suggestion]:
        """All changes for which this trace has a reason, the change that saves most first.

        Args:
            waits: calls that wait for the device.
            stretches: those in which the device waits for launches.
        """
        found = [
            *self._loading(),
            *self._copying([wait.call.span for wait in waits if wait.to_device]),
            *self._batch(),
            *self._kernels(),
            *self._launching(stretches),
            *self._gradients(),
            *self._waiting([wait for wait in waits if not wait.to_device]),
        ]
        worth = [each for each in found if each.share_ratio >= _MIN_SHARE]
        return sorted(worth, key=lambda each: -each.share_ratio)

    def _during(self, moments: Iterable[TimeRange], times: Intervals) -> float:
        return length(intersection(union(moments), times))

    def _a_step(self, microseconds: float) -> str:
        return milliseconds(microseconds * SECONDS_PER_US / self._count)

    def _loading(self) -> Iterator[Suggestion]:
        share = self._average["DataLoader"]
        loaders = {mark.name for mark in self._events.marks if names.is_loader(mark.name)}
        if share < _MIN_LOADING_SHARE or not loaders:
            return
        waits = f"{self._a_step(share * self._whole)} of every {self._a_step(self._whole)} are spent in next()"
        if any("_SingleProcessDataLoaderIter" in loader for loader in loaders):
            workers = max(2, math.ceil(share / max(1e-3, 1 - share) / _MAX_WORKER_LOAD))
            action = f"load batches in worker processes: DataLoader(num_workers={workers})"
            yield LoadingSuggestion(action, f"the training thread loads each batch itself: {waits}", share)
        else:
            action = (
                "give the DataLoader more workers or cheaper transforms; persistent_workers=True if epochs are short"
            )
            yield LoadingSuggestion(action, f"the workers do not keep up: {waits}", share)

    def _copying(self, waits: list[TimeRange]) -> Iterator[Suggestion]:
        """Copies to the device. ``waits``: calls that wait for one."""
        copies = [
            work
            for work in self._events.work
            if work.kind == MEMCPY and names.copy_kind(work.name)[0] == "HtoD" and self._steps.hold(work.start)
        ]
        from_pageable = [work for work in copies if names.copy_kind(work.name)[1]]
        if size := _bytes(from_pageable):
            exposed = self._during([*_spans(from_pageable), *waits], self._free)
            because = (
                f"{_megabytes(size / self._count)} a step are copied to the GPU from pageable memory, and "
                f"no kernel runs for {self._a_step(exposed)} of that"
            )
            action = "pin batches and copy them with non_blocking=True: DataLoader(pin_memory=True)"
            yield Suggestion(action, because, exposed / self._whole)
        elif waits:
            exposed = self._during(waits, self._free)
            because = (
                f"the host waits for the end of pinned copies {len(waits) / self._count:.1f} times a step, "
                f"{self._a_step(exposed)} of it with no kernel running"
            )
            action = "copy with .to(device, non_blocking=True): the batch is pinned already"
            yield Suggestion(action, because, exposed / self._whole)
        floats = _bytes([work for work in copies if work.external in self._events.float_copies])
        if floats > _bytes(copies) / 2:
            exposed = self._during(_spans(copies), self._free)
            because = (
                f"{_megabytes(floats / self._count)} of floats a step are copied to the GPU, and no kernel runs "
                f"for {self._a_step(exposed)} of that; as uint8 they are a quarter"
            )
            action = "send uint8 and convert on the GPU, if these are images"
            yield Suggestion(action, because, _UINT8_SAVES * (exposed / self._whole))

    def _batch(self) -> Iterator[Suggestion]:
        memory, reserved = self._gpu.memory_bytes, self._events.reserved_bytes.get(self._gpu.id)
        if not memory or not reserved or reserved / memory > _MAX_MEMORY_USED:
            return
        factor = min(_MAX_BATCH_FACTOR, _USABLE_MEMORY * memory / reserved)
        host = sum(self._average[name] for name in _ON_HOST)
        because = (
            f"{percent(1 - reserved / memory, 0)} of the GPU's memory is unused, and for {percent(host, 0)} of the "
            f"step the GPU waits for the host; a batch {factor:.1f} times as large does not wait longer"
        )
        yield Suggestion("use a larger batch", because, host * (1 - 1 / factor))

    def _kernels(self) -> Iterator[Suggestion]:
        """Kernels that change layouts, and kernels that do not use tensor cores although they could."""
        kernels = [work for work in self._events.work if work.kind == KERNEL and self._steps.hold(work.start)]
        layout = [work.span for work in kernels if names.converts_layout(work.name)]
        eligible = [
            work.span
            for work in kernels
            if work.operator is not None and names.is_eligible(work.operator)
            if not names.is_tensor_core(work.name) and not names.converts_layout(work.name)
        ]
        capability = 0 if self._events.is_amd else self._gpu.compute_major or 0
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
                f"{len(layout) / self._count:.0f} kernels a step do nothing but change the layout of "
                f"tensors, {self._a_step(took)}"
            )
            action = "keep model and batch in channels_last: .to(memory_format=torch.channels_last)"
            yield Suggestion(action, because, took / self._whole)

    def _launching(self, stretches: list[LaunchBoundStretch]) -> Iterator[Suggestion]:
        idle = sum(stretch.seconds * stretch.idle_ratio for stretch in stretches) / SECONDS_PER_US
        if idle:
            because = f"the GPU often idles while the host launches kernels one by one: {self._a_step(idle)} a step"
            yield Suggestion("compile the model (torch.compile) or use CUDA graphs", because, idle / self._whole)

    def _gradients(self) -> Iterator[Suggestion]:
        """The clearing of the gradients, on the host and on the device, if it launches something."""
        clears = [mark for mark in self._events.marks if names.clears_gradients(mark.name)]
        launched = [
            (work.span, work.call.moment)
            for work in self._events.work
            if work.kind in {KERNEL, MEMSET} and work.call is not None
        ]
        inside = enclosing(clears, {moment for _, moment in launched})
        device = [span for span, moment in launched if moment in inside]
        if device:
            host = [mark.span for mark in clears]
            clearing = self._during(host, self._free) + self._during(device, self._parts["Kernel"])
            because = (
                f"clearing the gradients launches {len(device) / self._count:.0f} kernels a step and takes "
                f"{self._a_step(clearing)}"
            )
            yield Suggestion("optimizer.zero_grad(set_to_none=True)", because, clearing / self._whole)

    def _waiting(self, waits: list[DeviceWait]) -> Iterator[Suggestion]:
        """Idle time of the device right after a call that waited for it, because no other work was queued."""
        idle = union(span for name in _ON_HOST for span in self._parts[name])
        calls, at = 0, 0
        lost: dict[str, float] = {}
        for wait in waits:
            start, end = wait.call.span
            while at < len(idle) and idle[at][1] <= end:
                at += 1
            if at < len(idle) and idle[at][0] <= end:
                calls += 1
                origin = " at ".join(filter(None, (wait.operator or wait.call.name, wait.call_site)))
                lost[origin] = lost.get(origin, 0.0) + idle[at][1] - max(idle[at][0], start)
                at += 1  # so that each idle time is counted once
        if calls:
            drained = sum(lost.values())
            because = (
                f"{calls / self._count:.1f} times a step the host waits for the GPU, which then idles for "
                f"{self._a_step(drained)}, most of it from {max(lost, key=lambda origin: lost[origin])}"
            )
            action = "remove a synchronisation: no .item(), .cpu() or print of a tensor in every step"
            yield Suggestion(action, because, drained / self._whole)


def _spans(copies: list[DeviceEvent]) -> Iterator[TimeRange]:
    """The times of copies, and of the calls that launched them, which stage pageable memory.

    Staging takes about as long as the copy. If the call began much earlier, it waited for something else.
    """
    for copy in copies:
        yield copy.span
        if copy.call is not None:
            staging = max(copy.call.start, copy.start - copy.took)
            yield min(staging, copy.call.end), copy.call.end


def _bytes(copies: list[DeviceEvent]) -> float:
    return sum(copy.bytes or 0 for copy in copies)


def _megabytes(size: float) -> str:
    """Bytes as ``12.3 MB`` (10**6), so that several in one sentence can be compared."""
    return f"{size / 1e6:.1f} MB"
