"""A trace as a person reads it: one screen, then the long tables."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Final

from telemetry.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.snapshot.trace import Trace

_WIDTH: Final = 110
_INDENT: Final = 10 * " "
_BAR: Final = 40
_MOST_ADVICE: Final = 3
_MOST_STREAMS: Final = 4
_MOST_ROWS: Final = 10
_MOST_STEPS: Final = 12
_NAME: Final = 72
_NARROW_NAME: Final = 40


def render(trace: Trace) -> str:
    """What the step is made of, where it waits and what to change; then steps, operators, kernels, copies and calls."""
    parts = [_head(trace), _categories(trace), _device(trace), _advice(trace), list(trace.notes)]
    parts += [_steps(trace), _operators(trace), _kernels(trace), _copies(trace), _waits(trace), _stretches(trace)]
    return "\n\n".join("\n".join(one_line(line) for line in lines) for lines in parts if lines) + "\n"


def overview(traces: Sequence[Trace]) -> str:
    """Several traces side by side: a line each."""
    headings = ["rank", "file", "steps", "step", "GPU busy", "idle", "computing", "overlap", "DataLoader"]
    rows = [
        [
            "-" if trace.rank is None else str(trace.rank),
            _short(trace.file.rpartition("/")[2], _NARROW_NAME),
            str(len(trace.steps)),
            _time(trace.average.seconds),
            _percent(trace.gpu.utilization_ratio),
            _percent(trace.temporal.idle_ratio),
            _percent(trace.temporal.compute_ratio),
            _percent(trace.overlap_ratio),
            _percent(trace.average.categories["DataLoader"]),
        ]
        for trace in traces
    ]
    return "\n".join(one_line(line) for line in _table(headings, rows)) + "\n"


def _head(trace: Trace) -> list[str]:
    rank = "" if trace.rank is None else f"rank {trace.rank}"
    if rank and trace.world_size is not None:
        rank += f" of {trace.world_size}"
    device = trace.device or ("" if trace.gpu.utilization_ratio is None else "a GPU that the trace does not name")
    if trace.device and trace.device_memory_bytes:
        device += f", {_size(trace.device_memory_bytes)}"
        if trace.peak_memory_bytes:
            device += f" ({_size(trace.peak_memory_bytes)} reserved at most)"
    count, mean = len(trace.steps), _time(trace.average.seconds)
    steps = f"{count} steps of {mean} on average" if count > 1 else f"1 step of {mean}"
    return [trace.file, ", ".join(part for part in (rank, device, steps) if part)]


def _categories(trace: Trace) -> list[str]:
    seconds = trace.average.seconds
    return [
        f"  {name:<14} {100 * ratio:5.1f} %  {_time(ratio * seconds):>9}  {'#' * round(_BAR * ratio)}".rstrip()
        for name, ratio in trace.average.categories.items()
    ]


def _device(trace: Trace) -> list[str]:
    gpu, temporal = trace.gpu, trace.temporal
    if gpu.utilization_ratio is None and temporal.idle_ratio is None:
        return ["No kernel ran on a GPU."]
    gpu_line = (
        f"GPU      busy {_percent(gpu.utilization_ratio)}, SM efficiency {_percent(gpu.sm_efficiency_ratio)}, "
        f"occupancy {_percent(gpu.occupancy_ratio)}, tensor cores {_percent(gpu.tensor_core_ratio)} of the kernel time"
    )
    line = (
        f"streams  idle {_percent(temporal.idle_ratio)}, computing {_percent(temporal.compute_ratio)}, other work "
        f"{_percent(temporal.non_compute_ratio)}"
    )
    if trace.overlap_ratio is not None:
        line += f"; computation runs beside {_percent(trace.overlap_ratio)} of the communication"
    lines = [gpu_line, line]
    lines.extend(
        f"         stream {each.stream} idles for the host {_percent(each.host_wait_ratio)}, between kernels "
        f"{_percent(each.kernel_wait_ratio)}, else {_percent(each.other_ratio)}"
        for each in trace.idle[:_MOST_STREAMS]
        if each.host_wait_ratio is not None
    )
    return lines


def _advice(trace: Trace) -> list[str]:
    if not trace.advice:
        return ["Nothing in this trace asks for a change."]
    lines = ["What to change, and the share of the step it could win back:"]
    for each in trace.advice[:_MOST_ADVICE]:
        lines.append(f"  {_percent(each.share_ratio):>6}  {each.action}")
        lines += wrap(each.because, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    rest = trace.advice[_MOST_ADVICE:]
    return lines + [f"  {_percent(each.share_ratio):>6}  {each.action}" for each in rest]


def _steps(trace: Trace) -> list[str]:
    if len(trace.steps) < 2:
        return []
    headings = ["step", "", *trace.average.categories]
    rows = [
        [str(step.step), _time(step.seconds), *map(_time, step.categories.values())]
        for step in trace.steps[:_MOST_STEPS]
    ]
    more = len(trace.steps) - _MOST_STEPS
    return _table(headings, rows) + ([f"{more} more: --json has all"] if more > 0 else [])


def _operators(trace: Trace) -> list[str]:
    headings = ["operator", "calls", "device", "", "host", "tensor cores"]
    rows = [
        [
            _short(each.name, _NAME),
            str(each.calls),
            _time(each.device_seconds) if each.device_ratio is not None else "-",
            _percent(each.device_ratio),
            _time(each.host_seconds),
            _percent(each.tensor_core_ratio) if each.tensor_core_eligible else "-",
        ]
        for each in trace.operators[:_MOST_ROWS]
    ]
    return _table(headings, rows) if rows else []


def _kernels(trace: Trace) -> list[str]:
    headings = ["kernel", "calls", "device", "", "mean", "tensor cores", "occupancy"]
    rows = [
        [
            _short(each.name, _NAME),
            str(each.calls),
            _time(each.device_seconds),
            _percent(each.device_ratio),
            _time(each.mean_seconds),
            "yes" if each.tensor_core else "no",
            _percent(each.occupancy_ratio),
        ]
        for each in trace.kernels[:_MOST_ROWS]
    ]
    return _table(headings, rows) if rows else []


def _copies(trace: Trace) -> list[str]:
    headings = ["copy", "host memory", "calls", "time", "size", "speed"]
    rows = [
        [
            each.kind,
            "-" if each.pageable is None else "pageable" if each.pageable else "pinned",
            str(each.calls),
            _time(each.seconds),
            "-" if each.bytes is None else _size(each.bytes),
            "-" if each.bandwidth_bytes_per_second is None else f"{each.bandwidth_bytes_per_second / 1e9:.1f} GB/s",
        ]
        for each in trace.memcpy
    ]
    return _table(headings, rows) if rows else []


def _waits(trace: Trace) -> list[str]:
    headings = ["waits for the GPU", "calls", "time", "in", "from"]
    rows = [
        [
            each.name,
            str(each.calls),
            _time(each.seconds),
            _short(each.operator or "-", _NARROW_NAME),
            _short(each.call_site or each.within or "-", _NAME),
        ]
        for each in trace.synchronizations[:_MOST_ROWS]
    ]
    return _table(headings, rows) if rows else []


def _stretches(trace: Trace) -> list[str]:
    headings = ["GPU waits for launches in step", "at", "for", "idle", "launches"]
    rows = [
        [
            str(each.step),
            _time(each.offset_seconds),
            _time(each.seconds),
            _percent(each.idle_ratio),
            str(each.launches),
        ]
        for each in trace.launch_bound[:_MOST_ROWS]
    ]
    return _table(headings, rows) if rows else []


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [_line(row, widths) for row in (headings, *rows)]


def _line(cells: Iterable[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if abs(seconds) < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    return f"{1e3 * seconds:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
