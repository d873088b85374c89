"""The part of a run that is compared: its blocks, and its seconds per step by category."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from telemetry.compare.pace_interval import PaceBlock
from telemetry.core.labels import CATEGORIES, COMPUTE, DATA_WAIT
from telemetry.report.pace_series import PacePoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.log_reader import ProcessLog

_FIRST_STEPS: Final = 10
_FIRST_RATIO: Final = 0.1
_FIRST_SECONDS: Final = 300.0
"""The first steps are left out: this many at least, and this share of the training loop, but no more seconds of it.
They fill caches, start workers and choose kernels."""

_LOOP: Final = tuple(CATEGORIES.index(name) for name in (DATA_WAIT, COMPUTE))


@dataclass(frozen=True, slots=True)
class RunPace:
    """The part of a run after its first steps, over all ranks.

    Attributes:
        blocks: a block for each window in which the training loop ran.
        steps: steps of the mean rank.
        per_step_seconds: by category of the ledger: seconds of a rank for each of its steps.
    """

    blocks: tuple[PaceBlock, ...]
    steps: float
    per_step_seconds: dict[str, float]


def pace_of(processes: Sequence[ProcessLog]) -> RunPace:
    """The pace of a run, from the processes that no later one has replaced.

    The windows are those of the first rank. The totals of the others at the same moments are added.
    """
    series = [_Series(process) for process in processes if process.totals.get("steps_total")]
    if not series:
        return RunPace((), 0.0, dict.fromkeys(CATEGORIES, 0.0))
    first = series[0]
    ends = [first.started + point.wall_seconds for point in first.compared()]
    sums = [_sum([each.at(end) for each in series]) for end in ends]
    blocks = [PaceBlock(after.steps - before.steps, _loop(after) - _loop(before)) for before, after in pairwise(sums)]
    steps = sums[-1].steps - sums[0].steps if sums else 0.0
    spent = (after - before for before, after in zip(sums[0].ledger, sums[-1].ledger, strict=True)) if sums else ()
    return RunPace(
        tuple(block for block in blocks if block.seconds > 0),
        steps / len(series),
        {name: seconds / steps if steps else 0.0 for name, seconds in zip(CATEGORIES, spent, strict=False)},
    )


class _Series:
    """The points of one process, on the clock of its node."""

    def __init__(self, process: ProcessLog) -> None:
        self.started = _unix_seconds(process.started)
        self._points = [PacePoint(0.0, 0.0, (0.0,) * len(CATEGORIES)), *process.pace.points()]
        self._walls = [point.wall_seconds for point in self._points]

    def compared(self) -> list[PacePoint]:
        """The points from the end of the first steps on."""
        total = _loop(self._points[-1])
        left_out = min(_FIRST_RATIO * total, _FIRST_SECONDS)
        return [point for point in self._points if point.steps >= _FIRST_STEPS and _loop(point) >= left_out]

    def at(self, moment: float) -> PacePoint:
        """The totals at a moment: between two points in a straight line."""
        wall = moment - self.started
        after = min(bisect_left(self._walls, wall), len(self._points) - 1)
        low, high = self._points[max(0, after - 1)], self._points[after]
        span = high.wall_seconds - low.wall_seconds
        share = min(1.0, max(0.0, (wall - low.wall_seconds) / span)) if span > 0 else 1.0
        return PacePoint(
            wall,
            low.steps + share * (high.steps - low.steps),
            tuple(a + share * (b - a) for a, b in zip(low.ledger, high.ledger, strict=True)),
        )


def _sum(points: Sequence[PacePoint]) -> PacePoint:
    ledgers = zip(*(point.ledger for point in points), strict=True)
    return PacePoint(points[0].wall_seconds, sum(point.steps for point in points), tuple(map(sum, ledgers)))


def _loop(point: PacePoint) -> float:
    return sum(point.ledger[index] for index in _LOOP)


def _unix_seconds(time: str) -> float:
    try:
        return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
