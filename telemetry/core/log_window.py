"""The newest window of the log, as other readers than the log need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telemetry.records import Percentiles, Totals


@dataclass(frozen=True, slots=True)
class LogWindow:
    """One window of the log.

    Attributes:
        added: what the window has added to the totals. ``added.wall_seconds`` is its length.
        step: durations of its steps, seconds; None without a step.
        wait: how long its steps waited for their batches, seconds; None without a step.
    """

    added: Totals
    step: Percentiles | None
    wait: Percentiles | None
