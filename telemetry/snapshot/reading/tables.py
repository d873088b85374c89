"""The long tables: operators and kernels by the time they took, copies by kind, calls that wait for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.snapshot.reading.events import KERNEL, MEMCPY, NOTHING
from telemetry.snapshot.reading.names import ELIGIBLE, converts_layout, copy_kind, uses_tensor_cores
from telemetry.snapshot.reading.owners import self_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.snapshot.reading.events import Events
    from telemetry.snapshot.reading.waits import Wait

_S: Final = 1e-6
_MOST_ROWS: Final = 50


@dataclass(frozen=True, slots=True)
class Operator:
    """What one operator cost over the trace.

    Attributes:
        name, calls: which, and how often it ran.
        device_seconds: of the kernels and copies that it launched itself, and not an operator within it.
        device_ratio: of all device time.
        host_seconds: on the host, without the operators within it; threads are added up.
        tensor_core_eligible: whether tensor cores can do its work; ``tensor_core_ratio``: the share of its kernel
            time that uses them, None without any.
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
    """All runs of one kernel. Occupancy and blocks per multiprocessor are weighted by time, None where unknown."""

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
    """Copies of one kind: HtoD, DtoH, DtoD, PtoP. What the trace does not say is None."""

    kind: str
    pageable: bool | None
    calls: int
    seconds: float
    bytes: int | None
    bandwidth_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class Synchronization:
    """Calls within the steps that return only when the device is done, by where they come from.

    Attributes:
        name: of the call: cudaStreamSynchronize …
        operator: the innermost around it; ``within``: the outermost; ``call_site``: the user's line. None where the
            trace does not say.
        calls, seconds: how many, and how long the host waited in them.
        to_device: whether they end a copy to the device.
    """

    name: str
    operator: str | None
    within: str | None
    call_site: str | None
    calls: int
    seconds: float
    to_device: bool


def operators(events: Events, owner: Sequence[int]) -> list[Operator]:
    """By device time, then by host time; those that cost most."""
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
            device[n] * _S,
            device[n] / whole if whole else None,
            own[n] * _S,
            bool(names.traits[n] & ELIGIBLE),
            tensor[n] / kernel[n] if kernel[n] else None,
        )
        for n in wanted[:_MOST_ROWS]
    ]


def kernels(events: Events) -> list[Kernel]:
    """By device time; those that cost most."""
    groups = _by_name(events)
    whole = sum(seconds for _, seconds, *_ in groups.values())
    most = sorted(groups.items(), key=lambda item: -item[1][1])[:_MOST_ROWS]
    return [
        Kernel(
            events.names[number],
            int(calls),
            took * _S,
            took / whole if whole else 0.0,
            took / calls * _S,
            uses_tensor_cores(events.names[number]),
            converts_layout(events.names[number]),
            occupancy / occupancy_time / 100 if occupancy_time else None,
            blocks / blocks_time if blocks_time else None,
        )
        for number, (calls, took, blocks, blocks_time, occupancy, occupancy_time) in most
    ]


def copies(events: Events) -> list[Copy]:
    """By kind and by whether the host's side is pageable, the longest first."""
    groups: dict[tuple[str, bool | None], list[tuple[float, float]]] = {}
    work = events.work
    for took, size, name, kind in zip(work.duration, work.first, work.name, work.kind, strict=True):
        if kind == MEMCPY:
            groups.setdefault(copy_kind(events.names[name]), []).append((took, size))
    found = []
    for (direction, pageable), members in groups.items():
        seconds = sum(took for took, _ in members) * _S
        total = None if any(size < 0 for _, size in members) else int(sum(size for _, size in members))
        speed = total / seconds if total is not None and seconds else None
        found.append(Copy(direction, pageable, len(members), seconds, total, speed))
    return sorted(found, key=lambda copy: -copy.seconds)


def synchronizations(waits: Sequence[Wait]) -> list[Synchronization]:
    """By their time, the longest first."""
    groups: dict[tuple[str, str | None, str | None, str | None, bool], tuple[int, float]] = {}
    for wait in waits:
        key = (wait.name, wait.operator, wait.within, wait.call_site, wait.to_device)
        count, seconds = groups.get(key, (0, 0.0))
        groups[key] = (count + 1, seconds + (wait.end - wait.start) * _S)
    found = [
        Synchronization(name, inside, within, site, count, seconds, copying)
        for (name, inside, within, site, copying), (count, seconds) in groups.items()
    ]
    return sorted(found, key=lambda each: -each.seconds)[:_MOST_ROWS]


def _by_name(events: Events) -> dict[int, list[float]]:
    """Of each kernel: calls, time, blocks x time and its time, occupancy x time and its time."""
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
