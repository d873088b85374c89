"""Decide: a run is stuck when its training thread has done nothing that is seen for much longer than a step takes.

Only time in the training loop counts: waiting for a batch, and the compute of a step. A start-up, an evaluation, a
checkpoint, a phase that the user has named and what comes after a loop do not; nor does time in which the agent did not
run either, because the machine slept or the process was stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.causes import NAMED_BY_SOURCE
from telemetry.records import COMPUTE, DATA_WAIT, Advice

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.records import RankPace

LEAST_SECONDS: Final = 30.0
"""A run that nobody has given a ``stuck_seconds`` is not stuck before."""

TIMES_P99: Final = 20.0
"""... nor before so many times what all but a hundredth of its steps take."""

TIMES_LONGEST: Final = 2.0
"""The first batch of an epoch has workers to start: it may take so many times the longest step so far."""

LEAST_STEPS: Final = 10
"""The first steps of a run compile and allocate: before so many have ended, ..."""

EARLY_SECONDS: Final = 540.0
"""... nothing is stuck for less. After ten minutes a hung collective is ended by NCCL, and what hung cannot be seen."""

LATE_TICKS: Final = 2.0
"""Of one tick no more than so many intervals count; what is beyond, the agent has not seen."""

MOST_EXCUSES: Final = 10
"""An epoch may take so many times as long to end, with workers that are slow to go."""

AS_LONG: Final = 0.25
"""A worker is stuck if its fetch has been in progress for this share of the time that the training thread waits. For
the rest of it the worker may have been starting, or busy with the batch before."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How long the steps of the run were so far. Seconds; None where there are none."""

    p99: float | None
    longest: float | None


@dataclass(frozen=True, slots=True)
class Moment:
    """What one tick has seen of the training thread.

    Attributes:
        loop_seconds: since the last tick, waiting for a batch or in the compute of a step.
        progress: changes with whatever the thread does that is seen: a request, a batch, an optimizer's step, a phase.
        steps: that have ended in the run.
        loop_left: whether the loop is gone that the newest step belongs to, as after ``break``.
        at_edge: whether the batch it waits for is an epoch's first.
    """

    loop_seconds: float
    progress: tuple[int, ...]
    steps: int
    loop_left: bool
    at_edge: bool


class StuckWatch:
    """Follows one rank.

    Args:
        setting: ``stuck_seconds``; None for auto.
        interval: seconds between two ticks.

    Attributes:
        seconds: for which nothing has been seen to go on, as far as they count.
        stuck: whether that is too long.
        excuses: how often in a row that was found to be no sign of a run that is stuck.
    """

    def __init__(self, setting: float | None, interval: float) -> None:
        self._setting = setting
        self._most = LATE_TICKS * interval
        self._progress: tuple[int, ...] | None = None
        self.seconds = 0.0
        self.stuck = False
        self.excuses = 0

    def update(self, moment: Moment, steps: Callable[[], Steps]) -> str | None:
        """Take in a tick.

        Args:
            moment: what it has seen.
            steps: looked up only when it may matter.

        Returns:
            ``opened``, ``held`` or ``closed`` of a run that is stuck; None of one that is not.
        """
        if moment.progress != self._progress or moment.loop_left:
            self._progress = moment.progress
            was, self.stuck, self.seconds, self.excuses = self.stuck, False, 0.0, 0
            return "closed" if was else None
        self.seconds += min(moment.loop_seconds, self._most)
        if self.stuck:
            return "held"
        early = EARLY_SECONDS if moment.steps < LEAST_STEPS else 0.0
        if self.seconds < max(early, self._setting or LEAST_SECONDS):
            return None
        self.stuck = self.seconds >= stuck_after(self._setting, steps(), at_edge=moment.at_edge)
        return "opened" if self.stuck else None

    def excuse(self) -> None:
        """What looked stuck is not: count anew."""
        self.seconds, self.stuck = 0.0, False
        self.excuses += 1


def stuck_after(setting: float | None, steps: Steps, *, at_edge: bool) -> float:
    """Seconds without progress from which on a run is stuck."""
    seconds = setting if setting is not None else max(LEAST_SECONDS, TIMES_P99 * (steps.p99 or 0.0))
    return max(seconds, TIMES_LONGEST * (steps.longest or 0.0)) if at_edge else seconds


def paused(seconds: float, interval: float, process_cpu: float | None) -> bool:
    """Whether the process, or the machine, stood still since the last tick: it came late, and nothing ran meanwhile."""
    late = seconds > LATE_TICKS * interval + 1.0
    return late and process_cpu is not None and process_cpu < 0.02 * seconds


def stuck_cause(category: str, source: str | None, fetching_seconds: float, stuck_seconds: float) -> str:
    """The cause of a run that is stuck.

    Args:
        category: of the ledger: what the training thread does.
        source: where its batches come from, see `records.Slice`; None also before the first one of a new loader.
        fetching_seconds: how long the longest fetch in progress in a worker has taken.
        stuck_seconds: how long the run has been stuck.
    """
    if category != DATA_WAIT:
        return "unknown"
    if source in {"workers", None} and fetching_seconds >= AS_LONG * stuck_seconds:
        return "worker_stuck"
    return NAMED_BY_SOURCE.get(source or "", "unknown")


def stuck_advice(category: str, seconds: float, at: str, missing: RankPace | None = None) -> tuple[Advice, ...]:
    """Where to look: what a stuck run needs first is a person who sees where it stands.

    Args:
        category: of the ledger: what the training thread does.
        seconds: how long the run has been stuck.
        at: the innermost frames of the training thread, in words.
        missing: the rank that has not come to where this one waits for the others.
    """
    if missing is not None:
        where = f"it was last seen in {missing.where}" if missing.where is not None else "it is not there"
        because = f"this rank has waited {seconds:.0f} s in a step for rank {missing.rank}; {where}"
        return (Advice(f"see what rank {missing.rank} does", None, None, None, because),)
    doing = {DATA_WAIT: "waiting for a batch", COMPUTE: "in the compute of a step"}.get(category, f"in {category}")
    because = f"the training thread has been {doing} for {seconds:.0f} s"
    action = f"see what it waits for: {at}" if at else "see what it waits for"
    return (Advice(action, None, None, None, because),)
