"""The attempts of a run: which processes belong together, and how each ended."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.endings import FAULT_SECONDS, INTERRUPT, RunEnd
from telemetry.log.process import Point, unix
from telemetry.model.records import CLEANED_UP
from telemetry.safety.processes import process_started
from telemetry.sources.cgroup import EVENTS, group_id, oom_kills
from telemetry.util.identity import clean_name, node_name
from telemetry.util.words import named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.log.lines import GpuErrorLine, Heartbeat, TotalsLine
    from telemetry.log.process import ProcessLog

FINISHED: Final = "finished"
FAILED: Final = "failed"
KILLED: Final = "killed"
RUNNING: Final = "running"

MISSED_WINDOWS: Final = 3
"""A process that has written no line for so many log intervals counts as ended."""

_STARTED_TOGETHER_SECONDS: Final = 60.0
"""A rank may start this long after all others have ended, and still belong to their attempt."""

_SAME_START_SECONDS: Final = 1.0
"""If the starts of two processes differ by more, they are two processes with one pid."""

_SLACK_SECONDS: Final = 0.5
"""Two ends that are this close may have come in either order."""

_SURE_SECONDS: Final = 60.0
"""A counter of the OOM killer that is read later may include another kill."""


# -- one process ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """One process of a run, from its start to its end, in seconds of Unix time by the clock that it had at its end.

    Attributes:
        log: what the process has logged.
        totals: its newest totals, from its heartbeat if that is newer than its log: ``beat``.
        begin: start of the process; ``agent``: start of its agent; ``end``: time of its newest line or heartbeat.
        replaced: whether it has ended by executing another program.
    """

    log: ProcessLog
    totals: TotalsLine
    begin: float
    agent: float
    end: float
    how: str
    beat: Heartbeat | None = None
    replaced: bool = False

    @property
    def rank(self) -> int:
        """The last rank of the process."""
        return self.log.rank

    @property
    def node(self) -> str:
        """The name of the node on which the process ran."""
        return str(self.log.head.node)

    @property
    def heartbeat_seconds(self) -> float:
        """Time between two heartbeats of the process."""
        return max(1.0, float(self.log.head.settings.interval_seconds))

    @property
    def failed_by_itself(self) -> bool:
        """Whether it failed for another reason than the end of a peer."""
        return self.how == FAILED and not self.log.end.lost_peer

    @property
    def oom_readings(self) -> list[tuple[float, int]]:
        """Readings of the OOM killer's counter: Unix time, and the number of kills until then."""
        found = [(unix(text), kills) for kills, texts in self.log.oom_readings.items() for text in texts]
        readings = [(time, kills) for time, kills in found if time is not None]
        newest = self.totals.oom_kills_total
        return sorted(readings if newest is None else [*readings, (self.end, newest)])

    @property
    def gpu_fault(self) -> tuple[float, GpuErrorLine] | None:
        """The first error of its GPU shortly before it failed or was killed, and its time; None without one."""
        if self.how not in {FAILED, KILLED} or self.log.end.exception == INTERRUPT:
            return None
        for line in self.log.gpu_errors:
            time = unix(line.time)
            if time is not None and time >= self.end - FAULT_SECONDS and line.xid not in {0, CLEANED_UP}:
                return time, structs.replace(line, rank=self.rank)
        return None

    @property
    def launch(self) -> tuple[str, str, int | None] | None:
        """The same value for all ranks that one launcher started on a node; None if the launcher is not known."""
        head = self.log.head
        if head.launcher not in {"torchrun", "slurm", "mpi", "spawn", "kubernetes"} or head.launch is None:
            return None
        return self.node, head.launch, head.restarts

    @property
    def offset(self) -> int:
        """Optimizer steps before the process loaded the state from which positions are counted."""
        return self.totals.resumption.resumed_at_optimizer_steps or 0

    @property
    def last_point(self) -> Point:
        """The totals at the end of the process."""
        return Point.at(self.totals)


def lives_of(processes: Sequence[ProcessLog], now: float) -> list[Life]:
    """The life of each process. A process without any time in its log has none."""
    lives = _chained([life for process in processes if (life := _life(process, now)) is not None])
    newest: dict[int, float] = {}
    for life in lives:
        newest[life.rank] = max(newest.get(life.rank, 0.0), life.begin)
    return [
        replace(life, how=KILLED) if life.how == RUNNING and newest[life.rank] > life.end else life for life in lives
    ]


def _life(log: ProcessLog, now: float) -> Life | None:
    totals, beat = log.totals, log.beat
    if beat is not None and (log.ended or beat.wall_seconds < totals.wall_seconds):
        beat = None  # the log is newer
    if beat is not None:
        totals = beat.over(totals)
    started, end = unix(log.started), unix(totals.time) or unix(log.last_time)
    if started is None or end is None:
        return None
    # By the clock of the newest stamp: should the clock have been stepped, the next process starts by it, too.
    agent = end - totals.wall_seconds if totals.wall_seconds else min(started, end)
    process = unix(log.head.process_started or "")
    before = 0.0 if process is None else max(0.0, started - process)
    return Life(log, totals, agent - before, agent, end, _how(log, end, now), beat)


