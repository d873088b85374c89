"""``telemetry report RUN_DIR [--json]``: prints the report of a run, and what is missing in its logs."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from telemetry.core.terminal import complain, show, show_json
from telemetry.report.log_reader import NoRunError, load
from telemetry.report.report_text import render
from telemetry.report.snapshot_traces import read_snapshots, verdict_of
from telemetry.report.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.log_reader import ProcessLog

_MISSED_WINDOWS: Final = 3
"""A process that wrote no line for this many log intervals counts as ended."""

_LOG_INTERVAL_SECONDS: Final = 10.0
"""The default of ``log_interval_seconds``, for logs that do not have it."""


def report(run_dir: str, *, as_json: bool) -> int:
    """Print the report of a run. Returns the exit status: 1 if there is no run in the folder."""
    try:
        processes = load(Path(run_dir))
    except NoRunError as error:
        complain(str(error))
        return 1
    summary = summarize(processes)
    problems = read_snapshots(Path(run_dir), summary["snapshots"])
    summary["verdict"] += verdict_of(summary["snapshots"])
    if as_json:
        return show_json(orjson.dumps(summary, option=orjson.OPT_INDENT_2).decode() + "\n")
    return show(render(summary, [*_notes(processes), *problems]))


def _notes(processes: Sequence[ProcessLog]) -> list[str]:
    """What is missing or damaged in the logs, a line each."""
    notes: list[str] = []
    now = datetime.now(tz=timezone.utc)
    for process in processes:
        who = f"rank {process.rank} (pid {process.pid})"
        if not process.ended:
            age = _age_seconds(process.last_time, now)
            gone = age is None or age > _MISSED_WINDOWS * _log_interval(process)
            notes.append(f"{who} {'did not end by itself' if gone else 'is running'}; newest line {process.last_time}")
        if process.torn_lines:
            notes.append(f"{who}: {process.torn_lines} line(s) of its log are torn and were skipped")
        if process.wrong_fields:
            notes.append(f"{who}: {process.wrong_fields} field(s) of its log are of the wrong type and were left out")
        notes += [f"{name} is no regular file and was not read" for name in process.skipped]
        failures = [line for line in process.errors if line.get("errors_total")]
        if failures:
            newest = failures[-1]
            notes.append(
                f"{who}: {len(failures)} failure(s) of the agent's own parts, the newest: {newest.get('message')}"
            )
    return notes


def _log_interval(process: ProcessLog) -> float:
    seconds: float = process.head.get("settings", {}).get("log_interval_seconds", _LOG_INTERVAL_SECONDS)
    return seconds


def _age_seconds(time: str, now: datetime) -> float | None:
    try:
        return (now - datetime.fromisoformat(time.replace("Z", "+00:00"))).total_seconds()
    except ValueError:
        return None
