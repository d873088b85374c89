"""Counts the agent's own failures by source and logs each at most once a minute. Never raises."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_QUIET_SECONDS: Final = 60.0
_MAX_TEXT: Final = 500


class ErrorLog:
    """Counts failures and keeps log lines of them.

    Attributes:
        counts: failures by source, since the start.
    """

    def __init__(self, mono_ns: Callable[[], int] = now_ns) -> None:
        self.counts: dict[str, int] = {}
        self._lines: deque[dict[str, Any]] = deque(maxlen=100)
        self._told: dict[tuple[str, str], int] = {}
        self._now = mono_ns

    def note(self, source: str, error: BaseException | str, *, count: int = 1) -> None:
        """Count a failure. The same message from the same source is logged once a minute."""
        self.counts[source] = self.counts.get(source, 0) + count
        self.tell(source, error)

    def tell(self, source: str, message: BaseException | str) -> None:
        """Log a message without counting a failure."""
        text = (message if isinstance(message, str) else text_of(message))[:_MAX_TEXT]
        now = self._now()
        key = (source, text)
        if now - self._told.get(key, -int(_QUIET_SECONDS * NS)) < _QUIET_SECONDS * NS:
            return
        if len(self._told) > 1000:
            self._told.clear()
        self._told[key] = now
        self._lines.append({"source": source, "message": text, "errors_total": self.counts.get(source, 0)})

    def take_lines(self) -> list[dict[str, Any]]:
        """The log lines since the last call."""
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines

    @contextmanager
    def contained(self, source: str, kind: type[BaseException] = Exception) -> Iterator[None]:
        """Count exceptions of this ``kind`` from the block under ``source``, and suppress them."""
        try:
            yield
        except kind as error:
            self.note(source, error)


def text_of(error: BaseException) -> str:
    """An exception as one line of text. Its frames are not kept, because they refer to the variables of functions."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_TEXT]
    except Exception:
        return type(error).__name__
