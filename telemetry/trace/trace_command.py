"""``telemetry trace FILE_OR_DIR [--json]``: prints the figures of traces.

The text of one trace is one screen with the main figures and the advice, and then the long tables.
"""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.trace.events import MAX_BYTES, NoTraceError, TraceError
from telemetry.trace.trace_file import Trace, read_trace
from telemetry.util.words import byte_size, complain, duration, one_line, percent, shortened, show, show_json, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ENDINGS: Final = (".json", ".json.gz")
_MAX_SHOWN: Final = 4
_WIDTH: Final = 110
_INDENT: Final = 10 * " "
_BAR: Final = 40
_MAX_ADVICE: Final = 3
_MAX_STREAMS: Final = 4
_MAX_ROWS: Final = 10
_NAME: Final = 72
_NARROW_NAME: Final = 40


def trace(path: str, *, as_json: bool, max_bytes: int | None) -> int:
    """Read and print a trace, or all traces in a folder. Returns the exit status: 1 if a file could not be read.

    In a folder, symbolic links are not followed, and JSON files that are not traces are skipped.

    Args:
        path: the file or the folder.
        as_json: whether to print JSON: an object for a file, a list for a folder.
        max_bytes: limit of one file, uncompressed; None for `MAX_BYTES`.
    """
    is_folder = Path(path).is_dir()
    files = _traces_in(path) if is_folder else [Path(path)]
    traces: list[Trace] = []
    problems: list[str] = []
    for file in files:
        try:
            traces.append(read_trace(file, MAX_BYTES if max_bytes is None else max_bytes))
        except TraceError as error:
            if not (is_folder and isinstance(error, NoTraceError)):
                problems.append(str(error))
    if not traces and not problems:
        problems.append(f"there is no trace in {path}: no file that ends in .json or .json.gz is one")
    for problem in problems:
        complain(problem)
    if not traces:
        return 1
    traces.sort(key=lambda each: (each.rank is None, each.rank or 0, each.file))
    if as_json:
        content = msgspec.json.encode(traces if is_folder else traces[0])
        written = show_json(msgspec.json.format(content, indent=2).decode() + "\n")
    else:
        written = show(_several(traces))
    return 1 if problems else written


def _traces_in(folder: str) -> list[Path]:
    paths = (Path(found, name) for found, _, names in os.walk(folder) for name in names if name.endswith(_ENDINGS))
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


# -- text ----------------------------------------------------------------------------------------------------------


def _several(traces: list[Trace]) -> str:
    if len(traces) == 1:
        return _render(traces[0])
    headings = ["rank", "file", "steps", "step", "GPU busy", "idle", "computing", "overlap", "DataLoader"]
    overview = _table(headings, (
        ["-" if trace.rank is None else str(trace.rank), shortened(trace.file.rpartition("/")[2], _NARROW_NAME),
         str(len(trace.steps)), duration(trace.average.seconds), percent(trace.gpu.utilization_ratio),
         percent(trace.temporal.idle_ratio), percent(trace.temporal.compute_ratio), percent(trace.overlap_ratio),
         percent(trace.average.categories["DataLoader"])]
        for trace in traces
    ))  # fmt: skip
    if len(traces) > _MAX_SHOWN:
        return _joined(overview) + "\nName one of the files to see all of it, or use --json.\n"
    return "\n\n".join([_joined(overview), *map(_render, traces)])


def _render(trace: Trace) -> str:
    """The text: the parts of the step, its waits and the advice; then tables of operators, kernels and copies."""
    parts = [_head(trace), _categories(trace), _device(trace), _advice(trace), trace.notes]
    return _joined(*parts, *_tables(trace))


