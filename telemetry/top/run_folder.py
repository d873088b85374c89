"""Follows a run through its run folder: logs, heartbeats, and what the nodes report. Writes nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.log_names import LOG_NAME
from telemetry.records import CATEGORIES
from telemetry.report.attempts import KILLED, RUNNING, lives_of
from telemetry.report.lines_by_process import ProcessLogs
from telemetry.report.log_lines import parsed
from telemetry.report.log_reader import take_heartbeats
from telemetry.report.rank_processes import not_replaced
from telemetry.top.ended_run import EndedRun
from telemetry.top.job_view import JobView, job_view, waiting
from telemetry.top.log_tail import LogTail
from telemetry.top.node_paces import NodePaces
from telemetry.top.rank_row import RankFacts
from telemetry.top.recent_totals import RecentTotals
from telemetry.util.files import caches_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from telemetry.report.attempts import Life
    from telemetry.report.lines_by_process import LinesOfFile
    from telemetry.report.process_log import ProcessLog

_LIST_SECONDS: Final = 5.0
"""Between two looks for new files."""

_SAME_TIME_SECONDS: Final = 120.0
"""Of a rank with several logs, those are followed that were written to this shortly before the newest."""

_SEEN_SECONDS: Final = 30.0
"""A process whose files were seen to change so recently is there, whatever the clock of its machine says."""

_MAX_FINDINGS: Final = 40
"""Lines of stalls, hangs and so on, kept of each process."""


@dataclass(slots=True)
class _FollowedLog:
    """One log that is followed. ``began``: whether anything of it was read."""

    tail: LogTail
    lines: LinesOfFile
    began: bool = False


@dataclass(slots=True)
class _Extras:
    """What the view keeps of a process beside its log.

    Attributes:
        changed: when anything new was seen of it, by this machine's monotonic clock; None before.
    """

    recent: RecentTotals
    figures: dict[str, Any] = field(default_factory=dict)
    window: dict[str, Any] = field(default_factory=dict)
    beat: dict[str, Any] = field(default_factory=dict)
    now_in: str = ""
    changed: float | None = None


class RunFolder:
    """One run.

    Args:
        path: the run folder, which may not exist yet.
        clock: Unix time; ``monotonic``: of this machine.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._clock, self._monotonic = clock, monotonic
        self._files: dict[str, _FollowedLog] = {}
        self._logs = ProcessLogs()
        self._extras: dict[int, _Extras] = {}
        self._next_list = 0.0
        self._reports = NodePaces(path / "job", monotonic)
        self._ended = EndedRun(path)

    @property
    def pause_seconds(self) -> float:
        """Between two polls: longer on a file system that many machines ask."""
        return 5.0 if caches_folders(self._path) else 1.0

    def poll(self) -> JobView:
        """Read what is new."""
        now, here = self._clock(), self._monotonic()
        if here >= self._next_list:
            self._next_list = here + _LIST_SECONDS
            self._list()
        for followed in self._files.values():
            self._read(followed, here)
        newest = max((log for log in self._logs.all if log.head), key=lambda log: log.started, default=None)
        if newest is None:
            return waiting(f"Waiting for the run to begin: there is no log in {self._path / 'logs'} yet.", now)
        current = not_replaced([log for log in self._logs.all if log.head and log.run == newest.run])
        self._beats(current, here)
        self._reports.read()
        lives = {id(life.log): life for life in lives_of(current, now)}
        facts = [self._facts(log, lives[id(log)], here) for log in current if id(log) in lives]
        if not facts:
            return waiting("Waiting for the first line of the log.", now)
        if any(each.how == RUNNING for each in facts):
            return job_view(facts, now)
        whole = self._ended.verdict(facts)
        return job_view(facts, now, [self._ended.note] if self._ended.note else (), whole)

    def _list(self) -> None:
        """Follow the newest logs of each rank."""
        found: dict[int, list[tuple[float, str, int]]] = {}
        try:
            with os.scandir(self._path / "logs") as entries:
                for entry in entries:
                    match = LOG_NAME.fullmatch(entry.name)
                    if match is None or match["rotated"] is not None:
                        continue
                    try:
                        written = entry.stat().st_mtime
                    except OSError:
                        continue
                    found.setdefault(int(match["rank"]), []).append((written, entry.name, int(match["pid"])))
        except OSError:
            return
        for rank, files in found.items():
            newest = max(files)[0]
            for written, name, pid in sorted(files):
                if name not in self._files and newest - written <= _SAME_TIME_SECONDS:
                    lines = self._logs.of_file(rank, pid)
                    self._files[name] = _FollowedLog(LogTail(self._path / "logs" / name), lines)

    def _read(self, followed: _FollowedLog, here: float) -> None:
        raw = followed.tail.read()
        if not raw:
            return
        for line in raw:
            self._take(line, followed)
        log, began = followed.lines.newest, followed.began
        followed.began = True
        extras = self._extras.get(id(log))
        if extras is None:
            return
        if began:
            extras.changed = here
        elif not followed.tail.from_start and extras.recent.loses_time and not _begins_or_ends(log.stalls):
            newer, log.stalls[:] = list(log.stalls), []
            for line in followed.tail.older_findings():
                self._take(line, followed)
            log.stalls += newer
        for kept in (log.stalls, log.hangs, log.changes, log.slow_steps, log.snapshots, log.errors):
            del kept[:-_MAX_FINDINGS]

    def _take(self, raw: bytes, followed: _FollowedLog) -> None:
        found = parsed(raw)
        if found is None:
            return
        line, wrong = found
        followed.lines.add(line, wrong)
        if line is None:
            return
        log = followed.lines.newest
        extras = self._extras.get(id(log))
        if extras is None:
            whole = followed.tail.from_start and not log.head.get("continued")
            extras = self._extras[id(log)] = _Extras(RecentTotals(from_start=whole))
        event = line.get("event")
        if event in {"window", "run_end"}:
            extras.recent.add(line)
            extras.window = line.get("step_seconds", extras.window)
            extras.now_in = _most(extras.recent.newest_ledger()) or extras.now_in
        elif event in {"gpu", "host"}:
            extras.figures |= line

    def _beats(self, logs: Iterable[ProcessLog], here: float) -> None:
        take_heartbeats(self._path / "attempts", logs)
        for log in logs:
            extras = self._extras.get(id(log))
            beat = log.beat
            if extras is None or not beat or beat["unix_seconds"] == extras.beat.get("unix_seconds"):
                continue
            if extras.beat:
                extras.changed = here
                before = extras.beat["ledger_total_seconds"]
                added = {name: s - before.get(name, 0.0) for name, s in beat["ledger_total_seconds"].items()}
                extras.now_in = _most(added) or extras.now_in
            extras.beat = beat

    def _facts(self, log: ProcessLog, life: Life, here: float) -> RankFacts:
        extras = self._extras.setdefault(id(log), _Extras(RecentTotals(from_start=False)))
        pace, hang = self._reports.of(log.rank)
        silent = max(0.0, self._clock() - life.end)
        there = life.how == RUNNING
        if extras.changed is not None:
            silent = min(silent, here - extras.changed)
            there = there or (life.how == KILLED and silent < _SEEN_SECONDS)
        beat = log.beat if log.beat and life.totals.get("unix_seconds") == log.beat["unix_seconds"] else None
        return RankFacts(
            log=log,
            how=RUNNING if there else life.how,
            seen=life.end,
            silent_seconds=silent,
            totals=life.totals,
            recent=extras.recent.over(),
            live=extras.recent.over(beat),
            now_in=pace.phase if pace is not None and pace.phase else extras.now_in,
            where=(hang.where if hang is not None else pace.where if pace is not None else None) or "",
            figures=extras.figures,
            step_seconds=extras.window,
            hang=hang,
        )


def _begins_or_ends(stalls: Iterable[dict[str, Any]]) -> bool:
    """Whether it is known how the newest stall began, or that it is over. Its lines of code alone do not tell."""
    return any(line["event"] != "stall_lines" for line in stalls)


def _most(seconds: dict[str, float]) -> str:
    """The category with most of the time; empty without any."""
    category = max(seconds, key=lambda name: seconds[name], default="")
    return category if seconds and seconds[category] > 0 and category in CATEGORIES else ""
