"""The figures of a metrics endpoint that the demo shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from telemetry.top.endpoints import samples


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one exposition of one rank that the demo shows.

    Attributes:
        steps: how many steps have ended.
        ledger_seconds: seconds by category; their sum is the wall clock of the run.
        buckets: histogram of the step duration: upper bounds in seconds, and how many steps took no longer.
        stall: the cause of the open stall; None without one.
    """

    steps: float
    ledger_seconds: dict[str, float]
    buckets: tuple[tuple[float, float], ...]
    stall: str | None

    @classmethod
    def of(cls, text: str) -> Reading:
        """Read an exposition."""
        steps, ledger, buckets, stall = 0.0, {}, [], None
        for name, labels, value in samples(text):
            if name == "training_steps_total":
                steps = value
            elif name == "training_time_seconds_total":
                ledger[labels["category"]] = value
            elif name == "training_step_duration_seconds_bucket":
                buckets.append((float(labels["le"]), value))
            elif name == "training_stall_active" and value:
                stall = labels["cause"]
        return cls(steps, ledger, tuple(buckets), stall)

    def since(self, before: Reading) -> Reading:
        """The differences to an earlier reading."""
        spent = before.ledger_seconds
        earlier = dict(before.buckets)
        return Reading(
            self.steps - before.steps,
            {category: seconds - spent.get(category, 0.0) for category, seconds in self.ledger_seconds.items()},
            tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in self.buckets),
            self.stall,
        )

    @property
    def wall_seconds(self) -> float:
        """Seconds of wall clock: the sum of the ledger."""
        return sum(self.ledger_seconds.values())

    @property
    def waiting_ratio(self) -> float | None:
        """The share of the training loop that waits for data; None without any training."""
        waited = self.ledger_seconds.get("data_wait", 0.0)
        loop = waited + self.ledger_seconds.get("compute", 0.0)
        return waited / loop if loop > 0 else None

    @property
    def median_step_seconds(self) -> float | None:
        """The p50 of the step duration as PromQL's ``histogram_quantile`` computes it; None without a step."""
        half = self.buckets[-1][1] / 2 if self.buckets else 0.0
        if half <= 0:
            return None
        for (low, below), (high, up_to) in pairwise(((0.0, 0.0), *self.buckets)):
            if up_to >= half:
                # The last bucket has no upper bound: the step is longer than the bound before, and no more is known.
                return low if high == float("inf") else low + (high - low) * (half - below) / (up_to - below)
        return None


_MATTER: Final = re.compile(
    r"training_(time_seconds_total|steps_total|exposed_wait_seconds_total|process_\w+|stall_active"
    r"|gpu_(utilization|sm_active)_ratio)|telemetry_overhead_seconds_total"
)


def lines_that_matter(text: str) -> list[str]:
    """The samples of an exposition that a person should see first, as they were served."""
    shown = []
    for line in text.splitlines():
        for name, _, value in samples(line):
            quiet = name == "training_stall_active" and value == 0
            if _MATTER.fullmatch(name) and not quiet:
                shown.append(line)
    return shown
