"""Callbacks for training frameworks, each in a file that only the script imports; and here what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry import api

if TYPE_CHECKING:
    from collections.abc import Mapping


class MarkedPhase:
    """At most one phase at a time, which begins in one hook and ends in another. Without an agent it does nothing."""

    def __init__(self) -> None:
        self._open: api.phase | None = None

    def begin(self, name: str) -> None:
        """Begin a phase, and end the one before."""
        self.end()
        self._open = api.phase(name)
        self._open.__enter__()

    def end(self) -> None:
        """End the phase, if there is one."""
        ended, self._open = self._open, None
        if ended is not None:
            ended.__exit__(None, None, None)


def prefixed(prefix: str = "telemetry/") -> Mapping[str, float]:
    """The newest figures with a prefix, which sets them apart from the script's own. Empty without an agent."""
    return {f"{prefix}{name}": value for name, value in api.metrics().items()}


def tell_tokens(number: int) -> None:
    """Tell the agent how many tokens this rank trains on; 0 if they are not counted.

    Raises:
        TypeError: it is no whole number. A tensor is refused without reading it, which could wait for the GPU.
    """
    if not (isinstance(number, int) and number == 0):
        api.tokens(number)
