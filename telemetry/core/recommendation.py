"""One recommended change and its predicted speed-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    """One recommended change.

    Attributes:
        action: what to do, in words; ``setting`` and ``value`` as a person types them, None if no setting is changed.
            A value without a setting is the factor named in the action.
        predicted_speedup: factor on the run's steps per second; None if there is no prediction.
        because: the reason, with its figures.
    """

    action: str
    setting: str | None
    value: str | None
    predicted_speedup: float | None
    because: str
