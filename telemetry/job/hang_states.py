"""The states of many ranks as JSON, those that do the same together: of ten thousand ranks that wait, a few rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.hang_records import Collective, HangState
from telemetry.core.rank_ranges import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_ROWS: Final = 256
"""In one file. Where ranks do more different things, those that many do are left out first."""

_MAX_RANKS: Final = 1 << 17
"""Of a job. A file that tells of more is damaged: it is not to fill the memory."""

_NUMBERS: Final = ("seconds", "steps")
_FIELDS: Final = frozenset(field.name for field in fields(HangState)) - {"rank", "node"}


def to_rows(states: Iterable[HangState]) -> list[dict[str, Any]]:
    """States as JSON values. Of ranks that do the same, the longest time stands for all."""
    groups: dict[HangState, list[HangState]] = defaultdict(list)
    for state in states:
        groups[replace(state, rank=0, node="", seconds=0.0)].append(state)
    rows = sorted(groups.values(), key=lambda group: (group[0].waits, len(group)))[:_MAX_ROWS]
    return [_row(group) for group in rows]


def _row(group: list[HangState]) -> dict[str, Any]:
    nodes: dict[str, list[int]] = defaultdict(list)
    for state in group:
        nodes[state.node].append(state.rank)
    row = asdict(replace(group[0], seconds=round(max(state.seconds for state in group), 1)))
    del row["rank"], row["node"]
    return row | {"nodes": [[node, ranges(ranks)] for node, ranks in sorted(nodes.items())]}


def from_rows(rows: Any) -> tuple[HangState, ...]:
    """The states of such rows.

    Raises:
        TypeError, ValueError, KeyError: these are no such rows.
    """
    states: list[HangState] = []
    for row in rows:
        known = {name: value for name, value in row.items() if name in _FIELDS}
        collective = known.pop("collective", None)
        if collective is not None:
            number = collective["sequence"]
            known["collective"] = Collective(
                str(collective["name"]), None if number is None else int(number),
                str(collective["group"]), str(collective["shapes"]),
            )  # fmt: skip
        for name in _NUMBERS:
            known[name] = known[name] + 0  # a text has no place here
        pattern = HangState(0, "", **known)
        for node, spans in row["nodes"]:
            for first, last in spans:
                if not 0 <= first <= last < _MAX_RANKS or len(states) + last - first >= 2 * _MAX_RANKS:
                    raise ValueError(first)
                states += [replace(pattern, rank=rank, node=str(node)) for rank in range(first, last + 1)]
    return tuple(states)
