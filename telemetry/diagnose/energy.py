"""Splits the energy of the GPU over the categories of the ledger.

The GPU counts its energy itself, so the sum is exact. The split is an estimate: between two readings, each category
gets the share that it had of the time. A GPU that waits draws less than one that computes. So waits that are short
against an interval get too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_WATTS: Final = 20e3
"""No GPU draws so much. A larger difference is a counter that began anew, or an error of the driver."""

_MARGIN_SECONDS: Final = 1.0
"""The driver counts in steps: it may add the energy of a whole step to a short interval."""


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The GPU's counter at one moment.

    Attributes:
        uuid: of the GPU. ``joules``: of its counter, which began with the driver.
        ledger_seconds: of the run at this moment, by category.
    """

    uuid: str
    joules: float
    ledger_seconds: Mapping[str, float]


def added_energy(
    before: dict[str, float] | None, earlier: EnergyReading, later: EnergyReading
) -> dict[str, float] | None:
    """Joules by category with those between two readings of one GPU added; unchanged if these cannot be used.

    Args:
        before: joules by category so far; None before the first.
        earlier: the reading before ``later``.
        later: the newest reading.
    """
    spent = {
        category: max(0.0, seconds - earlier.ledger_seconds.get(category, 0.0))
        for category, seconds in later.ledger_seconds.items()
    }
    seconds, joules = sum(spent.values()), later.joules - earlier.joules
    if later.uuid != earlier.uuid or seconds <= 0 or not 0 <= joules <= MAX_WATTS * (seconds + _MARGIN_SECONDS):
        return before
    so_far = before or {}
    return {category: so_far.get(category, 0.0) + joules * part / seconds for category, part in spent.items()}
