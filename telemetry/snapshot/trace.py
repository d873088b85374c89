"""Reads a trace of torch.profiler: what its steps are made of, where they wait, and what to change.

Needs neither torch nor numpy. A file is read as a stream; what it may cost is bounded by `Limits`. What each figure
means is in docs/TRACE.md.
"""

from __future__ import annotations

import gc
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from telemetry.snapshot.reading import device as devices
from telemetry.snapshot.reading import facts, launches, owners, steps, streams, tables, waits
from telemetry.snapshot.reading.advice import Hardware, Suggestion, advise
from telemetry.snapshot.reading.events import Events
from telemetry.snapshot.reading.limits import Limits, NoTraceError, TraceError
from telemetry.snapshot.reading.scanner import Scanner
from telemetry.snapshot.reading.source import open_source

__all__ = ["Limits", "NoTraceError", "Step", "Trace", "TraceError", "read_trace"]

_S: Final = 1e-6
_RANK: Final = re.compile(r"rank[-_.]?(\d{1,9})", re.IGNORECASE)
_MOST_STRETCHES: Final = 20


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its number, its seconds, and these by category; the categories sum to the step."""

    step: int
    seconds: float
    categories: dict[str, float]


@dataclass(frozen=True, slots=True)
class Average:
    """The mean step: its seconds, and the ratio of them that each category takes."""

    seconds: float
    categories: dict[str, float]


@dataclass(frozen=True, slots=True)
class Trace:
    """What one trace file says; the fields are those of ``telemetry trace --json``.

    Attributes:
        file: its path as it was given.
        rank, world_size: of the process that recorded it; None where neither the trace nor the file's name says.
        device: the name of the GPU that most kernels ran on; None without one, or where the trace does not say.
        device_memory_bytes, peak_memory_bytes: what that GPU has, and what torch had reserved of it at most.
        steps, average: the breakdown in TensorBoard's categories.
        gpu: utilisation and its kin over the steps.
        temporal, overlap_ratio, idle: as Holistic Trace Analysis has them.
        operators, kernels, memcpy, synchronizations: what took longest; see `reading.tables`.
        launch_bound: stretches in which the GPU waits for each launch.
        layout_conversions: the kernels among `kernels` that only change a tensor's layout.
        advice: what to change, most first.
        notes: what a reader should know about how whole the picture is.
    """

    file: str
    rank: int | None
    world_size: int | None
    device: str | None
    device_memory_bytes: int | None
    peak_memory_bytes: int | None
    steps: tuple[Step, ...]
    average: Average
    gpu: devices.Gpu
    temporal: streams.Temporal
    overlap_ratio: float | None
    idle: tuple[streams.Idle, ...]
    operators: tuple[tables.Operator, ...]
    kernels: tuple[tables.Kernel, ...]
    memcpy: tuple[tables.Copy, ...]
    synchronizations: tuple[tables.Synchronization, ...]
    launch_bound: tuple[launches.Stretch, ...]
    layout_conversions: tuple[tables.Kernel, ...]
    advice: tuple[Suggestion, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The trace as plain values."""
        return asdict(self)


def read_trace(path: str | os.PathLike[str], limits: Limits | None = None, *, follow: bool = True) -> Trace:
    """Read one trace file, ``.json`` or gzip.

    Args:
        path: the file.
        limits: what reading it may cost.
        follow: whether the path may be a symbolic link: not where it was found in a folder.

    Raises:
        NoTraceError: the file is sound, and no trace.
        TraceError: it cannot be read as one; the text says why and what to do.
    """
    file, limits = Path(path), limits or Limits()
    collecting = gc.isenabled()
    gc.disable()  # batches of dicts come and go by their reference counts; looking for cycles doubles the time
    try:
        with open_source(file, limits, follow=follow) as source:
            scanner, events = Scanner(source, limits), Events(limits)
            try:
                for batch in scanner.batches():
                    events.take(batch)
                events.close()
            except MemoryError:
                raise TraceError(f"{file} needs more memory than there is: record fewer steps") from None
        return _analyse(file, events, scanner)
    except (ArithmeticError, MemoryError) as error:
        raise TraceError(f"{file} holds times or numbers that no figure can be taken from ({error!r})") from error
    finally:
        if collecting:
            gc.enable()


def _analyse(file: Path, events: Events, scanner: Scanner) -> Trace:
    found = steps.find_steps(events)
    if found is None or found.length <= 0:
        raise NoTraceError(f"{file} is no trace of torch.profiler: it holds no operator, runtime call or kernel")
    parts = steps.exclusive(found, steps.find_categories(events))
    each = steps.breakdown(found, parts)
    average = {name: sum(step[name] for step in each) / found.length for name in steps.CATEGORIES}
    temporal, overlap, idle = streams.measure(events)
    owner = owners.owners(events)
    bound = launches.find(events, found)
    waiting = waits.find(events, found)
    gathered = facts.gather(events, found, parts=parts, owner=owner, waits=waiting, gaps=bound.gaps)
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
            Step(span.number, (span.end - span.start) * _S, {name: took * _S for name, took in step.items()})
            for span, step in zip(found.spans, each, strict=True)
        ),
        average=Average(found.length * _S / len(found.spans), average),
        gpu=devices.measure(events, found),
        temporal=temporal,
        overlap_ratio=overlap,
        idle=idle,
        operators=tuple(tables.operators(events, owner)),
        kernels=tuple(kernels),
        memcpy=tuple(tables.copies(events)),
        synchronizations=tuple(tables.synchronizations(waiting)),
        launch_bound=bound.stretches[:_MOST_STRETCHES],
        layout_conversions=tuple(kernel for kernel in kernels if kernel.layout_conversion),
        advice=advise(gathered, average, hardware),
        notes=tuple(_notes(events, scanner, found)),
    )


def _properties(listed: object, number: int | None) -> dict[str, Any]:
    """What the head of the trace says of one device."""
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict) and number is not None and each.get("id") == number:
            return each
    return {}


def _notes(events: Events, scanner: Scanner, found: steps.Steps) -> list[str]:
    notes: list[str] = []
    if not found.marked:
        notes.append("no step is marked (ProfilerStep#…): all of the trace is taken as one step")
    if found.dropped:
        notes.append(f"the last {found.dropped} step(s) are left out: the trace ends before their kernels do")
    if events.malformed:
        notes.append(f"{events.malformed} event(s) with fields that make no sense were passed over")
    if scanner.repaired:
        notes.append(f"{scanner.repaired} event(s) were no JSON by the letter and were read all the same")
    return notes


def _rank_of(file: Path) -> int | None:
    match = _RANK.search(file.name)
    return int(match[1]) if match else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None
