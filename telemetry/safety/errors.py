"""Counts failures of the agent's own code by source, logs each at most once a minute, and prints its stderr lines."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections import deque
from contextlib import contextmanager
from inspect import CO_VARARGS
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.safety.threads import named
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_QUIET_SECONDS: Final = 60.0
_MAX_TEXT: Final = 500
_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120 - strings to compare
_OUR_MODULES: Final = sys.stdlib_module_names | {"telemetry", "torch", "msgspec", "pynvml", "amdsmi", "structlog"}
"""Top-level modules whose exceptions our own code, and what it calls, may raise."""
_MAX_KINDS: Final = 4


class ErrorNote(NamedTuple):
    """A failure, or news, for the log. ``errors_total``: failures of this source so far."""

    source: str
    message: str
    errors_total: int


class ErrorLog:
    """Counts failures and keeps log lines of them.

    Attributes:
        counts: failures by source, since the start.
    """

    def __init__(self, mono_ns: Callable[[], int] = now_ns) -> None:
        self.counts: dict[str, int] = {}
        self._notes: deque[ErrorNote] = deque(maxlen=100)
        self._told: dict[tuple[str, str], int] = {}
        self._now = mono_ns

    def note(self, source: str, error: BaseException | str, *, count: int = 1) -> None:
        """Count a failure. The same message from the same source is logged once a minute.

        Raises:
            BaseException: the error, if it comes from the script.
        """
        if isinstance(error, BaseException):
            let_pass(error)
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
        self._notes.append(ErrorNote(source, text, self.counts.get(source, 0)))

    def take_notes(self) -> list[ErrorNote]:
        """What to log since the last call."""
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes

    @contextmanager
    def contained(self, source: str, kind: type[BaseException] = Exception) -> Iterator[None]:
        """Count and suppress exceptions of this ``kind`` from the block, under ``source``."""
        try:
            yield
        except kind as error:
            self.note(source, error)


def text_of(error: BaseException) -> str:
    """An exception as one line of text. Its frames are not kept, because they refer to functions' variables."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_TEXT]
    except Exception:
        return type(error).__name__


def let_pass(error: BaseException) -> None:
    """Raise an exception again that our code has caught, if it comes from the script.

    Python runs the script's signal handlers on the main thread between any two bytecodes, so also in our code. What a
    handler raises there (Ctrl-C, a preemption notice) is meant for the script.

    Args:
        error: an exception that our code has caught without calling the script's code on purpose.

    Raises:
        BaseException: the error, without our frames.
    """
    if named(get_ident()) is not None:
        return  # our threads run no handlers
    trace = error.__traceback__
    ours = True
    while trace is not None:
        ours = trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)
        if not ours and _is_handler(trace.tb_frame):
            raise error.with_traceback(trace)
        trace = trace.tb_next
    thrown = ours and type(error).__module__.partition(".")[0] not in _OUR_MODULES  # another thread threw it into this
    if thrown or not isinstance(error, Exception):
        raise error


def _is_handler(frame: FrameType) -> bool:
    """Whether a frame is a signal handler's. No other function gets a frame, the interrupted one, as its argument."""
    code, values = frame.f_code, frame.f_locals
    arguments = [*map(values.get, code.co_varnames[: code.co_argcount])]
    if code.co_flags & CO_VARARGS:
        arguments += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(isinstance(value, FrameType) for value in arguments)


def kind_of(error: BaseException) -> str:
    """Describe an exception of the user's code or of a library without its text.

    The text may hold anything: an address with a password, a token, a line of the data. Others may read the log. So it
    gets the types, from the exception back to its cause, the kernel's word for an error of the system, and the place:
    ``MlflowException from ConnectionRefusedError: Connection refused, at rest_utils.py:291``.
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


def say(*lines: str) -> bool:
    """Write lines to stderr immediately or not at all. Never blocks, never raises, leaves nothing in a buffer.

    Python writes its buffer again when it exits. On a full disk that fails, and Python exits with status 120. So the
    line is written directly to the descriptor. A ``sys.stderr`` that is not a file of Python's own, as in a notebook,
    gets them as text.

    Args:
        lines: without line breaks; characters that cannot be printed are shown as ``?``. More than 4 kB may block.

    Returns:
        Whether they were written.
    """
    text = "".join("".join(c if c.isprintable() else "?" for c in line) + "\n" for line in lines)
    stream: Any = sys.stderr
    if stream is None:
        return False
    try:
        number = stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except (OSError, ValueError):  # a buffer in memory, or closed
        number = None
    try:
        if number is not None:
            return _write(stream, number, text.encode(stream.encoding or "utf-8", "backslashreplace"))
        stream.write(text)
        stream.flush()
    except Exception:
        return False
    return True


def _write(stream: Any, number: int, line: bytes) -> bool:
    # A pipe without reading would block, and one whose reader is gone may end the process (SIGPIPE).
    ready = select.poll()
    ready.register(number, select.POLLOUT)
    if [state for _, state in ready.poll(0)] != [select.POLLOUT]:
        return False
    stream.flush()  # first what the script has already written
    return os.write(number, line) == len(line)
