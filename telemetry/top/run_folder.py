"""Follows a run through its run folder: logs and heartbeats. It writes nothing."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.diagnosis.verdict import judge
from telemetry.log.lines import GpuLine, HostLine, TotalsLine, WindowLine
from telemetry.log.process import not_replaced, stalls_of
from telemetry.log.reader import NoRunError, ProcessLogs, decoded, find_logs, load, take_heartbeats
from telemetry.model.records import CATEGORIES
from telemetry.report.attempt_list import FINISHED, KILLED, RUNNING, lives_of
from telemetry.report.summary import run_facts
from telemetry.safety.files import caches_folders
from telemetry.top.log_tail import LogTail
from telemetry.top.view import RECENT_SECONDS, JobView, RankRow, ended_view, run_end, running_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from telemetry.diagnosis.verdict import Verdict
    from telemetry.log.lines import Heartbeat
    from telemetry.log.reader import LogName
    from telemetry.report.attempt_list import Life

_LIST_SECONDS: Final = 5.0
"""Time between two looks for new logs."""

_SEEN_SECONDS: Final = 30.0
"""A process whose files have changed within this time is alive, whatever the clock of its machine shows."""

_MAX_FINDINGS: Final = 40
"""The most lines of stalls, hangs and so on that are kept for each process."""

_RECENT_STEPS: Final = 3
_RECENT_LONGEST_SECONDS: Final = 600.0
"""If steps are long, the last minute is longer until it has some steps, but at most this long."""

_SUMS: Final = (
    *("steps_total", "wall_seconds", "exposed_wait_total_seconds", "unseen_steps_total", "first_wait_seconds"),
    *("samples_total", "tokens_total"),
)
_SUMS_BY_NAME: Final = ("ledger_total_seconds", "stall_lost_total_seconds")
_KEPT: Final = (*_SUMS, *_SUMS_BY_NAME, "exposed_wait_absent")
_NOTHING_YET: Final = TotalsLine(steps_total=0, exposed_wait_total_seconds=0.0, samples_total=0, tokens_total=0)


class RecentTotals:
    """The totals of one process over its last minute, as differences. ``from_start``: they are added from its start."""

    def __init__(self, *, from_start: bool) -> None:
        self._kept = deque([_NOTHING_YET] if from_start else [])

    def add(self, totals: TotalsLine) -> None:
        """Add newer totals."""
        if not totals.ledger_total_seconds:
            return
        self._kept.append(TotalsLine(**{name: getattr(totals, name) for name in _KEPT}))
        while len(self._kept) > 2 and _is_enough(_difference(totals, self._kept[1])):
            self._kept.popleft()

    def over(self, beat: Heartbeat | None = None) -> TotalsLine:
        """The totals over the minute up to the newest, or up to a heartbeat; empty if not known yet."""
        if not self._kept:
            return TotalsLine()
        now = self._kept[-1] if beat is None else beat.over(TotalsLine())
        before = self._kept[0]
        return _difference(now, before) if now.wall_seconds > before.wall_seconds else TotalsLine()

    def newest(self) -> TotalsLine:
        """The difference of the last two totals; empty before there are two."""
        return _difference(self._kept[-1], self._kept[-2]) if len(self._kept) > 1 else TotalsLine()


def _difference(now: TotalsLine, before: TotalsLine) -> TotalsLine:
    """The difference of totals. A number that one of them lacks is absent; a sum by name begins at 0."""
    added: dict[str, Any] = {}
    for name in _SUMS:
        newer, older = getattr(now, name), getattr(before, name)
        added[name] = None if newer is None or older is None else newer - older
    for name in _SUMS_BY_NAME:
        values, old = getattr(now, name), getattr(before, name) or {}
        added[name] = values and {key: max(0.0, value - old.get(key, 0.0)) for key, value in values.items()}
    return TotalsLine(exposed_wait_absent=now.exposed_wait_absent, **added)


def _is_enough(added: TotalsLine) -> bool:
    seconds, steps = added.wall_seconds, added.steps_total or 0
    return seconds >= RECENT_SECONDS and (steps >= _RECENT_STEPS or seconds >= _RECENT_LONGEST_SECONDS)


@dataclass(slots=True)
class _Followed:
    """What is kept of a process beside its log.

    Attributes:
        recent: its totals over the last minute.
        now_in: the category of the ledger in which it spent most of its newest seconds.
        ledger: its newest ledger. ``changed``: Unix time here at which a newer one came; None before that.
        gpu, host, step_seconds: its newest readings.
    """

    recent: RecentTotals
    now_in: str = ""
    ledger: dict[str, float] = field(default_factory=dict)
    changed: float | None = None
    gpu: GpuLine = GpuLine()
    host: HostLine = HostLine()
    step_seconds: dict[str, float] | None = None

    def note_ledger(self, ledger: dict[str, float], now: float) -> None:
        """Note the ledger of a log or of a heartbeat."""
        if ledger == self.ledger:
            return
        spent = self.recent.newest().ledger_total_seconds
        if self.ledger:
            spent = {name: seconds - self.ledger.get(name, 0.0) for name, seconds in ledger.items()}
            self.changed = now
        self.ledger = ledger
        most = max(spent, key=lambda name: spent[name], default="")
        if most in CATEGORIES and spent[most] > 0:
            self.now_in = most


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
        rows = [self._row(life, now) for life in lives_of(current, now)]
        if not rows:
            return JobView(f"Waiting for the run to begin: there is no log in {self._path / 'logs'} yet.", now)
        if any(row.is_running for row in rows):
            return running_view(rows, now)
        return ended_view(rows, now, self._verdict(rows))

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
        log = None
        for raw in tail.read():
            line = decoded(raw)
            log = self._logs.add(name, line)
            followed = self._followed.get(id(log))
            if followed is None:
                recent = RecentTotals(from_start=tail.from_start and not log.head.continued)
                followed = self._followed[id(log)] = _Followed(recent)
            if isinstance(line, TotalsLine):
                followed.recent.add(line)
                if isinstance(line, WindowLine) and line.step_seconds:
                    followed.step_seconds = line.step_seconds
            elif isinstance(line, GpuLine) and line.wait_measured is not False:
                followed.gpu = line
            elif isinstance(line, HostLine):
                followed.host = line
        if log is not None:
            for kept in (log.stalls, log.hangs, log.changes, log.slow_steps, log.snapshots, log.errors):
                del kept[:-_MAX_FINDINGS]

    def _row(self, life: Life, now: float) -> RankRow:
        followed = self._followed[id(life.log)]
        followed.note_ledger(life.totals.ledger_total_seconds, now)
        silent = max(0.0, now - life.end)
        if followed.changed is not None:
            silent = min(silent, now - followed.changed)
            if life.how == KILLED and silent < _SEEN_SECONDS:
                life = replace(life, how=RUNNING)
        return RankRow(
            life=life,
            silent_seconds=silent,
            recent=followed.recent.over(),
            live=followed.recent.over(life.beat),
            now_in=followed.now_in,
            gpu=followed.gpu,
            host=followed.host,
            step_seconds=followed.step_seconds,
            stalls=tuple(stalls_of(life.log)),
        )

    def _verdict(self, rows: Sequence[RankRow]) -> Verdict:
        """The report's verdict on a run that has ended, from its whole logs, which are read once."""
        ended = [row.life.log.last_time for row in rows]
        if self._judged is None or self._judged[0] != ended:
            broke_off = any(row.life.how != FINISHED for row in rows)
            facts = run_facts(not_replaced(load(self._path)), end=run_end(rows), broke_off=broke_off)
            self._judged = ended, judge(facts)
        return self._judged[1]
