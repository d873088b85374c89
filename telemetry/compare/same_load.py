"""The ratio of two runs' paces without the time in which other programs held them up.

A run on a busy machine is slower, and no difference between its own windows tells by how much. But the kernel measures
how long a thread waited for a core while others used it. These seconds are taken out of the training loop of both runs.

Such a second does not always cost a second: a GPU may have had enough to do meanwhile, or a batch was ready. What it
costs is estimated from the windows of both runs: some were held up for longer than others. The error of this estimate
is in the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.compare.pace_interval import (
    FEWEST_BLOCKS,
    MIN_BLOCKS,
    PaceBlock,
    RatioInterval,
    between_runs,
    interval_around,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_KNOWN: Final = 0.9
"""The logs must tell of others for this share of the windows."""

_MAX_COST: Final = 2.0
"""A second of delay costs at most this many seconds, of each rank: other threads and ranks wait for the one held up."""

_MAX_SHARE_OF_LOOP: Final = 0.9
"""At most this share of a training loop is left out."""

_DOUBT_OF_THREAD: Final = 0.1
_DOUBT_OF_WORKERS: Final = 0.25
"""Others do more than take a core: they fill caches and use the memory's bandwidth, which no delay shows. So what a
second costs is known to about this standard deviation. Of workers only the thread that fetches is measured, not those
that send batches and hand them over, which are held up as well. See benchmarks/compare_loads.py."""

_DOUBT_OF_COST: Final = 0.5
"""Few windows cannot tell what a second of delay has cost. Then it is taken for one second, give or take so much."""

_OF_EACH_RUN: Final = 0.5
"""This part of the doubt is each run's own: the others of one run are not those of the other."""

_BESIDE: Final = 0.012
"""Runs that were not held up differ too where others use all cores: by about this standard deviation."""


@dataclass(frozen=True, slots=True)
class SameLoad:
    """Two runs without the time in which other programs held them up.

    Attributes:
        found: the ratio and its interval.
        cost: seconds of the training loop that a second of run-queue delay has cost.
        held_up_a, held_up_b: run-queue delay caused by others, as a share of the training loop.
    """

    found: RatioInterval
    cost: float
    held_up_a: float
    held_up_b: float


def without_others(a: Sequence[PaceBlock], b: Sequence[PaceBlock], ranks: int = 1) -> SameLoad | None:
    """Compare the paces as if no other program had used the machine. None if the logs do not tell of others."""
    known = [[block for block in blocks if block.held_up is not None] for blocks in (a, b)]
    if any(len(some) < max(FEWEST_BLOCKS, _KNOWN * len(all_)) for some, all_ in zip(known, (a, b), strict=True)):
        return None
    sides = [_Side(blocks) for blocks in known]
    few = min(map(len, known)) < MIN_BLOCKS
    cost = _cost(sides, _MAX_COST * ranks, fitted=not few)
    squares = 0.0 if few else sum(side.squares for side in sides)
    side_a, side_b = sides
    further = side_b.slope(cost) - side_a.slope(cost)
    weight = further / squares if squares > 0 else 0.0
    ratio = side_b.pace(cost) / side_a.pace(cost)
    doubts = [side.doubt(cost) for side in sides]
    own = [math.hypot(_OF_EACH_RUN * doubt, _BESIDE * side.others) for doubt, side in zip(doubts, sides, strict=True)]
    doubt = math.hypot(doubts[1] - doubts[0], *own, _DOUBT_OF_COST * further if few else 0.0)
    deviations = side_a.deviations(cost, weight), side_b.deviations(cost, -weight)
    found = interval_around(ratio, *deviations, [between_runs(blocks, ranks) for blocks in known], doubt)
    return SameLoad(found, cost, side_a.held_up, side_b.held_up)


def _cost(sides: Sequence[_Side], most: float, *, fitted: bool) -> float:
    """Least squares over the windows of both runs, each around its own run's mean; one second if it is not ``fitted``.

    A window lacks ``cost`` times the seconds that it was held up for more than others, times the net pace. That pace
    depends on ``cost`` as well, so that the equation is solved for both at once.
    """
    for side in sides:
        if side.held_up > 0:
            most = min(most, _MAX_SHARE_OF_LOOP / side.held_up)
    if not fitted:
        return min(1.0, most)
    lacking = sum(side.lacking for side in sides)
    if lacking <= 0:
        return min(1.0, most) if not any(side.squares for side in sides) else 0.0
    squares = sum(side.squares + side.lacking * side.held_up for side in sides)
    return min(most, lacking / squares) if squares > 0 else most


class _Side:
    """The windows of one run."""

    def __init__(self, blocks: Sequence[PaceBlock]) -> None:
        self._blocks = blocks
        self._steps = sum(block.steps for block in blocks)
        self.seconds = sum(block.seconds for block in blocks)
        self._delay = sum(block.held_up or 0.0 for block in blocks)
        self._workers_delay = sum(block.workers_held_up or 0.0 for block in blocks)
        self.others = sum((block.others or 0.0) * block.seconds for block in blocks) / self.seconds
        self.held_up = self._delay / self.seconds
        self._apart = [(block.held_up or 0.0) - self.held_up * block.seconds for block in blocks]
        self.squares = sum(value * value for value in self._apart)
        gross = self._steps / self.seconds
        lacking = [block.seconds - block.steps / gross for block in blocks]
        self.lacking = sum(apart * each for apart, each in zip(self._apart, lacking, strict=True))

    def pace(self, cost: float) -> float:
        """Steps per second of the loop without the time held up."""
        return self._steps / (self.seconds - cost * self._delay)

    def slope(self, cost: float) -> float:
        """By how much the logarithm of the pace grows with ``cost``."""
        return self._delay / (self.seconds - cost * self._delay)

    def doubt(self, cost: float) -> float:
        """The standard deviation of the logarithm of the pace that comes from what delays do not show."""
        seconds = _DOUBT_OF_THREAD * (self._delay - self._workers_delay) + _DOUBT_OF_WORKERS * self._workers_delay
        return seconds / (self.seconds - cost * self._delay)

    def deviations(self, cost: float, further: float) -> list[float]:
        """Of each window: what it adds to the error of this run's pace, and of ``cost``."""
        net, count = self.pace(cost), len(self._blocks)
        mean = self._steps / count
        left = [block.steps - net * (block.seconds - cost * (block.held_up or 0.0)) for block in self._blocks]
        found = [
            each / mean - count * further * apart * each / net for each, apart in zip(left, self._apart, strict=True)
        ]
        middle = sum(found) / count
        return [each - middle for each in found]
