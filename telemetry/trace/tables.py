"""The long tables: operators and kernels by their time, copies by kind, and calls that wait for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from telemetry.trace import names
from telemetry.trace.events import KERNEL, MEMCPY, enclosing
from telemetry.trace.steps import SECONDS_PER_US, tensor_core_share, weighted_mean

if TYPE_CHECKING:
    from telemetry.trace.events import DeviceEvent, HostEvent, TraceEvents
    from telemetry.trace.steps import TraceSteps

_MAX_ROWS: Final = 50


class Operator(Struct, frozen=True):
    """The cost of one operator over the trace.

    Attributes:
        device_seconds: time of the kernels and copies that it launched itself, without those of operators inside it.
        device_ratio: share of this time in all device time.
        host_seconds: time on the host without the operators inside it, summed over threads.
        tensor_core_eligible: whether tensor cores can do its work.
        tensor_core_ratio: the share of its kernel time that uses tensor cores.
    """

    name: str
    calls: int
    device_seconds: float
    device_ratio: float | None
    host_seconds: float
    tensor_core_eligible: bool
    tensor_core_ratio: float | None


class Kernel(Struct, frozen=True):
    """All runs of one kernel. Occupancy and blocks per SM are weighted by time."""

    name: str
    calls: int
    device_seconds: float
    device_ratio: float
    mean_seconds: float
    tensor_core: bool
    layout_conversion: bool
    occupancy_ratio: float | None
    blocks_per_sm: float | None


class Copy(Struct, frozen=True):
    """Copies of one kind: HtoD, DtoH, DtoD or PtoP."""

    kind: str
    pageable: bool | None
    calls: int
    seconds: float
    bytes: int | None
    bandwidth_bytes_per_second: float | None


class Synchronization(Struct, frozen=True):
    """Calls within the steps that wait for the device, grouped by their origin.

    Attributes:
        name: name of the call, such as ``cudaStreamSynchronize``.
        operator: the innermost operator around it; ``within``: the outermost; ``call_site``: the user's line.
        calls, seconds: number of calls, and time that the host waited in them.
        to_device: whether they wait for copies to the device.
    """

    name: str
    operator: str | None
    within: str | None
    call_site: str | None
    calls: int
    seconds: float
    to_device: bool


def operators(events: TraceEvents) -> list[Operator]:
    """The operators that took longest, by device time and then by host time."""
    own, calls = _self_times(events.operators)
    launched: dict[str, list[DeviceEvent]] = {name: [] for name in calls}
    for work in events.work:
        if work.operator is not None:
            launched[work.operator].append(work)
    device = {name: sum(work.took for work in each) for name, each in launched.items()}
    whole = sum(work.took for work in events.work)
    return [
        Operator(
            name,
            calls[name],
            device[name] * SECONDS_PER_US,
            device[name] / whole if whole else None,
            own[name] * SECONDS_PER_US,
            names.is_eligible(name),
            tensor_core_share(work for work in launched[name] if work.kind == KERNEL),
        )
        for name in sorted(calls, key=lambda name: (-device[name], -own[name]))[:_MAX_ROWS]
    ]


def _self_times(events: list[HostEvent]) -> tuple[dict[str, float], dict[str, int]]:
    """Self time of host events, in microseconds without the events inside them, and their count; both by name."""
    own: dict[str, float] = {}
    calls: dict[str, int] = {}
    open_on: dict[int, list[HostEvent]] = {}
    for event in events:
        around = open_on.setdefault(event.thread, [])
        while around and around[-1].end <= event.start:
            around.pop()
        if around:
            own[around[-1].name] -= min(event.end, around[-1].end) - event.start
        own[event.name] = own.get(event.name, 0.0) + event.took
        calls[event.name] = calls.get(event.name, 0) + 1
        around.append(event)
    return own, calls


def kernels(events: TraceEvents) -> list[Kernel]:
    """The kernels that took longest."""
    groups: dict[str, list[DeviceEvent]] = {}
    for work in events.work:
        if work.kind == KERNEL:
            groups.setdefault(work.name, []).append(work)
    took = {name: sum(run.took for run in runs) for name, runs in groups.items()}
    whole = sum(took.values())
    found = []
    for name in sorted(groups, key=lambda name: -took[name])[:_MAX_ROWS]:
        runs = groups[name]
        occupancy = weighted_mean((run.took, run.occupancy) for run in runs)
        found.append(
            Kernel(
                name,
                len(runs),
                took[name] * SECONDS_PER_US,
                took[name] / whole if whole else 0.0,
                took[name] / len(runs) * SECONDS_PER_US,
                names.is_tensor_core(name),
                names.converts_layout(name),
                None if occupancy is None else occupancy / 100,
                weighted_mean((run.took, run.blocks or None) for run in runs),
            )
        )
    return found


def copies(events: TraceEvents) -> list[Copy]:
    """All copies by kind and by whether the host memory is pageable, the longest first."""
    groups: dict[tuple[str, bool | None], list[DeviceEvent]] = {}
    for work in events.work:
        if work.kind == MEMCPY:
            groups.setdefault(names.copy_kind(work.name), []).append(work)
    found = []
    for (direction, pageable), members in groups.items():
        seconds = sum(each.took for each in members) * SECONDS_PER_US
        sizes = [each.bytes for each in members if each.bytes is not None]
        total = int(sum(sizes)) if len(sizes) == len(members) else None
        speed = total / seconds if total is not None and seconds else None
        found.append(Copy(direction, pageable, len(members), seconds, total, speed))
    return sorted(found, key=lambda copy: -copy.seconds)


class DeviceWait(NamedTuple):
    """One call that waits for the device. The other fields are as in `Synchronization`."""

    call: HostEvent
    operator: str | None
    within: str | None
    call_site: str | None
    to_device: bool


def device_waits(events: TraceEvents, steps: TraceSteps) -> list[DeviceWait]:
    """All waits within the steps, by their start."""
    first, last = steps.host[0].start, steps.host[-1].end
    calls = [call for call in events.calls if names.is_blocking(call.name) and first <= call.start < last]
    moments = {call.moment for call in calls}
    around, frames = enclosing(events.operators, moments), enclosing(events.frames, moments)
    to_device = {
        work.external
        for work in events.work
        if work.kind == MEMCPY and work.external > 0 and names.copy_kind(work.name)[0] == "HtoD"
    }
    found: list[DeviceWait] = []
    for call in calls:
        inner, outer = around.get(call.moment, (None, None))
        site = frames[call.moment][0] if call.moment in frames else events.call_sites.get(call.external)
        found.append(DeviceWait(call, inner, outer, site, call.external in to_device))
    return found


def synchronizations(waits: list[DeviceWait]) -> list[Synchronization]:
    """The groups of waits that took longest."""
    groups: dict[tuple[object, ...], list[DeviceWait]] = {}
    for wait in waits:
        groups.setdefault((wait.call.name, *wait[1:]), []).append(wait)
    found = []
    for members in groups.values():
        call, operator, within, site, to_device = members[0]
        seconds = sum(member.call.took for member in members) * SECONDS_PER_US
        found.append(Synchronization(call.name, operator, within, site, len(members), seconds, to_device))
    return sorted(found, key=lambda each: -each.seconds)[:_MAX_ROWS]
