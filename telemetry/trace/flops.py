"""Model FLOPs utilization (MFU): the floating-point operations of a step, as a share of what the device could do.

A multiplication and an addition are two operations. Only operations that the mathematics needs count: not what an
attention computes again in its backward pass, nor pairs that a causal mask leaves out. Operators call one another. The
innermost countable one of nested operators counts, because it has the types that really ran.
"""

from __future__ import annotations

import re
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final

from telemetry.trace.events import KERNEL
from telemetry.trace.records import FlopsUsage
from telemetry.trace.steps import SECONDS_PER_US, holds, union
from telemetry.util.text import listed, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.trace.events import Signature, TraceEvents
    from telemetry.trace.steps import TimeRange, TraceSteps

FORMATS: Final = {
    "double": "float64", "float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8", "c10::Float8_e5m2": "float8",
}  # fmt: skip
"""The number format for the type of an input in a trace."""

PEAKS: Final[dict[str, tuple[float | None, ...]]] = {
    r"Tesla T4": (None, 8.1, None, 65, None, None),
    r"Tesla V100-PCIE-\d+GB": (7, 14, None, 112, None, None),
    r"Tesla V100S-PCIE-\d+GB": (8.2, 16.4, None, 130, None, None),
    r"Tesla V100-(SXM2|DGXS)-\d+GB": (7.8, 15.7, None, 125, None, None),
    r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe": (19.5, 19.5, 156, 312, 312, None),
    r"NVIDIA A10G": (None, 35, 35, 70, 70, None),
    r"NVIDIA L4": (None, 30.3, 60, 121, 121, 242.5),
    r"NVIDIA L40S": (None, 91.6, 183, 362.05, 362.05, 733),
    r"NVIDIA H100 80GB HBM3": (67, 67, 494.5, 989.5, 989.5, 1979),
    r"NVIDIA H100 PCIe": (51, 51, 378, 756.5, 756.5, 1513),
    r"NVIDIA H100 NVL": (60, 60, 417.5, 835.5, 835.5, 1670.5),
    r"NVIDIA H200": (67, 67, 494.5, 989.5, 989.5, 1979),
    r"NVIDIA H200 NVL": (60, 60, 417.5, 835.5, 835.5, 1670.5),
    r"NVIDIA B200": (37, 75, 1100, 2250, 2250, 4500),
}
"""Dense TFLOP per second for float64, float32, TF32, float16, bfloat16 and float8, by CUDA's name of the device."""

_MATRICES: Final = {
    "mm": 0, "bmm": 0, "_scaled_mm": 0, "matmul": 0, "linear": 0, "dot": 0, "mv": 0,
    "addmm": 1, "_addmm_activation": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1,
}  # fmt: skip
"""Operators that multiply matrices, with the place of their first matrix."""

ATTENTION: Final = {
    "flash_attention": (0, 4, 1), "flash_attention_backward": (1, 11, 2),
    "efficient_attention": (0, 6, 1), "efficient_attention_backward": (1, 11, 2),
    "cudnn_attention": (0, 6, 1), "cudnn_attention_backward": (1, 14, 2),
    "flash_attention_for_cpu": (0, 4, 1), "flash_attention_for_cpu_backward": (1, 7, 2),
}  # fmt: skip
"""Fused attention: places of the query and of ``is_causal``, and the work in multiples of the forward pass."""

_FLAG: Final = {"True": True, "False": False}
_NO_SHAPES: Final = "the trace has no shapes of inputs (record_shapes; in snapshots the setting snapshot_shapes)"


def peaks_of(device: str) -> dict[str, float]:
    """FLOP per second by number format; empty for a device that is not in the table, such as a part of one (MIG)."""
    double, single, tf32, *lower = next((row for name, row in PEAKS.items() if re.fullmatch(name, device)), (None,) * 6)
    figures = zip(
        ("float64", "float32", "float16", "bfloat16", "float8"), (double, tf32 or single, *lower), strict=True
    )
    return {name: peak * 1e12 for name, peak in figures if peak is not None}


def measure(events: TraceEvents, steps: TraceSteps, device: str | None) -> FlopsUsage:
    """Count the matrix operators of the steps. ``device``: name of the GPU with most work."""
    flops, missing = _count(events, steps)
    if not flops:
        why = "no operator in it multiplies matrices, convolves or attends"
        if missing:
            shapes = any(isinstance(each.shapes, list) for each in events.signatures)
            why = f"no operator could be counted: {listed(missing)}" if shapes else _NO_SHAPES
        return FlopsUsage(None, {}, missing, None, None, why)
    each = {name: whole / len(steps.host) for name, whole in flops.items()}
    known = peaks_of(device or "")
    gpus = {work.device for work in events.work if work.kind == KERNEL}
    reasons = (
        (not gpus, "no kernel ran on a GPU"),
        (len(gpus) > 1, "kernels ran on several GPUs, and the operators do not tell on which"),
        (device is None, "the trace does not name the GPU"),
        (not known, f"the peak of {device} is not in the table"),
        (
            each.keys() - known,
            f"the table has no peak of {device} for {listed(sorted(each.keys() - known))}",
        ),
    )
    absent = next((why for true, why in reasons if true), None)
    ratio = None
    if absent is None:
        ratio = sum(whole / known[name] for name, whole in flops.items()) / (steps.length * SECONDS_PER_US)
    if ratio is not None and ratio > 1:
        ratio, absent = None, "at the peak the counted operations would take longer than the step did"
    peaks = {name: known[name] for name in each} if absent is None else None
    return FlopsUsage(sum(each.values()), each, missing, peaks, ratio, absent)


