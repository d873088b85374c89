"""Goodput: which share of a run's wall clock trained something that was kept, over all its attempts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from telemetry.report.attempts import (
    ASSUMED,
    BEGINNING,
    FAILED,
    FINISHED,
    KEPT,
    KILLED,
    LOST_STEPS,
    REPLAYED,
    RUNNING,
    Course,
    attempts_of,
    counter_now,
    courses_of,
    lives_of,
    loop_parts,
    oom_end,
    stuck_in_phases,
    stuck_in_saves,
)
from telemetry.report.process_log import lost_by_cause
from telemetry.util.clock import iso_time
from telemetry.util.text import plain_number, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.report.attempts import Attempt, Life
    from telemetry.report.process_log import ProcessLog

MIN_FAILURES: Final = 2
"""Fewer tell nothing about how often a run fails."""

_WORTH: Final = 0.01
"""A gain of less than this in effective training time is no advice."""


@dataclass(frozen=True, slots=True)
class Experience:
    """What a run tells about its checkpoints and failures.

    Attributes:
        failures: how many attempts were killed or failed.
        loop_seconds: of training, checkpoints included, over all attempts.
        checkpoints: how many a rank has written. ``checkpoint_seconds``: for how long one stops the training.
        restart_seconds: from a failure to the first new step.
    """

    failures: int
    loop_seconds: float
    checkpoints: int
    checkpoint_seconds: float | None
    restart_seconds: float

    @property
    def failure_seconds(self) -> float | None:
        """Seconds of training for one failure; None if too few were seen, or no time of training."""
        return self.loop_seconds / self.failures if self.failures >= MIN_FAILURES and self.loop_seconds > 0 else None

    @property
    def interval_seconds(self) -> float | None:
        """Seconds of training between two checkpoints so far."""
        if not self.checkpoints:
            return None
        return max(0.0, self.loop_seconds / self.checkpoints - (self.checkpoint_seconds or 0.0))

    @property
    def best_interval_seconds(self) -> float | None:
        """The interval that costs least; None if it is not known what that depends on."""
        if self.failure_seconds is None or not self.checkpoint_seconds:
            return None
        return best_interval(self.checkpoint_seconds, self.failure_seconds)

    def predicted(self, interval_seconds: float | None) -> float | None:
        """Effective training time, as a share of the wall clock, with checkpoints so far apart."""
        if interval_seconds is None or self.failure_seconds is None or self.checkpoint_seconds is None:
            return None
        return ettr(interval_seconds, self.checkpoint_seconds, self.failure_seconds, self.restart_seconds)

    def _productive(self, interval_seconds: float | None) -> float | None:
        ratio = self.predicted(interval_seconds)
        if ratio is None or interval_seconds is None or self.checkpoint_seconds is None:
            return None
        segment = interval_seconds + self.checkpoint_seconds
        return ratio * interval_seconds / segment if segment > 0 else None

    @property
    def gain(self) -> float | None:
        """What the best interval adds to the share of productive time; None if that is too little for an advice."""
        best, now = self._productive(self.best_interval_seconds), self._productive(self.interval_seconds)
        return best - now if best is not None and now is not None and best - now >= _WORTH else None

    def as_json(self) -> dict[str, Any] | None:
        """For ``report --json``; None if nothing can be said."""
        if self.best_interval_seconds is None or self.checkpoint_seconds is None:
            return None
        return {
            "checkpoint_seconds": round(self.checkpoint_seconds, 3),
            "interval_seconds": _rounded(self.interval_seconds, 1),
            "failure_seconds": _rounded(self.failure_seconds, 1),
            "best_interval_seconds": round(self.best_interval_seconds, 1),
            "predicted_ettr_ratio": _rounded(self.predicted(self.best_interval_seconds), 4),
        }


def best_interval(checkpoint_seconds: float, failure_seconds: float) -> float:
    """Seconds of training between two checkpoints that lose least time, by Daly.

    Args:
        checkpoint_seconds: for which one checkpoint stops the training.
        failure_seconds: of training for one failure.
    """
    cost, mean = checkpoint_seconds, failure_seconds
    if cost >= 2 * mean:
        return mean
    root = math.sqrt(cost / (2 * mean))
    return max(cost, math.sqrt(2 * cost * mean) * (1 + root / 3 + root * root / 9) - cost)


def ettr(interval_seconds: float, checkpoint_seconds: float, failure_seconds: float, restart_seconds: float) -> float:
    """Effective training time as a share of the wall clock, with failures at random moments.

    Writing checkpoints counts as effective, as everywhere in the report: restarts and redone steps do not.

    Args:
        interval_seconds: of training between two checkpoints.
        checkpoint_seconds: for which one stops the training.
        failure_seconds: of training, checkpoints included, for one failure.
        restart_seconds: from a failure to the first new step.
    """
    segment = interval_seconds + checkpoint_seconds
    # Of the time between two failures, the part that is after the newest complete checkpoint; failures are exponential.
    kept = segment / math.expm1(segment / failure_seconds) if segment / failure_seconds < 700 else 0.0
    return kept / (failure_seconds + restart_seconds)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


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
    """The books of a run, from the logs of all its processes."""
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
        "attempts": [_attempt_json(course) for course in goodput.courses],
        "goodput": {
            "wall_seconds": round(goodput.wall_seconds, 3),
            "goodput_ratio": _rounded_ratio(goodput.goodput_ratio),
            "ettr_ratio": _rounded_ratio(goodput.ettr_ratio),
            "seconds": {category: round(goodput.seconds[category], 3) for category in SECONDS},
        },
        "checkpoint_interval": goodput.experience.as_json(),
    }


def _attempt_json(course: Course) -> dict[str, Any]:
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


def _rounded_ratio(ratio: float | None) -> float | None:
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


_MIN_RATIO: Final = 0.005
"""A category with a smaller share of the GPU-hours is not mentioned."""

_WORDS: Final = {
    REDONE: "redone",
    DOWN: "down",
    STUCK: "stuck",
    RESTORE: "restoring",
    REPLAY: "replaying",
    STARTUP: "starting up",
}

_REPLAY_WORTH: Final = 0.01
"""From this share of the wall clock on, replay is worth an advice."""

_MAX_ATTEMPTS: Final = 20


def books_sentence(goodput: Goodput) -> str:
    """One sentence on the GPU-hours of a run with several attempts; empty for one attempt."""
    total = sum(goodput.rank_seconds.values())
    if len(goodput.courses) < 2 or total <= 0:
        return ""
    productive = goodput.rank_seconds[PRODUCTIVE]
    costs = sorted(((goodput.rank_seconds[c], c) for c in LOST), reverse=True)
    parts = [
        f"{_hours(seconds)} {_WORDS[category]}{_after(goodput) if category == REDONE else ''}"
        for seconds, category in costs
        if seconds / total >= _MIN_RATIO
    ]
    lost = f": {', '.join(parts)}" if parts else ""
    kept = f"{_hours(productive)} were productive ({rounded_percent(productive / total)})"
    return f"Of {_hours(total)} GPU-hours, {kept}{lost}."


def ended_by_oom(goodput: Goodput) -> str:
    """A sentence on a run that the OOM killer has ended; empty for others."""
    attempt = goodput.courses[-1].attempt if goodput.courses else None
    if attempt is None or attempt.oom is None or attempt.how not in {FAILED, KILLED}:
        return ""
    text = attempt.oom.text
    return (
        f"The run has ended: {text}. Raise the memory limit of its cgroup, or use less: fewer DataLoader workers, or a "
        "smaller prefetch_factor."
    )


def attempt_lines(goodput: Goodput) -> list[str]:
    """The lines of the report: the attempts, and the advice. Empty for one attempt."""
    if not books_sentence(goodput):
        return []
    shown = goodput.courses[-_MAX_ATTEMPTS:]
    lines = ["", "attempts:"]
    if len(shown) < len(goodput.courses):
        lines.append(f"the newest {len(shown)} of {len(goodput.courses)} attempts; --json has all")
    lines += [_attempt_line(course) for course in shown]
    return lines + [f"  {text}" for text in goodput_advice(goodput)]


def goodput_advice(goodput: Goodput) -> list[str]:
    """What to change, and what that is worth."""
    found = []
    told = goodput.experience
    best, now = told.best_interval_seconds, told.interval_seconds
    if told.gain is not None and best is not None and now is not None and told.failure_seconds is not None:
        predicted = told.predicted(best) or 0.0
        found.append(
            f"write a checkpoint every {_duration(best)} instead of every {_duration(now)}: predicted effective "
            f"training time {rounded_percent(predicted)} (a checkpoint stops the training for "
            f"{_duration(told.checkpoint_seconds or 0.0)}, and the run fails once in {_duration(told.failure_seconds)})"
        )
    elif told.failures and not told.checkpoints:
        found.append("write checkpoints: the run has written none, so each restart begins from nothing")
    if goodput.wall_seconds > 0 and goodput.seconds[REPLAY] / goodput.wall_seconds >= _REPLAY_WORTH:
        found.append(
            "resume the data without drawing batches again: a stateful loader (torchdata's StatefulDataLoader), or a "
            f"sampler that skips; {_duration(goodput.seconds[REPLAY])} went into batches that were thrown away"
        )
    return found


def _attempt_line(course: Course) -> str:
    attempt = course.attempt
    text = f"  attempt {attempt.number}: {attempt.how}, {course.steps} steps on {attempt.ranks} ranks"
    if course.source != ASSUMED or course.resumed:
        assumed = " (assumed: the newest complete checkpoint)" if course.source == ASSUMED else ""
        text += f", resumed at step {course.resumed:.0f}{assumed}"
    if (attempt.replaced or attempt.how in {FAILED, KILLED}) and course.lost_steps:
        text += f", {course.lost_steps} steps lost"
    reason = reason_of(attempt)
    return text if reason is None else f"{text} ({reason})"


def _after(goodput: Goodput) -> str:
    """What the redone steps are there for."""
    ends = [course.attempt.how for course in goodput.courses if course.attempt.how not in {FINISHED, RUNNING}]
    parts = []
    for how, one, many in ((KILLED, "kill", "kills"), (FAILED, "failure", "failures")):
        number = ends.count(how)
        if number:
            parts.append(f"{number} {one if number == 1 else many}")
    return f" after {' and '.join(parts)}" if parts else ""


def _hours(seconds: float) -> str:
    """Hours with two digits that matter."""
    hours = seconds / 3600
    return f"{hours:.0f}" if hours >= 9.95 else f"{hours:.1f}" if hours >= 0.995 else f"{plain_number(hours, 2)}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{plain_number(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_RESTARTS: Final = (REDONE, RESTORE, REPLAY, DOWN)
KWH: Final = 3.6e6
"""Joules."""


def throughput_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples and tokens of the run, and how many per second of the training loop. Null if a rank does not know them.

    What was trained again after a restart is in the sums. A rank's rate is its sum over its seconds in the loop; that
    of the run is the sum over the ranks.
    """
    found: dict[str, Any] = {}
    for name in ("samples", "tokens"):
        stepping = [rank for rank in ranks if rank["steps"]]
        known = bool(stepping) and all(rank[name] is not None for rank in stepping)
        sums: dict[int, tuple[int, float]] = {}
        for rank in stepping if known else ():
            total, seconds = sums.get(rank["rank"], (0, 0.0))
            ledger = rank["ledger"]
            sums[rank["rank"]] = total + rank[name], seconds + ledger[DATA_WAIT] + ledger[COMPUTE]
        found[name] = sum(total for total, _ in sums.values()) if known else None
        timed = known and all(seconds > 0 for _, seconds in sums.values())
        found[f"{name}_per_second"] = sum(total / seconds for total, seconds in sums.values()) if timed else None
    return found


