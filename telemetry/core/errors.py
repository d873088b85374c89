"""Counts the agent's own failures by source and logs each at most once a minute. Never raises."""

from __future__ import annotations

import errno
import os
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_QUIET_SECONDS: Final = 60.0
_MAX_TEXT: Final = 500
_MAX_KINDS: Final = 4


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


def kind_of(error: BaseException) -> str:
    """What an exception of the user's code or of a library is, without its text.

    The text may hold anything: an address with a password, a token, a line of the data. Others may read the log. So it
    gets the types, from the exception back to its cause, the kernel's word for an error of the system, and the place.

    Returns:
        For example ``MlflowException from ConnectionRefusedError: Connection refused, at rest_utils.py:291``.
    """
    kinds: list[str] = []
    each: BaseException | None = error
    while each is not None and len(kinds) < _MAX_KINDS:
        number = each.errno if isinstance(each, OSError) else None
        reason = f": {os.strerror(number)}" if isinstance(number, int) and number in errno.errorcode else ""
        kinds.append(type(each).__name__ + reason)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f", at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"  # noqa: PTH119
        trace = trace.tb_next
    return " from ".join(kinds) + place
