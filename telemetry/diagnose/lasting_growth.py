"""Whether a figure grows for good, and how fast.

Memory also grows at the start of a run, up to a cache's size, in steps, and in a saw-tooth while workers live. None of
that is a leak. So growth only counts if it goes on evenly, and if it is large compared with what the figure has ever
fallen by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.diagnose.reading_history import TimedReading

SHARES: Final = (2 / 3, 1 / 3, 1 / 6)
"""The newest part of the history that is judged. The first third of a run is always left out: it is its start-up."""

_MIN_READINGS: Final = 8
_MIN_SECONDS: Final = 20.0

_MIN_TIMES_FALL: Final = 2.0
"""Growth counts if it is this many times what the figure has ever fallen by. Memory of workers that are started anew in
each epoch falls by as much as it grows."""

_QUARTERS: Final = 4
_MIN_EVEN: Final = 0.3
"""From each quarter of the time to the next it must grow by this share of the mean. A single jump is no growth."""

_SLOWING: Final = 0.75
"""Growth slows down if it is less in each third of the time than in the one before, and if the last third has less than
this share of the first. Then it is assumed to go on slowing down in the same way."""

_THIRDS: Final = 3


@dataclass(frozen=True, slots=True)
class LastingGrowth:
    """Growth that goes on.

    Attributes:
        per_second: how fast, over the time that was judged. ``seconds``: that time.
        since: where that time begins.
        slowing: growth in a third of that time over that in the third before it; 1 if it does not slow down.
        newest: growth in the last third.
    """

    per_second: float
    seconds: float
    since: float
    slowing: float = 1.0
    newest: float = 0.0

    def seconds_to(self, amount: float) -> float:
        """When it will have grown by an amount; infinite if never, because it slows down."""
        if self.slowing >= 1:
            return amount / self.per_second
        # A geometric series of thirds, of which the next has grown by `following`.
        following = self.newest * self.slowing
        left = 1 - amount * (1 - self.slowing) / following if following > 0 else 0.0
        return self.seconds / _THIRDS * math.log(left) / math.log(self.slowing) if left > 0 else math.inf


def lasting_growth(readings: Sequence[TimedReading], at_least: float) -> LastingGrowth | None:
    """The growth over the longest of the times that show one; None if none does.

    Args:
        readings: oldest first.
        at_least: growth by less does not count, in the unit of the figure.
    """
    if len(readings) < _MIN_READINGS:
        return None
    first, last = readings[0].seconds, readings[-1].seconds
    fall: float | None = None
    for share in SHARES:
        window = [reading for reading in readings if reading.seconds >= last - share * (last - first)]
        seconds = window[-1].seconds - window[0].seconds
        if len(window) < _MIN_READINGS or seconds < _MIN_SECONDS:
            return None
        quarters = _quarters(window)
        # Looked at first: it takes no time, and most figures grow by nothing.
        if quarters[-1] - quarters[0] < at_least * (_QUARTERS - 1) / _QUARTERS:
            continue
        fall = _largest_fall(readings) if fall is None else fall
        slope = slope_of(window)
        grown = slope * seconds
        if grown < max(at_least, _MIN_TIMES_FALL * fall):
            continue
        if min(b - a for a, b in pairwise(quarters)) < _MIN_EVEN * grown / _QUARTERS:
            continue
        return LastingGrowth(slope, seconds, window[0].seconds, *_slowing(window))
    return None


def slope_of(readings: Sequence[TimedReading]) -> float:
    """The median of the slopes of all pairs (Theil and Sen). Single wrong readings have no influence.

    Args:
        readings: at least two, at different times.
    """
    return median((b.value - a.value) / (b.seconds - a.seconds) for a, b in combinations(readings, 2))


def long_enough(readings: Sequence[TimedReading]) -> bool:
    """Whether it can be told if a figure grows."""
    return len(readings) >= _MIN_READINGS and SHARES[0] * (readings[-1].seconds - readings[0].seconds) >= _MIN_SECONDS


def peak(readings: Sequence[TimedReading], growth: LastingGrowth) -> float:
    """The highest that a figure is now and then, at the time of the last reading.

    That is the highest reading since the growth began, moved along it. Memory is used up at a peak, such as a
    checkpoint. For growth that slows down this would be too high, so it is the last reading.
    """
    last = readings[-1]
    if growth.slowing < 1:
        return last.value
    return max(r.value + growth.per_second * (last.seconds - r.seconds) for r in readings if r.seconds >= growth.since)


def slope_since(readings: Sequence[TimedReading], since: float) -> float | None:
    """The slope from a time on, from its first to its last quarter; None if there are fewer than four readings.

    Memory that workers share is seldom read, so their own is a staircase, on which most pairs have no slope.
    """
    window = [reading for reading in readings if reading.seconds >= since]
    if len(window) < _QUARTERS:
        return None
    values, part = _quarters(window), len(window) // _QUARTERS
    seconds = median(r.seconds for r in window[-part:]) - median(r.seconds for r in window[:part])
    return (values[-1] - values[0]) / seconds


def _slowing(window: Sequence[TimedReading]) -> tuple[float, float]:
    """What `LastingGrowth` has as ``slowing`` and ``newest``."""
    bounds = [(len(window) - 1) * part // _THIRDS for part in range(_THIRDS + 1)]
    thirds = [window[a : b + 1] for a, b in pairwise(bounds)]
    slopes = [slope_of(third) for third in thirds]
    newest = slopes[-1] * (thirds[-1][-1].seconds - thirds[-1][0].seconds)
    slows = slopes[0] > slopes[1] > slopes[2] and slopes[2] < _SLOWING * slopes[0]
    return (math.sqrt(max(0.0, slopes[2]) / slopes[0]) if slows else 1.0), newest


def _quarters(window: Sequence[TimedReading]) -> list[float]:
    """The medians of four parts of the same number of readings."""
    bounds = [len(window) * part // _QUARTERS for part in range(_QUARTERS + 1)]
    return [median(r.value for r in window[a:b]) for a, b in pairwise(bounds)]


def _largest_fall(readings: Sequence[TimedReading]) -> float:
    """The largest fall below an earlier reading. A single reading that stands out does not count."""
    values = [reading.value for reading in readings]
    smooth = [median(values[max(0, i - 1) : i + 2]) for i in range(len(values))]
    fall, highest = 0.0, smooth[0]
    for value in smooth:
        highest = max(highest, value)
        fall = max(fall, highest - value)
    return fall