def _joined(*parts: list[str]) -> str:
    return "\n\n".join("\n".join(map(one_line, lines)) for lines in parts if lines) + "\n"


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
    line = (
        f"streams  idle {percent(temporal.idle_ratio)}, computing {percent(temporal.compute_ratio)}, other work "
        f"{percent(temporal.non_compute_ratio)}"
    )
    if trace.overlap_ratio is not None:
        line += f"; computation runs beside {percent(trace.overlap_ratio)} of the communication"
    gpu_line = (
        f"GPU      busy {percent(gpu.utilization_ratio)}, SM efficiency {percent(gpu.sm_efficiency_ratio)}, "
        f"occupancy {percent(gpu.occupancy_ratio)}, tensor cores {percent(gpu.tensor_core_ratio)} of the kernel time"
    )
    streams = [
        f"         stream {each.stream} idles for the host {percent(each.host_wait_ratio)}, between kernels "
        f"{percent(each.kernel_wait_ratio)}, else {percent(each.other_ratio)}"
        for each in trace.idle[:_MAX_STREAMS]
        if each.host_wait_ratio is not None
    ]
    return [gpu_line, line, *streams]


def _advice(trace: Trace) -> list[str]:
    if not trace.advice:
        return ["Nothing in this trace asks for a change."]
    lines = ["What to change, and the share of the step it could win back:"]
    for number, each in enumerate(trace.advice):
        lines.append(f"  {percent(each.share_ratio):>6}  {each.action}")
        if number < _MAX_ADVICE:
            lines += wrap(each.because, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return lines


def _tables(trace: Trace) -> Iterator[list[str]]:
    # fmt: off
    if len(trace.steps) > 1:
        more = len(trace.steps) - _MAX_ROWS
        steps = [
            [str(each.step), *map(duration, (each.seconds, *each.categories.values()))]
            for each in trace.steps[:_MAX_ROWS]
        ]
        yield [
            *_table(["step", "", *trace.average.categories], steps),
            *([f"{more} more: --json has all"] if more > 0 else []),
        ]
    yield _table(["operator", "calls", "device", "", "host", "tensor cores"], (
        [shortened(each.name, _NAME), str(each.calls),
         duration(each.device_seconds) if each.device_ratio is not None else "-", percent(each.device_ratio),
         duration(each.host_seconds), percent(each.tensor_core_ratio) if each.tensor_core_eligible else "-"]
        for each in trace.operators[:_MAX_ROWS]
    ))
    yield _table(["kernel", "calls", "device", "", "mean", "tensor cores", "occupancy"], (
        [shortened(each.name, _NAME), str(each.calls), duration(each.device_seconds), percent(each.device_ratio),
         duration(each.mean_seconds), "yes" if each.tensor_core else "no", percent(each.occupancy_ratio)]
        for each in trace.kernels[:_MAX_ROWS]
    ))
    yield _table(["copy", "host memory", "calls", "time", "size", "speed"], (
        [each.kind, "-" if each.pageable is None else "pageable" if each.pageable else "pinned", str(each.calls),
         duration(each.seconds), "-" if each.bytes is None else byte_size(each.bytes),
         "-" if each.bandwidth_bytes_per_second is None else f"{each.bandwidth_bytes_per_second / 1e9:.1f} GB/s"]
        for each in trace.memcpy
    ))
    yield _table(["waits for the GPU", "calls", "time", "in", "from"], (
        [each.name, str(each.calls), duration(each.seconds), shortened(each.operator or "-", _NARROW_NAME),
         shortened(each.call_site or each.within or "-", _NAME)]
        for each in trace.synchronizations[:_MAX_ROWS]
    ))
    yield _table(["GPU waits for launches in step", "at", "for", "idle", "launches"], (
        [str(each.step), duration(each.offset_seconds), duration(each.seconds), percent(each.idle_ratio),
         str(each.launches)]
        for each in trace.launch_bound[:_MAX_ROWS]
    ))
    # fmt: on


def _table(headings: list[str], rows: Iterable[list[str]]) -> list[str]:
    cells = list(rows)
    return table(headings, cells, names_first=True) if cells else []
