"""Output of the commands: prints any text safely to any terminal.

Names and messages in a log can contain any text. Unescaped control characters could change the window title, move the
cursor or forge a line. A character that the terminal's encoding lacks would end the command with a traceback.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

_NOT_PLAIN_ASCII: Final = re.compile(r"[^\n\x20-\x7e]")


def plain(text: str) -> str:
    r"""Text with every character escaped that is not printable; line breaks stay. ESC becomes ``\x1b``."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else _escaped(c) for c in text)


def one_line(text: str) -> str:
    """`plain` text in which line breaks are spaces: a value inside a line."""
    return plain(" ".join(text.splitlines()))


def show(text: str) -> int:
    """Print text for a person on the standard output, escaped as `plain` does.

    Returns:
        The exit status: 0, or 1 if the text could not be written. It is no error if the reader closes the pipe.
    """
    return _to_stdout(plain(text))


def show_json(text: str) -> int:
    """Print a JSON document on the standard output. Characters that its encoding lacks or cannot print are escaped.

    Returns:
        As `show`.
    """
    stdout = sys.stdout
    encoding = _encoding(stdout) if stdout is not None else "ascii"

    def escaped(match: re.Match[str]) -> str:
        character = match[0]
        if character.isprintable() and character.encode(encoding, "ignore"):
            return character
        units = character.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))

    return _to_stdout(_NOT_PLAIN_ASCII.sub(escaped, text))


def complain(message: str) -> None:
    """Print an error of a command on the standard error: one line that begins with ``telemetry:``."""
    warn(f"telemetry: {one_line(message)}\n")


def warn(text: str) -> None:
    """Print text with its line breaks on the standard error, escaped as `plain` does."""
    try:
        _write(sys.stderr, plain(text))
    except (OSError, ValueError):
        sys.stderr = None  # it cannot be reported; the buffer must not fail again at exit, with status 120


def _to_stdout(text: str) -> int:
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        sys.stdout = None  # the reader has closed the pipe; Python must not flush it again at exit
    except (OSError, ValueError) as error:
        sys.stdout = None
        complain(f"the standard output cannot be written: {error}")
        return 1
    return 0


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # started with the descriptor closed
        return
    encoding = _encoding(stream)
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _encoding(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
