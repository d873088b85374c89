"""Goodput: the share of a run's wall clock that trained something that was kept, over all attempts; and its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from telemetry.log.process import lost_by_cause
from telemetry.model.records import (
    CATEGORIES,
    CHECKPOINT,
    DATA_WAIT,
    DOWN,
    EVALUATION,
    LOST,
    OTHER,
    PRODUCTIVE,
    REDONE,
    REPLAY,
    RESTORE,
    STARTUP,
    STUCK,
)
from telemetry.report.attempt_list import FINISHED, RUNNING, attempts_of, lives_of
from telemetry.report.contract import Books, CheckpointInterval, Cost, Job, JobAttempt, Throughput
from telemetry.report.course import ASSUMED, courses_of
from telemetry.util.clock import iso_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.log.process import ProcessLog
    from telemetry.report.attempt_list import Life
    from telemetry.report.contract import Rank
    from telemetry.report.course import Course

SECONDS: Final = (
    *(PRODUCTIVE, REDONE, RESTORE, REPLAY, STARTUP, DATA_WAIT, EVALUATION, CHECKPOINT, STUCK, DOWN, OTHER),
)
"""Categories of the wall clock of a run. Each second is in exactly one of them."""

_RESTARTS: Final = (REDONE, RESTORE, REPLAY, DOWN)

MIN_FAILURES: Final = 2
"""With fewer failures, the time between two failures is not known."""


# -- how often to write a checkpoint -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experience:
    """The experience of a run with checkpoints and failures.

    Attributes:
        failures: number of attempts that were killed or failed.
        loop_seconds: training time, checkpoints included, over all attempts.
        checkpoints: checkpoints per rank. ``checkpoint_seconds``: time for which one stops the training.
        restart_seconds: time from a failure to the first new step.
    """

    failures: int
    loop_seconds: float
    checkpoints: int
    checkpoint_seconds: float
    restart_seconds: float

    def advised(self) -> CheckpointInterval | None:
        """The interval between checkpoints that costs least; None without enough failures or checkpoints."""
        if self.failures < MIN_FAILURES or self.loop_seconds <= 0 or not self.checkpoint_seconds:
            return None
        failure = self.loop_seconds / self.failures
        best = best_interval(self.checkpoint_seconds, failure)
        return CheckpointInterval(
            checkpoint_seconds=self.checkpoint_seconds,
            interval_seconds=max(0.0, self.loop_seconds / self.checkpoints - self.checkpoint_seconds),
            failure_seconds=failure,
            best_interval_seconds=best,
            predicted_ettr_ratio=ettr(best, self.checkpoint_seconds, failure, self.restart_seconds),
        )

    def gain(self, advised: CheckpointInterval) -> float:
        """The gain in the share of productive time with the best interval."""
        cost, failure = self.checkpoint_seconds, advised.failure_seconds
        best, now = (
            ettr(interval, cost, failure, self.restart_seconds) * interval / (interval + cost)
            for interval in (advised.best_interval_seconds, advised.interval_seconds)
        )
        return best - now


def best_interval(checkpoint_seconds: float, failure_seconds: float) -> float:
    """Seconds of training between two checkpoints that lose least time, by Daly. Failures: one in so many seconds."""
    cost, mean = checkpoint_seconds, failure_seconds
    if cost >= 2 * mean:
        return mean
    root = math.sqrt(cost / (2 * mean))
    return max(cost, math.sqrt(2 * cost * mean) * (1 + root / 3 + root * root / 9) - cost)


def ettr(interval_seconds: float, checkpoint_seconds: float, failure_seconds: float, restart_seconds: float) -> float:
    """Effective training time as a share of the wall clock, with failures at random moments.

    Like the rest of the report, this counts the writing of checkpoints as effective, but not restarts and redone steps.

    Args:
        interval_seconds: training time between two checkpoints.
        checkpoint_seconds: time for which one checkpoint stops the training.
        failure_seconds: training time, checkpoints included, per failure.
        restart_seconds: time from a failure to the first new step.
    """
    segment = interval_seconds + checkpoint_seconds
    # The part of the time between two failures that a complete checkpoint keeps; failures are exponential.
    kept = segment / math.expm1(segment / failure_seconds) if segment / failure_seconds < 700 else 0.0
    return kept / (failure_seconds + restart_seconds)


# -- the books -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goodput:
    """Where the wall clock of a run went.

    Attributes:
        courses: courses of the attempts, the oldest first.
        wall_seconds: time from the first start to the newest end.
        seconds: seconds by category of `SECONDS`, the mean over the ranks.
        rank_seconds: seconds by category of `SECONDS`, the sum over the ranks.
    """

    courses: Sequence[Course]
    wall_seconds: float
    seconds: dict[str, float]
    rank_seconds: dict[str, float]
    experience: Experience


def goodput_of(processes: Sequence[ProcessLog], now: float) -> Goodput:
    """Account for the wall clock of a run, from the logs of all its processes."""
    courses = courses_of(attempts_of(lives_of(processes, now), now))
    seconds, rank_seconds = dict.fromkeys(SECONDS, 0.0), dict.fromkeys(SECONDS, 0.0)
    wall, before = 0.0, None
    for course in courses:
        attempt = course.attempt
        if before is not None:
            gap = max(0.0, attempt.begin - before.end)
            wall += gap
            seconds[DOWN] += gap
            rank_seconds[DOWN] += gap * before.ranks
        length = attempt.length
        wall += length
        for life in attempt.lives:
            for category, spent in _of_life(life, course, length).items():
                rank_seconds[category] += spent
                seconds[category] += spent / len(attempt.lives)
        before = attempt
    return Goodput(courses, wall, seconds, rank_seconds, _experience(courses, seconds))


def _of_life(life: Life, course: Course, length: float) -> dict[str, float]:
    """The seconds of one process by category. Their sum is the length of its attempt."""
    totals = life.totals
    spent, stuck = dict.fromkeys(CATEGORIES, 0.0) | totals.ledger_total_seconds, totals.stuck_total_seconds
    restore = totals.resumption.restore_seconds
    if course.attempt.number == 0 and not course.resumed:
        restore = 0.0  # the first attempt of a run loads a model, but no checkpoint of this run
    first, cut, end = course.points(life)
    kept, lost = cut.since(first), end.since(cut)
    first_wait = min(totals.first_wait_seconds, spent[DATA_WAIT])
    begun = life.agent - course.attempt.begin + max(0.0, first_wait - stuck.get(STARTUP, 0.0))
    seconds = {
        PRODUCTIVE: kept.computing,
        REDONE: lost.computing + lost.waiting,
        RESTORE: min(restore, spent[STARTUP]),
        REPLAY: max(0.0, first.loop_seconds - first_wait - stuck.get(REPLAY, 0.0)),
        STARTUP: begun + max(0.0, spent[STARTUP] - restore),
        DATA_WAIT: kept.waiting,
        EVALUATION: max(0.0, spent[EVALUATION] - stuck.get(EVALUATION, 0.0)),
        CHECKPOINT: max(0.0, spent[CHECKPOINT] - stuck.get(CHECKPOINT, 0.0)),
        STUCK: sum(stuck.values()),
        OTHER: spent[OTHER],
    }
    # A rank that has ended waits for the others to end. It is down, unless its work was done.
    rest = max(0.0, length - sum(seconds.values()))
    if life.how in {FINISHED, RUNNING}:
        seconds[OTHER] += rest
    else:
        seconds[DOWN] = rest
    return seconds


def _experience(courses: Sequence[Course], seconds: dict[str, float]) -> Experience:
    by_rank: dict[int, tuple[int, float]] = {}
    for log in (life.log for course in courses for life in course.attempt.lives):
        number, spent = by_rank.get(log.rank, (0, 0.0))
        by_rank[log.rank] = number + log.saves_total, spent + log.save_seconds
    number, spent = max(by_rank.values(), default=(0, 0.0))
    return Experience(
        failures=sum(course.attempt.broke_off for course in courses),
        loop_seconds=sum(seconds[c] for c in (PRODUCTIVE, REDONE, DATA_WAIT, EVALUATION, OTHER, CHECKPOINT)),
        checkpoints=number,
        checkpoint_seconds=spent / number if number else 0.0,
        restart_seconds=sum(seconds[c] for c in (RESTORE, REPLAY, STARTUP, DOWN)) / max(1, len(courses) - 1),
    )


def job_of(processes: Sequence[ProcessLog], goodput: Goodput) -> Job:
    """The attempts and the sums for ``report --json``."""
    newest = goodput.courses[-1].attempt.ranks if goodput.courses else 0
    wall, seconds = goodput.wall_seconds, goodput.seconds
    lost = sum(seconds[category] for category in LOST)
    advised, digits = goodput.experience.advised(), {"checkpoint_seconds": 3, "predicted_ettr_ratio": 4}
    return Job(
        nodes=sorted({str(process.head.node) for process in processes}),
        ranks=newest,
        attempts=[_job_attempt(course) for course in goodput.courses],
        goodput=Books(
            wall_seconds=round(wall, 3),
            goodput_ratio=round(seconds[PRODUCTIVE] / wall, 4) if wall > 0 else None,
            ettr_ratio=round(1 - lost / wall, 4) if wall > 0 else None,
            seconds={category: round(seconds[category], 3) for category in SECONDS},
        ),
        checkpoint_interval=advised
        and CheckpointInterval(**{name: round(value, digits.get(name, 1)) for name, value in asdict(advised).items()}),
    )


def _job_attempt(course: Course) -> JobAttempt:
    attempt = course.attempt
    from_nothing = course.resumed_from == ASSUMED and course.resumed == 0
    return JobAttempt(
        attempt=attempt.number,
        started=iso_time(attempt.begin),
        ended=None if attempt.how == RUNNING else iso_time(attempt.end),
        end=attempt.how,
        reason=attempt.reason,
        ranks=attempt.ranks,
        steps=course.steps,
        resumed_from_step=None if from_nothing else round(course.resumed),
        resumed_from=course.resumed_from,
        lost_steps=course.lost_steps,
    )


# -- throughput, energy and money ----------------------------------------------------------------------------------


def throughput_of(ranks: Sequence[Rank]) -> Throughput:
    """Samples and tokens of the run, and their rates. None if a rank does not count them.

    The rate of a rank is its sum over its seconds in the training loop; the rate of the run is the sum over the ranks.
    """
    samples, samples_rate = _sum_and_rate([(rank, rank.samples) for rank in ranks if rank.steps])
    tokens, tokens_rate = _sum_and_rate([(rank, rank.tokens) for rank in ranks if rank.steps])
    return Throughput(samples=samples, samples_per_second=samples_rate, tokens=tokens, tokens_per_second=tokens_rate)


def _sum_and_rate(counts: Sequence[tuple[Rank, int | None]]) -> tuple[int | None, float | None]:
    sums: dict[int, tuple[int, float]] = {}
    for rank, own in counts:
        if own is None:
            return None, None
        total, seconds = sums.get(rank.rank, (0, 0.0))
        sums[rank.rank] = total + own, seconds + rank.loop_seconds
    if not sums:
        return None, None
    timed = all(seconds > 0 for _, seconds in sums.values())
    rate = sum(total / seconds for total, seconds in sums.values()) if timed else None
    return sum(total for total, _ in sums.values()), rate


def energy_of(ranks: Sequence[Rank], processes: Sequence[ProcessLog]) -> dict[str, float] | None:
    """Energy of the GPUs of a run in joules, by category of the ledger; None without any.

    A GPU counts the energy of all processes on it. If ranks of an attempt share a GPU, only the rank with most energy
    counts. A rank has several processes here if the agent was stopped and started again in one; these add up.
    """
    by_gpu: dict[tuple[Any, Any], dict[int, dict[str, float]]] = {}
    for place, (rank, process) in enumerate(zip(ranks, processes, strict=True)):
        if rank.gpu_energy_joules is None:
            continue
        gpu = process.totals.gpu_uuid or place
        sums = by_gpu.setdefault((rank.attempt, gpu), {}).setdefault(rank.rank, dict.fromkeys(CATEGORIES, 0.0))
        for category in CATEGORIES:
            sums[category] += rank.gpu_energy_joules.get(category, 0.0)
    largest = [max(by_rank.values(), key=lambda sums: sum(sums.values())) for by_rank in by_gpu.values()]
    return {c: sum(each[c] for each in largest) for c in CATEGORIES} if largest else None


def cost_of(ranks: Sequence[Rank], processes: Sequence[ProcessLog], goodput: Goodput) -> Cost | None:
    """The cost of the run, and of its waits, stalls and restarts; None without the setting ``gpu_hour_price``.

    A rank counts as one GPU.
    """
    prices = [price for p in processes if (price := p.head.settings.gpu_hour_price) is not None]
    if not prices:
        return None
    hourly = prices[-1] / 3600
    exposed = [rank.exposed_wait_ratio and rank.exposed_wait_ratio * rank.loop_seconds for rank in ranks if rank.steps]
    total = sum(goodput.rank_seconds.values())
    return Cost(
        gpu_hour_price=prices[-1],
        gpu_hours=total / 3600,
        total=total * hourly,
        waiting=None if None in exposed else sum(seconds or 0.0 for seconds in exposed) * hourly,
        stalls=sum(lost_by_cause(processes).values()) * hourly,
        restarts=sum(goodput.rank_seconds[category] for category in _RESTARTS) * hourly,
    )
