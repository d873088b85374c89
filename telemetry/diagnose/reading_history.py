"""The history of one figure in a fixed amount of memory, however long the run."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

MAX_READINGS: Final = 64
"""Of one history."""


class TimedReading(NamedTuple):
    """A figure at a time in seconds."""

    seconds: float
    value: float


class ReadingHistory:
    """Readings that are evenly spread over the time since the first one.

    When it is full, neighbours are merged, and from then on readings are twice as far apart. At the maximum spacing the
    oldest are dropped instead.

    Args:
        spacing: seconds between two readings at first. Readings that come faster are merged.
        max_spacing: seconds between two readings at most.
        highest: whether merged readings are shown as the highest of them; else as their mean.
    """

    def __init__(self, spacing: float, max_spacing: float, *, highest: bool = False) -> None:
        self.spacing = spacing
        self._highest = highest
        self._max_spacing = max_spacing
        self._merged: list[TimedReading] = []
        self._slot = 0
        self._sum_seconds = self._sum_values = 0.0
        self._top = -math.inf
        self._count = 0

    def add(self, seconds: float, value: float) -> bool:
        """Add a reading. Returns whether `readings` has changed."""
        slot = int(seconds / self.spacing)
        changed = False
        if self._count and slot != self._slot:
            self._close_slot()
            changed = True
            slot = int(seconds / self.spacing)
        self._slot = slot
        self._sum_seconds += seconds
        self._sum_values += value
        self._top = max(self._top, value)
        self._count += 1
        return changed

    @property
    def readings(self) -> tuple[TimedReading, ...]:
        """The merged readings, oldest first."""
        return tuple(self._merged)

    def _close_slot(self) -> None:
        value = self._top if self._highest else self._sum_values / self._count
        self._merged.append(TimedReading(self._sum_seconds / self._count, value))
        self._sum_seconds = self._sum_values = 0.0
        self._top = -math.inf
        self._count = 0
        if len(self._merged) < MAX_READINGS:
            return
        if 2 * self.spacing > self._max_spacing:
            del self._merged[0]
            return
        self.spacing *= 2
        pairs = zip(self._merged[::2], self._merged[1::2], strict=True)
        self._merged = [self._merge(a, b) for a, b in pairs]

    def _merge(self, a: TimedReading, b: TimedReading) -> TimedReading:
        value = max(a.value, b.value) if self._highest else (a.value + b.value) / 2
        return TimedReading((a.seconds + b.seconds) / 2, value)
