"""Goodput: which share of a run's wall clock trained something that was kept, over all its attempts.

Each attempt is as long as its longest process, and each gap between attempts is down. Within an attempt the seconds of
a category are the mean over its ranks. So the categories sum to the wall clock, whatever the ranks were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from telemetry.report.attempts import FAILED, FINISHED, KILLED, RUNNING, attempts_of, lives_of
from telemetry.report.checkpoint_interval import Experience
from telemetry.report.oom_evidence import counter_now, oom_end
from telemetry.report.resumption import ASSUMED, Course, courses_of
from telemetry.report.stuck_time import (
    BEGINNING,
    KEPT,
    LOST_STEPS,
    REPLAYED,
    loop_parts,
    stuck_in_phases,
    stuck_in_saves,
)
from telemetry.util.clock import iso_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.attempts import Attempt, Life
    from telemetry.report.process_log import ProcessLog

PRODUCTIVE: Final = "productive"
REDONE: Final = "redone"
RESTORE: Final = "restore"
REPLAY: Final = "replay"
STUCK: Final = "stuck"
DOWN: Final = "down"

SECONDS: Final = (
    PRODUCTIVE,
    REDONE,
    RESTORE,
    REPLAY,
    STARTUP,
    DATA_WAIT,
    EVALUATION,
    CHECKPOINT,
    STUCK,
    DOWN,
    OTHER,
)
"""The categories of a run. Every second of its wall clock is in exactly one of them."""

LOST: Final = (REDONE, RESTORE, REPLAY, STARTUP, STUCK, DOWN)
"""Those that restarts and hangs cost: the rest is the effective training time."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The books of a run.

    Attributes:
        courses: of its attempts, oldest first.
        wall_seconds: from its first start to its newest end.
        seconds: by category of `SECONDS`, the mean over the ranks.
        rank_seconds: the same, summed over the ranks.
        experience: what its checkpoints and failures tell about the best interval between checkpoints.
    """

    courses: Sequence[Course]
    wall_seconds: float
    seconds: dict[str, float]
    rank_seconds: dict[str, float]
    experience: Experience

    @property
    def goodput_ratio(self) -> float | None:
        """Productive time as a share of the wall clock."""
        return self.seconds[PRODUCTIVE] / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def ettr_ratio(self) -> float | None:
        """Share of the wall clock that restarts and hangs did not cost."""
        lost = sum(self.seconds[category] for category in LOST)
        return 1 - lost / self.wall_seconds if self.wall_seconds > 0 else None


def goodput_of(processes: Sequence[ProcessLog], now: float) -> Goodput:
    """The books of a run, from the logs of all its processes.

    Args:
        processes: of one run.
        now: Unix time of the report.
    """
    lives = lives_of(processes, now)
    attempts = attempts_of(lives)
    for attempt in attempts:
        attempt.oom = oom_end(attempt.lives, lives, now, counter_now)
    courses = courses_of(attempts)
    seconds, rank_seconds = dict.fromkeys(SECONDS, 0.0), dict.fromkeys(SECONDS, 0.0)
    wall, before = 0.0, None
    for course in courses:
        attempt = course.attempt
        if before is not None:
            gap = max(0.0, attempt.begin - before.end)
            wall += gap
            seconds[DOWN] += gap
            rank_seconds[DOWN] += gap * before.ranks
        length = _length(attempt)
        wall += length
        for life in attempt.lives:
            for category, spent in _of_life(life, course, length).items():
                rank_seconds[category] += spent
                seconds[category] += spent / len(attempt.lives)
        before = attempt
    return Goodput(courses, wall, seconds, rank_seconds, _experience(courses, seconds))


def as_job(processes: Sequence[ProcessLog], goodput: Goodput) -> dict[str, Any]:
    """The object ``job`` of ``report --json``."""
    newest = goodput.courses[-1].attempt.lives if goodput.courses else []
    return {
        "nodes": sorted({str(process.head.get("node")) for process in processes}),
        "ranks": len({life.rank for life in newest}),
        "attempts": [_attempt(course) for course in goodput.courses],
        "goodput": {
            "wall_seconds": round(goodput.wall_seconds, 3),
            "goodput_ratio": _rounded(goodput.goodput_ratio),
            "ettr_ratio": _rounded(goodput.ettr_ratio),
            "seconds": {category: round(goodput.seconds[category], 3) for category in SECONDS},
        },
        "checkpoint_interval": goodput.experience.as_json(),
    }


def _attempt(course: Course) -> dict[str, Any]:
    attempt = course.attempt
    lost = course.lost_steps if attempt.replaced or attempt.how not in {FINISHED, RUNNING} else 0
    first = course.source == ASSUMED and course.resumed == 0
    return {
        "attempt": attempt.number,
        "started": iso_time(attempt.begin),
        "ended": None if attempt.how == RUNNING else iso_time(attempt.end),
        "end": attempt.how,
        "reason": reason_of(attempt),
        "ranks": attempt.ranks,
        "steps": course.steps,
        "resumed_from_step": None if first else round(course.resumed),
        "resumed_from": course.source,
        "lost_steps": lost,
    }


def reason_of(attempt: Attempt) -> str | None:
    """Why an attempt ended, as far as its logs tell: the OOM killer, an exception, an exit status, or an exec."""
    if attempt.replaced:
        return "executed another program"
    if attempt.how == KILLED:
        return attempt.oom.text if attempt.oom is not None and attempt.oom.killed else None
    if attempt.how != FAILED:
        return None
    why: list[str] = []
    for life in attempt.lives:
        end = life.log.end
        if end.get("exception") and not end.get("lost_peer"):
            why.append(end["exception"])
        elif end.get("exit_status"):
            why.append(f"exit status {end['exit_status']}")
    oom = "" if attempt.oom is None else f"; {attempt.oom.text}"
    return f"{why[0]}{oom}" if why else oom.removeprefix("; ") or None


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)


def _length(attempt: Attempt) -> float:
    """How long an attempt lasted. Each process counts by its own monotonic clock, which is never stepped."""
    return max(life.begin - attempt.begin + (life.end - life.begin) for life in attempt.lives)


def _of_life(life: Life, course: Course, length: float) -> dict[str, float]:
    """The seconds of one process, by category. They sum to the length of its attempt."""
    spent = life.totals.get("ledger_total_seconds", {})
    restore = life.totals.get("restore_seconds", 0.0)
    if course.attempt.number == 0 and not course.resumed:
        restore = 0.0  # the run begins: what it loads is no checkpoint of its own
    parts, stuck = loop_parts(life, course)
    stuck_phases = stuck_in_phases(life)
    redone = parts[LOST_STEPS, DATA_WAIT] + parts[LOST_STEPS, COMPUTE]
    begun = life.begin - course.attempt.begin + (life.agent - life.begin) + parts[BEGINNING, DATA_WAIT]
    seconds = {
        PRODUCTIVE: parts[KEPT, COMPUTE],
        REDONE: 0.0 if course.in_replay else redone,
        RESTORE: min(restore, spent.get(STARTUP, 0.0)),
        REPLAY: parts[REPLAYED, DATA_WAIT] + parts[REPLAYED, COMPUTE] + (redone if course.in_replay else 0.0),
        STARTUP: begun + max(0.0, spent.get(STARTUP, 0.0) - restore),
        DATA_WAIT: parts[KEPT, DATA_WAIT],
        EVALUATION: spent.get(EVALUATION, 0.0) - stuck_phases[EVALUATION],
        CHECKPOINT: spent.get(CHECKPOINT, 0.0) - stuck_phases[CHECKPOINT],
        STUCK: stuck + sum(stuck_phases.values()),
        OTHER: spent.get(OTHER, 0.0),
    }
    # A rank that has ended waits for the others to end. It is down, unless its work was done.
    rest = max(0.0, length - sum(seconds.values()))
    if life.how in {FINISHED, RUNNING}:
        seconds[OTHER] += rest
    else:
        seconds[DOWN] = rest
    return seconds


def _experience(courses: Sequence[Course], seconds: dict[str, float]) -> Experience:
    """What the run tells about its checkpoints and failures."""
    ended = [course.attempt for course in courses if course.attempt.how not in {FINISHED, RUNNING}]
    logs = [life.log for course in courses for life in course.attempt.lives]
    writers = [log for log in logs if log.saves_total]
    by_rank: dict[int, list[float]] = {}
    for log in writers:
        sums = by_rank.setdefault(log.rank, [0.0, 0.0])
        sums[0] += log.saves_total
        sums[1] += log.save_seconds - stuck_in_saves(log)
    number, save_seconds = max(by_rank.values(), default=[0.0, 0.0])
    loop = sum(seconds[category] for category in (PRODUCTIVE, REDONE, DATA_WAIT, EVALUATION, OTHER, CHECKPOINT))
    restarts = max(1, len(courses) - 1)
    return Experience(
        failures=len(ended),
        loop_seconds=loop,
        checkpoints=int(number),
        checkpoint_seconds=save_seconds / number if number else None,
        restart_seconds=sum(seconds[category] for category in (RESTORE, REPLAY, STARTUP, DOWN)) / restarts,
    )
