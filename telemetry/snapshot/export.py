"""The thread that keeps what was recorded: what takes seconds there must not stop the sampling."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from telemetry.signals import signals_blocked

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.snapshot.outcome import Outcome


class Export:
    """A thread that waits for what comes of one plan, and keeps it.

    It is begun before the recording, because Python 3.12 and later begin no thread at the end of a process.

    Args:
        keep: keeps an outcome that has a trace.

    Raises:
        RuntimeError: no thread can be had.
    """

    def __init__(self, keep: Callable[[Outcome], None]) -> None:
        self._keep = keep
        self._given: SimpleQueue[Outcome | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="telemetry-export", daemon=True)
        with signals_blocked():
            self._thread.start()

    def give(self, outcome: Outcome | None) -> None:
        """What came of the plan; None where there is nothing to keep, which ends the thread."""
        self._given.put(outcome)

    def join(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        self._thread.join(seconds)

    def _main(self) -> None:
        outcome = self._given.get()
        if outcome is not None:
            self._keep(outcome)
