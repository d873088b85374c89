"""Paces of ranks for tests of the exchange between nodes."""

from __future__ import annotations

from telemetry.model.records import RankPace


def pace(rank: int, compute: float = 9.0, **fields) -> RankPace:
    """A rank that made 100 steps in 10 s and never waited."""
    return RankPace(
        rank=rank,
        seconds=10.0,
        steps=100,
        compute_seconds=compute,
        exposed_wait_seconds=0.0,
        away_seconds=0.0,
        **fields,
    )
