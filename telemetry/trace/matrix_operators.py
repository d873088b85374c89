"""Operators that multiply matrices, convolve or attend, and the floating-point operations (FLOPs) of their calls.

Operators call one another: ``aten::linear`` calls ``aten::addmm``, and under autocast it first calls itself with other
types. Of nested ones the innermost that can be counted is counted, because it has the types of what really ran.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Final

from telemetry.trace.flop_formulas import FORMULAS, UNREADABLE, convolution

if TYPE_CHECKING:
    from telemetry.trace.event_names import EventNames

_NONE: Final = -1
_FORWARD: Final = frozenset({"aten::convolution", "aten::_convolution"})

# torch before 1.11 has no values of arguments in a trace, so a convolution's stride is not known there. Its backward
# pass has the shape of its output: that of the gradient. It calls one operator for each gradient that is needed.
_OLD_BACKWARD: Final = "aten::cudnn_convolution_backward"
_OLD_GRADIENTS: Final = frozenset({f"{_OLD_BACKWARD}_input", f"{_OLD_BACKWARD}_weight"})


@dataclass(slots=True)
class CountedFlops:
    """What was counted in a span of time.

    Attributes:
        flops: by operator and type of its inputs, as the trace spells it.
        inside: names of matrix operators that are counted or ran inside a counted one, with that one's name.
        around: names of those that had a counted one inside.
        uncounted: calls that could not be counted, by name of the operator.
    """

    flops: dict[tuple[int, str], float] = field(default_factory=dict)
    inside: dict[int, int] = field(default_factory=dict)
    around: set[int] = field(default_factory=set)
    uncounted: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Node:
    """A call during the sweep.

    Attributes:
        row: its row. ``end``: microseconds.
        counted: whether it, or a call inside it, is counted.
        gradients: calls of `_OLD_GRADIENTS` directly inside it.
        within: names of the calls inside it, and its own, of which none is counted.
        missing: the outermost of these.
    """

    row: int
    end: float
    counted: bool = False
    gradients: int = 0
    within: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


class MatrixOperators:
    """Their calls in one trace.

    Attributes:
        shapes: whether any of them has the shapes of its inputs.
    """

    def __init__(self) -> None:
        self.shapes = False
        self._start, self._end, self._flops = array("d"), array("d"), array("d")
        self._name, self._thread, self._type, self._key = array("i"), array("i"), array("i"), array("i")
        self._types: list[str] = []
        self._type_numbers: dict[str, int] = {}
        self._weights: list[tuple[int, ...]] = []
        self._keys: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._outputs: dict[int, set[tuple[int, ...]]] = {}

    def add(self, event: dict[str, Any], name: int, thread: int) -> None:
        """Keep one call, given its event and the numbers of its name and thread."""
        args, start = event.get("args") or {}, event["ts"]
        shapes = args.get("Input Dims")
        if shapes is None:
            shapes = args.get("Input dims")
        flops, key = nan, _NONE
        if isinstance(shapes, list):
            self.shapes = True
            try:
                flops, key = self._counted(event["name"], _checked(shapes), args.get("Concrete Inputs") or ())
            except UNREADABLE:
                flops, key = nan, _NONE
        self._start.append(start)
        self._end.append(start + event["dur"])
        self._flops.append(flops)
        self._name.append(name)
        self._thread.append(thread)
        self._type.append(self._type_number(_first_type(args.get("Input type"))))
        self._key.append(key)

    def _counted(self, name: str, shapes: list[Any], values: Any) -> tuple[float, int]:
        """FLOPs of one call; if only the backward pass can tell, the number of its shapes."""
        if name == _OLD_BACKWARD:
            batch, output, weight = shapes[:3]
            key = self._shapes_number(batch, weight)
            self._outputs.setdefault(key, set()).add(tuple(output))
            return convolution(output, weight), _NONE
        if name in _FORWARD and not values:
            return nan, self._shapes_number(shapes[0], shapes[1])
        formula = FORMULAS.get(name)
        found = None if formula is None else formula(shapes, values)
        return (nan if found is None else float(found)), _NONE

    def _shapes_number(self, batch: list[int], weight: list[int]) -> int:
        key = tuple(batch), tuple(weight)
        number = self._keys.setdefault(key, len(self._keys))
        if number == len(self._weights):
            self._weights.append(key[1])
        return number

    def _type_number(self, kind: str) -> int:
        number = self._type_numbers.setdefault(kind, len(self._types))
        if number == len(self._types):
            self._types.append(kind)
        return number

    def count(self, names: EventNames, first: float, last: float) -> CountedFlops:
        """The FLOPs of the calls that begin from ``first`` on and before ``last``, microseconds."""
        found = CountedFlops()
        chosen = [row for row, start in enumerate(self._start) if first <= start < last]
        chosen.sort(key=lambda row: (self._thread[row], self._start[row], -self._end[row]))
        stack: list[_Node] = []
        for row in chosen:
            while stack and not self._inside(row, stack[-1]):
                self._leave(stack, names, found)
            stack.append(_Node(row, self._end[row]))
        while stack:
            self._leave(stack, names, found)
        return found

    def _inside(self, row: int, node: _Node) -> bool:
        """Whether a call that does not begin before another is inside it. At its end: if it takes no time itself."""
        if self._thread[row] != self._thread[node.row]:
            return False
        return self._start[row] < node.end or self._start[row] == node.end == self._end[row]

    def _leave(self, stack: list[_Node], names: EventNames, found: CountedFlops) -> None:
        """The innermost call ends: count it, unless something inside it is counted."""
        node = stack.pop()
        name = self._name[node.row]
        if not node.counted:
            flops = self._flops_of(node, names[name])
            if flops is None:
                node.within.append(name)
                node.missing = [name]
            else:
                key = name, self._types[self._type[node.row]]
                found.flops[key] = found.flops.get(key, 0.0) + flops
                found.inside.update(dict.fromkeys((name, *node.within), name))
                node.counted, node.within, node.missing = True, [], []
        else:
            found.around.add(name)
        if stack:
            around = stack[-1]
            around.counted |= node.counted
            around.gradients += names[name] in _OLD_GRADIENTS
            around.within += node.within
            around.missing += node.missing
        else:
            for missing in node.missing:
                found.uncounted[missing] = found.uncounted.get(missing, 0) + 1

    def _flops_of(self, node: _Node, name: str) -> float | None:
        flops, key = self._flops[node.row], self._key[node.row]
        if key != _NONE:
            outputs = self._outputs.get(key, set())
            return convolution(next(iter(outputs)), self._weights[key]) if len(outputs) == 1 else None
        if name == _OLD_BACKWARD:
            flops = flops * node.gradients if node.gradients else nan
        return None if isnan(flops) else flops


def _checked(shapes: list[Any]) -> list[Any]:
    """The same shapes. Those of tensors are lists of whole numbers; others are left alone, no formula reads them.

    Raises:
        ValueError: one is negative, or no number.
    """
    for shape in shapes:
        for size in shape:
            if type(size) is int and size < 0:
                raise ValueError
            if type(size) is not int and type(size) is not list:
                raise ValueError
    return shapes


def _first_type(types: Any) -> str:
    """The type of the first input; text, whatever stands there."""
    return types[0][:100] if isinstance(types, list) and types and isinstance(types[0], str) else ""