def energy_of(ranks: Sequence[Mapping[str, Any]], processes: Sequence[ProcessLog]) -> dict[str, float] | None:
    """Joules of the GPUs of a run by category of the ledger; None without any.

    A GPU counts the energy of all processes on it. Of the ranks of an attempt that share one, one counts: that with
    most energy. A rank has several processes here if the agent was stopped and started again in one; these add up.
    """
    by_rank: dict[tuple[Any, Any], dict[int, dict[str, float]]] = {}
    for place, (rank, process) in enumerate(zip(ranks, processes, strict=True)):
        own = rank["gpu_energy_joules"]
        if own is None:
            continue
        gpu = process.totals.get("gpu_uuid") or place
        sums = by_rank.setdefault((rank.get("attempt"), gpu), {}).setdefault(
            rank["rank"], dict.fromkeys(CATEGORIES, 0.0)
        )
        for category in CATEGORIES:
            sums[category] += own.get(category, 0.0)
    if not by_rank:
        return None
    largest = [max(ranks_of.values(), key=lambda sums: sum(sums.values())) for ranks_of in by_rank.values()]
    return {c: sum(each[c] for each in largest) for c in CATEGORIES}


def cost_of(
    ranks: Sequence[Mapping[str, Any]],
    processes: Sequence[ProcessLog],
    goodput: Goodput,
) -> dict[str, Any] | None:
    """What the run has cost, and what its waits, stalls and restarts did; None without the setting ``gpu_hour_price``.

    A rank counts as one GPU. Waiting is part of the stalls where a stall was open, so the parts do not add up.
    """
    prices = [price for p in processes if (price := p.head.get("settings", {}).get("gpu_hour_price")) is not None]
    if not prices:
        return None
    hourly = prices[-1] / 3600
    exposed = [_exposed_seconds(rank) for rank in ranks if rank["steps"]]
    lost = sum(lost_by_cause(processes).values())
    total = sum(goodput.rank_seconds.values())
    return {
        "gpu_hour_price": prices[-1],
        "gpu_hours": total / 3600,
        "total": total * hourly,
        "waiting": None if None in exposed else sum(seconds or 0.0 for seconds in exposed) * hourly,
        "stalls": lost * hourly,
        "restarts": sum(goodput.rank_seconds[category] for category in _RESTARTS) * hourly,
    }


