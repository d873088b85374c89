"""Median and spread, of values and of paired differences."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers: its median, its 10th and 90th percentile, and how many values it has."""

    median: float
    p10: float
    p90: float
    count: int

    def scaled(self, factor: float) -> Spread:
        """The same distribution in another unit."""
        return Spread(self.median * factor, self.p10 * factor, self.p90 * factor, self.count)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0..1) of the values lie, interpolated.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> Spread:
    """Summarise values."""
    return Spread(statistics.median(values), percentile(values, 0.1), percentile(values, 0.9), len(values))


def of_percentile(values: Sequence[float], share: float, parts: int = 5) -> Spread:
    """A percentile, and its spread over consecutive parts of the values."""
    size = max(1, len(values) // parts)
    of_parts = [percentile(values[at : at + size], share) for at in range(0, size * parts, size) if values[at:]]
    return Spread(percentile(values, share), percentile(of_parts, 0.1), percentile(of_parts, 0.9), len(values))


def differences(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """The differences of values that were taken next to each other."""
    return [value - other for value, other in zip(values, base, strict=True)]


def paired(values: Sequence[float], base: Sequence[float]) -> Spread:
    """The spread of the differences of values that were taken next to each other."""
    return spread(differences(values, base))


def ratio_of_medians(above: Sequence[float], below: Sequence[float], resamplings: int = 300) -> Spread:
    """The ratio of two medians. Its spread is that over resamplings of both lists (bootstrap)."""
    source = random.Random(0)
    ratios = [
        statistics.median(source.choices(above, k=len(above))) / statistics.median(source.choices(below, k=len(below)))
        for _ in range(resamplings)
    ]
    ratio = statistics.median(above) / statistics.median(below)
    return Spread(ratio, percentile(ratios, 0.1), percentile(ratios, 0.9), min(len(above), len(below)))


def of_groups(groups: Sequence[Sequence[float]], reduce: Callable[[Sequence[float]], float]) -> list[float]:
    """One number for each group."""
    return [reduce(group) for group in groups]
