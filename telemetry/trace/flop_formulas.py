"""Floating-point operations of one call of an operator, from the shapes of its inputs.

A multiplication and an addition are two. What is counted is what the mathematics of the operator needs: an attention
that computes its scores again in the backward pass does not count them twice. With a causal mask only the pairs that it
leaves count. ``shapes`` and ``values`` are "Input Dims" and "Concrete Inputs" of a trace, one entry for each argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias

Formula: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], float | None]
"""From shapes and values; None if they do not tell. May raise `UNREADABLE` for a trace that is damaged."""

UNREADABLE: Final = (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, ZeroDivisionError)

_TRUE, _FALSE = "True", "False"


def _product(at: int, shapes: Sequence[Any], _values: Sequence[Any]) -> float | None:
    """Of two matrices, or of two batches of matrices; ``at`` is the first one's place."""
    one, other = shapes[at], shapes[at + 1]
    if len(one) != len(other) or one[-1] != other[-2] or one[:-2] != other[:-2]:
        return None
    return float(2 * prod(one) * other[-1])


def _vector_product(at: int, shapes: Sequence[Any], _values: Sequence[Any]) -> float | None:
    """Of a matrix or a vector with a vector."""
    one, other = shapes[at], shapes[at + 1]
    return float(2 * prod(one)) if len(other) == 1 and one[-1] == other[0] else None


def _matmul(shapes: Sequence[Any], values: Sequence[Any]) -> float | None:
    """Of batches of matrices, or of a batch with one matrix."""
    one, other = shapes[0], shapes[1]
    if len(other) == 2 < len(one):
        return float(2 * prod(one) * other[1]) if one[-1] == other[0] else None
    return _product(0, shapes, values)


def _linear(shapes: Sequence[Any], _values: Sequence[Any]) -> float | None:
    batch, weight = shapes[0], shapes[1]
    return float(2 * prod(batch) * weight[0]) if len(weight) == 2 and batch[-1] == weight[1] else None


def convolution(output: Sequence[int], weight: Sequence[int]) -> float:
    """Of one convolution, or of one of its two gradients. The weight is (out, in / groups, kernel ...).

    Args:
        output: shape of what it makes. Of a transposed convolution: of its input.
        weight: shape of its weight.
    """
    return 2.0 * prod(output) * prod(weight[1:])


def _forward_convolution(shapes: Sequence[Any], values: Sequence[Any]) -> float | None:
    """Of input, weight, bias, stride, padding, dilation, transposed: the arguments of ``aten::convolution``."""
    batch, weight = shapes[0], shapes[1]
    if len(values) < 7 or len(batch) != len(weight):
        return None
    if values[6] == _TRUE:
        return convolution(batch, weight)
    if values[6] != _FALSE:
        return None
    places = len(weight) - 2
    stride, padding, dilation = (_numbers(values[at], places) for at in (3, 4, 5))
    sides = zip(batch[2:], weight[2:], stride, padding, dilation, strict=True)
    made = [(side + 2 * pad - apart * (kernel - 1) - 1) // step + 1 for side, kernel, step, pad, apart in sides]
    return convolution([batch[0], weight[0], *made], weight) if min(made) > 0 else None


def _backward_convolution(shapes: Sequence[Any], values: Sequence[Any]) -> float | None:
    """Of the gradient of the output, input, weight, ...: as many gradients as its mask asks for, without the bias's."""
    gradient, batch, weight = shapes[:3]
    if len(values) < 11 or values[7] not in {_TRUE, _FALSE}:
        return None
    wanted = [word.strip() == _TRUE for word in values[10].strip("[]").split(",")]
    return (
        sum(wanted[:2]) * convolution(batch if values[7] == _TRUE else gradient, weight) if len(wanted) == 3 else None
    )


def _attention(query: int, causal: int, times: int, shapes: Sequence[Any], values: Sequence[Any]) -> float | None:
    """Of query, key and value, each (batch, heads, length, width).

    Args:
        query: place of the query.
        causal: place of the flag of a causal mask.
        times: 1 for forward: two products. 2 for backward: the four that the gradients need.
        shapes: as in the trace.
        values: as in the trace.
    """
    q, k, v = shapes[query : query + 3]
    if len(q) < 3 or not len(q) == len(k) == len(v) or values[causal] not in {_TRUE, _FALSE}:
        return None
    rows, columns = q[-2], k[-2]
    pairs = rows * columns
    if values[causal] == _TRUE:
        square = min(rows, columns)
        pairs = square * (square + 1) // 2 + (rows - square) * columns
    return float(2 * times * prod(q[:-2]) * pairs * (q[-1] + v[-1]))


def _numbers(text: str, count: int) -> list[int]:
    """The numbers of ``[1, 2]``; one number stands for all."""
    found = [int(word) for word in text.strip("[]").split(",")]
    return found * count if len(found) == 1 else found


_SDPA: Final = "aten::_scaled_dot_product_"

ATTENTION: Final = {
    f"{_SDPA}flash_attention": (0, 4, 1),
    f"{_SDPA}flash_attention_backward": (1, 11, 2),
    f"{_SDPA}efficient_attention": (0, 6, 1),
    f"{_SDPA}efficient_attention_backward": (1, 11, 2),
    f"{_SDPA}cudnn_attention": (0, 6, 1),
    f"{_SDPA}cudnn_attention_backward": (1, 14, 2),
    f"{_SDPA}flash_attention_for_cpu": (0, 4, 1),
    f"{_SDPA}flash_attention_for_cpu_backward": (1, 7, 2),
}
"""Fused attention: place of the query, place of ``is_causal``, and how many times the products of the forward pass."""

FORMULAS: Final[dict[str, Formula]] = {
    "aten::mm": partial(_product, 0),
    "aten::bmm": partial(_product, 0),
    "aten::_scaled_mm": partial(_product, 0),
    "aten::addmm": partial(_product, 1),
    "aten::_addmm_activation": partial(_product, 1),
    "aten::baddbmm": partial(_product, 1),
    "aten::addbmm": partial(_product, 1),
    "aten::dot": partial(_vector_product, 0),
    "aten::mv": partial(_vector_product, 0),
    "aten::addmv": partial(_vector_product, 1),
    "aten::matmul": _matmul,
    "aten::linear": _linear,
    "aten::convolution": _forward_convolution,
    "aten::_convolution": _forward_convolution,
    "aten::convolution_backward": _backward_convolution,
    **{name: partial(_attention, *places) for name, places in ATTENTION.items()},
}
