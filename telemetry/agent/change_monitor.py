"""Follows whether the steps of this rank became slower or faster for good, and logs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telemetry.diagnose.change_detector import ChangeDetector
from telemetry.diagnose.loop_blocks import BlockBuilder
from telemetry.publish import log_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.core.samples import GpuSample, PressureSample
    from telemetry.core.step_changes import StepChange
    from telemetry.core.totals import Totals

_DIGITS = 6


class ChangeMonitor:
    """Used by the agent thread.

    Args:
        newest: returns the newest sample of a collector, for what changed together with the steps.
        emit: writes a line of the log.
        timestamp: returns a moment as ISO-8601; the argument is the wall clock of `Totals` at it.
    """

    def __init__(
        self,
        newest: Callable[[str], Any],
        emit: Callable[[str, dict[str, Any]], Any],
        timestamp: Callable[[float], str],
    ) -> None:
        self._newest = newest
        self._emit = emit
        self._timestamp = timestamp
        self._blocks = BlockBuilder()
        self._detector = ChangeDetector()

    def tick(self, totals: Totals) -> None:
        """Add a tick. Logs a change that is confirmed by it."""
        block = self._blocks.add(totals, self._signals())
        change = None if block is None else self._detector.add(block)
        if change is not None:
            self._emit("change", change_fields(change, self._timestamp(change.at_seconds)))

    @property
    def ratio(self) -> float | None:
        """Step time now over step time before the slow-down that holds on, see `ChangeDetector`."""
        return self._detector.ratio

    def _signals(self) -> dict[str, float]:
        """Figures of the machine that no counter has. What was not measured is missing."""
        gpu: GpuSample | None = self._newest("nvml")
        pressure: PressureSample | None = self._newest("pressure")
        found: dict[str, float | None] = {}
        if gpu is not None:
            found["gpu_clock_hertz"] = gpu.sm_clock_hertz
            found["gpu_temperature_celsius"] = gpu.temperature_celsius
        if pressure is not None:
            found |= {f"{name}_pressure_ratio": ratio for name, ratio in pressure.pressure_ratio.items()}
        return {name: value for name, value in found.items() if value is not None}


def change_fields(change: StepChange, at: str) -> dict[str, Any]:
    """The fields of the log event ``change``.

    Args:
        change: the change.
        at: when it happened, ISO-8601.
    """
    return {
        "at": at,
        "first_step": change.step,
        "ratio": round(change.ratio, 4),
        "part": change.part,
        "step_before_seconds": round(change.before_seconds, _DIGITS),
        "step_after_seconds": round(change.after_seconds, _DIGITS),
        "with": [
            {"what": each.what, "before": log_fields.rounded(each.before), "after": log_fields.rounded(each.after)}
            for each in change.companions
        ],
    }
