"""How far a process had come at which moment: what its windows and checkpoints tell, thinned out."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final, NamedTuple

_MAX_POINTS: Final = 256
_FIELDS: Final = 4


class Point(NamedTuple):
    """Counted since the process started.

    Attributes:
        optimizer_steps, steps: so far.
        wait_seconds, compute_seconds: of its training loop so far.
    """

    optimizer_steps: float
    steps: float
    wait_seconds: float
    compute_seconds: float


class ProgressPoints:
    """Points in the order in which they were logged. When there are too many, every other one is dropped."""

    __slots__ = ("_every", "_seen", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._seen = 0
        self._every = 1

    def wants_next(self) -> bool:
        """Whether the next window is to be added: as often as those that were kept."""
        self._seen += 1
        return self._seen % self._every == 0

    def add(self, point: Point) -> None:
        """One more, which is the newest."""
        self._values.extend(point)
        if len(self._values) > _MAX_POINTS * _FIELDS:
            kept = [self._at(index) for index in range(0, len(self), 2)]
            self._values, self._every = array("d"), 2 * self._every
            for each in kept:
                self._values.extend(each)

    def __len__(self) -> int:
        return len(self._values) // _FIELDS

    def at(self, axis: int, value: float, start: Point, end: Point) -> Point:
        """Where the process was when one of its figures had a value; between two points in a straight line.

        Args:
            axis: index of the figure in `Point`: 0 or 1.
            value: of that figure.
            start: the first point.
            end: the last point.
        """
        points = [start, *(self._at(index) for index in range(len(self))), end]
        keys = [point[axis] for point in points]
        for index in range(1, len(keys)):  # a damaged log may go back
            keys[index] = max(keys[index], keys[index - 1])
        after = min(bisect_left(keys, value), len(points) - 1)
        low, high = points[max(0, after - 1)], points[after]
        span = keys[after] - keys[max(0, after - 1)]
        share = min(1.0, max(0.0, (value - keys[max(0, after - 1)]) / span)) if span > 0 else 1.0
        return Point(*(a + (b - a) * share for a, b in zip(low, high, strict=True)))

    def _at(self, index: int) -> Point:
        return Point(*self._values[index * _FIELDS : (index + 1) * _FIELDS])
