"""The sinks: they get the figures, besides the log and the endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

NAMESPACE: Final = "telemetry"
"""Every key begins with it, so that it cannot be one of the user's."""


@dataclass(frozen=True, slots=True)
class SinkItem:
    """An item for the sinks: the figures of a rank at the end of one window, or a stall that has opened, in words.

    Attributes:
        step: number of training steps so far, over all attempts of the run.
        unix_seconds: Unix time.
        rank: the rank. ``several``: whether other ranks write as well.
        figures: the values by name, see `telemetry.agent.figures`; empty for a stall.
        stall: the stall; empty for figures.
    """

    step: int
    unix_seconds: float
    rank: int
    several: bool
    figures: dict[str, float] = field(default_factory=dict)
    stall: str = ""

    def key(self, name: str) -> str:
        """The key of a figure. It contains the rank if several ranks may write into the same run."""
        return f"{NAMESPACE}/rank-{self.rank}/{name}" if self.several else f"{NAMESPACE}/{name}"
