"""Detects whether this rank is stuck, and where.

A rank is stuck if its training thread has made no progress for much longer than a step takes. Time in the training loop
counts: waiting for a batch, and the compute of a step. Startup, phases that the user has named and the time after a
loop do not count. Time in which the agent did not run either does not count: the machine slept, or the process was
stopped. Evaluations and checkpoints have a longer limit, `longest_phase`. A rank is stuck in one if the hooks have seen
nothing for that long, and it then stays at one place. While another rank is in one, the time of a rank that waits for
it does not count before that limit.

The first batches of a run may take long. In the wait for them, whatever their fetches compute or read counts as
progress, so that a fetch that never ends is found as early as a later one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.diagnosis.costs import NAMED_BY_SOURCE
from telemetry.diagnosis.stragglers import absent_rank
from telemetry.records import CHECKPOINT, DATA_WAIT, EVALUATION, Advice, stuck_in_words
from telemetry.sources.proc import read_io, read_stat
from telemetry.sources.stacks import (
    DEBUGGER,
    EPOCH_END,
    all_stacks,
    fetch_in,
    inside,
    live_workers,
    place,
    stack_hash,
)
from telemetry.util.clock import NS, now_ns
from telemetry.util.stacks import stack_of

if TYPE_CHECKING:
    from telemetry.agent.accounting import Accounting, StepStats, StepTimes
    from telemetry.config import Config
    from telemetry.hooks.tracker import StepTracker
    from telemetry.records import RankPace
    from telemetry.sources.stacks import StuckPlace
    from telemetry.totals import Passed

# -- whether it is stuck -----------------------------------------------------------------------------------------------

MIN_SECONDS: Final = 30.0
"""A rank is stuck after this time at the earliest, unless ``stuck_seconds`` is set."""

TIMES_P99: Final = 20.0
"""A rank is also stuck only after this multiple of the 99th percentile of step durations."""

MIN_TIMES_P99: Final = 4.0
"""If that is longer than `EARLY_SECONDS`, this multiple is enough: the report must come before NCCL's timeout."""

TIMES_LONGEST: Final = 2.0
"""The first batch of an epoch may take this multiple of the longest step so far, because workers have to start."""

MIN_STEPS: Final = 10
"""Until so many steps have ended, `EARLY_SECONDS` holds: the first steps of a run compile and allocate."""

EARLY_SECONDS: Final = 540.0
"""Early in a run, a rank is stuck after this time at the earliest. NCCL ends a hung collective after ten minutes;
then the cause can no longer be found."""

LATE_TICKS: Final = 2.0
"""A tick counts for at most this many intervals. The agent did not observe the rest."""

PHASE_SECONDS: Final = 480.0
PHASE_TIMES: Final = 6.0
"""An evaluation or a checkpoint may show no progress for this time, or for this multiple of ``stuck_seconds``. Until
then, neither its rank nor one that waits for it is stuck."""

MAX_PHASE_SECONDS: Final = 510.0
TIMES_LONG_PHASE: Final = 1.1
"""Twice the longest phase so far is allowed up to the first of these limits, so that a report comes before NCCL's
timeout. The second, a multiple of the longest phase, is always allowed."""

FAR_SECONDS: Final = 45.0
"""The news from a rank on another node may be this old: NFS shows a change up to 30 s late, and the nodes write every
few seconds. A rank that waits for other ranks is not stuck before, because one of them may be in an evaluation. With
``stuck_seconds``, the time is `PHASE_TIMES` of that, if that is less."""

MAX_EXCUSES: Final = 10
"""The end of an epoch may take this many times as long, because workers can be slow to stop."""

MIN_FETCH_SHARE: Final = 0.25
"""A worker is stuck if its fetch has been in progress for this share of the training thread's wait. For the rest of the
wait the worker may have been starting, or busy with the previous batch."""

EXPECTED: Final = "expected"
OVERDUE: Final = "overdue"


