"""A distribution in a few dozen numbers: counts in buckets that grow by 2 %, so every quantile is within 1 %."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

GROWTH: Final = 1.02
_LOG_GROWTH: Final = math.log(GROWTH)
_SMALLEST: Final = 1e-7
_MIDDLE: Final = 2 / (1 + GROWTH)  # a bucket's middle by its upper bound: the same relative error to both ends


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; ``max`` is exact, the others within 1 % of the true value."""

    p50: float
    p95: float
    p99: float
    max: float


class Sketch:
    """Counts of seconds by bucket; bucket ``i`` holds ``GROWTH**(i-1) < seconds <= GROWTH**i``."""

    __slots__ = ("counts", "largest", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.largest = 0.0
        self.total = 0

    def add(self, values: Sequence[float]) -> None:
        """Count values in seconds. Values below 0.1 µs count as 0.1 µs."""
        counts, log, ceil = self.counts, math.log, math.ceil
        for seconds in values:
            index = ceil(log(seconds if seconds > _SMALLEST else _SMALLEST) / _LOG_GROWTH)  # noqa: FURB136 - a call
            counts[index] = counts.get(index, 0) + 1
        self.total += len(values)
        self.largest = max(self.largest, max(values, default=0.0))

    def merge(self, counts: Iterable[tuple[int, int]], largest: float) -> None:
        """Add the counts of another sketch."""
        for index, count in counts:
            self.counts[index] = self.counts.get(index, 0) + count
            self.total += count
        self.largest = max(self.largest, largest)

    def quantile(self, share: float) -> float | None:
        """The value below which ``share`` of the values lie, within 1 %; None without values."""
        if not self.total:
            return None
        wanted = share * (self.total - 1)
        seen = 0
        for seconds, count in self.values():
            seen += count
            if seen > wanted:
                return seconds
        return self.largest

    def values(self) -> Iterator[tuple[float, int]]:
        """Seconds and how often they were counted, the shortest first."""
        for index in sorted(self.counts):
            yield min(GROWTH**index * _MIDDLE, self.largest), self.counts[index]

    def percentiles(self) -> Percentiles | None:
        """p50, p95, p99 and the exact maximum; None without values."""
        p50, p95, p99 = self.quantile(0.50), self.quantile(0.95), self.quantile(0.99)
        if p50 is None or p95 is None or p99 is None:
            return None
        return Percentiles(p50, p95, p99, self.largest)

    def as_log_field(self) -> dict[int, int]:
        """The form in a log line: bucket index to count."""
        return dict(sorted(self.counts.items()))
