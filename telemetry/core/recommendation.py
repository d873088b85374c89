"""One recommended change and its predicted speed-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Advice:
    """One recommended change.

    Attributes:
        action: what to do, in words; ``setting`` and ``value`` as a person types them, None if no setting is changed.
            A value without a setting is the factor named in the action.
        predicted_speedup: factor on the run's steps per second; None if there is no prediction.
        because: the reason, with its figures.
        predicted_low: the least factor, where the measurements allow a range from it to ``predicted_speedup``; None if
            there is no range.
    """

    action: str
    setting: str | None
    value: str | None
    predicted_speedup: float | None
    because: str
    predicted_low: float | None = None


def speedup_text(advice: Mapping[str, Any]) -> str:
    """The predicted speed-up of an advice of the log or of a report, such as 1.9 or 1.2 to 1.9; empty without one."""
    high = advice.get("predicted_speedup")
    return "" if high is None else factor_text(high, advice.get("predicted_low"))


def factor_text(high: float, low: float | None) -> str:
    """A factor, such as 1.9, or a range of it, such as 1.2 to 1.9."""
    return f"{high:g}" if low is None or low >= high else f"{low:g} to {high:g}"
