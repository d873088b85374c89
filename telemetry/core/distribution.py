"""Distributions: percentiles and histograms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; ``max`` is exact, the others within 1 % of the true value."""

    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket, not cumulative: one for each upper bound in ``bounds``, and one for larger values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
