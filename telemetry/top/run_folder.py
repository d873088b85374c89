"""Follows a run through its run folder: logs, heartbeats, and the reports of the nodes. It writes nothing."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.verdict import judge
from telemetry.log_lines import LOG_NAME, GpuLine, HostLine, StallCodeLine, TotalsLine, WindowLine
from telemetry.node.peers import read_report
from telemetry.report.attempts import FINISHED, KILLED, RUNNING, lives_of
from telemetry.report.logs import NoRunError, ProcessLogs, decoded, load, named_by, take_heartbeats
from telemetry.report.process_log import not_replaced
from telemetry.report.summary import run_facts
from telemetry.top.view import JobView, RankRow, RecentTotals, end_of, job_view, most_time, waiting
from telemetry.util.files import caches_folders, open_regular
from telemetry.util.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from telemetry.diagnosis.hangs import HangState
    from telemetry.diagnosis.verdict import Verdict
    from telemetry.log_lines import Heartbeat, StallLine
    from telemetry.records import RankPace
    from telemetry.report.attempts import Life
    from telemetry.report.logs import LogName
    from telemetry.report.process_log import ProcessLog

FIRST_BYTES: Final = 1 << 16
"""Bytes at the end of a log that are read at first: the windows of about two minutes."""

_BACK_BYTES: Final = 1 << 21
"""Bytes that are searched backwards for the begin of an open stall."""

_FINDING: Final = re.compile(rb'"event": ?"(stall_open|stall_lines|stall_close|hang)"')

_LIST_SECONDS: Final = 5.0
"""Time between two looks for new logs, and for node reports, which are written as often."""

_SAME_TIME_SECONDS: Final = 120.0
"""If a rank has several logs, those are followed that were written to within this time before the newest."""

_SEEN_SECONDS: Final = 30.0
"""A process whose files have changed within this time is alive, whatever the clock of its machine shows."""

_REPORT_ALIVE_SECONDS: Final = 45.0
"""A node report that has not changed for this time is out of date."""

_MAX_REPORTS: Final = 4096
_MAX_FINDINGS: Final = 40
"""The most lines of stalls, hangs and so on that are kept for each process."""


class LogTail:
    """Follows one log file. If it is large, only its last part is read, and then what is added.

    Args:
        path: path of the log; the newest rotated file has ``.1`` at its end.

    Attributes:
        from_start: whether all of the file was read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._at = 0
        self._first_at = 0  # where the part that was read first begins
        self.from_start = False

    def read(self) -> list[bytes]:
        """The whole lines that were added; at first the first line and the last ones. Empty if there is no file."""
        lines: list[bytes] = []
        try:
            status = self._path.stat()
            if self._inode == status.st_ino and self._at == status.st_size:
                return []
            if self._inode not in {None, status.st_ino}:
                rotated = open_regular(self._path.with_name(f"{self._path.name}.1"))
                if rotated is not None:
                    with rotated:
                        same = os.fstat(rotated.fileno()).st_ino == self._inode
                        lines = self._added(rotated) if same else []
                self._at = 0
            first, self._inode = self._inode is None, status.st_ino
            file = open_regular(self._path)
            if file is None:  # such as a FIFO or a device
                return lines
            with file:
                return lines + (self._first(file) if first else self._added(file))
        except OSError:
            return lines

    def older_findings(self) -> list[bytes]:
        """Lines of stalls and hangs from before the part that was read first, from the newest opened stall on."""
        try:
            file = open_regular(self._path)
            if file is None:
                return []
            with file:
                begin = max(0, self._first_at - _BACK_BYTES)
                file.seek(begin)
                content = file.read(self._first_at - begin)
        except OSError:
            return []
        found: list[bytes] = []
        for line in reversed(content.splitlines()):
            match = _FINDING.search(line)
            if match is not None:
                found.append(line)
                if match[1] == b"stall_open":
                    break
        return found[::-1]

    def _first(self, file: BinaryIO) -> list[bytes]:
        size = os.fstat(file.fileno()).st_size
        head = file.readline(FIRST_BYTES)
        if not head.endswith(b"\n"):
            return []  # the first line is not whole yet
        self._at = len(head)
        self.from_start = size - self._at <= FIRST_BYTES
        if not self.from_start:
            file.seek(size - FIRST_BYTES)
            self._at = self._first_at = size - FIRST_BYTES + len(file.readline(FIRST_BYTES))  # the rest of a line
        return [head, *self._added(file)]

    def _added(self, file: BinaryIO) -> list[bytes]:
        size = os.fstat(file.fileno()).st_size
        if size < self._at:
            self._at = 0  # it was cut
        file.seek(self._at)
        content = file.read(size - self._at)
        end = content.rfind(b"\n") + 1  # a line without its end is still being written
        self._at += end
        return content[:end].splitlines()


