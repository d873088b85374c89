"""The long tables: operators and kernels by their time, copies by kind, and calls that wait for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.trace.event_names import ELIGIBLE, converts_layout, copy_kind, uses_tensor_cores
from telemetry.trace.intervals import SECONDS_PER_US
from telemetry.trace.operator_links import self_times
from telemetry.trace.trace_events import KERNEL, MEMCPY, NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.trace.device_waits import DeviceWait
    from telemetry.trace.trace_events import TraceEvents

_MAX_ROWS: Final = 50


@dataclass(frozen=True, slots=True)
class Operator:
    """What one operator cost over the trace.

    Attributes:
        name, calls: its name, and how often it ran.
        device_seconds: time of the kernels and copies that it launched itself, without those of operators inside it.
        device_ratio: their share of all device time; None without any device time.
        host_seconds: time on the host without the operators inside it, summed over threads.
        tensor_core_eligible: whether tensor cores can do its work.
        tensor_core_ratio: the share of its kernel time that uses tensor cores; None without kernels.
    """

    name: str
    calls: int
    device_seconds: float
    device_ratio: float | None
    host_seconds: float
    tensor_core_eligible: bool
    tensor_core_ratio: float | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """All runs of one kernel. Occupancy and blocks per SM are weighted by time; None if the trace does not tell."""

    name: str
    calls: int
    device_seconds: float
    device_ratio: float
    mean_seconds: float
    tensor_core: bool
    layout_conversion: bool
    occupancy_ratio: float | None
    blocks_per_sm: float | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies of one kind: HtoD, DtoH, DtoD or PtoP. Fields that the trace does not tell are None."""

    kind: str
    pageable: bool | None
    calls: int
    seconds: float
    bytes: int | None
    bandwidth_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class Synchronization:
    """Calls within the steps that wait for the device, grouped by where they come from.

    Attributes:
        name: name of the call, such as ``cudaStreamSynchronize``.
        operator: the innermost operator around it; ``within``: the outermost; ``call_site``: the user's line. None if
            the trace does not tell.
        calls, seconds: how many there were, and how long the host waited in them.
        to_device: whether they wait for copies to the device.
    """

    name: str
    operator: str | None
    within: str | None
    call_site: str | None
    calls: int
    seconds: float
    to_device: bool


def operators(events: TraceEvents, owner: Sequence[int]) -> list[Operator]:
    """The operators that took longest, by device time and then by host time."""
    names = events.names
    own, calls = self_times(events.operators, len(names))
    device, kernel, tensor = ([0.0] * len(names) for _ in range(3))
    uses = [uses_tensor_cores(names[number]) for number in range(len(names))]
    whole = 0.0
    work = events.work
    for took, kernel_name, kind, name in zip(work.duration, work.name, work.kind, owner, strict=True):
        whole += took
        if name == NOTHING:
            continue
        device[name] += took
        if kind == KERNEL:
            kernel[name] += took
            tensor[name] += took if uses[kernel_name] else 0.0
    wanted = [n for n in range(len(names)) if calls[n]]
    wanted.sort(key=lambda n: (-device[n], -own[n]))
    return [
        Operator(
            names[n],
            calls[n],
            device[n] * SECONDS_PER_US,
            device[n] / whole if whole else None,
            own[n] * SECONDS_PER_US,
            bool(names.traits[n] & ELIGIBLE),
            tensor[n] / kernel[n] if kernel[n] else None,
        )
        for n in wanted[:_MAX_ROWS]
    ]


def kernels(events: TraceEvents) -> list[Kernel]:
    """The kernels that took longest."""
    groups = _by_name(events)
    whole = sum(seconds for _, seconds, *_ in groups.values())
    most = sorted(groups.items(), key=lambda item: -item[1][1])[:_MAX_ROWS]
    return [
        Kernel(
            events.names[number],
            int(calls),
            took * SECONDS_PER_US,
            took / whole if whole else 0.0,
            took / calls * SECONDS_PER_US,
            uses_tensor_cores(events.names[number]),
            converts_layout(events.names[number]),
            occupancy / occupancy_time / 100 if occupancy_time else None,
            blocks / blocks_time if blocks_time else None,
        )
        for number, (calls, took, blocks, blocks_time, occupancy, occupancy_time) in most
    ]


def copies(events: TraceEvents) -> list[Copy]:
    """All copies by kind and by whether the host memory is pageable, the longest first."""
    groups: dict[tuple[str, bool | None], list[tuple[float, float]]] = {}
    work = events.work
    for took, size, name, kind in zip(work.duration, work.first, work.name, work.kind, strict=True):
        if kind == MEMCPY:
            groups.setdefault(copy_kind(events.names[name]), []).append((took, size))
    found = []
    for (direction, pageable), members in groups.items():
        seconds = sum(took for took, _ in members) * SECONDS_PER_US
        total = None if any(size < 0 for _, size in members) else int(sum(size for _, size in members))
        speed = total / seconds if total is not None and seconds else None
        found.append(Copy(direction, pageable, len(members), seconds, total, speed))
    return sorted(found, key=lambda copy: -copy.seconds)


def synchronizations(waits: Sequence[DeviceWait]) -> list[Synchronization]:
    """The groups of waits that took longest."""
    groups: dict[tuple[str, str | None, str | None, str | None, bool], tuple[int, float]] = {}
    for wait in waits:
        key = (wait.name, wait.operator, wait.within, wait.call_site, wait.to_device)
        count, seconds = groups.get(key, (0, 0.0))
        groups[key] = (count + 1, seconds + (wait.end - wait.start) * SECONDS_PER_US)
    found = [
        Synchronization(name, inside, within, site, count, seconds, copying)
        for (name, inside, within, site, copying), (count, seconds) in groups.items()
    ]
    return sorted(found, key=lambda each: -each.seconds)[:_MAX_ROWS]


def _by_name(events: TraceEvents) -> dict[int, list[float]]:
    """Sums by kernel: calls, time, blocks x time and the time with blocks known, and the same for occupancy."""
    groups: dict[int, list[float]] = {}
    work = events.work
    columns = zip(work.duration, work.first, work.second, work.name, work.kind, strict=True)
    for took, blocks, occupancy, name, kind in columns:
        if kind != KERNEL:
            continue
        sums = groups.setdefault(name, [0.0] * 6)
        sums[0] += 1
        sums[1] += took
        if blocks > 0:
            sums[2] += blocks * took
            sums[3] += took
        if occupancy >= 0:
            sums[4] += occupancy * took
            sums[5] += took
    return groups
