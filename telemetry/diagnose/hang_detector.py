"""Decides whether a run hangs: its training thread has made no progress for much longer than a step takes.

Time in the training loop counts: waiting for a batch, and the compute of a step. Startup, phases that the user has
named and the time after a loop do not count. Time in which the agent did not run either does not count: the machine
slept, or the process was stopped.

Evaluations and checkpoints have a patient limit of their own, `longest_phase`. A rank is stuck in one if the hooks have
seen nothing for that long, and it then stays at one place. While another rank is in one, the time of a rank that waits
for it does not count before that limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.core.recommendation import Advice
from telemetry.diagnosis.causes import NAMED_BY_SOURCE
from telemetry.diagnosis.stragglers import absent_rank
from telemetry.records import DATA_WAIT, stuck_in_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.records import RankPace

MIN_SECONDS: Final = 30.0
"""Without the setting ``stuck_seconds``, a hang is reported after this time at the earliest, ..."""

TIMES_P99: Final = 20.0
"""... and at the earliest after this multiple of the 99th percentile of its step durations."""

MIN_TIMES_P99: Final = 4.0
"""Where that is longer than `EARLY_SECONDS`, this multiple is enough: the report has to come before NCCL's timeout."""

TIMES_LONGEST: Final = 2.0
"""The first batch of an epoch may take this multiple of the longest step so far, because workers have to start."""

MIN_STEPS: Final = 10
"""The first steps of a run compile and allocate. Before this many steps have ended, ..."""

EARLY_SECONDS: Final = 540.0
"""... a hang is reported after this time at the earliest. NCCL ends a hung collective after ten minutes; then the cause
can no longer be found."""

LATE_TICKS: Final = 2.0
"""A tick counts at most this many intervals. The agent did not observe the rest."""

PHASE_SECONDS: Final = 480.0
PHASE_TIMES: Final = 6.0
"""An evaluation or a checkpoint may show no progress for this time, or for this multiple of ``stuck_seconds``. Until
then, neither its rank nor one that waits for it is stuck."""

MAX_PHASE_SECONDS: Final = 510.0
TIMES_LONG_PHASE: Final = 1.1
"""Twice the longest one so far may be longer. It counts up to this limit, so that a report comes before NCCL's timeout.
But each may take this multiple of the longest one."""

FAR_SECONDS: Final = 45.0
"""What a rank on another node does may become known this late: NFS shows a change up to 30 s late, and the nodes write
every few seconds. A rank that waits for other ranks is not stuck before, because one of them may be in an evaluation.
With ``stuck_seconds`` set, it is `PHASE_TIMES` of that, if that is less."""

MAX_EXCUSES: Final = 10
"""The end of an epoch may take this many times as long, because workers can be slow to stop."""

MIN_FETCH_SHARE: Final = 0.25
"""A worker is stuck if its fetch has been in progress for this share of the training thread's wait. For the rest of the
wait the worker may have been starting, or busy with the previous batch."""


EXPECTED: Final = "expected"
OVERDUE: Final = "overdue"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of the run's steps so far, in seconds; None before the first step."""

    p99: float | None
    longest: float | None


@dataclass(frozen=True, slots=True)
class Moment:
    """What one tick has observed of the training thread.

    Attributes:
        loop_seconds: seconds since the last tick that the thread waited for a batch or computed a step.
        progress: changes with every observed action: a batch request, a batch, an optimizer step, a phase.
        steps: completed steps of the run.
        loop_left: whether the loop of the newest step has been left, for example by ``break``.
        at_epoch_boundary: whether the thread waits for the first batch of an epoch.
        seconds: time since the last tick, whatever the thread did; 0.0 if the process or a debugger was stopped.
        waits_for_far_ranks: whether it waits for other ranks, and some of them are on other nodes.
        phase_at: in an evaluation or a checkpoint of this rank, a hash of the stack; else None.
        peer_phase: while another rank is in one: `EXPECTED`, or `OVERDUE` once that takes too long; else None.
    """

    loop_seconds: float
    progress: tuple[int, ...]
    steps: int
    loop_left: bool
    at_epoch_boundary: bool
    seconds: float = 0.0
    waits_for_far_ranks: bool = False
    phase_at: str | None = None
    peer_phase: str | None = None


