"""All figures of a trace of torch.profiler: the parts of its steps, their waits, and what to change.

It needs neither torch nor numpy. The figures: docs/snapshots.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from msgspec import Struct

from telemetry.trace import tables
from telemetry.trace.events import MAX_BYTES, NoTraceError, TraceEvents, read_events
from telemetry.trace.steps import (
    Average,
    GpuUsage,
    LaunchBoundStretch,
    StreamIdle,
    TemporalBreakdown,
    TraceStep,
    TraceSteps,
    average_of,
    breakdown,
    categorize,
    find_steps,
    launch_bound,
    streams,
    usage,
)
from telemetry.trace.tables import Copy, Kernel, Operator, Synchronization
from telemetry.trace.trace_advice import Advisor, Suggestion

_RANK: Final = re.compile(r"rank[-_.]?(\d{1,9})", re.IGNORECASE)
_MAX_STRETCHES: Final = 20


class Trace(Struct, frozen=True, kw_only=True):
    """All figures of a trace file. Encoded as they are, they are what ``telemetry trace --json`` prints.

    Shares are 0 to 1. Figures that the trace does not contain are None.

    Attributes:
        rank, world_size: rank and world size of the process that recorded it; None if they are neither in the trace nor
            in the file's name.
        device: name of the GPU with most work; ``device_memory_bytes``: its memory; ``peak_memory_bytes``: the
            most that torch had reserved there.
        steps, average: the breakdown into TensorBoard's categories.
        temporal, overlap_ratio, idle: figures that Holistic Trace Analysis defines.
        operators, kernels, memcpy, synchronizations, launch_bound: the largest of each.
        layout_conversions: the ``kernels`` that only change a tensor's layout.
        advice: what to change; the change that saves most is first.
        notes: a sentence for each thing that is missing in the trace.
    """

    file: str
    rank: int | None
    world_size: int | None
    device: str | None
    device_memory_bytes: int | None
    peak_memory_bytes: int | None
    steps: list[TraceStep]
    average: Average
    gpu: GpuUsage
    temporal: TemporalBreakdown
    overlap_ratio: float | None
    idle: list[StreamIdle]
    operators: list[Operator]
    kernels: list[Kernel]
    memcpy: list[Copy]
    synchronizations: list[Synchronization]
    launch_bound: list[LaunchBoundStretch]
    layout_conversions: list[Kernel]
    advice: list[Suggestion]
    notes: list[str]


def read_trace(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Trace:
    """Read one trace file, ``.json`` or gzip. ``max_bytes``: limit of its size, uncompressed.

    Raises:
        NoTraceError: the file is valid JSON, but not a trace.
        TraceError: it cannot be read as a trace; the text has the reason and what to do.
    """
    file = Path(path)
    events = read_events(file, max_bytes)
    steps = find_steps(events)
    if steps is None or steps.length <= 0:
        raise NoTraceError(f"{file} is not a trace of torch.profiler: it has no operator, runtime call or kernel")
    parts = categorize(events, steps)
    each = breakdown(steps, parts)
    average = average_of(each)
    temporal, overlap, idle = streams(events)
    stretches = launch_bound(events, steps)
    waits = tables.device_waits(events, steps)
    kernels = tables.kernels(events)
    gpu, process, named = events.gpu, events.process, _RANK.search(file.name)
    return Trace(
        file=os.fsencode(file).decode("utf-8", "replace"),
        rank=int(named[1]) if process.rank is None and named else process.rank,
        world_size=process.world_size,
        device=gpu.name,
        device_memory_bytes=gpu.memory_bytes,
        peak_memory_bytes=events.reserved_bytes.get(gpu.id),
        steps=each,
        average=average,
        gpu=usage(events, steps),
        temporal=temporal,
        overlap_ratio=overlap,
        idle=idle,
        operators=tables.operators(events),
        kernels=kernels,
        memcpy=tables.copies(events),
        synchronizations=tables.synchronizations(waits),
        launch_bound=stretches[:_MAX_STRETCHES],
        layout_conversions=[kernel for kernel in kernels if kernel.layout_conversion],
        advice=Advisor(events, steps, parts, average).advise(waits, stretches),
        notes=_notes(events, steps),
    )


def _notes(events: TraceEvents, steps: TraceSteps) -> list[str]:
    notes: list[str] = []
    if not steps.marked:
        notes.append("no step is marked (ProfilerStep#…): all of the trace is taken as one step")
    if steps.dropped:
        notes.append(f"the last {steps.dropped} step(s) are left out: the trace ends before their kernels do")
    if events.malformed:
        notes.append(f"{events.malformed} event(s) with invalid fields were skipped")
    if events.repaired:
        notes.append("text that is not JSON, such as nan or a control character, was read as null or as a space")
    return notes
