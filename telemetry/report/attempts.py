"""The attempts of a run: which processes belong together, and how each attempt ended.

A run that is killed or fails is started again in the same run folder. Nothing relies on a last line: a killed process
has none, and its newest stamp tells when it was killed.

A process that executes another program, such as its own script anew, is not killed: it keeps its pid and its start. Its
attempt is finished, and what it goes on as is the next one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.report.log_schema import RESUMPTION, checked_fields
from telemetry.util.processes import clean_name, node_name, process_started

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.oom_end import OomEnd
    from telemetry.report.process_log import ProcessLog

FINISHED: Final = "finished"
FAILED: Final = "failed"
KILLED: Final = "killed"
RUNNING: Final = "running"

MISSED_WINDOWS: Final = 3
"""A process that wrote no line for so many log intervals counts as ended."""

_LOG_INTERVAL_SECONDS: Final = 10.0
"""The default of ``log_interval_seconds``, for logs that do not have it."""

_STARTED_TOGETHER_SECONDS: Final = 60.0
"""Ranks of one attempt may start so far apart that the first has ended before the last starts; but not further."""

_SAME_START_SECONDS: Final = 1.0
"""A process that has the pid of another did not start at the same time."""

_SLACK_SECONDS: Final = 0.5
"""Two ends that are not further apart may have come in either order."""


class OomReading(NamedTuple):
    """How many processes of a cgroup the OOM killer had killed at a Unix time."""

    time: float
    kills: int


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a run, from its start to its end, in seconds of Unix time by the clock that it had at its end.

    Attributes:
        log: what it has logged.
        totals: its newest totals: those of its heartbeat, if that is newer than its log.
        begin: start of the process; ``agent``: start of its agent; ``end``: its newest stamp.
        how: how it ended.
        replaced: whether it has ended by executing another program.
    """

    log: ProcessLog
    totals: dict[str, Any]
    begin: float
    agent: float
    end: float
    how: str
    replaced: bool = False

    @property
    def rank(self) -> int:
        """Its last rank."""
        return self.log.rank

    @property
    def node(self) -> str:
        """Where it ran."""
        return str(self.log.head.get("node"))

    @property
    def heartbeat_seconds(self) -> float:
        """Between two of its heartbeats."""
        return max(1.0, _interval(self.log, "interval_seconds", 1.0))

    @property
    def oom_kills(self) -> int | None:
        """The newest that it has read of the counter of its cgroup; None where there is no counter."""
        return self.totals.get("oom_kills_total")

    @property
    def oom_readings(self) -> list[OomReading]:
        """What it has read of that counter: the first and the last time of each value."""
        found = [(text, kills) for kills, texts in self.log.oom_readings.items() for text in texts]
        readings = [OomReading(time, kills) for text, kills in found if (time := unix(text)) is not None]
        return readings if self.oom_kills is None else [*readings, OomReading(self.end, self.oom_kills)]

    @property
    def launch(self) -> tuple[str, str, int | None] | None:
        """What started it, the same for all ranks that one launcher started on a node; None if that is not known."""
        head = self.log.head
        if head.get("launcher") not in {"torchrun", "slurm", "mpi", "spawn", "kubernetes"} or "launch" not in head:
            return None
        return self.node, head["launch"], head.get("restarts")


@dataclass(slots=True)
class Attempt:
    """The processes that were started together. ``oom``: what the OOM killer has to do with its end."""

    number: int
    lives: list[Life] = field(default_factory=list)
    oom: OomEnd | None = None

    @property
    def begin(self) -> float:
        """When its first process began."""
        return min(life.begin for life in self.lives)

    @property
    def end(self) -> float:
        """When its last process ended, as far as that is known."""
        return max(life.end for life in self.lives)

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return len({life.rank for life in self.lives})

    @property
    def replaced(self) -> bool:
        """Whether it has ended because a process has executed another program: its work may not be done."""
        return self.how == FINISHED and any(life.replaced for life in self.lives)

    @property
    def how(self) -> str:
        """How it ended: as the rank that ended first. Ranks that lose a peer fail after it."""
        if any(life.how == RUNNING for life in self.lives):
            return RUNNING
        ends = {life.how for life in self.lives}
        if ends == {FINISHED}:
            return FINISHED
        failed = [life for life in self.lives if life.how == FAILED]
        own = [life for life in failed if not life.log.end.get("lost_peer")]
        killed = [life for life in self.lives if life.how == KILLED]
        if killed and failed and min(life.end for life in killed) > min(life.end for life in failed) + _SLACK_SECONDS:
            return FAILED  # the others lived on
        # A rank that fails by itself makes the launcher kill the others, whose newest stamp may be a little older.
        if own and (not killed or min(life.end for life in own) <= _death(killed) + _SLACK_SECONDS):
            return FAILED
        return KILLED if killed else FAILED