@dataclass(frozen=True, slots=True)
class Moment:
    """The training thread at one tick.

    Attributes:
        loop_seconds: seconds since the last tick that the thread waited for a batch or computed a step.
        progress: it changes with every observed action: a batch request, a batch, an optimizer step, a phase.
        steps: completed steps of the run.
        loop_left: whether the loop of the newest step has been left, for example by ``break``.
        at_epoch_boundary: whether the thread waits for the first batch of an epoch.
        early_wait: whether it waits for one of the first batches of the run. Then ``progress`` shows also what their
            fetches do.
        seconds: time since the last tick, whatever the thread did; 0.0 if the process or a debugger was stopped.
        waits_for_far_ranks: whether the thread waits for other ranks, and some of them are on other nodes.
        phase_at: a hash of the stack in an evaluation or a checkpoint of this rank; else None.
        peer_phase: `EXPECTED` while another rank is in one, `OVERDUE` once that takes too long; else None.
    """

    loop_seconds: float
    progress: tuple[int, ...]
    steps: int
    loop_left: bool
    at_epoch_boundary: bool
    seconds: float = 0.0
    early_wait: bool = False
    waits_for_far_ranks: bool = False
    phase_at: str | None = None
    peer_phase: str | None = None


class StuckDetector:
    """Decides for one rank, tick by tick, whether it is stuck.

    Args:
        setting: ``stuck_seconds``; None for auto.
        interval: seconds between two ticks.

    Attributes:
        seconds: counted seconds without progress. ``still_seconds``: all of them, even those in a checkpoint.
        excused_seconds: seconds in which another rank was in an evaluation or a checkpoint.
        stuck: whether the rank is stuck.
        excuses: how many times in a row `excuse` was called.
    """

    def __init__(self, setting: float | None, interval: float) -> None:
        self._setting = setting
        self._most = LATE_TICKS * interval
        self._progress: tuple[int, ...] | None = None
        self.seconds = self.still_seconds = self.excused_seconds = 0.0
        self.stuck = False
        self.excuses = 0
        self._phase_at: str | None = None
        self._longest_phase = 0.0

    def update(self, moment: Moment, stats: StepStats) -> str | None:
        """Add a tick.

        Args:
            moment: what the tick has observed.
            stats: has the durations of the run's steps.

        Returns:
            ``opened`` when the rank becomes stuck, ``held`` while it is, ``closed`` when it goes on; else None.
        """
        if moment.progress != self._progress or moment.loop_left:
            if self._phase_at is not None:
                self._longest_phase = max(self._longest_phase, self.still_seconds)
            self._progress, self._phase_at = moment.progress, moment.phase_at
            was, self.stuck, self.excuses = self.stuck, False, 0
            self.seconds = self.still_seconds = self.excused_seconds = 0.0
            return "closed" if was else None
        self.still_seconds += moment.seconds
        if moment.phase_at is not None:
            # Only time at one place counts, and only after the longest allowed evaluation or checkpoint.
            moved, self._phase_at = moment.phase_at != self._phase_at, moment.phase_at
            late = self.still_seconds > longest_phase(self._setting, self._longest_phase)
            counts = self.stuck or (late and not moved)
            self.seconds = self.seconds + min(moment.seconds, self._most) if counts else 0.0
        elif moment.peer_phase == EXPECTED and not self.stuck:
            self.excused_seconds += min(moment.loop_seconds, self._most)
        else:
            self.seconds += min(moment.loop_seconds, self._most)
        if self.stuck:
            return "held"
        # Once the other rank's evaluation or checkpoint takes too long, the wait for it counts, too.
        without_step = self.seconds + (self.excused_seconds if moment.peer_phase == OVERDUE else 0.0)
        self.stuck = self._is_stuck(moment, without_step, stats)
        if not self.stuck:
            return None
        self.seconds = without_step if moment.phase_at is None else max(self.still_seconds, self.seconds)
        return "opened"

    def _is_stuck(self, moment: Moment, without_step: float, stats: StepStats) -> bool:
        least = self._setting or MIN_SECONDS
        if moment.phase_at is not None:
            return self.seconds >= least
        early = EARLY_SECONDS if moment.steps < MIN_STEPS and not moment.early_wait else 0.0
        if moment.waits_for_far_ranks:
            far = FAR_SECONDS if self._setting is None else min(FAR_SECONDS, PHASE_TIMES * self._setting)
            least = max(least, far)
        if self.seconds < least or without_step < early:
            return False
        at_boundary = moment.at_epoch_boundary
        return without_step >= stuck_after_seconds(self._setting, stats.step_times(), at_epoch_boundary=at_boundary)

    def excuse(self) -> None:
        """Start counting again, because the rank was not stuck."""
        self.seconds, self.stuck = 0.0, False
        self.excuses += 1


