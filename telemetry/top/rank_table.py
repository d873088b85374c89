"""The table of ranks: a line for each, in columns that fit the width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.report.attempts import FAILED, FINISHED
from telemetry.top.rank_row import GONE, OK, SILENT, STALLED, STARTING, STARVED, STUCK, WAITING
from telemetry.top.screen_text import SHORT
from telemetry.util.text import byte_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.top.rank_row import RankRow
    from telemetry.top.screen_text import Charset, ScreenLine

STYLES: Final = {
    GONE: "bad",
    FAILED: "bad",
    STUCK: "bad",
    SILENT: "warn",
    STALLED: "warn",
    STARVED: "warn",
    WAITING: "dim",
    STARTING: "dim",
    OK: "good",
    FINISHED: "good",
}

_BAR: Final = (8, 48)


class RankTable:
    """Makes the lines of the table.

    Args:
        charset: what the terminal can show.
    """

    def __init__(self, charset: Charset) -> None:
        self._chars = charset

    def lines(
        self, rows: Sequence[RankRow], at: int, *, width: int, whole_run: bool, figures_of: Sequence[RankRow]
    ) -> list[ScreenLine]:
        """The headings and a line for each row.

        Args:
            rows: those to show.
            at: the place of the cursor among them; -1 for none.
            width: columns of the screen.
            whole_run: whether the bars are of the whole run.
            figures_of: all ranks: a column is left out if none of them has a figure for it.
        """
        gpu = any("utilization_ratio" in row.figures for row in figures_of)
        columns = self._columns(width, gpu=gpu, rows=figures_of)
        bars = "whole run" if whole_run else "last minute"
        heading = "".join(
            f"{self._chars.right(name, size) if right else self._chars.cell(name, size)} "
            for name, size, right in columns
        )
        lines: list[ScreenLine] = [((self._chars.cell(f" {heading}{bars}", width), "strong"),)]
        return lines + [
            self._line(row, columns, width, cursor=place == at, whole_run=whole_run) for place, row in enumerate(rows)
        ]

    def _columns(self, width: int, *, gpu: bool, rows: Sequence[RankRow]) -> list[tuple[str, int, bool]]:
        """Name, width, and whether to the right."""
        rank = max(4, len(str(max((row.rank for row in rows), default=0))))
        columns = [("rank", rank, True), ("node", 8, False), ("state", 18, False), ("now", 10, False),
                   ("step/s", 6, True), ("wait", 4, True)]  # fmt: skip
        columns += [("gpu", 4, True), ("mem", 4, True)] if gpu else []
        if width >= 110:
            columns += [("watt", 4, True), ("C", 3, True)] if gpu else []
            columns += [("rss", 7, True)]
        spare = width - 1 - sum(size + 1 for _, size, _ in columns) - _BAR[0]
        nodes = max((len(row.node) for row in rows), default=0)
        longest = max((len(row.finding) for row in rows), default=0)
        grown = []
        for name, size, right in columns:
            wanted = {"node": nodes, "state": longest}.get(name, size)
            more = max(0, min(wanted - size, spare // 2 if name == "node" else spare - 4))
            spare -= more
            grown.append((name, size + more, right))
        return grown

    def _line(
        self, row: RankRow, columns: list[tuple[str, int, bool]], width: int, *, cursor: bool, whole_run: bool
    ) -> ScreenLine:
        style = STYLES[row.state]
        cells = {
            "rank": str(row.rank),
            "node": row.node,
            "state": row.finding,
            "now": SHORT.get(row.now_in, "-"),
            "step/s": _rate(row.steps_per_second),
            "wait": _ratio(row.wait_ratio),
            "gpu": _ratio(row.figures.get("utilization_ratio")),
            "mem": _ratio(_used(row)),
            "watt": _whole(row.figures.get("power_watts")),
            "C": _whole(row.figures.get("temperature_celsius")),
            "rss": _size(row.figures.get("process_resident_memory_bytes")),
        }
        spans = [(">" if cursor else " ", "cursor" if cursor else "")]
        taken = 1
        for name, size, right in columns:
            text = self._chars.right(cells[name], size) if right else self._chars.cell(cells[name], size)
            plain = "cursor" if cursor else ""
            spans.append((f"{text} ", style if name == "state" else plain))
            taken += size + 1
        ledger = row.ledger if whole_run else row.recent_ledger
        return (*spans, *self._chars.bar(ledger, max(0, min(width - taken, _BAR[1]))))


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{100 * min(value, 1.0):.0f}%"


def _used(row: RankRow) -> float | None:
    used, total = row.figures.get("memory_used_bytes"), row.figures.get("memory_total_bytes")
    return used / total if used is not None and total else None


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _size(value: float | None) -> str:
    return "-" if value is None else byte_size(value)
