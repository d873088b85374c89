"""A lasting change of how long the steps of a rank take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Companion(NamedTuple):
    """What changed together with the steps: a figure with its unit in its name, before and after."""

    what: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class StepChange:
    """One change.

    Attributes:
        at_seconds: when the steps changed, on the clock of `Totals.wall_seconds`. ``step``: the first step after it.
        before_seconds, after_seconds: duration of a step, median.
        part: the part of a step that changed most: ``data_wait`` or ``compute``.
        companions: what changed with it: first the seconds of that part in a step.
    """

    at_seconds: float
    step: int
    before_seconds: float
    after_seconds: float
    part: str
    companions: tuple[Companion, ...] = ()

    @property
    def ratio(self) -> float:
        """Step time after the change over step time before it."""
        return self.after_seconds / self.before_seconds
