"""The user's callback for stalls: called on a thread of its own, one call at a time."""

from __future__ import annotations

import importlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.errors import kind_of
from telemetry.core.own_threads import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.core.errors import ErrorLog

_SOURCE: Final = "on_stall"


class StallCallback:
    """Calls the user's function for each stall. The caller never waits for it.

    A thread exists only while a call is in progress. If a stall opens meanwhile, the function is not called for it.
    That is counted as an error, and the log names the stall. An exception in the function is counted, too.

    Args:
        callback: the function, or its dotted name, which is resolved at the first stall; None if it is not set.
        errors: counts failed calls and skipped stalls. Used only on the caller's thread.
    """

    def __init__(self, callback: Callable[[dict[str, Any]], Any] | str | None, errors: ErrorLog) -> None:
        self._callback = callback
        self._errors = errors
        self._thread: OwnThread | None = None
        self._failed: deque[str] = deque()

    def tell(self, stall: dict[str, Any]) -> None:
        """Start a call of the function with the fields of a stall. Returns at once."""
        if self._callback is None:
            return
        self.note_failures()
        if self._thread is not None and self._thread.is_alive():
            cause = stall.get("cause")
            self._errors.note(_SOURCE, f"not told of a stall ({cause}): the call for an earlier one has not returned")
            return
        thread = OwnThread(self._call, self._callback, stall, name="telemetry-on-stall", others_code=True)
        with self._errors.contained(_SOURCE):  # no thread can be started
            thread.start()
            self._thread = thread

    def note_failures(self) -> None:
        """Count the calls that have failed since the last time."""
        while self._failed:
            self._errors.note(_SOURCE, self._failed.popleft())

    def wait(self, seconds: float) -> None:
        """Wait for the call in progress, at most this many seconds."""
        thread = self._thread
        if thread is None:
            return
        thread.join(seconds)
        self.note_failures()
        if thread.is_alive():
            self._errors.tell(_SOURCE, "the run has ended, and the call for a stall has not returned")

    def _call(self, callback: Callable[[dict[str, Any]], Any] | str, stall: dict[str, Any]) -> None:
        try:
            _resolve(callback)(stall)
        except BaseException as error:  # includes sys.exit(): Python would print other exceptions to stderr
            self._failed.append(kind_of(error))


def _resolve(callback: Callable[[dict[str, Any]], Any] | str) -> Callable[[dict[str, Any]], Any]:
    """Resolve a callback given by its dotted name. By the first stall, its module has long been imported."""
    if not isinstance(callback, str):
        return callback
    module, _, name = callback.rpartition(".")
    found: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
    return found