class NodeReports:
    """The reports of nodes on their ranks, in ``job`` of the run folder. A job on one node has none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0
        # A report has no time that can be compared with this machine's clock. Its age is the age of its sequence.
        self._sequences: dict[str, tuple[int, float]] = {}
        self.paces: dict[int, RankPace] = {}
        self.hangs: dict[int, HangState] = {}

    def read(self, here: float) -> None:
        """Read the reports, unless they were read a moment ago. ``here``: this machine's monotonic clock."""
        if here < self._next:
            return
        self._next = here + _LIST_SECONDS
        self.paces, self.hangs = {}, {}
        for path in sorted(self._folder.glob("node-*.json"))[:_MAX_REPORTS]:
            report = read_report(path)
            if report is None:
                continue
            sequence, changed = self._sequences.get(path.name, (None, here))
            if sequence != report.sequence:
                changed = here
            self._sequences[path.name] = report.sequence, changed
            if here - changed <= _REPORT_ALIVE_SECONDS:
                self.paces |= {pace.rank: pace for pace in report.ranks}
                self.hangs |= {state.rank: state for state in report.hang}


@dataclass(slots=True)
class _FollowedLog:
    """One log that is followed. ``newest``: the process of its newest line; None before the first."""

    tail: LogTail
    name: LogName
    newest: ProcessLog | None = None


@dataclass(slots=True)
class _Extras:
    """The state of a process beside its log. ``changed``: monotonic time of its last news, or None."""

    recent: RecentTotals
    row: RankRow
    beat: Heartbeat | None = None
    changed: float | None = None

    def note_spent(self, spent: dict[str, float]) -> None:
        """Note where its newest seconds were spent."""
        self.row = replace(self.row, now_in=most_time(spent) or self.row.now_in)


