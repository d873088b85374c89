"""Follows a run through its run folder: logs and heartbeats. It writes nothing."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.log.lines import GpuLine, HostLine, TotalsLine, WindowLine
from telemetry.log.process import not_replaced, stalls_of
from telemetry.log.reader import NoRunError, ProcessLogs, find_logs, take_heartbeats
from telemetry.log.tail import LogTail
from telemetry.model.records import CATEGORIES
from telemetry.model.totals import difference
from telemetry.report.attempt_list import KILLED, RUNNING, lives_of
from telemetry.report.summary import read_report
from telemetry.safety.files import caches_folders
from telemetry.top.view import RECENT_SECONDS, JobView, RankRow, ended_view, running_view

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.diagnosis.verdict import Verdict
    from telemetry.log.lines import Line
    from telemetry.log.process import ProcessLog
    from telemetry.log.reader import LogName
    from telemetry.model.records import StallRecord
    from telemetry.report.attempt_list import Life

# -- what is kept of one process ---------------------------------------------------------------------------------------

_SEEN_SECONDS: Final = 30.0
"""A process whose files have changed within this time is alive, whatever the clock of its machine shows."""

_RECENT_STEPS: Final = 3
_RECENT_LONGEST_SECONDS: Final = 600.0
"""If steps are long, the last minute is longer until it has some steps, but at most this long."""

_SUMS: Final = (
    *("steps_total", "wall_seconds", "exposed_wait_total_seconds", "unseen_steps_total", "first_wait_seconds"),
    *("samples_total", "tokens_total", "ledger_total_seconds", "cpu_total_seconds"),
)
_NOTHING_YET: Final = TotalsLine(
    steps_total=0, exposed_wait_total_seconds=0.0, samples_total=0, tokens_total=0, cpu_total_seconds={}
)


def _difference(now: TotalsLine, before: TotalsLine) -> TotalsLine:
    """What was added to the totals. A number that one of them lacks is absent."""
    added = {name: difference(getattr(now, name), getattr(before, name)) for name in _SUMS}
    return TotalsLine(exposed_wait_absent=now.exposed_wait_absent, **added)


class _Followed:
    """What is kept of a process beside its log: its totals over the last minute, and its newest readings.

    Args:
        from_start: whether its log was read from its start, so that its totals begin at 0.
    """

    def __init__(self, *, from_start: bool) -> None:
        self._totals = deque([_NOTHING_YET] if from_start else [])
        self._ledger: dict[str, float] = {}
        self._changed: float | None = None  # Unix time here at which its ledger was seen to change
        self._now_in = ""
        self._gpu, self._host = GpuLine(), HostLine()
        self._step_seconds: dict[str, float] | None = None
        self.stalls: tuple[StallRecord, ...] = ()

    def take(self, line: Line | None) -> None:
        """Take the next line of its log."""
        if isinstance(line, TotalsLine) and line.ledger_total_seconds:
            self._totals.append(_difference(line, _NOTHING_YET))  # not the line: it has sketches, too
            while len(self._totals) > 2 and _is_enough(line, self._totals[1]):
                self._totals.popleft()
        match line:
            case WindowLine(step_seconds=dict(seconds)) if seconds:
                self._step_seconds = seconds
            case GpuLine() if line.wait_measured is not False:
                self._gpu = line
            case HostLine():
                self._host = line

    def row(self, life: Life, now: float) -> RankRow:
        """The rank on the screen."""
        self._note_ledger(life.totals.ledger_total_seconds, now)
        silent = max(0.0, now - life.end)
        if self._changed is not None:
            silent = min(silent, now - self._changed)
            if life.how == KILLED and silent < _SEEN_SECONDS:
                life = replace(life, how=RUNNING)
        return RankRow(
            life=life,
            silent_seconds=silent,
            recent=self._recent(self._totals[-1]) if self._totals else TotalsLine(),
            live=self._recent(life.totals),
            now_in=self._now_in,
            gpu=self._gpu,
            host=self._host,
            step_seconds=self._step_seconds,
            stalls=self.stalls,
        )

    def _recent(self, totals: TotalsLine) -> TotalsLine:
        """What was added in the last minute; empty if that is not known yet."""
        if not self._totals or totals.wall_seconds <= self._totals[0].wall_seconds:
            return TotalsLine()
        return _difference(totals, self._totals[0])

    def _note_ledger(self, ledger: dict[str, float], now: float) -> None:
        """Note the ledger of the log or of a heartbeat: in which category the newest seconds were spent."""
        if ledger == self._ledger:
            return
        before = self._ledger
        if before:
            self._changed = now
        elif len(self._totals) > 1:
            before = self._totals[-2].ledger_total_seconds
        else:
            before = ledger
        self._ledger = ledger
        spent = {name: ledger.get(name, 0.0) - before.get(name, 0.0) for name in CATEGORIES}
        most = max(CATEGORIES, key=lambda name: spent[name])
        if spent[most] > 0:
            self._now_in = most


def _is_enough(now: TotalsLine, before: TotalsLine) -> bool:
    seconds, steps = now.wall_seconds - before.wall_seconds, (now.steps_total or 0) - (before.steps_total or 0)
    return seconds >= RECENT_SECONDS and (steps >= _RECENT_STEPS or seconds >= _RECENT_LONGEST_SECONDS)


# -- the folder --------------------------------------------------------------------------------------------------------

_LIST_SECONDS: Final = 5.0
"""Time between two looks for new logs."""

_MAX_FINDINGS: Final = 40
"""The most lines of stalls, hangs and so on that are kept for each process."""


class RunFolder:
    """Follows the run in a folder, which may not exist yet. ``clock`` returns Unix time."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._tails: dict[LogName, LogTail] = {}
        self._logs = ProcessLogs()
        self._followed: dict[int, _Followed] = {}  # by the id of the log
        self._next_list = 0.0
        self._judged: tuple[list[str], Verdict] | None = None

    @property
    def pause_seconds(self) -> float:
        """Time between two polls: longer on a file system that many machines use."""
        return 5.0 if caches_folders(self._path) else 1.0

    def poll(self) -> JobView:
        """Read what is new.

        Raises:
            NoRunError: the run has ended, and its logs are gone.
        """
        now = self._clock()
        if now >= self._next_list:
            self._next_list = now + _LIST_SECONDS
            self._list()
        for name, tail in self._tails.items():
            self._read(name, tail)
        logs = [log for log in self._logs.all if not log.empty]
        newest = max(logs, key=lambda log: log.started, default=None)
        current = [] if newest is None else not_replaced([log for log in logs if log.run == newest.run])
        take_heartbeats(self._path / "attempts", current)
        rows = [self._followed[id(life.log)].row(life, now) for life in lives_of(current, now)]
        if not rows:
            return JobView(f"Waiting for the run to begin: there is no log in {self._path / 'logs'} yet.", now)
        if any(row.is_running for row in rows):
            return running_view(rows, now)
        ended = [row.life.log.last_time for row in rows]
        if self._judged is None or self._judged[0] != ended:  # all of its logs are read, once
            self._judged = ended, read_report(self._path, traces=False).verdict
        return ended_view(rows, now, self._judged[1])

    def _list(self) -> None:
        """Follow the log of each rank that was written to last: the others are of earlier attempts."""
        newest: dict[int, tuple[float, LogName, Path]] = {}
        try:
            for name, paths in find_logs(self._path).items():
                found = paths[-1].stat().st_mtime, name, paths[-1]
                newest[name.rank] = max(newest.get(name.rank, found), found)
        except (NoRunError, OSError):  # no folder yet, or a file that has just gone: the next look comes soon
            return
        for _, name, path in newest.values():
            self._tails.setdefault(name, LogTail(path))

    def _read(self, name: LogName, tail: LogTail) -> None:
        changed: dict[int, ProcessLog] = {}
        for line in tail.read():
            log = self._logs.add(name, line)
            if id(log) not in self._followed:
                self._followed[id(log)] = _Followed(from_start=tail.from_start and not log.head.continued)
            self._followed[id(log)].take(line)
            changed[id(log)] = log
        for log in changed.values():
            for kept in (log.stalls, log.hangs, log.changes, log.slow_steps, log.snapshots, log.errors):
                del kept[:-_MAX_FINDINGS]
            self._followed[id(log)].stalls = tuple(stalls_of(log))
