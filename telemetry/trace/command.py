"""``telemetry trace FILE_OR_DIR [--json]``: the text that the command line prints.

Of a trace that is one screen with the main figures and the advice, then the long tables.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.trace.files import NoTraceError, ReadLimits, TraceError
from telemetry.trace.reader import Trace, read_trace
from telemetry.util.text import byte_size, duration, one_line, percent, shortened, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ENDINGS: Final = (".json", ".json.gz")
_MAX_FILES: Final = 10_000
_DEEPEST: Final = 5
_MAX_SHOWN: Final = 4
_WIDTH: Final = 110
_INDENT: Final = 10 * " "
_BAR: Final = 40
_MAX_ADVICE: Final = 3
_MAX_STREAMS: Final = 4
_MAX_ROWS: Final = 10
_MAX_STEPS: Final = 12
_NAME: Final = 72
_NARROW_NAME: Final = 40


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """What the command prints.

    Attributes:
        text: for the standard output; empty if nothing could be read.
        problems: lines for the standard error.
        status: the exit status; 1 if a file could not be read.
    """

    text: str
    problems: tuple[str, ...]
    status: int


def trace(path: str, *, as_json: bool, limits: ReadLimits) -> ReadOutcome:
    """Read a trace, or all traces in a folder.

    In a folder, symbolic links are not followed, and JSON files that are not traces are skipped.

    Args:
        path: the file or the folder.
        as_json: whether to give JSON: an object for a file, a list for a folder.
        limits: the limits for reading one file.
    """
    if not Path(path).is_dir():
        try:
            read = read_trace(path, limits)
        except TraceError as error:
            return ReadOutcome("", (str(error),), 1)
        return ReadOutcome(_dump(read.as_json()) if as_json else render(read), (), 0)
    return _folder(path, as_json=as_json, limits=limits)


def _folder(path: str, *, as_json: bool, limits: ReadLimits) -> ReadOutcome:
    traces: list[Trace] = []
    problems: list[str] = []
    for file in _files(Path(path), _DEEPEST):
        try:
            traces.append(read_trace(file, limits, follow=False))
        except NoTraceError:
            continue
        except TraceError as error:
            problems.append(str(error))
        if len(traces) + len(problems) >= _MAX_FILES:
            problems.append(f"only the first {_MAX_FILES} files in {path} were read")
            break
    if not traces and not problems:
        problems.append(f"there is no trace in {path}: no file that ends in .json or .json.gz is one")
    status = 1 if problems else 0
    if not traces:
        return ReadOutcome("", tuple(problems), status)
    traces.sort(key=lambda each: (each.rank is None, each.rank or 0, each.file))
    text = _dump([each.as_json() for each in traces]) if as_json else _several(traces)
    return ReadOutcome(text, tuple(problems), status)


def _several(traces: list[Trace]) -> str:
    if len(traces) == 1:
        return render(traces[0])
    shown = traces if len(traces) <= _MAX_SHOWN else []
    more = "" if shown else "\nName one of the files to see all of it, or use --json.\n"
    return "\n\n".join([overview(traces), *map(render, shown)]) + more


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Files that may be traces, sorted by name. Symbolic links are not followed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat(follow_symlinks=False).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) and depth > 1:
            yield from _files(Path(entry.path), depth - 1)
        elif stat.S_ISREG(mode) and entry.name.endswith(_ENDINGS):
            yield Path(entry.path)


def _dump(value: dict[str, Any] | list[dict[str, Any]]) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def render(trace: Trace) -> str:
    """What the step consists of, where it waits and what to change. Then tables of operators, kernels and copies."""
    flops = wrap(f"FLOPs    {trace.flops}", _WIDTH, subsequent_indent=9 * " ")
    parts = [_head(trace), _categories(trace), [*_device(trace), *flops], _advice(trace), list(trace.notes)]
    parts += [_steps(trace), _operators(trace), _kernels(trace), _copies(trace), _waits(trace), _stretches(trace)]
    return "\n\n".join("\n".join(one_line(line) for line in lines) for lines in parts if lines) + "\n"


def overview(traces: Sequence[Trace]) -> str:
    """A table with one line per trace."""
    headings = ["rank", "file", "steps", "step", "GPU busy", "idle", "computing", "overlap", "DataLoader"]
    rows = [
        [
            "-" if trace.rank is None else str(trace.rank),
            shortened(trace.file.rpartition("/")[2], _NARROW_NAME),
            str(len(trace.steps)),
            duration(trace.average.seconds),
            percent(trace.gpu.utilization_ratio),
            percent(trace.temporal.idle_ratio),
            percent(trace.temporal.compute_ratio),
            percent(trace.overlap_ratio),
            percent(trace.average.categories["DataLoader"]),
        ]
        for trace in traces
    ]
    return "\n".join(one_line(line) for line in table(headings, rows, names_first=True)) + "\n"


def _head(trace: Trace) -> list[str]:
    rank = "" if trace.rank is None else f"rank {trace.rank}"
    if rank and trace.world_size is not None:
        rank += f" of {trace.world_size}"
    device = trace.device or ("" if trace.gpu.utilization_ratio is None else "a GPU that the trace does not name")
    if trace.device and trace.device_memory_bytes:
        device += f", {byte_size(trace.device_memory_bytes)}"
        if trace.peak_memory_bytes:
            device += f" ({byte_size(trace.peak_memory_bytes)} reserved at most)"
    count, mean = len(trace.steps), duration(trace.average.seconds)
    steps = f"{count} steps of {mean} on average" if count > 1 else f"1 step of {mean}"
    return [trace.file, ", ".join(part for part in (rank, device, steps) if part)]


def _categories(trace: Trace) -> list[str]:
    seconds = trace.average.seconds
    return [
        f"  {name:<14} {100 * ratio:5.1f} %  {duration(ratio * seconds):>9}  {'#' * round(_BAR * ratio)}".rstrip()
        for name, ratio in trace.average.categories.items()
    ]


def _device(trace: Trace) -> list[str]:
    gpu, temporal = trace.gpu, trace.temporal
    if gpu.utilization_ratio is None and temporal.idle_ratio is None:
        return ["No kernel ran on a GPU."]
    gpu_line = (
        f"GPU      busy {percent(gpu.utilization_ratio)}, SM efficiency {percent(gpu.sm_efficiency_ratio)}, "
        f"occupancy {percent(gpu.occupancy_ratio)}, tensor cores {percent(gpu.tensor_core_ratio)} of the kernel time"
    )
    line = (
        f"streams  idle {percent(temporal.idle_ratio)}, computing {percent(temporal.compute_ratio)}, other work "
        f"{percent(temporal.non_compute_ratio)}"
    )
    if trace.overlap_ratio is not None:
        line += f"; computation runs beside {percent(trace.overlap_ratio)} of the communication"
    lines = [gpu_line, line]
    lines.extend(
        f"         stream {each.stream} idles for the host {percent(each.host_wait_ratio)}, between kernels "
        f"{percent(each.kernel_wait_ratio)}, else {percent(each.other_ratio)}"
        for each in trace.idle[:_MAX_STREAMS]
        if each.host_wait_ratio is not None
    )
    return lines


def _advice(trace: Trace) -> list[str]:
    if not trace.advice:
        return ["Nothing in this trace asks for a change."]
    lines = ["What to change, and the share of the step it could win back:"]
    for each in trace.advice[:_MAX_ADVICE]:
        lines.append(f"  {percent(each.share_ratio):>6}  {each.action}")
        lines += wrap(each.because, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    rest = trace.advice[_MAX_ADVICE:]
    return lines + [f"  {percent(each.share_ratio):>6}  {each.action}" for each in rest]


def _steps(trace: Trace) -> list[str]:
    if len(trace.steps) < 2:
        return []
    headings = ["step", "", *trace.average.categories]
    rows = [
        [str(step.step), duration(step.seconds), *map(duration, step.categories.values())]
        for step in trace.steps[:_MAX_STEPS]
    ]
    more = len(trace.steps) - _MAX_STEPS
    return table(headings, rows, names_first=True) + ([f"{more} more: --json has all"] if more > 0 else [])


def _operators(trace: Trace) -> list[str]:
    headings = ["operator", "calls", "device", "", "host", "tensor cores"]
    rows = [
        [
            shortened(each.name, _NAME),
            str(each.calls),
            duration(each.device_seconds) if each.device_ratio is not None else "-",
            percent(each.device_ratio),
            duration(each.host_seconds),
            percent(each.tensor_core_ratio) if each.tensor_core_eligible else "-",
        ]
        for each in trace.operators[:_MAX_ROWS]
    ]
    return table(headings, rows, names_first=True) if rows else []


def _kernels(trace: Trace) -> list[str]:
    headings = ["kernel", "calls", "device", "", "mean", "tensor cores", "occupancy"]
    rows = [
        [
            shortened(each.name, _NAME),
            str(each.calls),
            duration(each.device_seconds),
            percent(each.device_ratio),
            duration(each.mean_seconds),
            "yes" if each.tensor_core else "no",
            percent(each.occupancy_ratio),
        ]
        for each in trace.kernels[:_MAX_ROWS]
    ]
    return table(headings, rows, names_first=True) if rows else []


def _copies(trace: Trace) -> list[str]:
    headings = ["copy", "host memory", "calls", "time", "size", "speed"]
    rows = [
        [
            each.kind,
            "-" if each.pageable is None else "pageable" if each.pageable else "pinned",
            str(each.calls),
            duration(each.seconds),
            "-" if each.bytes is None else byte_size(each.bytes),
            "-" if each.bandwidth_bytes_per_second is None else f"{each.bandwidth_bytes_per_second / 1e9:.1f} GB/s",
        ]
        for each in trace.memcpy
    ]
    return table(headings, rows, names_first=True) if rows else []


def _waits(trace: Trace) -> list[str]:
    headings = ["waits for the GPU", "calls", "time", "in", "from"]
    rows = [
        [
            each.name,
            str(each.calls),
            duration(each.seconds),
            shortened(each.operator or "-", _NARROW_NAME),
            shortened(each.call_site or each.within or "-", _NAME),
        ]
        for each in trace.synchronizations[:_MAX_ROWS]
    ]
    return table(headings, rows, names_first=True) if rows else []


def _stretches(trace: Trace) -> list[str]:
    headings = ["GPU waits for launches in step", "at", "for", "idle", "launches"]
    rows = [
        [
            str(each.step),
            duration(each.offset_seconds),
            duration(each.seconds),
            percent(each.idle_ratio),
            str(each.launches),
        ]
        for each in trace.launch_bound[:_MAX_ROWS]
    ]
    return table(headings, rows, names_first=True) if rows else []
