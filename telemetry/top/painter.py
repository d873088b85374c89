"""Paints frames on a terminal with rich: only the lines that changed are written. The one user of rich."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from telemetry.top.screen_text import Charset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

    from telemetry.top.screen_text import ScreenLine

_STYLES: Final = {
    "": Style.null(),
    "good": Style(color="green"),
    "bad": Style(color="red", bold=True),
    "warn": Style(color="yellow"),
    "dim": Style(dim=True),
    "strong": Style(bold=True),
    "cursor": Style(reverse=True),
    DATA_WAIT: Style(color="red"),
    COMPUTE: Style(color="green"),
    CHECKPOINT: Style(color="blue"),
    EVALUATION: Style(color="cyan"),
    STARTUP: Style(color="yellow"),
    OTHER: Style(color="white", dim=True),
}

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The other screen of the terminal, without a cursor and without line breaks of its own."""

LEAVE: Final = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"


class Painter:
    """Knows what stands on the screen.

    Args:
        stream: the standard output.
        write: writes text to the terminal.
    """

    def __init__(self, stream: TextIO, write: Callable[[str], None]) -> None:
        self._console = Console(file=stream, width=1 << 12, highlight=False, markup=False, emoji=False)
        self._stream = stream
        self._write = write
        self._shown: list[ScreenLine | None] = []
        self._size = (0, 0)
        self._drawn: dict[ScreenLine, str] = {}

    @property
    def is_capable(self) -> bool:
        """Whether the terminal can place text: it is one, and no dumb one.

        Some variables of the environment, such as FORCE_COLOR, make rich take a file for a terminal.
        """
        if not self._stream.isatty():
            return False
        return self._console.is_terminal and not self._console.is_dumb_terminal and bool(os.environ.get("TERM"))

    def charset(self) -> Charset:
        """What the terminal can show."""
        encoding = getattr(self._console.file, "encoding", None) or "ascii"
        colours = self._stream.isatty() and self._console.color_system is not None and not self._console.no_color
        try:
            "\u2592\u2588\u259a".encode(encoding)
        except (UnicodeError, LookupError):
            blocks = False
        else:
            blocks = colours
        return Charset(encoding, blocks=blocks, fit=set_cell_size, columns=cell_len)

    def forget(self) -> None:
        """Something else has written on the screen."""
        self._size = (0, 0)

    def paint(self, lines: Sequence[ScreenLine], size: tuple[int, int]) -> None:
        """Show a frame.

        Args:
            lines: from the top.
            size: columns and lines of the terminal.
        """
        written = []  # erased before, not behind it: there the last column would be lost
        if size != self._size:
            written.append("\x1b[0m\x1b[2J")
            self._shown, self._size = [None] * len(lines), size
        for place, line in enumerate(lines):
            if place >= len(self._shown) or self._shown[place] != line:
                written.append(f"\x1b[{place + 1};1H\x1b[K{self._ansi(line)}\x1b[0m")
        self._shown = list(lines)
        if written:
            self._write("".join(written))

    def plain(self, lines: Sequence[ScreenLine]) -> str:
        """A frame as plain text."""
        return "".join(f"{''.join(text for text, _ in line).rstrip()}\n" for line in lines)

    def _ansi(self, line: ScreenLine) -> str:
        found = self._drawn.get(line)
        if found is None:
            if len(self._drawn) > 4096:
                self._drawn.clear()
            text = Text.assemble(*((text, _STYLES[style]) for text, style in line), end="", no_wrap=True)
            with self._console.capture() as captured:
                self._console.print(text, end="", crop=False, soft_wrap=True)
            found = self._drawn[line] = captured.get()
        return found
