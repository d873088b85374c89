"""How fast a process was over time, and how busy its machine: totals at the ends of its windows, thinned out."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.records import CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_POINTS: Final = 512
_LEDGER_END: Final = 2 + len(CATEGORIES)


class CpuSeconds(NamedTuple):
    """Counted since the process started, see `log_fields.cpu_seconds`.

    While the first three are not measured, they do not grow, ``known`` neither. NaN: the kernel does not tell.
    """

    used: float = 0.0
    others: float = 0.0
    known: float = 0.0
    thread: float = math.nan
    thread_delay: float = math.nan
    worker: float = 0.0
    worker_delay: float = 0.0


_CPU: Final = CpuSeconds._fields
_FIELDS: Final = _LEDGER_END + len(_CPU)


class PacePoint(NamedTuple):
    """Counted since the process started: the wall clock, the steps, and the ledger, in the order of `CATEGORIES`."""

    wall_seconds: float
    steps: float
    ledger: tuple[float, ...]
    cpu: CpuSeconds = CpuSeconds()


class PaceSeries:
    """Points in the order in which they were logged. When there are too many, every other one is dropped.

    The points are totals, so nothing is lost with a dropped one but detail.
    """

    __slots__ = ("_every", "_seen", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._seen = 0
        self._every = 1

    def add(self, totals: dict[str, Any]) -> None:
        """Add a window. Totals that go back are of a damaged log, and are left out."""
        self._seen += 1
        if self._seen % self._every:
            return
        ledger = totals["ledger_total_seconds"]
        cpu = CpuSeconds(*self._values[-len(_CPU) :])._asdict() | totals.get("cpu_total_seconds", {})
        point = (
            totals["wall_seconds"],
            totals["steps_total"],
            *(ledger.get(name, 0.0) for name in CATEGORIES),
            *(cpu[name] for name in _CPU),
        )
        if any(new < old for new, old in zip(point, self._values[-_FIELDS:], strict=False)):
            return
        self._values.extend(point)
        if len(self._values) > _MAX_POINTS * _FIELDS:
            kept = [self._values[at : at + _FIELDS] for at in range(_FIELDS, len(self._values), 2 * _FIELDS)]
            self._values, self._every = array("d"), 2 * self._every
            for each in kept:
                self._values.extend(each)

    def points(self) -> Sequence[PacePoint]:
        """All points, oldest first."""
        values = self._values
        return [
            PacePoint(
                values[at],
                values[at + 1],
                tuple(values[at + 2 : at + _LEDGER_END]),
                CpuSeconds(*values[at + _LEDGER_END : at + _FIELDS]),
            )
            for at in range(0, len(values), _FIELDS)
        ]
