"""Reads a trace of torch.profiler: what its steps consist of, where they wait, and what to change.

It needs neither torch nor numpy. A file is read as a stream, within `ReadLimits`. docs/TRACE.md explains each figure.
"""

from __future__ import annotations

import gc
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from telemetry.trace import device as devices
from telemetry.trace import flops as counts
from telemetry.trace import operators as tables
from telemetry.trace import steps as breakdowns
from telemetry.trace.advice import Advisor, Hardware, Suggestion
from telemetry.trace.events import TraceEvents
from telemetry.trace.files import NoTraceError, ReadLimits, Scanner, TraceError, open_stream
from telemetry.trace.steps import SECONDS_PER_US

__all__ = ["NoTraceError", "ReadLimits", "Trace", "TraceError", "TraceStep", "read_trace"]

_RANK: Final = re.compile(r"rank[-_.]?(\d{1,9})", re.IGNORECASE)
_MAX_STRETCHES: Final = 20


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step: its number, its seconds, and the seconds by category, which sum to those of the step."""

    step: int
    seconds: float
    categories: dict[str, float]


@dataclass(frozen=True, slots=True)
class Average:
    """The mean step: its seconds, and the share of each category (0 to 1)."""

    seconds: float
    categories: dict[str, float]


@dataclass(frozen=True, slots=True)
class Trace:
    """The figures of one trace file. The fields are those of ``telemetry trace --json``.

    Attributes:
        file: the path as it was given.
        rank, world_size: those of the process that recorded it; None if neither the trace nor the file's name tells.
        device: name of the GPU that most work ran on; None without a GPU, or if the trace does not tell.
        device_memory_bytes: memory of that GPU.
        peak_memory_bytes: the most memory that torch had reserved there.
        steps, average: the breakdown into TensorBoard's categories.
        gpu: how well the GPUs were used over the steps.
        flops: floating-point operations of a step, and their share of the device's peak (MFU).
        temporal, overlap_ratio, idle: as Holistic Trace Analysis defines them.
        operators, kernels, memcpy, synchronizations: those that took longest; see `trace.operators`.
        launch_bound: stretches in which the GPU waits for each launch.
        layout_conversions: those of `kernels` that only change a tensor's layout.
        advice: what to change; the change that wins most is first.
        notes: what is missing in the trace, in words.
    """

    file: str
    rank: int | None
    world_size: int | None
    device: str | None
    device_memory_bytes: int | None
    peak_memory_bytes: int | None
    steps: tuple[TraceStep, ...]
    average: Average
    gpu: devices.GpuUsage
    flops: counts.FlopsUsage
    temporal: devices.TemporalBreakdown
    overlap_ratio: float | None
    idle: tuple[devices.StreamIdle, ...]
    operators: tuple[tables.Operator, ...]
    kernels: tuple[tables.Kernel, ...]
    memcpy: tuple[tables.Copy, ...]
    synchronizations: tuple[tables.Synchronization, ...]
    launch_bound: tuple[devices.LaunchBoundStretch, ...]
    layout_conversions: tuple[tables.Kernel, ...]
    advice: tuple[Suggestion, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The trace as dicts, lists, text and numbers."""
        return asdict(self)


def read_trace(path: str | os.PathLike[str], limits: ReadLimits | None = None, *, follow: bool = True) -> Trace:
    """Read one trace file, ``.json`` or gzip.

    Args:
        path: the file.
        limits: the limits for reading it.
        follow: whether the path may be a symbolic link. It may not if it was found in a folder.

    Raises:
        NoTraceError: the file is valid JSON, but not a trace.
        TraceError: it cannot be read as a trace; the text says why and what to do.
    """
    file, limits = Path(path), limits or ReadLimits()
    collecting = gc.isenabled()
    gc.disable()  # batches of dicts are freed by their reference counts; collecting cycles doubles the time
    try:
        with open_stream(file, limits, follow=follow) as source:
            scanner, events = Scanner(source, limits), TraceEvents(limits)
            try:
                for batch in scanner.batches():
                    events.add(batch)
                events.close()
            except MemoryError:
                raise TraceError(f"{file} needs more memory than there is: record fewer steps") from None
        return _analyse(file, events, scanner)
    except (ArithmeticError, MemoryError) as error:
        raise TraceError(f"{file} has times or numbers that cannot be computed with ({error!r})") from error
    finally:
        if collecting:
            gc.enable()