def _count(events: TraceEvents, steps: TraceSteps) -> tuple[dict[str, float], tuple[str, ...]]:
    """The FLOPs by number format, and the names of the outermost operators that could not be counted."""
    first, last = steps.host[0].start, steps.host[-1].end
    calls = sorted(
        (each.thread, each.start, -each.start - each.took, each.name, each.external)
        for each in events.products
        if first <= each.start < last
    )
    per_call = [_flops(each) for each in events.signatures]
    counted: dict[int, list[TimeRange]] = {thread: [] for thread, *_ in calls}
    flops: dict[str, float] = {}
    unknown: list[tuple[int, float, float, int]] = []
    for thread, start, minus_end, name, signature in reversed(calls):
        spans, found = counted[thread], per_call[signature]
        if spans and spans[-1][0] < -minus_end:
            continue  # a counted call is inside
        if found is None:
            unknown.append((thread, start, -minus_end, name))
        else:
            spans.append((start, -minus_end))
            kind = events.signatures[signature].kind
            number_format = FORMATS.get(kind, kind or "an unknown type")
            flops[number_format] = flops.get(number_format, 0.0) + found
    inside = {thread: union(spans) for thread, spans in counted.items()}
    until: dict[int, float] = {}
    missing: dict[str, None] = {}
    for thread, start, end, name in reversed(unknown):
        if start >= until.get(thread, -inf) and not holds(inside[thread], start):
            until[thread] = end
            missing[shortened(events.names[name], 60)] = None
    return flops, tuple(missing)[:20]


def _flops(call: Signature) -> float | None:
    """The FLOPs of one call; None if its shapes and values, which come from a file, are not enough."""
    shapes, values = call.shapes, call.values
    name = call.name.removeprefix("aten::").removeprefix("_scaled_dot_product_")
    try:
        if any(type(size) is not list and (type(size) is not int or size < 0) for shape in shapes for size in shape):
            return None
        if name in _MATRICES:
            return _product(*shapes[_MATRICES[name] : _MATRICES[name] + 2], turned=name == "linear")
        if name in ATTENTION:
            return _attention(*ATTENTION[name], shapes, values)
        if name in {"convolution", "_convolution"}:
            batch, weight = shapes[:2]
            made = batch if _FLAG[values[6]] else _output(batch, weight, values[3:6])
            return float(2 * prod(made) * prod(weight[1:]))  # the weight is (out, in / groups, kernel ...)
        if name == "convolution_backward":
            gradient, batch, weight = shapes[:3]
            needed = [_FLAG[word.strip()] for word in values[10].strip("[]").split(",")]
            return float(2 * prod(batch if _FLAG[values[7]] else gradient) * prod(weight[1:]) * sum(needed[:2]))
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError):
        pass
    return None


def _product(one: Sequence[int], other: Sequence[int], *, turned: bool) -> float | None:
    """The FLOPs for two matrices, two batches of matrices, or a batch with one matrix or vector."""
    other = other[::-1] if turned else other
    inner, width = (other[-2], other[-1]) if len(other) > 1 else (other[0], 1)
    fits = one[-1] == inner and (len(other) < 3 or one[:-2] == other[:-2])
    return float(2 * prod(one) * width) if fits else None


def _output(batch: Sequence[int], weight: Sequence[int], values: Sequence[str]) -> list[int]:
    """The output's shape, from stride, padding and dilation: ``[1, 2]``, or one number for all places."""
    numbers = [[int(word) for word in text.strip("[]").split(",")] for text in values]
    stride, padding, dilation = (found * (len(weight) - 2) if len(found) == 1 else found for found in numbers)
    sides = zip(batch[2:], weight[2:], stride, padding, dilation, strict=True)
    return [batch[0], weight[0], *(max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1) for n, k, s, p, d in sides)]


def _attention(query: int, causal: int, times: int, shapes: Any, values: Any) -> float | None:
    """The FLOPs for query, key and value, each (batch, heads, length, width). The forward pass has two products."""
    q, k, v = shapes[query : query + 3]
    rows, columns = q[-2], k[-2]
    pairs = rows * columns
    if _FLAG[values[causal]]:
        square = min(rows, columns)
        pairs = square * (square + 1) // 2 + (rows - square) * columns
    return float(2 * times * prod(q[:-2]) * pairs * (q[-1] + v[-1])) if len(q) == len(k) == len(v) else None