def _how(log: ProcessLog, end: float, now: float) -> str:
    if not log.ended:
        return RUNNING if now - end <= MISSED_WINDOWS * log_interval(log) or _is_there(log) else KILLED
    if log.end.exception == INTERRUPT:
        return KILLED
    return FAILED if log.end.exception or log.end.exit_status else FINISHED


def _is_there(log: ProcessLog) -> bool:
    """Whether a process that writes nothing is still there, on this machine: it is stopped, or its disk hangs."""
    started = unix(log.head.process_started or "")
    if started is None or log.head.node != clean_name(node_name(os.environ)):
        return False
    now_there = process_started(log.pid)
    return now_there is not None and abs(now_there - started) <= _SAME_START_SECONDS


def log_interval(log: ProcessLog) -> float:
    """Seconds between two windows of a process."""
    return log.head.settings.log_interval_seconds


def _chained(lives: Sequence[Life]) -> list[Life]:
    """Mark each life whose process has a later life without a stop of its agent: it has executed another program."""
    found = sorted(lives, key=lambda life: life.agent)
    newest: dict[tuple[str, int], int] = {}
    for at, life in enumerate(found):
        before = newest.get((life.node, life.log.pid))
        newest[life.node, life.log.pid] = at
        if before is not None and _same_process(found[before], life) and not found[before].log.ended:
            found[before] = replace(found[before], how=FINISHED, replaced=True)
            found[at] = replace(life, begin=max(life.begin, min(found[before].end, life.agent)))
    return found


def _same_process(one: Life, other: Life) -> bool:
    """Whether two lives of one pid are of one process. A pid is used again after some time."""
    first, second = (unix(life.log.head.process_started or "") for life in (one, other))
    return first is not None and second is not None and abs(first - second) <= _SAME_START_SECONDS


# -- an attempt, and how it ended ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OomEnd:
    """How the OOM killer ended an attempt.

    Attributes:
        ranks: those that it may have killed, or that failed after it had killed another process.
        kills: number of processes that it killed.
        killed: whether it killed the ranks. Otherwise they failed because it killed a process that they needed.
        sure: whether the counter was read soon after.
    """

    ranks: tuple[int, ...]
    kills: int
    killed: bool
    sure: bool

    @property
    def all_ranks(self) -> bool:
        """Whether the OOM killer has killed all of the ranks."""
        return self.killed and self.kills >= len(self.ranks)

    @property
    def text(self) -> str:
        """What the OOM killer did, in a few words."""
        probably = "" if self.sure else "probably "
        ranks = named(self.ranks)
        if self.all_ranks:
            return f"{ranks} {probably}killed by the OOM killer"
        of = f"{self.kills} of {ranks}" if self.killed else f"a process of {ranks}"
        return f"the OOM killer {probably}killed {of}"


