"""The terminal while the screen is shown: keys one by one, the other screen, and everything as it was afterwards."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
from typing import TYPE_CHECKING, Final

from telemetry.top.painter import ENTER, LEAVE
from telemetry.top.terminal_keys import KeyDecoder
from telemetry.util.files import opened

if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any

_ESCAPE_SECONDS: Final = 0.05
_READ_BYTES: Final = 4096


_LEAVING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the loop."""


class HangUpError(Exception):
    """The terminal is gone."""


class TerminalMode:
    r"""Use as a context manager around the loop.

    Ctrl-C raises `KeyboardInterrupt` as always. SIGTERM, SIGHUP and SIGQUIT (Ctrl-\) end the loop with `SystemExit`;
    from then on all of them are ignored, until the terminal is as it was. Ctrl-Z is noticed with the next keys:
    `suspended`.

    Args:
        encoding: of the terminal.
    """

    def __init__(self, encoding: str) -> None:
        self._out = sys.stdout.fileno()
        self._encoding = encoding
        self._keys: int | None = None
        self._own_keys = False
        self._saved: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._decoder = KeyDecoder(encoding)
        self._shown = False
        self.suspended = False

    def __enter__(self) -> TerminalMode:  # noqa: PYI034, Python 3.10 has no Self
        self._keys = self._keyboard()
        try:
            self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._note_suspend)
            for number in _LEAVING:
                self._handlers[number] = signal.signal(number, self._leave)
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._ignore()
            self._end()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}
            if self._own_keys and self._keys is not None:
                os.close(self._keys)

    def write(self, text: str) -> None:
        """Write to the terminal.

        Raises:
            HangUpError: it is gone.
        """
        data = text.encode(self._encoding, "replace")
        while data:
            try:
                data = data[os.write(self._out, data) :]
            except BlockingIOError:
                select.select([], [self._out], [], 1.0)
            except OSError as error:
                raise HangUpError(str(error)) from error

    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        try:
            found = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return found.columns or 80, found.lines or 24

    def wait_for_keys(self, seconds: float) -> list[str]:
        """The keys that are pressed; empty if none is within ``seconds``.

        Raises:
            HangUpError: the terminal is gone.
        """
        if self._keys is None:
            select.select([], [], [], seconds)
            return []
        if not select.select([self._keys], [], [], seconds)[0]:
            return self._decoder.rest()
        try:
            sent = os.read(self._keys, _READ_BYTES)
        except OSError as error:
            raise HangUpError(str(error)) from error
        if not sent:
            raise HangUpError("the terminal is closed")
        keys = self._decoder.keys(sent)
        if not keys and not select.select([self._keys], [], [], _ESCAPE_SECONDS)[0]:
            keys = self._decoder.rest()
        return keys

    def suspend(self) -> None:
        """Stop as Ctrl-Z does, with the terminal as it was. Returns when the process goes on."""
        self.suspended = False
        self._end()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._note_suspend)
        self._begin()

    def _keyboard(self) -> int | None:
        if sys.stdin is not None and sys.stdin.isatty():
            return sys.stdin.fileno()
        try:
            number = opened("/dev/tty", os.O_RDONLY)
        except OSError:
            return None
        self._own_keys = True
        return number

    def _begin(self) -> None:
        self._shown = True
        if self._keys is not None:
            self._saved = termios.tcgetattr(self._keys)
            mode = termios.tcgetattr(self._keys)
            mode[3] &= ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(self._keys, termios.TCSADRAIN, mode)
        self.write(ENTER)

    def _end(self) -> None:
        """Make the terminal as it was; nothing if it is so already."""
        if not self._shown:
            return
        try:
            self.write(LEAVE)
        except HangUpError:
            pass
        if self._keys is not None and self._saved is not None:
            try:
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._saved)
            except (OSError, termios.error):
                pass
        self._shown = False

    def _note_suspend(self, _number: int, _frame: FrameType | None) -> None:
        self.suspended = True

    def _ignore(self) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)

    def _leave(self, number: int, _frame: FrameType | None) -> None:
        # The terminal is restored here: this may be raised anywhere, even at the begin of `__exit__`.
        self._ignore()
        self._end()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