def _exposed_seconds(rank: Mapping[str, Any]) -> float | None:
    ratio = rank["exposed_wait_ratio"]
    return None if ratio is None else float(ratio * (rank["ledger"][DATA_WAIT] + rank["ledger"][COMPUTE]))


def throughput_lines(throughput: Mapping[str, Any]) -> list[str]:
    """A line on samples and tokens; none if neither is known."""
    parts = []
    for name in ("samples", "tokens"):
        total, rate = throughput[name], throughput[f"{name}_per_second"]
        if total is not None:
            parts.append(
                f"{total} {name}" + (f", {plain_number(rate, 4)} per second of the training loop" if rate else "")
            )
    return ["", f"throughput: {'; '.join(parts)}"] if parts else []


def energy_lines(energy: Mapping[str, float] | None) -> list[str]:
    """A line on the energy of the GPUs; none without it."""
    total = sum(energy.values()) if energy is not None else 0.0
    if energy is None or total <= 0:
        return []
    waiting = energy[DATA_WAIT]
    kwh, of = plain_number(waiting / KWH), plain_number(total / KWH)
    share = rounded_percent(waiting / total)
    return ["", f"energy: {kwh} of {of} kWh went into waits for data ({share}); of the whole GPUs, split by time"]


def cost_lines(cost: Mapping[str, Any] | None) -> list[str]:
    """A line on money; none without a price."""
    if cost is None:
        return []
    parts = [f"{cost[name]:.2f} {name}" for name in ("waiting", "stalls", "restarts") if cost[name] is not None]
    return [
        "",
        f"cost: {cost['total']:.2f} for {plain_number(cost['gpu_hours'])} GPU-hours; of that {', '.join(parts)}",
    ]
