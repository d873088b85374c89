"""Calls within the steps that wait until the device has finished its work, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from telemetry.trace.event_names import copy_kind, is_blocking
from telemetry.trace.operator_links import enclosing
from telemetry.trace.trace_events import MEMCPY, NOTHING

if TYPE_CHECKING:
    from telemetry.trace.step_breakdown import TraceSteps
    from telemetry.trace.trace_events import TraceEvents


@dataclass(frozen=True, slots=True)
class DeviceWait:
    """One call that waits.

    Attributes:
        start, end: microseconds, on the host.
        name: name of the call, such as ``cudaStreamSynchronize``.
        operator: the innermost operator around it; ``within``: the outermost; ``call_site``: the user's line. None if
            the trace does not tell.
        to_device: whether it waits for a copy to the device.
    """

    start: float
    end: float
    name: str
    operator: str | None
    within: str | None
    call_site: str | None
    to_device: bool


def find(events: TraceEvents, steps: TraceSteps) -> list[DeviceWait]:
    """All waits within the steps, by their start."""
    names, calls, operators = events.names, events.calls, events.operators
    blocking = {number for number in range(len(names)) if is_blocking(names[number])}
    first, last = steps.host[0].start, steps.host[-1].end
    chosen = [i for i, name in enumerate(calls.name) if name in blocking and first <= calls.start[i] < last]
    chosen.sort(key=calls.start.__getitem__)
    moments = [(calls.thread[i], calls.start[i]) for i in chosen]
    around = enclosing(operators, moments)
    frames = enclosing(events.frames, moments)
    ids = {calls.external[i] for i in chosen} - {NOTHING, 0}
    by_id = {e: n for e, n in zip(operators.external, operators.name, strict=True) if e in ids} if ids else {}
    to_device = _copied_to_device(events)
    found: list[DeviceWait] = []
    for i, moment in zip(chosen, moments, strict=True):
        external = calls.external[i]
        inner, outer = around.get(moment) or (by_id.get(external, NOTHING),) * 2
        site = names.get(frames.get(moment, (NOTHING, NOTHING))[0]) or events.call_sites.get(external)
        end = calls.start[i] + calls.duration[i]
        name = names[calls.name[i]]
        found.append(
            DeviceWait(calls.start[i], end, name, names.get(inner), names.get(outer), site, external in to_device)
        )
    return found


def _copied_to_device(events: TraceEvents) -> set[int]:
    """External ids of the operators that copied from the host to the device."""
    names, work = events.names, events.work
    copies = {number for number in range(len(names)) if copy_kind(names[number])[0] == "HtoD"}
    columns = zip(work.external, work.name, work.kind, strict=True)
    return {external for external, name, kind in columns if kind == MEMCPY and external > 0 and name in copies}
