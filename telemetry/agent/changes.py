"""Follows the duration of the steps: lasting changes, growth within minutes, and the trend of a short run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.changes import ChangeDetector
from telemetry.diagnosis.growth import GrowthDetector, growth_finding
from telemetry.diagnosis.lines import line_shares
from telemetry.log_lines import ChangedFigure, ChangeLine
from telemetry.util.profiles import STEP, StackProfile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.agent.collectors import Samples
    from telemetry.agent.findings import FindingLog
    from telemetry.diagnosis.changes import StepChange
    from telemetry.diagnosis.growth import StepGrowth, StepTrend
    from telemetry.diagnosis.lines import LineShare
    from telemetry.sources.lines import StepSampler
    from telemetry.totals import Totals

_YOUNG_SECONDS: Final = 120.0
"""Until so many seconds of training, there are enough samples of the run to compare its halves."""


class ChangeMonitor:
    """Looks for changes of the step time once a tick: lasting ones, and growth within minutes.

    Args:
        sampler: has samples of the steps, for the line of code that grows.
        findings: gets the growth.
    """

    def __init__(self, sampler: StepSampler, findings: FindingLog) -> None:
        self._sampler = sampler
        self._findings = findings
        self._detector = ChangeDetector()
        self._growth = GrowthDetector()
        self._told: StepGrowth | None = None

    def tick(self, totals: Totals, samples: Samples) -> StepChange | None:
        """Add a tick, and tell growth that is new or has gone on. Returns a lasting change that this tick confirms."""
        gauges = _gauges(samples)
        self._growth.tick(totals, gauges | _memory(samples))
        if self._growth.growth is not self._told:
            if self._told is None and totals.loop_seconds >= _YOUNG_SECONDS:
                self._sampler.follow()
            self.tell(totals)
        return self._detector.tick(totals, gauges)

    @property
    def ratio(self) -> float | None:
        """Step time now divided by step time before a lasting slow-down, see `ChangeDetector`."""
        return self._detector.ratio

    @property
    def step_trend(self) -> StepTrend | None:
        """The trend of a short run; None for other runs."""
        return self._growth.trend()

    def tell(self, totals: Totals) -> None:
        """Tell the growth, if there is any, with what it has cost in the run so far."""
        growth, newest = self._growth.growth, self._sampler.newest
        self._told = growth
        if growth is None:
            return
        parts, ends = self._sampler.parts, (growth.before_seconds, growth.after_seconds)
        half, quarter = len(parts) // 2, (ends[1] - ends[0]) / 4
        if newest is None:
            before, after = (ends[0] + quarter, _merged(parts[:half])), (ends[1] - quarter, _merged(parts[half:]))
        else:
            before, after = (ends[0], _merged(parts)), (ends[1], newest)
        self._findings.tell(growth_finding(growth, totals, _by_growth(*before, *after)))


def _merged(parts: Sequence[StackProfile]) -> StackProfile:
    merged = StackProfile()
    for part in parts:
        merged.merge(part)
    return merged


def _by_growth(
    before_seconds: float, before: StackProfile, after_seconds: float, after: StackProfile
) -> list[LineShare]:
    """The lines of the later steps, first the one that has grown most. ``seconds``: of a step."""
    known = {(line.file, line.line, line.calls): line.share for line in line_shares(before, STEP)}
    lines = line_shares(after, STEP)
    if not known:  # too few samples
        return [*lines]

    def growth(line: LineShare) -> float:
        return line.share * after_seconds - known.get((line.file, line.line, line.calls), 0.0) * before_seconds

    return sorted(lines, key=growth, reverse=True)


def _gauges(samples: Samples) -> dict[str, float]:
    """The machine's gauges."""
    gpu, pressure = samples.nvml, samples.pressure
    found: dict[str, float | None] = {}
    if gpu is not None:
        found |= {"gpu_clock_hertz": gpu.sm_clock_hertz, "gpu_temperature_celsius": gpu.temperature_celsius}
    if pressure is not None:
        found |= {f"{name}_pressure_ratio": ratio for name, ratio in pressure.pressure_ratio.items()}
    return _measured(found)


def _memory(samples: Samples) -> dict[str, float]:
    memory, allocator = samples.memory, samples.torch_memory
    return _measured(
        {
            "training_bytes": None if memory is None else memory.training_bytes,
            "cuda_bytes": None if allocator is None else allocator.allocated_bytes,
        }
    )


def _measured(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def change_line(change: StepChange, at: str) -> ChangeLine:
    """The log line of a change. ``at``: when it happened, ISO-8601."""
    return ChangeLine(
        at=at,
        first_step=change.step,
        ratio=round(change.ratio, 4),
        part=change.part,
        step_before_seconds=change.before_seconds,
        step_after_seconds=change.after_seconds,
        figures=[ChangedFigure(each.what, each.before, each.after) for each in change.companions],
    )