def longest_phase(setting: float | None, longest: float) -> float:
    """Seconds for which an evaluation or checkpoint may show no progress. ``longest``: most seconds so far."""
    if setting is not None:
        return max(PHASE_TIMES * setting, TIMES_LONGEST * longest)
    usual = min(TIMES_LONGEST * longest, MAX_PHASE_SECONDS)
    return max(PHASE_SECONDS, usual, TIMES_LONG_PHASE * longest)


def stuck_after_seconds(setting: float | None, steps: StepTimes, *, at_epoch_boundary: bool) -> float:
    """Seconds without progress after which a rank counts as stuck."""
    p99 = steps.p99 or 0.0
    auto = max(MIN_SECONDS, min(TIMES_P99 * p99, max(EARLY_SECONDS, MIN_TIMES_P99 * p99)))
    seconds = setting if setting is not None else auto
    return max(seconds, TIMES_LONGEST * (steps.longest or 0.0)) if at_epoch_boundary else seconds


def paused(seconds: float, interval: float, process_cpu: float | None, *, intervals: int = 1) -> bool:
    """Whether the process or the machine was stopped since the last tick: the tick is late, and nothing ran.

    Args:
        seconds: time since the last tick.
        interval: usual time between two ticks.
        process_cpu: CPU seconds of the process in that time; None if they are unknown.
        intervals: number of intervals after which this tick was due.
    """
    late = seconds > (intervals - 1 + LATE_TICKS) * interval + 1.0
    return late and process_cpu is not None and process_cpu < 0.02 * seconds


def stuck_cause(category: str, source: str | None, fetching_seconds: float, stuck_for_seconds: float) -> str:
    """The cause of the stall of a stuck rank.

    Args:
        category: the ledger category that the training thread is in.
        source: source of its batches, see `Conditions`; None also before the first batch of a new loader.
        fetching_seconds: duration so far of the longest fetch in progress in a worker.
        stuck_for_seconds: time for which the run has made no progress.
    """
    if category != DATA_WAIT:
        return "unknown"
    if source in {"workers", None} and fetching_seconds >= MIN_FETCH_SHARE * stuck_for_seconds:
        return "worker_stuck"
    return NAMED_BY_SOURCE.get(source or "", "unknown")


# -- where it is stuck -------------------------------------------------------------------------------------------------

_FETCH_WORK_STEPS: Final = 10
_IDLE_RATIO: Final = 0.02
"""A fetch makes progress with each tenth of a second that its worker computes. A process computes more than this share
of a core if it fetches itself. The agent takes 0.2 %."""

_LEFT_SECONDS: Final = 10.0
"""A process that was interrupted while stuck may need this long to end. After that, its end has another reason."""


