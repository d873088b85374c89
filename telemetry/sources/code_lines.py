"""What the code of a function of the user's tells about its lines. It never changes, and no source is read."""

from __future__ import annotations

import dis
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

_ATTRIBUTES: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NO_NAMES: Final = _ATTRIBUTES | {"LOAD_CONST"}
_GRADIENTS_OFF: Final = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


class EvaluationLines(NamedTuple):
    """The lines of a function from ``eval()`` on, up to ``train()`` or its end.

    ``first``, ``last``: line numbers. ``gradients_off``: whether they switch gradients off themselves.
    """

    first: int
    last: int
    gradients_off: bool


def evaluation_lines(code: CodeType) -> list[EvaluationLines]:
    """The lines of a function that evaluate: from each call of ``eval()``, unless a backward pass follows."""
    calls: dict[str, set[int]] = defaultdict(set)
    found, end = [], 0
    for line, operation, names in _by_line(code):
        end = max(end, line)
        if operation in _ATTRIBUTES:
            for name in names:
                calls[name].add(line)
    for first in sorted(calls["eval"]):
        last = min((line for line in calls["train"] if line > first), default=end)
        inside = {name for name, lines in calls.items() if any(first <= line <= last for line in lines)}
        if "backward" not in inside:
            found.append(EvaluationLines(first, last, bool(inside & _GRADIENTS_OFF)))
    return found


def draws_ahead(code: CodeType, line: int, until: int) -> bool:
    """Whether what a line assigns is not used up to a later line, as a batch that is drawn for the next step."""
    stored: set[str] = set()
    used: set[str] = set()
    for at, operation, names in _by_line(code):
        if at == line and "STORE_" in operation:
            stored.update(names)
        elif line < at <= until and "LOAD_" in operation and operation not in _NO_NAMES:
            used.update(names)
    return bool(stored) and not stored & used


def _by_line(code: CodeType) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Line, operation and names of each instruction with a line."""
    starts = sorted((offset, line) for offset, line in dis.findlinestarts(code) if line is not None)
    offsets = [offset for offset, _ in starts]
    for each in dis.get_instructions(code):
        at = bisect_right(offsets, each.offset) - 1
        if at >= 0 and each.argval is not None:
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            yield starts[at][1], each.opname, tuple(map(str, names))