class HangDetector:
    """Decides for one rank, tick by tick.

    Args:
        setting: ``stuck_seconds``; None for auto.
        interval: seconds between two ticks.

    Attributes:
        seconds: counted seconds without progress. ``still_seconds``: all of them, such as those in a checkpoint.
        excused_seconds: those in which another rank was in an evaluation or a checkpoint.
        hanging: whether the run hangs.
        excuses: how many times in a row `excuse` was called.
    """

    def __init__(self, setting: float | None, interval: float) -> None:
        self._setting = setting
        self._most = LATE_TICKS * interval
        self._progress: tuple[int, ...] | None = None
        self.seconds = 0.0
        self.still_seconds = self.excused_seconds = 0.0
        self.hanging = False
        self.excuses = 0
        self._phase_at: str | None = None
        self._longest_phase = 0.0

    def update(self, moment: Moment, steps: Callable[[], StepTimes]) -> str | None:
        """Add a tick.

        Args:
            moment: what the tick has observed.
            steps: returns the step durations. It is called only when they matter.

        Returns:
            ``opened`` when a hang begins, ``held`` while it lasts, ``closed`` when the run goes on; else None.
        """
        if moment.progress != self._progress or moment.loop_left:
            if self._phase_at is not None:
                self._longest_phase = max(self._longest_phase, self.still_seconds)
            self._progress, self._phase_at = moment.progress, moment.phase_at
            was, self.hanging, self.seconds, self.excuses = self.hanging, False, 0.0, 0
            self.still_seconds = self.excused_seconds = 0.0
            return "closed" if was else None
        self.still_seconds += moment.seconds
        if moment.phase_at is not None:
            self._count_phase(moment, moment.phase_at)
        elif moment.peer_phase == EXPECTED and not self.hanging:
            self.excused_seconds += min(moment.loop_seconds, self._most)
        else:
            self.seconds += min(moment.loop_seconds, self._most)
        if self.hanging:
            return "held"
        self.hanging = self._is_stuck(moment, steps)
        if self.hanging:
            self.seconds = (
                max(self.still_seconds, self.seconds) if moment.phase_at else self.seconds + self._overdue(moment)
            )
        return "opened" if self.hanging else None

    def _count_phase(self, moment: Moment, at: str) -> None:
        """In an evaluation or a checkpoint: what counts is time at one place after the longest that it may take."""
        moved, self._phase_at = at != self._phase_at, at
        late = self.still_seconds > longest_phase(self._setting, self._longest_phase)
        if self.hanging or (late and not moved):
            self.seconds += min(moment.seconds, self._most)
        else:
            self.seconds = 0.0

    def _is_stuck(self, moment: Moment, steps: Callable[[], StepTimes]) -> bool:
        least = self._setting or MIN_SECONDS
        if moment.phase_at is not None:
            return self.seconds >= least
        far = far_seconds(self._setting) if moment.waits_for_far_ranks else 0.0
        early = EARLY_SECONDS if moment.steps < MIN_STEPS else 0.0
        without_step = self.seconds + self._overdue(moment)
        if self.seconds < max(far, least) or without_step < early:
            return False
        return without_step >= hang_after_seconds(self._setting, steps(), at_epoch_boundary=moment.at_epoch_boundary)

    def _overdue(self, moment: Moment) -> float:
        """Once the other rank's evaluation or checkpoint takes too long, the time waited for it counts, too."""
        return self.excused_seconds if moment.peer_phase == OVERDUE else 0.0

    def excuse(self) -> None:
        """Start counting again: the run does not hang, although it looked like it."""
        self.seconds, self.hanging = 0.0, False
        self.excuses += 1


def longest_phase(setting: float | None, longest: float) -> float:
    """How many seconds an evaluation or checkpoint may show no progress.

    Args:
        setting: ``stuck_seconds``; None for auto.
        longest: seconds without progress of the longest one so far.
    """
    if setting is not None:
        return max(PHASE_TIMES * setting, TIMES_LONGEST * longest)
    usual = min(TIMES_LONGEST * longest, MAX_PHASE_SECONDS)
    return max(PHASE_SECONDS, usual, TIMES_LONG_PHASE * longest)


def far_seconds(setting: float | None) -> float:
    """Seconds without progress before which a rank that waits for ranks of other nodes is not stuck.

    Args:
        setting: ``stuck_seconds``; None for auto.
    """
    return FAR_SECONDS if setting is None else min(FAR_SECONDS, PHASE_TIMES * setting)


def hang_after_seconds(setting: float | None, steps: StepTimes, *, at_epoch_boundary: bool) -> float:
    """Seconds without progress after which a run counts as hanging."""
    p99 = steps.p99 or 0.0
    auto = max(MIN_SECONDS, min(TIMES_P99 * p99, max(EARLY_SECONDS, MIN_TIMES_P99 * p99)))
    seconds = setting if setting is not None else auto
    return max(seconds, TIMES_LONGEST * (steps.longest or 0.0)) if at_epoch_boundary else seconds


def paused(seconds: float, interval: float, process_cpu: float | None, *, intervals: int = 1) -> bool:
    """Whether the process or the machine was stopped since the last tick: the tick is late, and nothing ran.

    Args:
        seconds: since the last tick.
        interval: usual time between two.
        process_cpu: CPU seconds of the process in that time; None if they are unknown.
        intervals: after how many intervals this tick was due.
    """
    late = seconds > (intervals - 1 + LATE_TICKS) * interval + 1.0
    return late and process_cpu is not None and process_cpu < 0.02 * seconds


def hang_cause(category: str, source: str | None, fetching_seconds: float, stuck_for_seconds: float) -> str:
    """The cause of a hang.

    Args:
        category: the ledger category that the training thread is in.
        source: where its batches come from, see `Conditions`; None before the first batch of a new loader, too.
        fetching_seconds: duration so far of the longest fetch in progress in a worker.
        stuck_for_seconds: how long the run has made no progress.
    """
    if category != DATA_WAIT:
        return "unknown"
    if source in {"workers", None} and fetching_seconds >= MIN_FETCH_SHARE * stuck_for_seconds:
        return "worker_stuck"
    return NAMED_BY_SOURCE.get(source or "", "unknown")


def hang_advice(category: str, seconds: float, at: str, missing: RankPace | None = None) -> tuple[Advice, ...]:
    """Advice for a hang: where to look.

    Args:
        category: the ledger category that the training thread is in.
        seconds: how long the run has made no progress.
        at: the innermost frames of the training thread, as text.
        missing: the rank that has not reached the synchronisation that this one waits in.
    """
    if missing is not None:
        slow = absent_rank(missing)
        because = f"this rank has waited {seconds:.0f} s in a step for {slow.name}, which {slow.why}"
        return (Advice(f"find out what {slow.name} does", None, None, None, because),)
    because = f"the training thread has been {stuck_in_words(category)} for {seconds:.0f} s"
    action = f"find out what it waits for: {at}" if at else "find out what it waits for"
    return (Advice(action, None, None, None, because),)
