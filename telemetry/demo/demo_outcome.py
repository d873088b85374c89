"""The figures of a run's report that the demo compares: the predicted speed-up, and the steps per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from telemetry.report.logs import load
from telemetry.report.summary import costliest_of, summarize

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What one run came to.

    Attributes:
        steps_per_second: steps per second of training loop (wait and compute from the first batch on); None without
            a step.
        workers: the ``num_workers`` that the costliest stall's first advice names; None if it names none.
        predicted_speedup: the factor on the steps per second that this advice predicts; None if it predicts none.
    """

    steps_per_second: float | None
    workers: int | None
    predicted_speedup: float | None


def outcome(run: Path) -> DemoOutcome:
    """Read a run's log.

    Raises:
        telemetry.report.logs.NoRunError: there is no log.
    """
    processes = load(run)
    report = summarize(processes)
    rank, first_wait = report["ranks"][-1], processes[-1].totals.get("first_wait_seconds")
    loop = rank["ledger"]["data_wait"] + rank["ledger"]["compute"]
    loop -= first_wait if isinstance(first_wait, float) else 0.0
    rate = rank["steps"] / loop if rank["steps"] and loop > 0 else None
    stall = costliest_of(rank["rank"], report["stalls"])
    advice = stall["advice"][0] if stall is not None and stall["advice"] else {}
    if advice.get("setting") != "num_workers":
        return DemoOutcome(rate, None, None)
    return DemoOutcome(rate, int(advice["value"]), advice.get("predicted_speedup"))