@dataclass
class Attempt:
    """The processes that were started together. ``oom``: how the OOM killer ended them, if it did."""

    number: int
    lives: list[Life] = field(default_factory=list)
    oom: OomEnd | None = None

    @property
    def begin(self) -> float:
        """Start of the first process."""
        return min(life.begin for life in self.lives)

    @property
    def end(self) -> float:
        """End of the last process, as far as it is known."""
        return max(life.end for life in self.lives)

    @property
    def length(self) -> float:
        """Length in seconds. Each process counts by its own monotonic clock, which is never stepped."""
        begin = self.begin
        return max(life.begin - begin + (life.end - life.begin) for life in self.lives)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len({life.rank for life in self.lives})

    @property
    def replaced(self) -> bool:
        """Whether the attempt ended because a process executed another program: its work may not be done."""
        return self.how == FINISHED and any(life.replaced for life in self.lives)

    @property
    def how(self) -> str:
        """How the attempt ended: like the rank that ended first. Ranks that lose a peer fail after it."""
        ends = {life.how for life in self.lives}
        if RUNNING in ends or ends == {FINISHED}:
            return RUNNING if RUNNING in ends else FINISHED
        if not {FAILED, KILLED} <= ends:
            return KILLED if KILLED in ends else FAILED
        failed = [life for life in self.lives if life.how == FAILED]
        killed = [life for life in self.lives if life.how == KILLED]
        if min(life.end for life in killed) > min(life.end for life in failed) + _SLACK_SECONDS:
            return FAILED  # the others lived on
        # A rank that fails by itself makes the launcher kill the others, whose newest stamp may be a little older.
        dead = min(life.end + life.heartbeat_seconds for life in killed) + _SLACK_SECONDS
        return FAILED if any(life.failed_by_itself and life.end <= dead for life in failed) else KILLED

    @property
    def broke_off(self) -> bool:
        """Whether the attempt was killed or has failed."""
        return self.how in {FAILED, KILLED}

    @property
    def gpu_fault(self) -> GpuErrorLine | None:
        """The first error of a GPU shortly before the end of its process; None without one."""
        faults = [fault for life in self.lives if (fault := life.gpu_fault) is not None]
        return min(faults, key=lambda fault: fault[0])[1] if faults else None

    @property
    def run_end(self) -> RunEnd | None:
        """How the attempt ended, for the verdict; None if it has finished or goes on."""
        if not self.broke_off:
            return None
        oom = "" if self.oom is None else self.oom.text
        ended = [life for life in self.lives if life.how == FAILED] if self.how == FAILED else []
        own = [life for life in ended if life.failed_by_itself] or ended
        killed = [life for life in self.lives if life.how == KILLED]
        logged = own or [life for life in killed if life.log.ended]
        if logged:
            first = min(logged, key=lambda life: life.end)
            return RunEnd((first.rank,), first.log.end, oom, self.gpu_fault)
        return RunEnd(tuple(sorted({life.rank for life in killed})), None, oom, self.gpu_fault)

    @property
    def reason(self) -> str | None:
        """Why the attempt ended, if it is known: an exception, an exit status, the OOM killer, a GPU, or an exec."""
        end = self.run_end
        if end is None:
            return "executed another program" if self.replaced else None
        why, line, fault = [], end.process if self.how == FAILED else None, end.gpu_fault
        if line is not None and line.exception and not line.lost_peer:
            why.append(line.exception)
        elif line is not None and line.exit_status:
            why.append(f"exit status {line.exit_status}")
        if end.killed_by_oom:
            why.append(end.killed_by_oom)
        if fault is not None:
            why.append(f"Xid {fault.xid} on rank {fault.rank}")
        return "; ".join(why) or None


def attempts_of(lives: Sequence[Life], now: float) -> list[Attempt]:
    """Sort the processes into attempts, the oldest first."""
    attempts: list[Attempt] = []
    for life in sorted(lives, key=lambda life: life.begin):
        if not attempts or not _belongs(life, attempts[-1]):
            attempts.append(Attempt(len(attempts)))
        attempts[-1].lives.append(life)
    for attempt in attempts:
        attempt.oom = _oom_end(attempt.lives, lives, now)
    return attempts


def _belongs(life: Life, attempt: Attempt) -> bool:
    """Whether a process belongs to an attempt. All processes of the attempt began before it."""
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
    sizes, size = {other.log.head.world_size for other in attempt.lives}, life.log.head.world_size
    return together and sizes == {size} and size is not None and size > 1


def _oom_end(ended: Sequence[Life], lives: Sequence[Life], now: float) -> OomEnd | None:
    """How the OOM killer ended the processes of an attempt, from all readings of its counter; None if it did not."""
    victims = [(life, found) for life in ended if life.how == KILLED and (found := _killed_with(life, lives, now))]
    if not victims:
        victims = [(life, found) for life in ended if life.failed_by_itself and (found := _killed_before(life))]
    if not victims:
        return None
    return OomEnd(
        ranks=tuple(sorted({life.rank for life, _ in victims})),
        kills=max(kills for _, (kills, _) in victims),
        killed=victims[0][0].how == KILLED,
        sure=all(late <= _SURE_SECONDS for _, (_, late) in victims),
    )


def _killed_with(life: Life, lives: Sequence[Life], now: float) -> tuple[int, float] | None:
    """Number of kills when a process was killed, and delay of the reading; None if the OOM killer did not kill it."""
    group, before = life.log.head.memory_group, life.totals.oom_kills_total
    if group is None or before is None:
        return None
    readings = [each for other in lives if other.log.head.memory_group == group for each in other.oom_readings]
    current = _counter_now(life.log)
    if current is not None:
        readings.append((now, current))
    dead = life.end + 2 * life.heartbeat_seconds  # it would have written another heartbeat
    for time, kills in sorted(readings):
        if time > life.end and kills > before:
            return kills - before, time - life.end
        if time > dead:
            return None  # it was dead, and no one had been killed by the OOM killer
    return None


def _counter_now(log: ProcessLog) -> int | None:
    """The present counter in the cgroup of a process; None if the cgroup is gone, or on another machine."""
    path = Path(log.head.memory_events or "")
    if path.name not in EVENTS:
        return None
    try:
        same = group_id(path.parent, Path("/proc")) == log.head.memory_group
    except (OSError, ValueError):
        return None
    return oom_kills(path) if same else None


def _killed_before(life: Life) -> tuple[int, float] | None:
    """Like `_killed_with`, for a process that failed shortly after its own reading of the counter."""
    readings = life.oom_readings
    for (_, before), (time, kills) in pairwise(readings):
        if kills > before and life.end - time <= _SURE_SECONDS:
            return kills - before, 0.0
    return None
