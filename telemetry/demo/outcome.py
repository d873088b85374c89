"""What a run's report says, in the two figures the demo compares: what was predicted, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from telemetry.report.load import load
from telemetry.report.summary import costliest, summarize

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        steps_per_second: of the training loop (wait and compute, from its first batch on); None without a step.
        workers: the number that the first advice of the stall in the verdict asks for; None if it asks for none.
        predicted_speedup: what it promises.
    """

    steps_per_second: float | None
    workers: int | None
    predicted_speedup: float | None


def outcome(run: Path) -> Outcome:
    """Read a run's log.

    Raises:
        telemetry.report.load.NoRunError: there is none.
    """
    processes = load(run)
    report = summarize(processes)
    rank, first_wait = report["ranks"][-1], processes[-1].totals.get("first_wait_seconds")
    loop = rank["ledger"]["data_wait"] + rank["ledger"]["compute"]
    loop -= first_wait if isinstance(first_wait, float) else 0.0
    rate = rank["steps"] / loop if rank["steps"] and loop > 0 else None
    stall = costliest(rank["rank"], report["stalls"])
    advice = stall["advice"][0] if stall is not None and stall["advice"] else {}
    if advice.get("setting") != "num_workers":
        return Outcome(rate, None, None)
    return Outcome(rate, int(advice["value"]), advice.get("predicted_speedup"))
