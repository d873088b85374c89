"""Throughput, energy and money of a run, over all its ranks and attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.records import CATEGORIES, COMPUTE, DATA_WAIT
from telemetry.report.goodput import DOWN, REDONE, REPLAY, RESTORE
from telemetry.report.stall_losses import lost_by_cause
from telemetry.util.text import plain_number, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.report.goodput import Goodput
    from telemetry.report.process_log import ProcessLog

_RESTARTS: Final = (REDONE, RESTORE, REPLAY, DOWN)
KWH: Final = 3.6e6
"""Joules."""


def throughput_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples and tokens of the run, and how many per second of the training loop. Null if a rank does not know them.

    What was trained again after a restart is in the sums. A rank's rate is its sum over its seconds in the loop; that
    of the run is the sum over the ranks.

    Args:
        ranks: as in the report: an entry for each process.
    """
    found: dict[str, Any] = {}
    for name in ("samples", "tokens"):
        stepping = [rank for rank in ranks if rank["steps"]]
        known = bool(stepping) and all(rank[name] is not None for rank in stepping)
        sums: dict[int, tuple[int, float]] = {}
        for rank in stepping if known else ():
            total, seconds = sums.get(rank["rank"], (0, 0.0))
            ledger = rank["ledger"]
            sums[rank["rank"]] = total + rank[name], seconds + ledger[DATA_WAIT] + ledger[COMPUTE]
        found[name] = sum(total for total, _ in sums.values()) if known else None
        timed = known and all(seconds > 0 for _, seconds in sums.values())
        found[f"{name}_per_second"] = sum(total / seconds for total, seconds in sums.values()) if timed else None
    return found


def energy_of(ranks: Sequence[Mapping[str, Any]], processes: Sequence[ProcessLog]) -> dict[str, float] | None:
    """Joules of the GPUs of a run by category of the ledger; None without any.

    A GPU counts the energy of all processes on it. Of the ranks of an attempt that share one, one counts: that with
    most energy. A rank has several processes here if the agent was stopped and started again in one; these add up.
    """
    by_rank: dict[tuple[Any, Any], dict[int, dict[str, float]]] = {}
    for place, (rank, process) in enumerate(zip(ranks, processes, strict=True)):
        own = rank["gpu_energy_joules"]
        if own is None:
            continue
        gpu = process.totals.get("gpu_uuid") or place
        sums = by_rank.setdefault((rank.get("attempt"), gpu), {}).setdefault(
            rank["rank"], dict.fromkeys(CATEGORIES, 0.0)
        )
        for category in CATEGORIES:
            sums[category] += own.get(category, 0.0)
    if not by_rank:
        return None
    largest = [max(ranks_of.values(), key=lambda sums: sum(sums.values())) for ranks_of in by_rank.values()]
    return {c: sum(each[c] for each in largest) for c in CATEGORIES}


def cost_of(
    ranks: Sequence[Mapping[str, Any]],
    processes: Sequence[ProcessLog],
    goodput: Goodput,
) -> dict[str, Any] | None:
    """What the run has cost, and what its waits, stalls and restarts did; None without the setting ``gpu_hour_price``.

    A rank counts as one GPU. Waiting is part of the stalls where a stall was open, so the parts do not add up.
    """
    prices = [price for p in processes if (price := p.head.get("settings", {}).get("gpu_hour_price")) is not None]
    if not prices:
        return None
    hourly = prices[-1] / 3600
    exposed = [_exposed_seconds(rank) for rank in ranks if rank["steps"]]
    lost = sum(lost_by_cause(processes).values())
    total = sum(goodput.rank_seconds.values())
    return {
        "gpu_hour_price": prices[-1],
        "gpu_hours": total / 3600,
        "total": total * hourly,
        "waiting": None if None in exposed else sum(seconds or 0.0 for seconds in exposed) * hourly,
        "stalls": lost * hourly,
        "restarts": sum(goodput.rank_seconds[category] for category in _RESTARTS) * hourly,
    }


def _exposed_seconds(rank: Mapping[str, Any]) -> float | None:
    ratio = rank["exposed_wait_ratio"]
    return None if ratio is None else float(ratio * (rank["ledger"][DATA_WAIT] + rank["ledger"][COMPUTE]))


def throughput_lines(throughput: Mapping[str, Any]) -> list[str]:
    """A line on samples and tokens; none if neither is known."""
    parts = []
    for name in ("samples", "tokens"):
        total, rate = throughput[name], throughput[f"{name}_per_second"]
        if total is not None:
            parts.append(
                f"{total} {name}" + (f", {plain_number(rate, 4)} per second of the training loop" if rate else "")
            )
    return ["", f"throughput: {'; '.join(parts)}"] if parts else []


def energy_lines(energy: Mapping[str, float] | None) -> list[str]:
    """A line on the energy of the GPUs; none without it."""
    total = sum(energy.values()) if energy is not None else 0.0
    if energy is None or total <= 0:
        return []
    waiting = energy[DATA_WAIT]
    kwh, of = plain_number(waiting / KWH), plain_number(total / KWH)
    share = rounded_percent(waiting / total)
    return ["", f"energy: {kwh} of {of} kWh went into waits for data ({share}); of the whole GPUs, split by time"]


def cost_lines(cost: Mapping[str, Any] | None) -> list[str]:
    """A line on money; none without a price."""
    if cost is None:
        return []
    parts = [f"{cost[name]:.2f} {name}" for name in ("waiting", "stalls", "restarts") if cost[name] is not None]
    return [
        "",
        f"cost: {cost['total']:.2f} for {plain_number(cost['gpu_hours'])} GPU-hours; of that {', '.join(parts)}",
    ]