@dataclass(frozen=True, slots=True)
class StuckRank:
    """A rank that is stuck, as it is now.

    Attributes:
        kind: ``opened``, ``held`` or ``closed``.
        cause: one of `CAUSES`.
        category: the ledger category of the training thread.
        seconds: time without progress.
        at: the innermost frames of the training thread, as text.
        missing: the rank that has not reached the synchronisation in which this rank waits, if known.
        worker: where the worker stands whose fetch takes longest; None without a fetch, and before the stacks are read.
        first_batch: whether no batch has come yet.
    """

    kind: str
    cause: str
    category: str
    seconds: float
    at: str
    missing: RankPace | None = None
    worker: StuckPlace | None = None
    first_batch: bool = False

    def evidence(self) -> dict[str, Any]:
        """Its fields in the evidence of the log."""
        told = {"stuck_for_seconds": round(self.seconds, 3), "stuck_in": self.category, "stuck_at": self.at}
        if self.worker is not None and self.worker.where is not None:
            told["worker_at"] = f"{self.worker.call} at {self.worker.where}"
        return told

    def advice(self) -> tuple[Advice, ...]:
        """Advice on the place to look at."""
        if self.missing is not None:
            slow = absent_rank(self.missing)
            because = f"this rank has waited {self.seconds:.0f} s in a step for {slow.name}, which {slow.why}"
            return (Advice(f"find out what {slow.name} does", None, None, None, because),)
        because = f"the training thread has been {stuck_in_words(self.category)} for {self.seconds:.0f} s"
        action = f"find out what it waits for: {self.at}" if self.at else "find out what it waits for"
        return (Advice(action, None, None, None, because),)

    def advice_on_locks(self) -> tuple[Advice, ...]:
        """Advice if the very first fetch does not end: its worker may wait for a lock that was copied by the fork."""
        if self.cause != "worker_stuck" or not self.first_batch:
            return ()
        at = "" if self.worker is None or self.worker.where is None else f"; it is in {self.evidence()['worker_at']}"
        because = (
            f"if a thread of the training process held a lock when the worker was forked, it is never free there{at}"
        )
        action = "start the workers without the locks of the training process, if it waits for one"
        return (Advice(action, "multiprocessing_context", "forkserver", None, because),)


