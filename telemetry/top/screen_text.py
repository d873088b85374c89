"""Pieces of the screen: styled text of a given width, and bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from telemetry.util.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

Span = tuple[str, str]
"""A text, and the name of its style: empty, ``good``, ``bad``, ``warn``, ``dim``, ``strong``, ``cursor``, or a category
of the ledger."""

ScreenLine = tuple[Span, ...]

SHORT: Final = {
    STARTUP: "startup",
    DATA_WAIT: "data wait",
    COMPUTE: "compute",
    EVALUATION: "eval",
    CHECKPOINT: "checkpoint",
    OTHER: "other",
}

_LETTERS: Final = {STARTUP: "s", DATA_WAIT: "w", COMPUTE: "#", EVALUATION: "e", CHECKPOINT: "c", OTHER: "."}
_BLOCKS: Final = {
    STARTUP: "\u2591", DATA_WAIT: "\u2592", COMPUTE: "\u2588",
    EVALUATION: "\u2593", CHECKPOINT: "\u259a", OTHER: "\u00b7",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Charset:
    """What the terminal can show.

    Attributes:
        encoding: of the terminal.
        blocks: whether bars are made of blocks. Without colours, letters are easier to tell apart.
        fit: cuts or fills a text to a number of columns.
        columns: of a text.
    """

    encoding: str
    blocks: bool
    fit: Callable[[str, int], str]
    columns: Callable[[str], int]

    def safe(self, text: str) -> str:
        """A text from a log or an endpoint as one line without control characters, in this encoding."""
        shown = text if text.isascii() and text.isprintable() else one_line(text)
        return shown if shown.isascii() else shown.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def cell(self, text: str, width: int) -> str:
        """A text of exactly this width; one that is longer ends in a dot or two."""
        shown, width = self.safe(text), max(0, width)
        if self.columns(shown) <= width:
            return self.fit(shown, width)
        return self.fit(shown, width - 2) + ".." if width > 3 else self.fit(shown, width)

    def right(self, text: str, width: int) -> str:
        """A short figure, to the right."""
        return text.rjust(width)[:width] if len(text) <= width else text[:width]

    def wrapped(self, text: str, width: int, most: int) -> list[str]:
        """A text in lines, at most so many; the last one ends in dots if something is missing."""
        width = max(1, width)
        lines: list[str] = []
        line = ""
        for word in self.safe(text).split(" "):
            longer = f"{line} {word}" if line else word
            if self.columns(longer) <= width or not line:
                line = longer
            else:
                lines.append(line)
                line = word
        lines.append(line)
        lines = [part for each in lines for part in self._parts(each, width)]
        if len(lines) <= most:
            return lines
        kept = lines[:most]
        last = kept[-1]
        while last and self.columns(last) > width - 4:
            last = last[:-1]
        return [*kept[:-1], f"{last} ..."]

    def _parts(self, text: str, width: int) -> list[str]:
        """A word that is longer than a line, such as a path, in parts."""
        parts = []
        while self.columns(text) > width:
            cut = len(self.fit(text, width).rstrip()) or 1
            parts.append(text[:cut])
            text = text[cut:]
        return [*parts, text]

    def bar(self, seconds: dict[str, float], width: int) -> ScreenLine:
        """A ledger as a bar. A category with time that is less than a column is left out."""
        total = sum(each for each in seconds.values() if each > 0)
        if total <= 0:
            return (("".ljust(width), ""),)
        signs = _BLOCKS if self.blocks else _LETTERS
        spans: list[Span] = []
        done, at = 0.0, 0
        for category in _BAR_ORDER:
            done += max(0.0, seconds.get(category, 0.0))
            until = round(width * done / total)
            if until > at:
                spans.append((signs[category] * (until - at), category))
                at = until
        return (*spans, (" " * (width - at), "")) if at < width else tuple(spans)

    def legend(self) -> ScreenLine:
        """What the parts of a bar mean."""
        signs = _BLOCKS if self.blocks else _LETTERS
        return tuple(span for c in _BAR_ORDER for span in ((f"{signs[c]}", c), (f" {SHORT[c]}  ", "dim")))


_BAR_ORDER: Final = (DATA_WAIT, *(category for category in CATEGORIES if category != DATA_WAIT))
"""The one that is looked for begins each bar."""
