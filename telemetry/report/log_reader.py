"""Reads the log files of a run. They may be damaged, of a killed process, still growing, or of a newer version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.report.log_files import find_logs, newest_run
from telemetry.report.log_lines import heartbeat
from telemetry.report.parallel_reading import read_one_by_one, read_side_by_side

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from telemetry.report.line_selection import LineObserver
    from telemetry.report.process_log import ProcessLog

_MAX_READINGS: Final = 2
"""Of the logs: a second one if the newest run is in the middle of a file."""


def load(
    run_dir: Path, observer: LineObserver | None = None, *, all_windows: bool = False, side_by_side: bool = False
) -> list[ProcessLog]:
    """All processes of the newest run in a folder, by rank and then by start.

    Args:
        run_dir: the run folder.
        observer: sees every line of that run that is not skipped.
        all_windows: whether every window is read. Otherwise some are skipped where a later line of the process has
            their sums.
        side_by_side: whether other processes may be started to read large logs.

    Raises:
        NoRunError: the folder does not exist, or has no log.
    """
    found = find_logs(run_dir)
    run, ranks = ("", 0) if observer is None else newest_run(found.logs)
    for _ in range(_MAX_READINGS):
        if observer is not None:
            observer.begin(ranks)
        processes = (
            side_by_side and not all_windows and read_side_by_side(found.logs, observer, run)
        ) or read_one_by_one(found.logs, observer, run, all_windows=all_windows)
        newest = max(processes, key=lambda process: process.started)
        own = [process for process in processes if process.run == newest.run]
        there = len({process.rank for process in own})
        if observer is None or (newest.run == run and there <= ranks):
            break
        run, ranks = newest.run, there  # the heads of the files did not tell all
    take_heartbeats(run_dir / "attempts", own)
    newest.skipped = found.skipped
    return sorted(own, key=lambda process: (process.rank, process.started))


def take_heartbeats(folder: Path, processes: Iterable[ProcessLog]) -> None:
    """Give each process that did not end by itself its newest heartbeat.

    Args:
        folder: ``attempts`` in the run folder.
        processes: those that are to be looked at.
    """
    for process in processes:
        life = process.head.get("life")
        if process.ended or not life or not life.isalnum():
            continue
        beat = heartbeat(folder, life)
        if beat is not None:
            process.beat = beat
