"""Which log files a run folder has, and which run in them is the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from telemetry.core.log_names import LOG_NAME
from telemetry.report.line_selection import head_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class NoRunError(Exception):
    """The folder has no run; the text says what is missing."""


class RotatedLog(NamedTuple):
    """One log. ``paths``: its file, and those that were rotated away from it, the oldest first."""

    rank: int
    pid: int
    paths: list[Path]


class RunLogs(NamedTuple):
    """The logs of a folder. ``skipped``: names of those that are no regular files and are not read."""

    logs: list[RotatedLog]
    skipped: list[str]


class RunHeads(NamedTuple):
    """A run as the heads of its files tell it: its name, and how many ranks have a log."""

    run: str
    ranks: int


def find_logs(run_dir: Path) -> RunLogs:
    """The logs in a run folder, by rank, pid and number.

    Raises:
        NoRunError: the folder does not exist, or has no log.
    """
    folder = run_dir / "logs"
    if not folder.is_dir():
        raise NoRunError(f"{run_dir} is not a run folder: there is no {folder}{_instead_of(run_dir)}")
    files: dict[tuple[int, int, int], list[tuple[int, Path]]] = {}
    skipped: list[str] = []
    for path in folder.iterdir():
        match = LOG_NAME.fullmatch(path.name)
        if match and not path.is_file():  # a FIFO would be waited for
            skipped.append(path.name)
        elif match:
            key = (int(match["rank"]), int(match["pid"]), int(match["number"] or 1))
            files.setdefault(key, []).append((int(match["rotated"] or 0), path))
    if not files:
        raise NoRunError(f"there is no log in {folder}: no file is named rank-<rank>.<pid>.jsonl")
    # The highest number is the oldest.
    logs = [
        RotatedLog(rank, pid, [path for _, path in sorted(parts, reverse=True)])
        for (rank, pid, _), parts in sorted(files.items())
    ]
    return RunLogs(logs, sorted(skipped))


def _instead_of(folder: Path) -> str:
    """The run folder that was probably meant: the one of these logs, or the newest of this folder of runs."""
    try:
        if any(LOG_NAME.fullmatch(path.name) for path in folder.iterdir()):
            return f"; its run folder is {folder.absolute().parent}"
        inside = [(logs.stat().st_mtime, logs.parent) for logs in folder.glob("*/logs") if logs.is_dir()]
    except OSError:
        return ""
    return f"; the newest run in it is {max(inside)[1]}" if inside else ""


def newest_run(logs: Sequence[RotatedLog]) -> RunHeads:
    """The run that started last, as far as the first lines of the files tell: a file may have several runs."""
    ranks: dict[str, set[int]] = {}
    began: dict[str, str] = {}
    for log in logs:
        for head in map(head_of, log.paths):
            run = head.get("run", "")
            ranks.setdefault(run, set()).add(log.rank)
            began[run] = max(began.get(run, ""), head.get("started") or head.get("time") or "")
    run = max(began, key=began.__getitem__)
    return RunHeads(run, len(ranks[run]))
