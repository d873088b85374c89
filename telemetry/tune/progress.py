"""Shows on the standard error which trial runs, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from typing import Final

from telemetry.util.text import warn

_EVERY_SECONDS: Final = 0.5


class Progress:
    """One line, rewritten in place on a terminal. Elsewhere there is one line for each trial.

    Args:
        most_trials: how many trials there are at most.
    """

    def __init__(self, most_trials: int) -> None:
        self._most = most_trials
        self._took: list[float] = []
        self._began = 0.0
        self._shown = 0.0
        self._name = ""
        self._expected = 0.0
        self._in_place = sys.stderr is not None and sys.stderr.isatty()

    def begin(self, number: int, name: str, expected_seconds: float) -> None:
        """A trial begins. ``expected_seconds``: how long it takes, before any has ended."""
        self._began = time.monotonic()
        self._expected = sum(self._took) / len(self._took) if self._took else expected_seconds
        self._name = f"trial {number} of at most {self._most}: {name}"
        if not self._in_place:
            warn(f"{self._name}; {self._left(0.0)}\n")

    def tick(self) -> None:
        """The trial goes on."""
        now = time.monotonic()
        if self._in_place and now - self._shown >= _EVERY_SECONDS:
            self._shown = now
            passed = now - self._began
            sys.stderr.write(f"\r\x1b[K{self._name}; {passed:.0f} s, {self._left(passed)}")
            sys.stderr.flush()

    def end(self) -> None:
        """The trial has ended."""
        self._took.append(time.monotonic() - self._began)
        if self._in_place:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _left(self, passed: float) -> str:
        more = max(0, self._most - len(self._took) - 1)
        return f"at most {max(0.0, self._expected - passed) + more * self._expected:.0f} s left"