class StuckMonitor:
    """Follows on the agent thread whether one rank is stuck, and where.

    Attributes:
        fetch: where the worker stands whose fetch takes longest, read by `stacks`; None without one.
        left: the rank as it was stuck until a moment ago, when the loop was left, as by Ctrl-C; else None.
    """

    def __init__(self, config: Config, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._watch = StuckDetector(config.stuck_seconds, config.interval_seconds)
        self._stuck: StuckRank | None = None
        self.fetch: StuckPlace | None = None
        self.left: StuckRank | None = None
        self._left_seconds = 0.0
        self._steps_before = 0  # steps that had ended when the rank was last stuck
        self._no_batch_yet = True
        self._fetch_work = 0
        self._waited_seconds = 0.0  # how long nothing was seen, at the newest tick that saw nothing

    def tick(
        self,
        added: Passed | None,
        source: str | None,
        accounting: Accounting,
        *,
        waits_for_far_ranks: bool = False,
        peer_phase: str | None = None,
    ) -> StuckRank | None:
        """Add a tick. Returns the rank if it is stuck, or was until this tick; else None.

        Args:
            added: what has passed since the last tick; None if the process was stopped, also in a debugger.
            source: where batches come from, see `Conditions`.
            accounting: has the training thread's category and step durations.
            waits_for_far_ranks: this rank waits for other ranks, and some of them are on other nodes.
            peer_phase: whether another rank is in an evaluation or a checkpoint, see `Moment`.
        """
        seconds, loop_seconds = (0.0, 0.0) if added is None else (added.seconds, added.loop_seconds)
        tracker, ledger, stats = self._tracker, accounting.ledger, accounting.stats
        waiting, in_phase = ledger.category == DATA_WAIT, ledger.category in {CHECKPOINT, EVALUATION}
        early_wait = waiting and stats.steps < MIN_STEPS
        progress: tuple[int, ...] = tracker.progress
        if early_wait and added is not None:
            loop_seconds, progress = seconds, (*progress, *self._work_of_fetches(added))
        moment = Moment(
            loop_seconds=loop_seconds,
            progress=progress,
            early_wait=early_wait,
            steps=stats.steps,
            loop_left=tracker.loop_left and not waiting and not in_phase,
            at_epoch_boundary=waiting and ledger.at_epoch_boundary,
            seconds=seconds,
            waits_for_far_ranks=waits_for_far_ranks,
            phase_at=stack_hash(stack_of(tracker.thread)) if in_phase else None,
            peer_phase=peer_phase,
        )
        kind = self._watch.update(moment, stats)
        self._left_seconds += seconds
        self._waited_seconds = self._watch.still_seconds or self._waited_seconds
        self._no_batch_yet = not ledger.batches
        if self._left_seconds > _LEFT_SECONDS or accounting.steps_total > self._steps_before:
            self.left = None
        if kind == "opened":
            self.fetch = None
            self._steps_before = accounting.steps_total
            self._stuck = self._opened(ledger.category, source)
        elif kind is not None and self._stuck is not None:
            before, seconds = self._stuck, max(self._stuck.seconds, self._watch.seconds)
            self._stuck = replace(before, kind=kind, seconds=seconds)
            if kind == "closed" and accounting.steps_total == self._steps_before:
                self.left, self._left_seconds = self._stuck, 0.0
        else:
            self._stuck = None
        return self._stuck

    @property
    def still_seconds(self) -> float:
        """Seconds since the hooks last saw the training thread do anything."""
        return self._watch.still_seconds

    def in_debugger(self) -> bool:
        """Whether a person has stopped the training thread in a debugger."""
        return inside(stack_of(self._tracker.thread), DEBUGGER)

    def blame(self, stuck: StuckRank, missing: RankPace) -> StuckRank:
        """Add the rank that the stuck one waits for."""
        self._stuck = replace(stuck, cause="straggler", missing=missing)
        return self._stuck

    def stacks(self) -> list[str]:
        """The stacks of all threads and workers, each as a text. Takes at most 1.5 s."""
        workers = live_workers(self._tracker.loaders)
        texts = all_stacks(self._tracker.thread, workers)
        self.fetch = fetch_in(workers)
        if self._stuck is not None:
            self._stuck = replace(self._stuck, worker=self.fetch)
        return texts

    def timed_out(self) -> StuckRank:
        """The rank as it was stuck until the DataLoader's ``timeout`` ended the wait. It is kept in ``left``."""
        self._left_seconds = 0.0
        self.left = self._stuck = StuckRank(
            "opened", "worker_stuck", DATA_WAIT, self._waited_seconds, "", first_batch=self._no_batch_yet
        )
        return self.left

    def _work_of_fetches(self, added: Passed) -> tuple[int, int]:
        """What fetches have done so far: tenths of a second of CPU time, and bytes read from storage.

        Without workers the fetch is on the training thread. Then each tick counts in which the process has computed.
        """
        pids = [pid for loader in self._tracker.loaders.live() for pid in loader.pids]
        if pids:
            cpu = sum(stat.cpu_seconds for pid in pids if (stat := read_stat(pid)) is not None)
            self._fetch_work = int(_FETCH_WORK_STEPS * cpu)
        elif added.process_cpu_seconds is None or added.process_cpu_seconds > _IDLE_RATIO * added.seconds:
            self._fetch_work += 1
        read = (io.read_bytes for pid in pids or [os.getpid()] if (io := read_io(pid)) is not None)
        return self._fetch_work, sum(read)

    @property
    def stuck(self) -> StuckRank | None:
        """This rank, if it is stuck, or was at the newest tick."""
        return self._stuck

    def _opened(self, category: str, source: str | None) -> StuckRank | None:
        stack = stack_of(self._tracker.thread)
        ending = inside(stack, EPOCH_END) and self._watch.excuses < MAX_EXCUSES
        if not stack or inside(stack, DEBUGGER) or ending:
            self._watch.excuse()
            return None
        seconds = self._watch.seconds
        cause = stuck_cause(category, source, self._longest_fetch(), seconds)
        return StuckRank("opened", cause, category, seconds, place(stack), first_batch=self._no_batch_yet)

    def _longest_fetch(self) -> float:
        """Seconds of the longest fetch in progress, over all loaders.

        A new loader counts, too, although it may turn out to evaluate. The workers' samples leave such a loader out
        once another one has trained.
        """
        blocks = [loader.block for loader in self._tracker.loaders.live() if loader.block is not None]
        since = [c.fetching_since_ns for block in blocks for c in block.read() if c.fetching_since_ns]
        return (now_ns() - min(since)) / NS if since else 0.0
