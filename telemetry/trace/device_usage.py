"""How well the devices were used over the steps, as TensorBoard's PyTorch profiler estimates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from telemetry.trace.event_names import uses_tensor_cores
from telemetry.trace.trace_events import KERNEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.trace.step_breakdown import TraceSteps
    from telemetry.trace.trace_events import DeviceWork, TraceEvents

_Kernel: TypeAlias = tuple[float, float, float]
"""Start, end, and blocks per SM: -1 if the trace does not tell."""

_NO_BLOCKS: Final = 1e-9
"""A sum below this is zero, apart from rounding."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Averages over the devices that ran kernels, 0 to 1; None if the trace does not tell.

    Attributes:
        utilization_ratio: share of the time from the first step to the last in which any kernel ran.
        sm_efficiency_ratio: share of the multiprocessors that had a block, over the same time. It is taken from the
            blocks per SM, at most 1 at any time.
        occupancy_ratio: estimated achieved occupancy of the kernels, weighted by their time.
        tensor_core_ratio: share of the kernel time in kernels that use tensor cores, by their names.
    """

    utilization_ratio: float | None
    sm_efficiency_ratio: float | None
    occupancy_ratio: float | None
    tensor_core_ratio: float | None


def measure(events: TraceEvents, steps: TraceSteps) -> GpuUsage:
    """The averages over all devices of the trace."""
    start, end = steps.spans[0].start, steps.spans[-1].end
    work = events.work
    on_device: dict[int, list[int]] = {}
    for place, (device, kind) in enumerate(zip(work.device, work.kind, strict=True)):
        if kind == KERNEL:
            on_device.setdefault(device, []).append(place)
    if not on_device or end <= start:
        return GpuUsage(None, None, None, None)
    each = [_busy(work, places, start, end) for places in on_device.values()]
    return GpuUsage(
        _mean([ran for ran, _ in each]),
        _mean([efficiency for _, efficiency in each]),
        _mean([_occupancy(work, places, start, end) for places in on_device.values()]),
        None if is_amd(events) else _tensor_cores(events),
    )


def main_device(events: TraceEvents) -> int | None:
    """The number of the device that most work ran on; None if no work ran on a device."""
    busy: dict[int, float] = {}
    for took, device in zip(events.work.duration, events.work.device, strict=True):
        busy[device] = busy.get(device, 0.0) + took
    return max(busy, key=lambda number: busy[number]) if busy else None


def is_amd(events: TraceEvents) -> bool:
    """Whether the trace is of AMD's runtime. The names of AMD's kernels do not tell about matrix cores."""
    return any(name.startswith("hip") for name in events.names.ids)


def _busy(work: DeviceWork, places: Sequence[int], start: float, end: float) -> tuple[float, float | None]:
    """Utilisation and SM efficiency of one device. Overlapping kernels form a group; most groups have one kernel."""
    starts, took, blocks = work.start, work.duration, work.first
    kernels = sorted((starts[place], starts[place] + took[place], blocks[place]) for place in places)
    ran = efficient = 0.0
    group: list[_Kernel] = []
    reach = float("-inf")
    for kernel in kernels:
        if kernel[0] < reach:
            group.append(kernel)
            reach = max(reach, kernel[1])
            continue
        if group:
            ran += max(0.0, min(reach, end) - max(group[0][0], start))
            efficient += _efficient(group, start, end)
        group = [kernel]
        reach = kernel[1]
    ran += max(0.0, min(reach, end) - max(group[0][0], start))
    efficient += _efficient(group, start, end)
    known = any(kernel[2] > 0 for kernel in kernels)
    return ran / (end - start), efficient / (end - start) if known else None


def _efficient(group: Sequence[_Kernel], start: float, end: float) -> float:
    """The time of overlapping kernels, weighted at each moment by the sum of their blocks per SM, at most 1."""
    if len(group) == 1:
        begin, stop, blocks = group[0]
        inside = min(stop, end) - max(begin, start)
        return inside * min(blocks, 1.0) if inside > 0 and blocks > 0 else 0.0
    changes = [(begin, blocks) for begin, _, blocks in group if blocks > 0]
    changes += [(stop, -blocks) for _, stop, blocks in group if blocks > 0]
    changes.sort()
    weighted = together = last = 0.0
    for time, change in changes:
        inside = min(time, end) - max(last, start)
        if together > _NO_BLOCKS and inside > 0:
            weighted += inside * min(together, 1.0)
        last, together = time, together + change
    return weighted


def _occupancy(work: DeviceWork, places: Sequence[int], start: float, end: float) -> float | None:
    whole = weighted = 0.0
    for place in places:
        inside = min(work.start[place] + work.duration[place], end) - max(work.start[place], start)
        if work.second[place] >= 0 and inside > 0:
            whole += inside
            weighted += inside * work.second[place]
    return weighted / whole / 100 if whole else None


def _tensor_cores(events: TraceEvents) -> float | None:
    uses = [uses_tensor_cores(events.names[number]) for number in range(len(events.names))]
    whole = tensor = 0.0
    for took, name, kind in zip(events.work.duration, events.work.name, events.work.kind, strict=True):
        if kind == KERNEL:
            whole += took
            tensor += took if uses[name] else 0.0
    return tensor / whole if whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
