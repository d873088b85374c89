"""Whether the OOM killer ended an attempt: what the counter of its cgroup said before, and to others after it.

A killed process cannot tell. Its last heartbeat has the counter of its cgroup as it was before. The other ranks of the
same cgroup, the next attempt in it, or this report, if it runs on that machine, have it as it was after.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.report.attempts import FAILED, KILLED, Life, OomReading
from telemetry.report.oom_end import OomEnd
from telemetry.sources.cgroup import EVENTS, group_id, oom_kills

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.report.process_log import ProcessLog

_SURE_SECONDS: Final = 60.0
"""If the counter is read later, it may have counted something else in the meantime."""


def oom_end(ended: Sequence[Life], lives: Sequence[Life], now: float, read: Callable[..., int | None]) -> OomEnd | None:
    """Whether the OOM killer ended an attempt; None if nothing tells so.

    Args:
        ended: the processes of the attempt.
        lives: all processes of the run, whose readings tell what the counter was later.
        now: Unix time of the report.
        read: gives the counter of a process's cgroup now, as `counter_now`.
    """
    victims = [(life, found) for life in ended if life.how == KILLED and (found := _after(life, lives, now, read))]
    if not victims:
        own = [life for life in ended if life.how == FAILED and not life.log.end.get("lost_peer")]
        victims = [(life, found) for life in own if (found := _before_end(life))]
    if not victims:
        return None
    return OomEnd(
        ranks=tuple(sorted({life.rank for life, _ in victims})),
        kills=max(kills for _, (kills, _) in victims),
        killed=victims[0][0].how == KILLED,
        sure=all(late <= _SURE_SECONDS for _, (_, late) in victims),
    )


def counter_now(log: ProcessLog) -> int | None:
    """The counter of the cgroup of a process now; None if that is gone, or on another machine."""
    path = Path(log.head.get("memory_events", ""))
    if path.name not in EVENTS:
        return None
    try:
        same = group_id(path.parent, Path("/proc")) == log.head.get("memory_group")
    except (OSError, ValueError):
        return None
    return oom_kills(path) if same else None


def _after(life: Life, lives: Sequence[Life], now: float, read: Callable[..., int | None]) -> tuple[int, float] | None:
    """How many were killed when this one was, and how late that was read; None if it was not the OOM killer."""
    group, before = life.log.head.get("memory_group"), life.oom_kills
    if group is None or before is None:
        return None
    readings = [each for other in lives if other.log.head.get("memory_group") == group for each in other.oom_readings]
    current = read(life.log)
    if current is not None:
        readings.append(OomReading(now, current))
    dead = life.end + 2 * life.heartbeat_seconds  # it would have written another heartbeat
    for reading in sorted(readings):
        if reading.time > life.end and reading.kills > before:
            return reading.kills - before, reading.time - life.end
        if reading.time > dead:
            return None  # it was dead, and no one had been killed by the OOM killer
    return None


def _before_end(life: Life) -> tuple[int, float] | None:
    """The same for a process that failed, by what it has read itself shortly before its end."""
    before: OomReading | None = None
    for reading in sorted(life.oom_readings):
        if before is not None and reading.kills > before.kills and life.end - reading.time <= _SURE_SECONDS:
            return reading.kills - before.kills, 0.0
        before = reading
    return None
