"""How figures and tables are written in the output of the commands. A figure that is absent is shown as ``-``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def megabytes(size: float) -> str:
    """Bytes as ``12.3 MB`` (10**6), so that several in one sentence can be compared."""
    return f"{size / 1e6:.1f} MB"


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


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, names_first: bool = False) -> list[str]:
    """The lines of a table, each column as wide as its widest cell.

    Args:
        headings: one per column.
        rows: rows of cells, one cell per heading.
        names_first: align the first column to the left; all others are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [_table_row(row, widths, names_first=names_first) for row in (headings, *rows)]


def _table_row(cells: Sequence[str], widths: Sequence[int], *, names_first: bool) -> str:
    aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    if names_first:
        aligned[0] = cells[0].ljust(widths[0])
    return "  ".join(aligned).rstrip()
