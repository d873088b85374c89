"""Sums by rank and time, in a bounded number of time bins. The bins become wider as the run becomes longer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_WIDTH_SECONDS: Final = 1.0

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
"""Figures by row and bin."""


class TimeGrid:
    """Named arrays of sums, of the same rows and bins, and sketches by bin over all rows.

    Bin ``i`` begins at ``(first + i) * width_seconds``, Unix time. If a time does not fit, bins are merged in pairs.

    Args:
        rows: how many.
        bins: the most bins. At least half of them are used by a run that is longer than ``bins`` seconds.

    Attributes:
        width_seconds: of a bin.
        used: how many bins have been used, counted from the first.
    """

    def __init__(self, rows: int, bins: int) -> None:
        self.rows, self.bins = rows, bins
        self.width_seconds = _FIRST_WIDTH_SECONDS
        self.used = 0
        self._first = 0
        self._arrays: dict[str, Array] = {}
        self._sketches: dict[str, list[Sketch | None]] = {}

    def index_of(self, time: float) -> int:
        """The bin of a Unix time. Bins are moved or merged to make room for it."""
        index = int(time // self.width_seconds) - self._first
        while not 0 <= index < self.bins:
            if not self.used:
                self._first += index
            elif index < 0 and self.used - index <= self.bins:
                self._move(-index)
            else:
                self._merge_pairs()
            index = int(time // self.width_seconds) - self._first
        self.used = max(self.used, index + 1)
        return index

    def widen(self, seconds: float, least: int) -> None:
        """Merge bins until each is so wide, as long as there remain more than ``least``."""
        while self.width_seconds < seconds and self.used > 2 * least:
            self._merge_pairs()

    def add(self, name: str, row: int, index: int, value: float) -> None:
        """Add to one sum."""
        self._array(name)[row, index] += value

    def spread(self, row: int, begin: float, end: float, amounts: dict[str, float]) -> None:
        """Add amounts that were spent evenly between two Unix times."""
        self.index_of(begin)
        last = self.index_of(end)
        first = self.index_of(begin)  # the end may have widened or moved the bins
        edges = (np.arange(first, last + 2) + self._first) * self.width_seconds
        shares = np.diff(np.clip(edges, begin, end)) / (end - begin)
        for name, amount in amounts.items():
            if amount:
                self._array(name)[row, first : last + 1] += (amount * shares).astype(np.float32)

    def sketch(self, name: str, index: int) -> Sketch:
        """The sketch of a bin."""
        sketches = self._sketches.setdefault(name, [None] * self.bins)
        found = sketches[index]
        if found is None:
            found = sketches[index] = Sketch()
        return found

    def add_grid(self, other: TimeGrid, rows: Mapping[int, int]) -> None:
        """Add the sums and sketches of another grid, whose bins may become wider by this.

        Args:
            other: a grid of any width and number of bins. Its bins may become wider, too.
            rows: its rows that are added, each with the row of this grid.
        """
        if not other.used:
            return
        begins = other.begins()
        for time in (begins[0], begins[-1]):
            self.index_of(time)
        while self.width_seconds < other.width_seconds:
            self._merge_pairs()
        while other.width_seconds < self.width_seconds:
            other._merge_pairs()
        at = other._first - self._first
        theirs, own = [*rows.keys()], [*rows.values()]
        for name in other._arrays:
            self._array(name)[own, at : at + other.used] += other.sums(name)[theirs]
        for name in other._sketches:
            for index, sketch in enumerate(other.sketches(name)):
                if sketch is not None:
                    self.sketch(name, at + index).merge(sketch.counts.items(), sketch.largest)

    def sums(self, name: str) -> Array:
        """The sums of all rows in the used bins; zeros without any."""
        array = self._arrays.get(name)
        return np.zeros((self.rows, self.used), np.float32) if array is None else array[:, : self.used]

    def sketches(self, name: str) -> list[Sketch | None]:
        """The sketches of the used bins, None for a bin without values."""
        return self._sketches.get(name, [None] * self.used)[: self.used]

    def begins(self) -> list[float]:
        """Where each used bin begins, Unix time."""
        return [(self._first + index) * self.width_seconds for index in range(self.used)]

    def _array(self, name: str) -> Array:
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = np.zeros((self.rows, self.bins), np.float32)
        return array

    def _move(self, by: int) -> None:
        """Make room for earlier bins."""
        for name, array in self._arrays.items():
            moved = np.zeros_like(array)
            moved[:, by:] = array[:, : self.bins - by]
            self._arrays[name] = moved
        for name, sketches in self._sketches.items():
            self._sketches[name] = ([None] * by + sketches)[: self.bins]
        self._first -= by
        self.used += by

    def _merge_pairs(self) -> None:
        odd = self._first % 2
        for name, array in self._arrays.items():
            merged = np.zeros_like(array)
            for offset in (0, 1):  # the first and the second of each pair
                half = array[:, max(0, offset - odd) :: 2] if offset >= odd else array[:, 2 - odd :: 2]
                at = 0 if offset >= odd else 1
                merged[:, at : at + half.shape[1]] += half
            self._arrays[name] = merged
        for name, sketches in self._sketches.items():
            pairs: list[Sketch | None] = [None] * self.bins
            for index, sketch in enumerate(sketches):
                at = (index + odd) // 2
                kept = pairs[at] if at < self.bins else None
                if sketch is not None and kept is not None:
                    kept.merge(sketch.counts.items(), sketch.largest)
                elif sketch is not None:
                    pairs[at] = sketch
            self._sketches[name] = pairs
        self.used = (self.used + odd + 1) // 2
        self._first //= 2
        self.width_seconds *= 2
