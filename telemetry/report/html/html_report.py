"""Writes the page of a run to a file."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from telemetry.report.attempts import log_interval, unix
from telemetry.report.html import overview
from telemetry.report.html.chart_specs import TimeAxis
from telemetry.report.html.page import PageHead, page
from telemetry.report.html.page_sections import sections
from telemetry.report.rank_processes import not_replaced
from telemetry.report.summary import judged
from telemetry.util.text import plain_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.goodput import Goodput
    from telemetry.report.html.run_recorder import RunRecorder
    from telemetry.report.process_log import ProcessLog

_BIN_INTERVALS: Final = 1.2
"""A bin is at least so many log intervals wide, or some would be empty; but a short run gets `_MIN_BINS` of them."""

_MIN_BINS: Final = 20


def html_page(
    summary: dict[str, Any],
    processes: Sequence[ProcessLog],
    goodput: Goodput,
    *,
    recorder: RunRecorder,
    notes: Sequence[str],
) -> str:
    """The report of a run as one HTML page.

    Args:
        summary: the report, as ``--json`` prints it.
        processes: of the run.
        goodput: its books.
        recorder: has seen the lines of the logs.
        notes: what is missing or damaged in the logs.
    """
    times = [time for process in processes if (time := unix(process.last_time)) is not None]
    recorder.finish()
    grid = recorder.grid
    grid.widen(_BIN_INTERVALS * max(map(log_interval, processes), default=0.0), _MIN_BINS)
    axis = TimeAxis(tuple(grid.begins()), grid.width_seconds) if grid.used else None
    now = not_replaced(processes)
    state, kind = overview.state_of(summary, judged(now).kind)
    first, more = overview.first_cards(overview.advice_cards(summary, now, goodput))
    head = PageHead(
        run=summary["run"],
        state=state,
        kind=kind,
        verdict=summary["verdict"],
        first=first,
        more=more,
        tiles=overview.tiles(summary, processes, now),
        facts=_facts(summary, processes, axis),
        notes=[*notes, *_own_notes(recorder)],
    )
    return page(head, sections(summary, processes, recorder, max(times, default=0.0)), axis)


def _facts(summary: dict[str, Any], processes: Sequence[ProcessLog], axis: TimeAxis | None) -> list[tuple[str, str]]:
    job, newest = summary["job"], processes[-1]
    nodes = job["nodes"]
    shown = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    gpus = sorted({str(name) for process in processes if (name := process.environment.get("gpu"))})
    loader = ", ".join(f"{name}={value}" for name, value in newest.loader.items())
    versions = ", ".join(f"{name} {value}" for name, value in newest.environment.items() if name != "gpu")
    facts = [
        ("Started", str(min(process.started for process in processes))),
        ("Newest line", str(max(process.last_time for process in processes))),
        ("Ranks", str(job["ranks"])),
        ("Nodes", f"{len(nodes)}: {shown}"),
        ("GPU", ", ".join(gpus) or "none seen"),
        ("Loader", loader or "not known"),
        ("Environment", versions or "not known"),
        ("Written", datetime.now(tz=timezone.utc).isoformat(timespec="seconds")),
    ]
    return [*facts, ("Time bins", f"{plain_number(axis.width_seconds)} s")] if axis else facts


def _own_notes(recorder: RunRecorder) -> list[str]:
    notes = [
        "Of windows and samples, the charts show some in each time bin, if a bin has many. Sums are exact.",
    ]
    if recorder.cut:
        notes.append("The oldest log files are gone: what was before the first line that is left is spread evenly.")
    if recorder.ranks_left_out:
        notes.append("There are more ranks than the charts have room for; the tables and sums have all of them.")
    return notes
