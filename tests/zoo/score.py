"""Computes from the results whether the goals are reached: what was found, named and predicted, over all runs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .judgement import Result
    from .specimens import Specimen

MIN_RIGHT: Final = 0.95
"""Share of the runs in which the cause named first must be right."""

MAX_OFF: Final = 0.15
"""How far a predicted speed-up, or the nearer end of its range, may be from the realised one, as a share of it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, and whether it is reached."""

    name: str
    met: bool
    reached: str


@dataclass(frozen=True, slots=True)
class Score:
    """One specimen over its repetitions."""

    specimen: Specimen
    results: tuple[Result, ...]

    @property
    def told(self) -> tuple[Result, ...]:
        """Runs with a result."""
        return tuple(r for r in self.results if r.verdict)

    @property
    def detected(self) -> int:
        """Runs in which a stall was found."""
        return sum(r.detected for r in self.results)

    @property
    def right(self) -> int:
        """Runs in which the cause named first was right."""
        return sum(bool(r.right) for r in self.results)

    @property
    def accused(self) -> int:
        """Runs in which a control was accused, or that failed."""
        return sum(r.accused is not False for r in self.results) if self.specimen.healthy else 0

    @property
    def followed(self) -> int:
        """Runs after which advice was followed, with any result."""
        return sum(r.advised is not None for r in self.results)

    @property
    def predicted(self) -> float | None:
        """Median predicted speed-up of the runs in which the advice was followed."""
        values = [r.advised.predicted for r in self.results if r.advised is not None]
        return median(values) if values else None

    @property
    def realised(self) -> float | None:
        """Median realised speed-up."""
        values = [r.realised for r in self.results if r.realised is not None]
        return median(values) if values else None

    @property
    def off(self) -> float | None:
        """Median over the runs of how far the prediction is from the realised speed-up, see `Advised.off`; None if no
        advice was followed, or no run with it succeeded."""
        off = [r.advised.off(r.realised) for r in self.results if r.advised is not None and r.realised]
        return median(off) if off else None


def scores(specimens: Sequence[Specimen], results: Sequence[Result]) -> list[Score]:
    """Scores by specimen, in the order of the specimens."""
    return [Score(s, tuple(r for r in results if r.specimen == s.name)) for s in specimens]


def goals(scored: Sequence[Score]) -> list[Goal]:
    """The goals for the specimens that were run."""
    stalls = [s for s in scored if not s.specimen.healthy]
    controls = [s for s in scored if s.specimen.healthy]
    wanted = sum(len(s.results) for s in stalls)
    found, right = sum(s.detected for s in stalls), sum(s.right for s in stalls)
    accused, calm = sum(s.accused for s in controls), sum(len(s.results) for s in controls)
    compared = [s for s in scored if s.followed]
    near = [s for s in compared if s.off is not None and s.off <= MAX_OFF]
    return [
        Goal("every stall is found", found == wanted, f"{found} of {wanted} runs"),
        Goal("no control is accused", not accused, f"{accused} of {calm} runs accused"),
        Goal(
            f"the cause named first is right in {100 * MIN_RIGHT:.0f} % of the runs",
            right >= MIN_RIGHT * wanted,
            f"{right} of {wanted} runs",
        ),
        Goal(
            f"each predicted speed-up is within {100 * MAX_OFF:.0f} % of the realised one",
            len(near) == len(compared),
            f"{len(near)} of {len(compared)} specimens whose advice can be followed here",
        ),
    ]
