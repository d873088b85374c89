"""How well the devices were used over the steps, as TensorBoard's PyTorch profiler estimates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from telemetry.snapshot.reading.events import KERNEL
from telemetry.snapshot.reading.intervals import length, union, within
from telemetry.snapshot.reading.names import uses_tensor_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.snapshot.reading.events import Events
    from telemetry.snapshot.reading.steps import Steps

_Kernel: TypeAlias = tuple[float, float, float, float]
"""Start, end, blocks per SM, achieved occupancy in percent; -1 for what the trace does not say."""

_NO_BLOCKS: Final = 1e-9
"""Less is what rounding leaves of none."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Averages over the devices that ran kernels; None where the trace does not say.

    Attributes:
        utilization_ratio: share of the time, from the first step to the last, in which any kernel ran.
        sm_efficiency_ratio: share of the multiprocessors with a block on them, taken from the blocks per SM, at most
            1 at any moment, over the same time.
        occupancy_ratio: estimated achieved occupancy of the kernels, weighted by their time.
        tensor_core_ratio: share of the kernel time in kernels whose names say that they use tensor cores.
    """

    utilization_ratio: float | None
    sm_efficiency_ratio: float | None
    occupancy_ratio: float | None
    tensor_core_ratio: float | None


def measure(events: Events, steps: Steps) -> Gpu:
    """Figures of all devices of the trace."""
    start, end = steps.spans[0].start, steps.spans[-1].end
    kernels: dict[int, list[_Kernel]] = {}
    uses = [uses_tensor_cores(events.names[number]) for number in range(len(events.names))]
    whole = tensor = 0.0
    for begin, took, _, _, blocks, occupancy, name, _, device, kind in events.devices():
        if kind == KERNEL:
            kernels.setdefault(device, []).append((begin, begin + took, blocks, occupancy))
            whole += took
            tensor += took if uses[name] else 0.0
    if not kernels or end <= start:
        return Gpu(None, None, None, None)
    each = kernels.values()
    return Gpu(
        _mean([_utilization(members, start, end) for members in each]),
        _mean([_sm_efficiency(members, start, end) for members in each]),
        _mean([_occupancy(members, start, end) for members in each]),
        None if is_amd(events) or not whole else tensor / whole,
    )


def main_device(events: Events) -> int | None:
    """The number of the device that most work ran on; None without any."""
    busy: dict[int, float] = {}
    for _, took, _, _, _, _, _, _, device, _ in events.devices():
        busy[device] = busy.get(device, 0.0) + took
    return max(busy, key=lambda number: busy[number]) if busy else None


def is_amd(events: Events) -> bool:
    """Whether the trace is of AMD's runtime: its kernels' names say nothing about matrix cores."""
    return any(name.startswith("hip") for name in events.names.ids)


def _utilization(kernels: Sequence[_Kernel], start: float, end: float) -> float:
    busy = union((begin, stop) for begin, stop, *_ in kernels)
    return length(within(busy, start, end)) / (end - start)


def _sm_efficiency(kernels: Sequence[_Kernel], start: float, end: float) -> float | None:
    changes = [(begin, blocks) for begin, _, blocks, _ in kernels if blocks > 0]
    if not changes:
        return None
    changes += [(stop, -blocks) for _, stop, blocks, _ in kernels if blocks > 0]
    changes.sort()
    busy = blocks = 0.0
    last = changes[0][0]
    for time, change in changes:
        if blocks > _NO_BLOCKS and time > start and last < end:
            busy += min(blocks, 1.0) * (min(time, end) - max(last, start))
        last, blocks = time, blocks + change
    return busy / (end - start)


def _occupancy(kernels: Sequence[_Kernel], start: float, end: float) -> float | None:
    whole = weighted = 0.0
    for begin, stop, _, occupancy in kernels:
        inside = min(stop, end) - max(begin, start)
        if occupancy >= 0 and inside > 0:
            whole += inside
            weighted += inside * occupancy
    return weighted / whole / 100 if whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