class RunFolder:
    """Follows the run in a folder, which may not exist yet. ``clock`` returns Unix time."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._clock, self._monotonic = clock, monotonic
        self._files: dict[str, _FollowedLog] = {}
        self._logs = ProcessLogs()
        self._extras: dict[int, _Extras] = {}
        self._next_list = 0.0
        self._reports = NodeReports(path / "job")
        self._ended_as: tuple[object, ...] = ()
        self._whole: tuple[Verdict | None, list[str]] = None, []

    @property
    def pause_seconds(self) -> float:
        """Time between two polls: longer on a file system that many machines use."""
        return 5.0 if caches_folders(self._path) else 1.0

    def poll(self) -> JobView:
        """Read the new lines and reports."""
        now, here = self._clock(), self._monotonic()
        if here >= self._next_list:
            self._next_list = here + _LIST_SECONDS
            self._list()
        for followed in self._files.values():
            self._read(followed, here)
        newest = max((log for log in self._logs.all if not log.empty), key=lambda log: log.started, default=None)
        if newest is None:
            return waiting(f"Waiting for the run to begin: there is no log in {self._path / 'logs'} yet.", now)
        current = not_replaced([log for log in self._logs.all if not log.empty and log.run == newest.run])
        self._beats(current, here)
        self._reports.read(here)
        lives = {id(life.log): life for life in lives_of(current, now)}
        rows = [self._row(log, lives[id(log)], here) for log in current if id(log) in lives]
        if not rows:
            return waiting("Waiting for the first line of the log.", now)
        if any(each.how == RUNNING for each in rows):
            return job_view(rows, now)
        whole, notes = self._verdict_of_report(rows)
        return job_view(rows, now, notes, whole)

    def _list(self) -> None:
        found: dict[int, list[tuple[float, str, LogName]]] = {}
        try:
            with os.scandir(self._path / "logs") as entries:
                for entry in entries:
                    match = LOG_NAME.fullmatch(entry.name)
                    if match is not None and match["rotated"] is None:
                        written = entry.stat().st_mtime
                        found.setdefault(int(match["rank"]), []).append((written, entry.name, named_by(match)))
        except OSError:  # no folder yet, or a file that has just gone: the next look comes soon
            return
        for files in found.values():
            newest = max(files)[0]
            for written, file, name in sorted(files):
                if file not in self._files and newest - written <= _SAME_TIME_SECONDS:
                    self._files[file] = _FollowedLog(LogTail(self._path / "logs" / file), name)

    def _read(self, followed: _FollowedLog, here: float) -> None:
        raw = followed.tail.read()
        if not raw:
            return
        began = followed.newest is not None
        for line in raw:
            self._take(line, followed)
        log = followed.newest
        extras = self._extras.get(id(log))
        if log is None or extras is None:
            return
        if began:
            extras.changed = here
        elif not followed.tail.from_start and _loses_time(extras.recent) and not _begins_or_ends(log.stalls):
            newer, log.stalls[:] = list(log.stalls), []
            for line in followed.tail.older_findings():
                self._take(line, followed)
            log.stalls += newer
        for kept in (log.stalls, log.hangs, log.changes, log.slow_steps, log.snapshots, log.errors):
            del kept[:-_MAX_FINDINGS]

    def _take(self, raw: bytes, followed: _FollowedLog) -> None:
        line = decoded(raw)
        log = followed.newest = self._logs.add(followed.name, line)
        if line is None:
            return
        extras = self._extras.get(id(log))
        if extras is None:
            whole = followed.tail.from_start and not log.head.continued
            extras = self._extras[id(log)] = _Extras(RecentTotals(from_start=whole), RankRow(log))
        if isinstance(line, TotalsLine):
            extras.recent.add(line)
            extras.note_spent(extras.recent.newest().ledger_total_seconds)
            if isinstance(line, WindowLine) and line.step_seconds:
                extras.row = replace(extras.row, step_seconds=line.step_seconds)
        elif isinstance(line, GpuLine) and line.wait_measured is not False:
            extras.row = replace(extras.row, gpu=line)
        elif isinstance(line, HostLine):
            extras.row = replace(extras.row, resident_memory_bytes=line.process_resident_memory_bytes)

    def _beats(self, logs: Iterable[ProcessLog], here: float) -> None:
        take_heartbeats(self._path / "attempts", logs)
        for log in logs:
            extras, beat = self._extras.get(id(log)), log.beat
            if extras is None or beat is None:
                continue
            before, extras.beat = extras.beat, beat
            if before is not None and before.unix_seconds != beat.unix_seconds:
                extras.changed = here
                spent, then = beat.ledger_total_seconds, before.ledger_total_seconds
                extras.note_spent({c: s - then.get(c, 0.0) for c, s in spent.items()})

    def _row(self, log: ProcessLog, life: Life, here: float) -> RankRow:
        extras = self._extras.setdefault(id(log), _Extras(RecentTotals(from_start=False), RankRow(log)))
        pace, hang = self._reports.paces.get(log.rank), self._reports.hangs.get(log.rank)
        silent = max(0.0, self._clock() - life.end)
        there = life.how == RUNNING
        if extras.changed is not None:
            silent = min(silent, here - extras.changed)
            there = there or (life.how == KILLED and silent < _SEEN_SECONDS)
        row = extras.row
        return replace(
            row,
            how=RUNNING if there else life.how,
            seen=life.end,
            silent_seconds=silent,
            totals=life.totals,
            recent=extras.recent.over(),
            live=extras.recent.over(life.beat),
            now_in=pace.phase if pace is not None and pace.phase else row.now_in,
            where=(hang.where if hang is not None else pace.where if pace is not None else None) or "",
            hang=hang,
            life=life,
        )

    def _verdict_of_report(self, rows: Sequence[RankRow]) -> tuple[Verdict | None, list[str]]:
        """The report's verdict on a run that has ended, from its whole logs, or why there is none; once per end."""
        ended_as = tuple((each.log.rank, each.log.pid, each.log.started, each.log.last_time) for each in rows)
        if ended_as != self._ended_as:
            try:
                whole, broke_off = not_replaced(load(self._path)), any(each.how != FINISHED for each in rows)
                self._whole = judge(run_facts(whole, end=end_of(rows), broke_off=broke_off)), []
            except (NoRunError, OSError) as error:
                note = f"the verdict is on the ends of the logs alone; their whole cannot be read: {error}"
                self._whole = None, [one_line(note)]
            self._ended_as = ended_as
        return self._whole


def _loses_time(recent: RecentTotals) -> bool:
    """Whether stalls cost time between the last two totals, or no step ended: a stall is open then."""
    last = recent.newest()
    return last.wall_seconds > 0 and (any((last.stall_lost_total_seconds or {}).values()) or not last.steps_total)


def _begins_or_ends(stalls: Iterable[StallLine]) -> bool:
    """Whether the begin or the end of the newest stall is known. Its lines of code alone do not show it."""
    return any(not isinstance(line, StallCodeLine) for line in stalls)
