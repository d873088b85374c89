"""The seconds that stalls have cost, by cause. The totals of a process tell them even if old logs are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telemetry.report.summary import stalls_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from telemetry.report.process_log import ProcessLog


def lost_by_cause(processes: Iterable[ProcessLog]) -> dict[str, float]:
    """Seconds that some processes have lost in stalls, by cause; without causes that have cost nothing."""
    lost: dict[str, float] = {}
    for process in processes:
        for cause, seconds in _lost_by(process).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return {cause: seconds for cause, seconds in lost.items() if seconds > 0}


def _lost_by(process: ProcessLog) -> Mapping[str, float]:
    """Of one process; from the stalls that are left in its log if its totals do not tell."""
    total: Mapping[str, float] | None = process.totals.get("stall_lost_total_seconds")
    if total is not None:
        return total
    return lost_of(stalls_of(process))


def lost_of(stalls: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that some stalls have cost, by cause.

    Args:
        stalls: entries of ``stalls`` of the report.
    """
    lost: dict[str, float] = {}
    for stall in stalls:
        for cause, seconds in stall["evidence"].get("lost_seconds", {}).items():
            lost[cause] = lost.get(cause, 0.0) + seconds
    return lost
