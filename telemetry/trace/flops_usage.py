"""Model FLOPs utilization (MFU): the floating-point operations of a step, as a share of what the device could do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.trace import peak_flops
from telemetry.trace.event_names import multiplies_matrices, uses_cuda_cores, uses_tensor_cores
from telemetry.trace.intervals import SECONDS_PER_US
from telemetry.trace.trace_events import KERNEL, NOTHING
from telemetry.util.text import percent, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.trace.matrix_operators import CountedFlops
    from telemetry.trace.step_breakdown import TraceSteps
    from telemetry.trace.trace_events import TraceEvents

_MAX_NAMES: Final = 20
_MAX_SHOWN: Final = 3
_NAME: Final = 60
_PREFIXES: Final = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))

_NO_SHAPES: Final = "the trace has no shapes of inputs (record_shapes; in snapshots the setting snapshot_shapes)"


@dataclass(frozen=True, slots=True)
class FlopsUsage:
    """Floating-point operations of the average step. What is not known is None, and ``absent`` says why.

    Attributes:
        per_step: of the operators that could be counted, forward and backward.
        by_format: the same by number format: ``float32``, ``tf32``, ``float16``, ``bfloat16``, ``float64``, ``float8``.
        not_counted: operators, and kernels that no operator launched, that compute too and could not be counted. With
            any, the figures are at least so high.
        peak_per_second: dense peak of the device for the formats that occur, FLOP per second.
        mfu_ratio: the time that the counted operations take at the peak, as a share of the step.
        absent: why there is no ``per_step`` or no ``mfu_ratio``.
    """

    per_step: float | None
    by_format: dict[str, float]
    not_counted: tuple[str, ...]
    peak_per_second: dict[str, float] | None
    mfu_ratio: float | None
    absent: str | None


def measure(events: TraceEvents, steps: TraceSteps, owner: Sequence[int], device: str | None) -> FlopsUsage:
    """Count the operators of the steps.

    Args:
        events: of the trace.
        steps: its steps.
        owner: for each device event, the number of the name of the operator that launched it; -1 without one.
        device: name of the GPU that most work ran on.
    """
    counted = events.matrices.count(events.names, steps.host[0].start, steps.host[-1].end)
    missing = tuple(_missing(events, counted, owner))
    if not counted.flops:
        why = "no operator in it multiplies matrices, convolves or attends"
        if not events.matrices.shapes and (missing or counted.uncounted):
            why = _NO_SHAPES
        elif missing:
            why = f"no operator could be counted: {_listed(missing)}"
        return FlopsUsage(None, {}, missing, None, None, why)
    number = len(steps.host)
    formats, unclear = _by_format(events, counted, owner, device)
    by_format = {name: flops / number for name, flops in formats.items()}
    peaks, absent = _peaks(events, by_format, device)
    if unclear and peaks is not None:
        peaks, absent = None, f"the kernels' names do not tell whether {_listed(unclear)} used tensor cores (TF32)"
    seconds = steps.length * SECONDS_PER_US / number
    ratio = None if peaks is None else sum(flops / peaks[name] for name, flops in by_format.items()) / seconds
    if ratio is not None and ratio > 1:
        ratio, absent = None, "at the peak the counted operations would take longer than the step did"
    return FlopsUsage(sum(by_format.values()), by_format, missing, peaks, ratio, absent)


def _missing(events: TraceEvents, counted: CountedFlops, owner: Sequence[int]) -> list[str]:
    """Operators that could not be counted, and kernels of matrix products that no counted operator has launched."""
    names = events.names
    found = dict.fromkeys(sorted(counted.uncounted, key=lambda name: -counted.uncounted[name]))
    kernels: dict[str, None] = {}
    matrix = [multiplies_matrices(names[number]) for number in range(len(names))]
    # torch's own operators launch nothing beside what they call; another library's may.
    passing = {name for name in counted.around if names[name].startswith("aten::")}
    known = counted.inside.keys() | found.keys() | passing
    for kind, name, launched_by in zip(events.work.kind, events.work.name, owner, strict=True):
        if kind == KERNEL and matrix[name] and launched_by not in known:
            text = f"kernel {names[name]}" if launched_by == NOTHING else names[launched_by]
            kernels[shortened(text, _NAME)] = None
    every = dict.fromkeys(shortened(names[number], _NAME) for number in found) | kernels
    return list(every)[:_MAX_NAMES]


def _by_format(
    events: TraceEvents, counted: CountedFlops, owner: Sequence[int], device: str | None
) -> tuple[dict[str, float], list[str]]:
    """FLOPs by number format, and the operators on float32 of which it is not known whether they ran as TF32."""
    has_tf32 = peak_flops.TF32 in peak_flops.peaks_of(device or "")
    on_tensor_cores, on_cuda_cores, on_unknown = _cores(events, counted, owner)
    found: dict[str, float] = {}
    unclear = []
    for (name, kind), flops in counted.flops.items():
        number_format = peak_flops.FORMATS.get(kind, kind or "an unknown type")
        if number_format == peak_flops.FLOAT32 and has_tf32:
            if name in on_tensor_cores:
                number_format = peak_flops.TF32
            elif name in on_unknown or name not in on_cuda_cores:
                unclear.append(shortened(events.names[name], _NAME))
        found[number_format] = found.get(number_format, 0.0) + flops
    return found, unclear


def _cores(events: TraceEvents, counted: CountedFlops, owner: Sequence[int]) -> tuple[set[int], set[int], set[int]]:
    """The counted operators some of whose kernels run on tensor cores, on CUDA cores, on cores that no name tells."""
    names = events.names
    found: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    place = [_place(names[number]) for number in range(len(names))]
    for kind, name, launched_by in zip(events.work.kind, events.work.name, owner, strict=True):
        operator = counted.inside.get(launched_by)
        if kind == KERNEL and operator is not None and place[name] is not None:
            found[place[name] or 0].add(operator)
    return found


def _place(kernel: str) -> int | None:
    if uses_tensor_cores(kernel):
        return 0
    if not multiplies_matrices(kernel):
        return None
    return 1 if uses_cuda_cores(kernel) else 2


def _peaks(
    events: TraceEvents, by_format: Mapping[str, float], device: str | None
) -> tuple[dict[str, float] | None, str | None]:
    """The device's peak for each format; or None, and why."""
    devices = {number for number, kind in zip(events.work.device, events.work.kind, strict=True) if kind == KERNEL}
    if not devices:
        return None, "no kernel ran on a GPU"
    if len(devices) > 1:
        return None, "kernels ran on several GPUs, and the operators do not tell on which"
    if device is None:
        return None, "the trace does not name the GPU"
    known = peak_flops.peaks_of(device)
    if not known:
        return None, f"the peak of {device} is not in the table"
    lacking = [name for name in by_format if name not in known]
    if lacking:
        return None, f"the table has no peak of {device} for {_listed(lacking)}"
    return {name: known[name] for name in by_format}, None


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def amount(flops: float) -> str:
    """Floating-point operations as ``1.23 TFLOP``."""
    size, unit = next((each for each in _PREFIXES if flops >= each[0]), (1.0, "FLOP"))
    return f"{flops / size:.3g} {unit}" if flops < 1e18 else f"{flops / size:.0f} {unit}"


def sentence(usage: FlopsUsage) -> str:
    """What is known, in words."""
    if usage.per_step is None:
        return f"not known: {usage.absent}"
    least = f" (at least: {_listed(usage.not_counted)} not counted)" if usage.not_counted else ""
    text = f"{amount(usage.per_step)} a step{least}"
    if usage.mfu_ratio is None or usage.peak_per_second is None:
        return f"{text}; no MFU: {usage.absent}"
    peaks = ", ".join(f"{name} {peak / 1e12:g} TFLOP/s" for name, peak in usage.peak_per_second.items())
    return f"{text}; MFU {percent(usage.mfu_ratio)} of the dense peak ({peaks})"
