"""Reads the source on a thread of its own, so that keys stay quick while a file system or an endpoint is slow."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from telemetry.core.terminal import one_line
from telemetry.top.job_view import waiting

if TYPE_CHECKING:
    from telemetry.top.job_view import JobView

_IDLE_FACTOR: Final = 5.0
"""It rests so many times as long as a poll takes: of a core it takes a sixth at most."""


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
        self._first = threading.Event()
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
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._view = self._source.poll()
                pause = self._source.pause_seconds
            except Exception as error:
                # A log can hold anything. The view goes on, and says so.
                before = self._view
                note = one_line(f"cannot be read: {type(error).__name__}: {error}")
                self._view = waiting(before.verdict.text, before.seen, [note]) if not before.rows else before
            self._first.set()
            self._stop.wait(max(pause, _IDLE_FACTOR * (time.monotonic() - began)))
