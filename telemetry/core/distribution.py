"""Distributions as the readers see them."""

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
    """Cumulative-free counts: one per bound of ``bounds``, and one more for what lies above the last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
