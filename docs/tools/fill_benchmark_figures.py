"""Write the figures of the published benchmark into the tables that quote them: ``make docs-reference``.

Each figure keeps the number of decimals it has on the page. It is rounded once, from the value as measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[2]

_HOT, _COLD = "Per step on the training thread, hot", "Per step on the training thread, cold"
_FETCH, _SCRAPE = "Per fetch in a DataLoader worker", "A scrape of a node of 8 ranks"
_THREADS, _TAIL = "The agent's own threads", "The longest of many steps of 40 us"
_FLOOR: Final = "floor adds: two stamps, stored in a list"
_PER_STEP: Final = ((_HOT, "telemetry adds"), (_COLD, "telemetry adds"))
_PER_FETCH: Final = (
    (_FETCH, "hot, nothing else is done: telemetry"),
    (_FETCH, "cold, after a convolution of an image: telemetry"),
)
_SCRAPED: Final = ((_SCRAPE, "GET /metrics"), (_SCRAPE, "GET /metrics, 99th percentile"))
_AGENT: Final = ((_THREADS, "CPU at 1 Hz"),)
_AT_THE_START: Final = (("Memory", "added to torch at the start, RSS"),)

OVERHEAD, PRODUCTION = "docs/overhead.md", "docs/production.md"

# Page, start of the table's row, and the measured rows (section and name, by their starts) in the order of the figures.
QUOTES: Final = (
    (OVERHEAD, "the floor: two stamps and a store", ((_HOT, _FLOOR), (_COLD, _FLOOR))),
    (OVERHEAD, "**telemetry**, everything on", _PER_STEP),
    (OVERHEAD, "prometheus_client: a counter", ((_HOT, "prometheus_client"), (_COLD, "prometheus_client"))),
    (OVERHEAD, "TraceML 0.5.0 |", ((_HOT, "TraceML 0.5.0 adds"), (_COLD, "TraceML 0.5.0 adds"))),
    (OVERHEAD, "the agent's threads", _AGENT),
    (OVERHEAD, "TraceML 0.5.0, the same", ((_THREADS, "TraceML 0.5.0: the same, its threads"),)),
    (OVERHEAD, "… with its launcher", ((_THREADS, "TraceML 0.5.0: the same, all of it"),)),
    (OVERHEAD, "a node of 8 ranks with 2 workers", ((_THREADS, "a node with 8 ranks"),)),
    (OVERHEAD, "the 99.99th percentile of steps", ((_TAIL, "longer by, 99.99th percentile"),)),
    (OVERHEAD, "the longest of these steps", ((_TAIL, "longer by, the longest of a segment"),)),
    (
        OVERHEAD,
        "waits for the GIL with the agent",
        ((_TAIL, "with the agent: the same"), (_TAIL, "bare: waits for the GIL")),
    ),
    (OVERHEAD, "the longest wait for the GIL with the agent", ((_TAIL, "with the agent: the longest wait"),)),
    (OVERHEAD, "per fetch in a DataLoader worker", _PER_FETCH),
    (OVERHEAD, "resident memory over torch itself", _AT_THE_START),
    (OVERHEAD, "growth over a million steps", (("Memory", "growth over 1,000,000 steps"),)),
    (OVERHEAD, "`GET /metrics` of a node with 8 ranks", _SCRAPED),
    (
        OVERHEAD,
        "the worst step, with five scrapes a second",
        ((_SCRAPE, "step longer by, worst of a segment"), (_SCRAPE, "steps met by a scrape longer by, median")),
    ),
    (PRODUCTION, "per step on the training thread", _PER_STEP),
    (PRODUCTION, "the agent's threads", _AGENT),
    (PRODUCTION, "per fetch in a DataLoader worker", _PER_FETCH),
    (PRODUCTION, "resident memory, at the start", _AT_THE_START),
    (PRODUCTION, "a scrape of a node with 8 ranks", _SCRAPED),
)

_NUMBER: Final = r"-?\d+(?:\.\d+)?"
# A median with its unit ("0.28 % of a core"), and, where there is one, its spread: "(0.21 - 0.39)", with a dash.
_FIGURE: Final = re.compile(
    rf"(?<![\w.])(?P<median>{_NUMBER})(?= (?:µs|ms|MiB|%))(?:[^(|\d]*\((?P<p10>{_NUMBER}) \u2013 (?P<p90>{_NUMBER}))?"
    rf"|no longer \((?P<low>{_NUMBER}) \u2013 (?P<high>{_NUMBER}) ms\)"
)


def filled(page: str, text: str) -> str:
    """The text of a page with every quoted figure taken from the results. Source: the results that overhead.md names.

    Raises ValueError when a row is missing, stands twice, or has another number of figures than it should.
    """
    lines = text.splitlines(keepends=True)
    for document, row, names in QUOTES:
        if document != page:
            continue
        at = [index for index, line in enumerate(lines) if line.startswith(f"| {row}")]
        if len(at) != 1:
            raise ValueError(f"{page}: {len(at)} rows start with '| {row}'; there must be one")
        lines[at[0]] = _filled_row(page, row, lines[at[0]], [_measured(*name) for name in names])
    return "".join(lines)


def _filled_row(page: str, row: str, line: str, rows: list[dict[str, Any]]) -> str:
    found = list(_FIGURE.finditer(line, line.index("|", 1)))  # the first cell names the row
    if len(found) != len(rows):
        raise ValueError(f"{page}: '| {row}' has {len(found)} figures; it must have {len(rows)}")
    for match, measured in reversed(list(zip(found, rows, strict=True))):
        if match["low"] is not None and measured["median"] > 0:
            raise ValueError(f"{page}: '| {row}' says 'no longer', which is not what was measured")
        for start, end, text in sorted(_replacements(match, measured), reverse=True):
            line = line[:start] + text + line[end:]
    return line


def _replacements(match: re.Match[str], measured: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    for group, statistic in (("median", "median"), ("p10", "p10"), ("p90", "p90"), ("low", "p10"), ("high", "p90")):
        if match[group] is not None:
            decimals = len(match[group].partition(".")[2])
            rounded = round(measured[statistic], decimals) + 0.0  # never "-0.0"
            yield *match.span(group), f"{rounded:.{decimals}f}"


def _measured(section: str, name: str) -> dict[str, Any]:
    named = re.findall(r"benchmarks/results/(overhead-[\w-]+)\.md", (ROOT / OVERHEAD).read_text("utf-8"))
    if len(named) != 1:
        raise ValueError(f"{OVERHEAD} must name one file of results, once; it names {len(named)}")
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{named[0]}.json").read_text("utf-8"))["rows"]
    row: dict[str, Any] = next(r for r in rows if r["section"].startswith(section) and r["name"].startswith(name))
    return row


if __name__ == "__main__":
    for name in (OVERHEAD, PRODUCTION):
        path = ROOT / name
        path.write_text(filled(name, path.read_text("utf-8")), encoding="utf-8")
