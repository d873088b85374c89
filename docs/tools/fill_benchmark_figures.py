"""Write the figures of the published benchmark into the tables of docs/overhead.md: ``make docs-reference``.

Each figure keeps the number of decimals it has on the page. It is rounded once, from the value as measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "overhead.md"

_HOT, _COLD = "Per step on the training thread, hot", "Per step on the training thread, cold"
_FETCH, _SCRAPE = "Per fetch in a DataLoader worker", "A scrape of a node of 8 ranks"
_THREADS, _TAIL = "The agent's own threads", "The longest of many steps of 40 us"
_FETCH_HOT: Final = "hot, nothing else is done: telemetry"
_FETCH_COLD: Final = "cold, after a convolution of an image: telemetry"
_FLOOR: Final = "floor adds: two stamps, stored in a list"

# The start of the table's row, and the measured rows (section and name, by their starts) in the order of its figures.
QUOTES: Final = (
    ("the floor: two stamps and a store", ((_HOT, _FLOOR), (_COLD, _FLOOR))),
    ("**telemetry**, everything on", ((_HOT, "telemetry adds"), (_COLD, "telemetry adds"))),
    ("prometheus_client: a counter", ((_HOT, "prometheus_client"), (_COLD, "prometheus_client"))),
    ("TraceML 0.5.0 |", ((_HOT, "TraceML 0.5.0 adds"), (_COLD, "TraceML 0.5.0 adds"))),
    ("the agent's threads", ((_THREADS, "CPU at 1 Hz"),)),
    ("TraceML 0.5.0, the same", ((_THREADS, "TraceML 0.5.0: the same, all of it"),)),
    ("a node of 8 ranks with 2 workers", ((_THREADS, "a node with 8 ranks"),)),
    ("per fetch in a DataLoader worker", ((_FETCH, _FETCH_HOT), (_FETCH, _FETCH_COLD))),
    ("resident memory at the start", (("Memory", "added to torch at the start, RSS"),)),
    ("growth over a million steps", (("Memory", "growth over 1,000,000 steps"),)),
    ("`GET /metrics` of a node with 8 ranks", ((_SCRAPE, "GET /metrics"), (_SCRAPE, "GET /metrics, 99th percentile"))),
    ("a step during a scrape", ((_SCRAPE, "steps met by a scrape longer by, median"),)),
    ("the 99.99th percentile of steps", ((_TAIL, "longer by, 99.99th percentile"),)),
    ("the three [sinks]", (("The sinks", "all on: more by"),)),
)

_NUMBER: Final = r"-?\d+(?:\.\d+)?"
# A median with its unit ("0.28 % of a core"), and, where there is one, its spread: "(0.21 - 0.39)", with a dash.
_FIGURE: Final = re.compile(
    rf"(?<![\w.])(?P<median>{_NUMBER})(?= (?:µs|ms|MiB|%))(?:[^(|\d]*\((?P<p10>{_NUMBER}) \u2013 (?P<p90>{_NUMBER}))?"
)


def filled(text: str) -> str:
    """The page with every quoted figure taken from the results that it names.

    Raises ValueError when a row is missing, stands twice, or has another number of figures than it should.
    """
    (results,) = re.findall(r"benchmarks/results/(overhead-[\w-]+)\.md", text)
    measured = json.loads((ROOT / "benchmarks" / "results" / f"{results}.json").read_text("utf-8"))["rows"]
    lines = text.splitlines(keepends=True)
    for start, names in QUOTES:
        at = [index for index, line in enumerate(lines) if line.startswith(f"| {start}")]
        if len(at) != 1:
            raise ValueError(f"{len(at)} rows start with '| {start}'; there must be one")
        lines[at[0]] = _filled_row(lines[at[0]], [_row(measured, *name) for name in names])
    return "".join(lines)


def _filled_row(line: str, rows: list[dict[str, Any]]) -> str:
    figures = list(_FIGURE.finditer(line, line.index("|", 1)))  # the first cell names the row
    if len(figures) != len(rows):
        raise ValueError(f"{line!r} has {len(figures)} figures; it must have {len(rows)}")
    for match, measured in reversed(list(zip(figures, rows, strict=True))):
        for statistic in ("p90", "p10", "median"):  # from right to left, so that the earlier positions stay
            if match[statistic] is not None:
                decimals = len(match[statistic].partition(".")[2])
                rounded = f"{round(measured[statistic], decimals) + 0.0:.{decimals}f}"  # never "-0.0"
                line = line[: match.start(statistic)] + rounded + line[match.end(statistic) :]
    return line


def _row(rows: list[dict[str, Any]], section: str, name: str) -> dict[str, Any]:
    return next(row for row in rows if row["section"].startswith(section) and row["name"].startswith(name))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