def _death(killed: Sequence[Life]) -> float:
    """The latest moment at which the first of the killed processes may have died."""
    return min(life.end + life.heartbeat_seconds for life in killed)


def lives_of(processes: Sequence[ProcessLog], now: float) -> list[Life]:
    """The processes as lives; one without any time is left out.

    Args:
        processes: of one run.
        now: Unix time of the report.
    """
    lives = _chained([life for process in processes if (life := _life(process, now)) is not None])
    newest: dict[int, float] = {}
    for life in lives:
        newest[life.rank] = max(newest.get(life.rank, 0.0), life.begin)
    return [
        replace(life, how=KILLED) if life.how == RUNNING and newest[life.rank] > life.end else life for life in lives
    ]


def _chained(lives: Sequence[Life]) -> list[Life]:
    """The lives, of which those of one process follow each other: one that is not stopped is replaced by the next."""
    newest: dict[tuple[str, int], int] = {}
    chained = sorted(lives, key=lambda life: life.agent)
    for index, life in enumerate(chained):
        before = newest.get((life.node, life.log.pid))
        newest[life.node, life.log.pid] = index
        if before is None or not _same_process(chained[before], life):
            continue
        other = chained[before]
        if not other.log.ended:
            other = chained[before] = replace(other, how=FINISHED, replaced=True)
        if other.replaced:
            chained[index] = replace(life, begin=max(life.begin, min(other.end, life.agent)))
    return chained


def _same_process(one: Life, other: Life) -> bool:
    started = [unix(life.log.head.get("process_started") or "") for life in (one, other)]
    first, second = started
    return first is not None and second is not None and abs(first - second) <= _SAME_START_SECONDS


def attempts_of(lives: Sequence[Life]) -> list[Attempt]:
    """The attempts, oldest first."""
    attempts: list[Attempt] = []
    for life in sorted(lives, key=lambda life: life.begin):
        if not attempts or not _belongs(life, attempts[-1]):
            attempts.append(Attempt(len(attempts)))
        attempts[-1].lives.append(life)
    return attempts


def _belongs(life: Life, attempt: Attempt) -> bool:
    """Whether a process was started with those of an attempt, all of which began before it."""
    same = [other for other in attempt.lives if other.rank == life.rank]
    if any(other.log.pid == life.log.pid and other.node == life.node and other.begin == life.begin for other in same):
        return True  # the agent was stopped and started again
    if any(other.end <= life.begin for other in same):
        return False
    if any(other.end > life.begin for other in attempt.lives):
        return True
    launches = {other.launch for other in attempt.lives if other.node == life.node}
    if life.launch is not None and launches - {None}:
        return life.launch in launches
    together = life.begin - attempt.end <= _STARTED_TOGETHER_SECONDS
    sizes = {other.log.head.get("world_size") for other in attempt.lives}
    return together and sizes == {life.log.head.get("world_size")} and life.log.head.get("world_size", 1) > 1


def _life(log: ProcessLog, now: float) -> Life | None:
    totals, beat = log.totals, log.beat
    if not log.ended and beat and beat["wall_seconds"] >= totals.get("wall_seconds", 0.0):
        totals = totals | beat
    totals = totals | checked_fields(totals.get("resumption", {}), RESUMPTION)[0]
    started, end = unix(log.started), unix(totals.get("time", "")) or unix(log.last_time)
    if started is None or end is None:
        return None
    # By the clock of the newest stamp: should the clock have been stepped, the next process starts by it, too.
    agent = end - totals["wall_seconds"] if "wall_seconds" in totals else min(started, end)
    process = unix(log.head.get("process_started", ""))
    before = 0.0 if process is None else max(0.0, started - process)
    return Life(log, totals, agent - before, agent, end, _how(log, end, now), bool(log.end.get("replaced")))


def _how(log: ProcessLog, end: float, now: float) -> str:
    if not log.ended:
        return RUNNING if now - end <= MISSED_WINDOWS * log_interval(log) or _is_there(log) else KILLED
    if log.end.get("exception") == "KeyboardInterrupt":
        return KILLED
    return FAILED if log.end.get("exception") or log.end.get("exit_status") else FINISHED


def _is_there(log: ProcessLog) -> bool:
    """Whether a process that writes nothing is still there, on this machine: it is stopped, or its disk hangs."""
    started = unix(log.head.get("process_started", ""))
    if started is None or log.head.get("node") != clean_name(node_name(os.environ)):
        return False
    now_there = process_started(log.pid)
    return now_there is not None and abs(now_there - started) <= _SAME_START_SECONDS


def log_interval(log: ProcessLog) -> float:
    """Seconds between two windows of a process."""
    return _interval(log, "log_interval_seconds", _LOG_INTERVAL_SECONDS)


def _interval(log: ProcessLog, name: str, default: float) -> float:
    seconds: float = log.head.get("settings", {}).get(name, default)
    return seconds


def unix(text: str) -> float | None:
    """Unix time of a time in a log; None if it is not a time."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
