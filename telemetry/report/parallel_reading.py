"""Reads the logs of a large run with several processes: parsing a log takes one core, and most machines have more."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from telemetry.report.line_selection import head_of, read_log
from telemetry.report.lines_by_process import ProcessLogs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.line_selection import LineObserver
    from telemetry.report.log_files import RotatedLog
    from telemetry.report.process_log import ProcessLog

_MIN_BYTES: Final = 1 << 28
"""Smaller logs are read in a second or two, by this process alone."""

_MAX_PROCESSES: Final = 16
"""The storage becomes the limit."""


def read_one_by_one(
    logs: Sequence[RotatedLog], observer: LineObserver | None = None, run: str = "", *, all_windows: bool = False
) -> list[ProcessLog]:
    """All processes of some logs. The arguments are those of `read_log`."""
    return _read(logs, observer, run, all_windows=all_windows).all


def read_side_by_side(
    logs: Sequence[RotatedLog], observer: LineObserver | None = None, run: str = ""
) -> list[ProcessLog] | None:
    """The same as `read_one_by_one`, by several processes. Each has an observer of its own, a part of this one.

    Returns:
        None if it is not worth it, or not possible: then read them one by one. The observer has seen nothing then.
    """
    cores = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
    if cores < 2 or sum(map(_size, logs)) < _MIN_BYTES:
        return None
    groups = _groups(_parts(logs), cores)
    if len(groups) < 2:
        return None
    observers = [None if observer is None else observer.part(len({log.rank for log in group})) for group in groups]
    try:
        # Forked: a new interpreter would import all of this again. The commands have no threads.
        with ProcessPoolExecutor(len(groups), multiprocessing.get_context("fork")) as pool:
            found = [*pool.map(_read_group, groups, observers, repeat(run))]
    except (OSError, BrokenProcessPool):  # no process can be started, or one was killed
        return None
    lives = [life for processes, _ in found for life in processes.lives]
    if len(lives) > len({*lives}):
        return None  # a process is in files whose heads did not tell
    for _, part in found:
        if observer is not None and part is not None:
            observer.add(part)
    return [log for processes, _ in found for log in processes.all]


def _read_group(
    logs: Sequence[RotatedLog], observer: LineObserver | None, run: str
) -> tuple[ProcessLogs, LineObserver | None]:
    return _read(logs, observer, run), observer


def _read(
    logs: Sequence[RotatedLog], observer: LineObserver | None = None, run: str = "", *, all_windows: bool = False
) -> ProcessLogs:
    processes = ProcessLogs()
    for log in logs:
        file = processes.of_file(log.rank, log.pid)
        read_log(file, log.paths, observer, run, all_windows=all_windows)
        processes.leave_out_if_empty(file)
    return processes


def _parts(logs: Sequence[RotatedLog]) -> list[list[RotatedLog]]:
    """The logs in parts that have no process in common: one that gets another rank continues in another log."""
    part_of: dict[str, list[RotatedLog]] = {}
    parts: dict[int, list[RotatedLog]] = {}
    for log in logs:
        lives = {life for path in log.paths if (life := head_of(path).get("life")) is not None}
        before = {id(part): part for life in lives if (part := part_of.get(life)) is not None}
        joined = [*(each for part in before.values() for each in part), log]
        for number in before:
            del parts[number]
        parts[id(joined)] = joined
        known = {life for life, part in part_of.items() if id(part) in before} if before else set()
        part_of |= dict.fromkeys(known | lives, joined)
    return [*parts.values()]


def _groups(parts: Sequence[Sequence[RotatedLog]], groups: int) -> list[list[RotatedLog]]:
    """The parts in at most so many groups of about the same size, each in the order of the logs."""
    found: list[list[RotatedLog]] = [[] for _ in range(min(groups, len(parts)))]
    sizes = [0] * len(found)
    for size, part in sorted(((sum(map(_size, part)), part) for part in parts), key=itemgetter(0), reverse=True):
        smallest = min(range(len(found)), key=sizes.__getitem__)
        found[smallest] += part
        sizes[smallest] += max(size, 1)
    return [sorted(group) for group in found]


def _size(log: RotatedLog) -> int:
    try:
        return sum(path.stat().st_size for path in log.paths)
    except OSError:
        return 0
