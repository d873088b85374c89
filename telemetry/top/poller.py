"""Reads the source on a thread of its own, so that keys stay quick while a file system or an endpoint is slow."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from telemetry.top.job_view import waiting
from telemetry.util.text import one_line

if TYPE_CHECKING:
    from telemetry.top.job_view import JobView

_IDLE_FACTOR: Final = 5.0
"""It rests so many times as long as a poll takes: of a core it takes a sixth at most."""

_GRACE_SECONDS: Final = 10.0
_GRACE_FACTOR: Final = 2.0
"""A poll is overdue if its view has not come so long after it began, or in so many times what the last one took."""


class ViewSource(Protocol):
    """Where views come from."""

    @property
    def pause_seconds(self) -> float:
        """Between two polls."""

    def poll(self) -> JobView:
        """The view now."""


class ViewPoller:
    """Keeps the newest view.

    Args:
        source: is used by the thread alone.
        begin: what is shown before the first view.
    """

    def __init__(self, source: ViewSource, begin: str) -> None:
        self._source = source
        self._view = waiting(begin, time.time())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-top", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end. It is not waited for: a dead file system may hold it."""
        self._stop.set()

    def view(self) -> JobView:
        """The newest view."""
        return self._view

    def _run(self) -> None:
        pause = 1.0
        known = self._view
        while not self._stop.is_set():
            began = time.monotonic()
            note = ""
            try:
                known = self._source.poll()
                pause = self._source.pause_seconds
            except Exception as error:
                # A log can hold anything. The view goes on, and says so.
                note = one_line(f"cannot be read: {type(error).__name__}: {error}")
            took = time.monotonic() - began
            rest = max(pause, _IDLE_FACTOR * took)
            self._view = replace(
                known,
                notes=(note, *known.notes) if note else known.notes,
                overdue=time.time() + rest + max(_GRACE_SECONDS, _GRACE_FACTOR * took),
            )
            self._stop.wait(rest)
