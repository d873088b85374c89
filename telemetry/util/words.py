"""Formats figures and tables, and prints text safely on any terminal."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TextIO


# -- formats for the output of the commands. An absent figure is shown as ``-``. ---------------------------------------


def percent(ratio: float | None, decimals: int = 1) -> str:
    """A ratio of 0 to 1 as ``12.3 %``."""
    return "-" if ratio is None else f"{100 * ratio:.{decimals}f} %"


def rounded_percent(ratio: float) -> str:
    """A ratio of 0 to 1 for a sentence: whole percents from 10 % on, one decimal below."""
    return percent(ratio, 0 if ratio >= 0.0995 or ratio == 0 else 1)


def plain_number(value: float, digits: int = 3) -> str:
    """A number with at most so many significant digits and never as a power of ten; a large one is whole."""
    if abs(value) >= 10**digits - 0.5:
        return f"{value:.0f}"
    text = f"{value:.{digits}g}"
    if "e-" not in text:
        return text
    exponent = int(text.partition("e-")[2])
    return f"{value:.{exponent + digits - 1}f}".rstrip("0")


def duration(seconds: float | None) -> str:
    """Seconds in a suitable unit: ``0``, ``12.3 us``, ``12.3 ms`` or ``12.34 s``."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0"
    if abs(seconds) < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    return milliseconds(seconds) if abs(seconds) < 1 else f"{seconds:.2f} s"


def rough_duration(seconds: float) -> str:
    """Seconds for a sentence that says "about": ``40 s``, ``12 min``, ``3 h`` or ``5 days``."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def milliseconds(seconds: float) -> str:
    """Seconds as ``12.3 ms``, so that several in one sentence can be compared."""
    return f"{1e3 * seconds:.1f} ms"


def byte_size(size: float) -> str:
    """Bytes in a suitable decimal unit: ``123 B``, ``123 KB``, ``123 MB`` or ``12.3 GB``."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def binary_size(size: float) -> str:
    """Bytes in a suitable binary unit: ``123 B``, ``12.3 KiB``, ``123 MiB`` or ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def shortened(text: str, width: int) -> str:
    """Text cut to at most ``width`` characters, with ``...`` at its end where something is missing."""
    return text if len(text) <= width else text[: width - 3] + "..."


def listed(texts: Sequence[str], most: int = 3) -> str:
    """The first ``most`` texts in a sentence, and the number of the others."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, names_first: bool = False) -> list[str]:
    """The lines of a table, aligned to the right; with ``names_first`` its first column to the left."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for cells in (headings, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append("  ".join([cells[0].ljust(widths[0]) if names_first else first, *others]).rstrip())
    return lines


def ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last rank of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


def named(ranks: Iterable[int], most: int = 6) -> str:
    """Ranks as a person reads them, such as ``rank 3`` or ``ranks 0-2, 5``; only the first ``most`` ranges."""
    all_ranks = sorted(set(ranks))
    if len(all_ranks) == 1:
        return f"rank {all_ranks[0]}"
    found = ranges(all_ranks)
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in found[:most]]
    left = sum(last - first + 1 for first, last in found[most:])
    return f"ranks {', '.join(texts)}{f' and {left} more' if left else ''}"


# -- output of the commands: prints any text safely to any terminal ----------------------------------------------------
# Names and messages in a log can contain any text. Unescaped control characters could change the window title, move the
# cursor or forge a line. A character that the terminal's encoding lacks would end the command with a traceback.

_NOT_PLAIN_ASCII: Final = re.compile(r"[^\n\x20-\x7e]")


def plain(text: str) -> str:
    r"""Escape every character that is not printable, except line breaks. ESC becomes ``\x1b``."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Escape text as `plain` does, and turn line breaks into spaces."""
    return plain(" ".join(text.splitlines()))


def show(text: str) -> int:
    """Print text for a person on the standard output, escaped as `plain` does.

    Returns the exit status: 0, or 1 if the text could not be written. It is no error if the reader closes the pipe.
    """
    return _to_stdout(plain(text))


def show_json(text: str) -> int:
    """Print a JSON document as `show` does. What cannot be printed, or the encoding lacks, is escaped as in JSON."""
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
        sys.stderr = None  # nothing can report it, and the buffer must not fail again at exit, with status 120


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
