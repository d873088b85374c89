"""Lasting changes of the steps, in the report."""

from __future__ import annotations

from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.rank_ranges import named
from telemetry.util.text import duration, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.process_log import ProcessLog

_TOGETHER_SECONDS: Final = 120.0
"""Changes of several ranks within this time are one. Each rank knows the moment to a block of 30 s."""

_WAITS: Final = "waiting_for_ranks_ratio"
"""Where this has grown, a rank is slower because it waits for another one."""

_TAKES: Final = {
    "data_wait_seconds": "waiting for data takes",
    "compute_seconds": "compute takes",
    "fetch_seconds": "fetches take",
}
_NAMES: Final = {
    "gpu_clock_hertz": "GPU clock",
    "gpu_temperature_celsius": "GPU temperature",
    "read_bytes_per_second": "reads of the workers",
    "other_cores": "cores used by other processes",
    "cpu_throttled_ratio": "CPU quota throttling",
    "cpu_pressure_ratio": "CPU pressure",
    "io_pressure_ratio": "I/O pressure",
    "memory_pressure_ratio": "memory pressure",
    "garbage_ratio": "garbage collection",
    _WAITS: "waiting for other ranks",
}


def changes_of(processes: Sequence[ProcessLog]) -> list[dict[str, Any]]:
    """The changes of all ranks, oldest first, as ``report --json`` has them. Damaged ones are left out."""
    changes = [
        {
            "at": line["at"],
            "step": line.get("first_step"),
            "rank": process.rank,
            "ratio": line["ratio"],
            "part": line.get("part"),
            "with": [each for each in line.get("with", []) if each.keys() >= {"what", "before", "after"}],
        }
        for process in processes
        for line in process.changes
        if line.get("ratio", 0) > 0 and _unix_seconds(line.get("at")) is not None
    ]
    return sorted(changes, key=lambda change: (change["at"], change["rank"]))


def change_lines(changes: Sequence[dict[str, Any]], ranks: int) -> list[str]:
    """A sentence for each change; those of several ranks at the same time are one.

    Args:
        changes: as `changes_of` returns them.
        ranks: how many ranks the run has.
    """
    lines = []
    for _, group in groupby(_numbered(changes), key=lambda pair: pair[0]):
        together = [change for _, change in group]
        own = [change for change in together if not _waits_more(change)] or together
        shown = max(own, key=lambda change: abs(change["ratio"] - 1))
        lines.append(_sentence(shown, sorted({change["rank"] for change in own}), ranks))
    return lines


def _numbered(changes: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Each change with the number of its group: in the same direction, and soon after the first of the group."""
    numbered: list[tuple[int, dict[str, Any]]] = []
    groups: list[tuple[float, bool]] = []
    for change in changes:
        at, slower = _unix_seconds(change["at"]) or 0.0, change["ratio"] > 1
        if not groups or at - groups[-1][0] > _TOGETHER_SECONDS or groups[-1][1] != slower:
            groups.append((at, slower))
        numbered.append((len(groups), change))
    return numbered


def _waits_more(change: dict[str, Any]) -> bool:
    return any(each["what"] == _WAITS and each["after"] > each["before"] for each in change["with"])


def _sentence(change: dict[str, Any], slow: Sequence[int], ranks: int) -> str:
    ratio = change["ratio"]
    by = f"{percent(ratio - 1, 0)} slower" if ratio > 1 else f"{percent(1 - ratio, 0)} shorter"
    parts = [_companion(each) for each in change["with"] if each["what"] != _WAITS]
    if ranks > 1 and len(slow) < ranks:
        parts.append(f"only {named(slow)}")
    step = "" if change["step"] is None else f" (step {change['step']})"
    return f"since {change['at']}{step} steps are {by}{': ' if parts else ''}{', '.join(parts)}"


def _companion(each: dict[str, Any]) -> str:
    what, before, after = each["what"], each["before"], each["after"]
    if what in _TAKES:
        return f"{_TAKES[what]} {duration(abs(after - before))} {'longer' if after > before else 'less'}"
    return f"{_NAMES.get(what, what)} {_figure(what, before)} to {_figure(what, after)}"


def _figure(what: str, value: float) -> str:
    if what.endswith("_ratio"):
        return percent(value, 0)
    if what.endswith("_hertz"):
        return f"{value / 1e6:.0f} MHz"
    if what.endswith("_bytes_per_second"):
        return f"{value / 1e6:.1f} MB/s"
    return duration(value) if what.endswith("_seconds") else f"{value:.1f}"


def _unix_seconds(time: object) -> float | None:
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