def _analyse(file: Path, events: TraceEvents, scanner: Scanner) -> Trace:
    found = breakdowns.find_steps(events)
    if found is None or found.length <= 0:
        raise NoTraceError(f"{file} is no trace of torch.profiler: it has no operator, runtime call or kernel")
    parts = breakdowns.exclusive(found, breakdowns.find_categories(events))
    each = breakdowns.breakdown(found, parts)
    average = {name: sum(step[name] for step in each) / found.length for name in breakdowns.CATEGORIES}
    temporal, overlap, idle = devices.streams(events)
    owner = tables.owners(events)
    gaps = devices.launch_gaps(events, found)
    waits = tables.device_waits(events, found)
    number = devices.main_device(events)
    properties = _properties(scanner.metadata.get("deviceProperties"), number)
    hardware = Hardware(
        _integer(properties.get("computeMajor")) if not devices.is_amd(events) else None,
        _integer(properties.get("totalGlobalMem")),
        events.reserved_bytes.get(-1 if number is None else number),
    )
    distributed = scanner.metadata.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rank = _integer(distributed.get("rank"))
    kernels = tables.kernels(events)
    return Trace(
        file=os.fsencode(file).decode("utf-8", "replace"),
        rank=_rank_of(file) if rank is None else rank,
        world_size=_integer(distributed.get("world_size")),
        device=_text(properties.get("name")),
        device_memory_bytes=hardware.memory_bytes,
        peak_memory_bytes=hardware.reserved_bytes,
        steps=tuple(
            TraceStep(
                span.number,
                (span.end - span.start) * SECONDS_PER_US,
                {name: took * SECONDS_PER_US for name, took in step.items()},
            )
            for span, step in zip(found.spans, each, strict=True)
        ),
        average=Average(found.length * SECONDS_PER_US / len(found.spans), average),
        gpu=devices.usage(events, found),
        flops=counts.measure(events, found, _text(properties.get("name"))),
        temporal=temporal,
        overlap_ratio=overlap,
        idle=idle,
        operators=tuple(tables.operators(events, owner)),
        kernels=tuple(kernels),
        memcpy=tuple(tables.copies(events)),
        synchronizations=tuple(tables.synchronizations(waits)),
        launch_bound=tuple(devices.launch_bound(gaps, found)[:_MAX_STRETCHES]),
        layout_conversions=tuple(kernel for kernel in kernels if kernel.layout_conversion),
        advice=Advisor(events, found, parts, average, hardware).advise(owner, waits, gaps),
        notes=tuple(_notes(events, scanner, found)),
    )


def _properties(listed: object, number: int | None) -> dict[str, Any]:
    """The properties of one device, from the values beside the events; empty if the trace has none."""
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict) and number is not None and each.get("id") == number:
            return each
    return {}


def _notes(events: TraceEvents, scanner: Scanner, found: breakdowns.TraceSteps) -> list[str]:
    notes: list[str] = []
    if not found.marked:
        notes.append("no step is marked (ProfilerStep#…): all of the trace is taken as one step")
    if found.dropped:
        notes.append(f"the last {found.dropped} step(s) are left out: the trace ends before their kernels do")
    if events.malformed:
        notes.append(f"{events.malformed} event(s) with invalid fields were skipped")
    if scanner.repaired:
        notes.append(f"{scanner.repaired} event(s) were not valid JSON and could be read nevertheless")
    return notes


def _rank_of(file: Path) -> int | None:
    match = _RANK.search(file.name)
    return int(match[1]) if match else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None
