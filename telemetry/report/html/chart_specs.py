"""What a chart of the page shows: labels, colours and figures. They do not say how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from telemetry.util.text import byte_size, duration, percent

Figures = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""Figures by time bin, or by rank. NaN: not measured."""

SECONDS: Final = "seconds"
RATIO: Final = "ratio"
BYTES: Final = "bytes"
WATTS: Final = "watts"
HERTZ: Final = "hertz"
CELSIUS: Final = "celsius"
COUNT: Final = "count"


@dataclass(frozen=True, slots=True)
class Curve:
    """One line, one area or one part of the bars. ``low`` and ``high``: a band around it, or None."""

    label: str
    colour: str
    values: Figures
    low: Figures | None = None
    high: Figures | None = None
    dash: str = "solid"

    @property
    def is_measured(self) -> bool:
        """Whether there is a figure at all."""
        return bool(np.isfinite(self.values).any())


@dataclass(frozen=True, slots=True)
class TimeChart:
    """Curves over time. ``stacked``: as areas, one on the other, that fill 0 to 1."""

    key: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    stacked: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class BarChart:
    """Stacked bars, one for each label. ``wide``: upright bars without gaps, for hundreds of ranks."""

    key: str
    title: str
    unit: str
    labels: tuple[str, ...]
    curves: tuple[Curve, ...]
    wide: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class HeatMetric:
    """One figure of all ranks over time: rows of figures, and the limits of the colours.

    A few figures may be above the upper limit, so that they do not take the contrast from the others.
    """

    key: str
    label: str
    unit: str
    cells: Figures
    low: float
    high: float

    @property
    def capped(self) -> bool:
        """Whether figures are above the upper limit of the colours."""
        return bool((self.cells > self.high * (1 + 1e-6)).any())


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Figures of ranks over time. One metric is shown at a time, the first at the start.

    Attributes:
        rows: a label for each row, which is a rank, or some ranks.
        bins_per_cell: how many time bins a cell is wide.
        outliers: sentences on ranks that differ from the others.
    """

    key: str
    title: str
    metrics: tuple[HeatMetric, ...]
    rows: tuple[str, ...]
    bins_per_cell: int = 1
    outliers: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened: at a time, or from one time to another. Unix time."""

    kind: str
    begin: float
    end: float | None
    text: str


@dataclass(frozen=True, slots=True)
class MarkChart:
    """All marks, a row for each kind."""

    key: str
    title: str
    marks: tuple[Mark, ...]
    kinds: tuple[str, ...]
    notes: tuple[str, ...] = ()


Chart = TimeChart | BarChart | HeatMap | MarkChart


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The bins that all charts over time share. ``begins``: Unix time of each."""

    begins: tuple[float, ...]
    width_seconds: float

    @property
    def middles_ms(self) -> Figures:
        """The middle of each bin, milliseconds of Unix time."""
        return (np.array(self.begins) + self.width_seconds / 2) * 1000.0


def shown(value: float | None, unit: str) -> str:
    """A figure with its unit; a dash if it was not measured."""
    if value is None or not np.isfinite(value):
        return "-"
    if unit == SECONDS:
        return duration(value)
    if unit == RATIO:
        return percent(value)
    if unit == BYTES:
        return byte_size(value)
    if unit == HERTZ:
        return f"{value / 1e6:.0f} MHz"
    return f"{value:.0f} {_SIGNS[unit]}" if unit in _SIGNS else f"{value:.1f}"


_SIGNS: Final = {WATTS: "W", CELSIUS: "°C"}
