"""Which ranks are shown, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.top.rank_row import STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.top.rank_row import RankRow

WORST: Final = "worst first"

_UNKNOWN_LAST: Final = float("inf")
_SEVERITY: Final = {state: place for place, state in enumerate(STATES)}


def _worst(row: RankRow) -> Any:
    # By whole percents, so that ranks which are alike do not change places all the time.
    return _SEVERITY[row.state], -round(100 * (row.wait_ratio or 0.0)), row.rank


def _slowest(row: RankRow) -> Any:
    return _UNKNOWN_LAST if row.steps_per_second is None else row.steps_per_second, row.rank


def _largest(value: float | None, row: RankRow) -> Any:
    return _UNKNOWN_LAST if value is None else -value, row.rank


SORTS: Final[dict[str, Callable[[RankRow], Any]]] = {
    WORST: _worst,
    "rank": lambda row: (row.rank, row.node, row.pid),
    "node": lambda row: (row.node, row.rank),
    "slowest first": _slowest,
    "wait": lambda row: _largest(row.wait_ratio, row),
    "GPU, idle first": lambda row: (row.figures.get("utilization_ratio", _UNKNOWN_LAST), row.rank),
    "memory": lambda row: _largest(row.figures.get("process_resident_memory_bytes"), row),
}
"""The orders, by the name that is shown."""


def arranged(rows: Iterable[RankRow], sort: str, *, trouble_only: bool = False, text: str = "") -> list[RankRow]:
    """The rows that are shown, in their order.

    Args:
        rows: of all ranks.
        sort: from `SORTS`.
        trouble_only: leave out ranks that are all right.
        text: leave out ranks without this text in their number, node, state, finding or activity.
    """
    wanted = text.casefold()
    shown = [
        row
        for row in rows
        if (row.in_trouble or not trouble_only) and (not wanted or wanted in _searched(row).casefold())
    ]
    return sorted(shown, key=SORTS[sort])


def _searched(row: RankRow) -> str:
    return f"rank {row.rank} {row.node} {row.state} {row.finding} {row.now_in.replace('_', ' ')}"
