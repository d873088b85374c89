"""``telemetry report RUN_DIR [--json]``."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from telemetry.report.load import NoRunError, load
from telemetry.report.summary import summarize
from telemetry.report.text import render
from telemetry.report.traces import read_snapshots, verdict_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.load import ProcessLog

_MISSED_WINDOWS: Final = 3
"""After so many log intervals without a line a process is taken to be gone."""


def report(run_dir: str, *, as_json: bool) -> int:
    """Print the report of a run. Returns the exit status: 1 when there is no run to report on."""
    try:
        processes = load(Path(run_dir))
    except NoRunError as error:
        sys.stderr.write(f"telemetry: {error}\n")
        return 1
    summary = summarize(processes)
    problems = read_snapshots(Path(run_dir), summary["snapshots"])
    summary["verdict"] += verdict_of(summary["snapshots"])
    if as_json:
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2).decode() + "\n"
    else:
        text = render(summary, [*_notes(processes), *problems])
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None  # the reader has seen enough; and Python is not to flush it again at exit
    return 0


def _notes(processes: Sequence[ProcessLog]) -> list[str]:
    """What a person should know about how whole the picture is."""
    notes: list[str] = []
    now = datetime.now(tz=timezone.utc)
    for process in processes:
        who = f"rank {process.rank} (pid {process.pid})"
        if not process.ended:
            age = _age_seconds(process.last_time, now)
            gone = age is None or age > _MISSED_WINDOWS * _log_interval(process)
            notes.append(f"{who} {'did not end by itself' if gone else 'is running'}; newest line {process.last_time}")
        if process.torn_lines:
            notes.append(f"{who}: {process.torn_lines} line(s) of its log are torn and were passed over")
        failures = [line for line in process.errors if line.get("errors_total")]
        if failures:
            newest = failures[-1]
            notes.append(
                f"{who}: {len(failures)} failure(s) of the agent's own parts, the newest: {newest.get('message')}"
            )
    return notes


def _log_interval(process: ProcessLog) -> float:
    settings = process.head.get("settings")
    value = settings.get("log_interval_seconds") if isinstance(settings, dict) else None
    return float(value) if isinstance(value, (int, float)) else 10.0


def _age_seconds(time: str, now: datetime) -> float | None:
    try:
        return (now - datetime.fromisoformat(time.replace("Z", "+00:00"))).total_seconds()
    except ValueError:
        return None
