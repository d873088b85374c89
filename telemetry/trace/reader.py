"""Reads a trace of torch.profiler: the parts of its steps, their waits, and what to change.

It needs neither torch nor numpy. A file is read as a stream, within `ReadLimits`. The figures: docs/snapshots.md.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from pathlib import Path
from typing import Any, Final

from telemetry.trace import device as devices
from telemetry.trace import flops as counts
from telemetry.trace import tables
from telemetry.trace.advice import Advisor, Hardware
from telemetry.trace.events import TraceEvents
from telemetry.trace.files import FileStream, NoTraceError, ReadLimits, Scanner, TraceError
from telemetry.trace.records import Average, Trace, TraceStep
from telemetry.trace.steps import CATEGORIES, SECONDS_PER_US, TraceSteps, breakdown, categorize, find_steps

_RANK: Final = re.compile(r"rank[-_.]?(\d{1,9})", re.IGNORECASE)
_MAX_STRETCHES: Final = 20


def read_trace(path: str | os.PathLike[str], limits: ReadLimits | None = None, *, follow: bool = True) -> Trace:
    """Read one trace file, ``.json`` or gzip.

    ``follow``: whether the path may be a symbolic link. It may not if it was found in a folder.

    Raises:
        NoTraceError: the file is valid JSON, but not a trace.
        TraceError: it cannot be read as a trace; the text has the reason and what to do.
    """
    file, limits = Path(path), limits or ReadLimits()
    collecting = gc.isenabled()
    gc.disable()  # batches of dicts are freed by their reference counts; collecting cycles doubles the time
    try:
        with contextlib.closing(FileStream(file, limits, follow=follow)) as stream:
            scanner, events = Scanner(stream, limits), TraceEvents(limits)
            try:
                for batch in scanner.batches():
                    events.add(batch)
            except MemoryError:
                raise TraceError(f"{file} needs more memory than there is: record fewer steps") from None
        return _analyse(file, events, scanner)
    except (ArithmeticError, MemoryError) as error:
        raise TraceError(f"{file} has times or numbers that cannot be computed with ({error!r})") from error
    finally:
        if collecting:
            gc.enable()


def _analyse(file: Path, events: TraceEvents, scanner: Scanner) -> Trace:
    steps = find_steps(events)
    if steps is None or steps.length <= 0:
        raise NoTraceError(f"{file} is no trace of torch.profiler: it has no operator, runtime call or kernel")
    parts = categorize(events, steps)
    each = breakdown(steps, parts)
    average = {name: sum(step[name] for step in each) / steps.length for name in CATEGORIES}
    temporal, overlap, idle = devices.streams(events)
    owner = tables.owners(events)
    gaps = devices.launch_gaps(events, steps)
    waits = tables.device_waits(events, steps)
    number = devices.main_device(events)
    properties = _properties(scanner.metadata.get("deviceProperties"), number)
    hardware = Hardware(
        None if events.is_amd else _integer(properties.get("computeMajor")),
        _integer(properties.get("totalGlobalMem")),
        events.reserved_bytes.get(-1 if number is None else number),
    )
    distributed = scanner.metadata.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rank, named = _integer(distributed.get("rank")), _RANK.search(file.name)
    kernels = tables.kernels(events)
    device = properties.get("name")
    device = device.encode("utf-8", "replace").decode() if isinstance(device, str) else None
    return Trace(
        file=os.fsencode(file).decode("utf-8", "replace"),
        rank=int(named[1]) if rank is None and named else rank,
        world_size=_integer(distributed.get("world_size")),
        device=device,
        device_memory_bytes=hardware.memory_bytes,
        peak_memory_bytes=hardware.reserved_bytes,
        steps=tuple(
            TraceStep(
                span.number,
                (span.end - span.start) * SECONDS_PER_US,
                {name: took * SECONDS_PER_US for name, took in step.items()},
            )
            for span, step in zip(steps.spans, each, strict=True)
        ),
        average=Average(steps.length * SECONDS_PER_US / len(steps.spans), average),
        gpu=devices.usage(events, steps),
        flops=counts.measure(events, steps, device),
        temporal=temporal,
        overlap_ratio=overlap,
        idle=idle,
        operators=tuple(tables.operators(events, owner)),
        kernels=tuple(kernels),
        memcpy=tuple(tables.copies(events)),
        synchronizations=tuple(tables.synchronizations(waits)),
        launch_bound=tuple(devices.launch_bound(gaps, steps)[:_MAX_STRETCHES]),
        layout_conversions=tuple(kernel for kernel in kernels if kernel.layout_conversion),
        advice=Advisor(events, steps, parts, average, hardware).advise(owner, waits, gaps),
        notes=tuple(_notes(events, scanner, steps)),
    )


def _properties(listed: object, number: int | None) -> dict[str, Any]:
    """The properties of one device, from the values beside the events; empty if the trace has none."""
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict) and number is not None and each.get("id") == number:
            return each
    return {}


def _notes(events: TraceEvents, scanner: Scanner, steps: TraceSteps) -> list[str]:
    notes: list[str] = []
    if not steps.marked:
        notes.append("no step is marked (ProfilerStep#…): all of the trace is taken as one step")
    if steps.dropped:
        notes.append(f"the last {steps.dropped} step(s) are left out: the trace ends before their kernels do")
    if events.malformed:
        notes.append(f"{events.malformed} event(s) with invalid fields were skipped")
    if scanner.repaired:
        notes.append("words that are no JSON, such as nan, were read as null")
    return notes


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
