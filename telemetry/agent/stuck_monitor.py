"""Detects whether this rank is stuck, and where.

A rank is stuck if its training thread has made no progress for much longer than a step takes. Waiting for a batch and
the compute of a step count, and so does an evaluation or a checkpoint, with a longer limit. Startup, phases that the
user has named and the time after a loop do not count, nor does time in which another rank evaluates or writes a
checkpoint, and time in which the agent did not run: the machine slept, or the process was stopped.

The first batches of a run may take long. In the wait for them, whatever their fetches compute or read counts as
progress, so that a fetch that never ends is found as early as a later one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.costs import NAMED_BY_SOURCE
from telemetry.diagnosis.stragglers import absent_rank
from telemetry.model.records import CHECKPOINT, DATA_WAIT, EVALUATION, Advice, Collective, stuck_in_words
from telemetry.seams.collectives import awaited
from telemetry.sources.proc import read_io, read_stat, thread_state
from telemetry.sources.stuck_stacks import (
    DEBUGGER,
    EPOCH_END,
    all_stacks,
    fetch_in,
    inside,
    live_workers,
    place,
    stack_hash,
)
from telemetry.util.stacks import stack_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.config import Config
    from telemetry.loop.ledger import Accounting, StepStats, StepTimes
    from telemetry.model.records import RankPace
    from telemetry.model.totals import Passed
    from telemetry.seams.tracker import StepTracker
    from telemetry.sources.stuck_stacks import StuckPlace
    from telemetry.util.stacks import Stack

# -- the numbers -------------------------------------------------------------------------------------------------------
# `tests/test_hangs.py` has the times after which a rank is stuck, and healthy runs that are not.

MIN_SECONDS: Final = 30.0
"""A rank is stuck after this time at the earliest, unless ``stuck_seconds`` is set."""

TIMES_P99: Final = 20.0
"""A rank is also stuck only after this multiple of the 99th percentile of its steps: one in a hundred is longer."""

TIMES_LONGEST: Final = 2.0
"""The first batch of an epoch may take this multiple of the longest step so far, because workers have to start. And
steps may take this multiple of their p99, however long they are."""

BEFORE_NCCL_SECONDS: Final = 510.0
"""An evaluation or a checkpoint may show no progress for this time, and the first steps of a run may take it, because
they compile. For long steps it is enough, too. NCCL ends a hung collective after 600 s, and then the cause can no
longer be found; until a rank hears of another one's checkpoint, up to `FAR_SECONDS` may pass."""

TIMES_IN_PHASE: Final = 6.0
"""With ``stuck_seconds``, an evaluation or a checkpoint may show no progress for this multiple of it."""

FAR_SECONDS: Final = 45.0
"""The news from a rank on another node may be this old: NFS shows a change up to 30 s late, and the nodes write every
few seconds. A rank that waits for other ranks is not stuck before, because one of them may be in an evaluation."""

MIN_STEPS: Final = 10
"""The first steps of a run are so many."""

LATE_TICKS: Final = 2.0
"""A tick counts for at most this many intervals. The agent did not observe the rest."""

_IDLE_RATIO: Final = 0.02
"""A process computes nothing if it uses less than this share of a core. The agent takes 0.2 %."""

_MIN_FETCH_SHARE: Final = 0.25
"""A worker is stuck if its fetch has been in progress for this share of the training thread's wait. For the rest of the
wait the worker may have been starting, or busy with the previous batch."""

_LEFT_SECONDS: Final = 10.0
"""A process that was interrupted while stuck may need this long to end. After that, its end has another reason."""


# -- whether it is stuck -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """The training thread at one tick.

    Attributes:
        progress: it changes with every observed action: a batch request, a batch, an optimizer step, a phase.
        seconds: time since the last tick that may be lost: in the loop, in an evaluation or in a checkpoint.
        over: whether the loop of the newest step has been left, as by ``break``, or its thread has ended.
        slow: whether it is in one of the first steps of the run, or waits for workers to end.
        at_epoch_boundary: whether it waits for the first batch of an epoch.
        waits_for_far_ranks: whether it waits for other ranks, and some of them are on other nodes.
        phase_at: a hash of the stack in an evaluation or a checkpoint of this rank; else None.
        loop_at: the same in a loop without loaders, whose rollouts no hook sees.
        peer_phase_seconds: how long another rank has shown no progress in one; None if none is in one.
        deadlock_seconds: how long this rank has stood in a collective, if all others stand in collectives and not all
            in the same one; else None.
    """

    progress: tuple[int, ...]
    seconds: float
    over: bool = False
    slow: bool = False
    at_epoch_boundary: bool = False
    waits_for_far_ranks: bool = False
    phase_at: str | None = None
    loop_at: str | None = None
    peer_phase_seconds: float | None = None
    deadlock_seconds: float | None = None


class StuckDetector:
    """Decides for one rank, tick by tick, whether it is stuck.

    Args:
        setting: ``stuck_seconds``; None for auto.
        interval: seconds between two ticks.

    Attributes:
        seconds: time without progress.
        stuck: whether the rank is stuck.
    """

    def __init__(self, setting: float | None, interval: float) -> None:
        self._setting = setting
        self._most = LATE_TICKS * interval
        self._progress: tuple[int, ...] | None = None
        self._excused = 0.0  # the part of the time in which another rank was in a phase
        self._phase_at: str | None = None
        self._phase_at_seconds = 0.0  # how long this rank has been at that place
        self.seconds = 0.0
        self.stuck = False

    def update(self, moment: Moment, stats: StepStats) -> str | None:
        """Add a tick. ``stats`` has the durations of the run's steps.

        Returns:
            ``opened`` when the rank becomes stuck, ``held`` while it is, ``closed`` when it goes on; else None.
        """
        if moment.progress != self._progress or (moment.over and moment.deadlock_seconds is None):
            was, self.stuck, self._progress = self.stuck, False, moment.progress
            self.seconds = self._excused = self._phase_at_seconds = 0.0
            return "closed" if was else None
        passed = min(moment.seconds, self._most)
        self.seconds = max(self.seconds + passed, moment.deadlock_seconds or 0.0)
        if self.stuck:
            return "held"
        self.stuck = self._is_stuck(moment, passed, stats)
        return "opened" if self.stuck else None

    def _is_stuck(self, moment: Moment, passed: float, stats: StepStats) -> bool:
        least, patient = self._setting or MIN_SECONDS, phase_seconds(self._setting)
        if moment.deadlock_seconds is not None:  # it never ends, whatever the rank does in it
            return moment.deadlock_seconds >= max(
                least, far_seconds(self._setting) if moment.waits_for_far_ranks else 0
            )
        at = moment.phase_at or moment.loop_at
        if at is not None:
            # Code that moves does something, also if no hook sees it.
            self._phase_at_seconds = (self._phase_at_seconds + passed) * (at == self._phase_at)
            self._phase_at = at
        if moment.phase_at is not None:
            return self.seconds >= patient and self._phase_at_seconds >= least
        if moment.loop_at is not None and self._phase_at_seconds < (patient if moment.slow else least):
            return False  # where no step is seen, a loop may often be in the same place when one looks
        if moment.peer_phase_seconds is not None:
            # The wait for a phase that has become too long is no excuse, and never was one.
            self._excused = self._excused + passed if moment.peer_phase_seconds < patient else 0.0
        stood = self.seconds - self._excused
        return stood >= least and stood >= limit_seconds(self._setting, stats.step_times(), moment)


def limit_seconds(setting: float | None, steps: StepTimes, moment: Moment) -> float:
    """Seconds without progress after which a rank is stuck in the loop."""
    p99 = steps.p99 or 0.0
    limit = setting or max(MIN_SECONDS, min(TIMES_P99 * p99, BEFORE_NCCL_SECONDS), TIMES_LONGEST * p99)
    if moment.at_epoch_boundary:
        limit = max(limit, TIMES_LONGEST * (steps.longest or 0.0))
    if moment.slow:
        limit = max(limit, BEFORE_NCCL_SECONDS)
    return max(limit, far_seconds(setting)) if moment.waits_for_far_ranks else limit


def far_seconds(setting: float | None) -> float:
    """How old the news from a rank on another node may be."""
    return min(FAR_SECONDS, phase_seconds(setting))


def phase_seconds(setting: float | None) -> float:
    """Seconds for which an evaluation or a checkpoint may show no progress."""
    return BEFORE_NCCL_SECONDS if setting is None else TIMES_IN_PHASE * setting


def never_ends(own: Collective | None, others: Sequence[Collective | None]) -> bool:
    """Whether all ranks stand in collectives, and those of one process group not in the same one.

    A rank of an unknown group may be in any.
    """
    if own is None or None in others:
        return False
    of_group = [other for other in others if other is not None and len({own.group, other.group} - {""}) < 2]
    return any((own.name, own.sequence) != (other.name, other.sequence) for other in of_group)


def paused(seconds: float, interval: float, process_cpu: float | None, *, intervals: int = 1) -> bool:
    """Whether the process or the machine was stopped since the last tick: the tick is late, and nothing ran.

    Args:
        seconds: time since the last tick.
        interval: usual time between two ticks.
        process_cpu: CPU seconds of the process in that time; None if they are unknown.
        intervals: number of intervals after which this tick was due.
    """
    late = seconds > (intervals - 1 + LATE_TICKS) * interval + 1.0
    return late and process_cpu is not None and process_cpu < _IDLE_RATIO * seconds


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
    if source in {"workers", None} and fetching_seconds >= _MIN_FETCH_SHARE * stuck_for_seconds:
        return "worker_stuck"
    return NAMED_BY_SOURCE.get(source or "", "unknown")


# -- where it is stuck -------------------------------------------------------------------------------------------------


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

    @property
    def worker_at(self) -> str:
        """The place of the worker whose fetch takes longest; empty if it is not known."""
        return "" if self.worker is None or self.worker.where is None else f"{self.worker.call} at {self.worker.where}"

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
        at = f"; it is in {self.worker_at}" if self.worker_at else ""
        because = (
            f"if a thread of the training process held a lock when the worker was forked, it is never free there{at}"
        )
        action = "start the workers without the locks of the training process, if it waits for one"
        return (Advice(action, "multiprocessing_context", "forkserver", None, because),)


class StuckMonitor:
    """Follows on the agent thread whether one rank is stuck, and where.

    Attributes:
        stuck: this rank, if it is stuck, or was until the newest tick; else None.
        fetch: where the worker stands whose fetch takes longest, read by `stacks`; None without one.
        left: the rank as it was stuck until a moment ago, when the loop was left, as by Ctrl-C; else None.
        awaits: the collective in which the training thread has stood for half of the shortest time after which a rank
            is stuck; else None.
    """

    def __init__(self, config: Config, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._least = config.stuck_seconds or MIN_SECONDS
        self._stands_at: tuple[object, ...] = ()
        self._stands_seconds = 0.0  # how long the training thread has been there
        self.awaits: Collective | None = None
        self._watch = StuckDetector(config.stuck_seconds, config.interval_seconds)
        self.stuck: StuckRank | None = None
        self.fetch: StuckPlace | None = None
        self.left: StuckRank | None = None
        self._left_seconds = 0.0
        self._busy_ticks = 0  # in which the process has computed
        self._waited_seconds = 0.0  # time without progress at the newest tick that saw none

    def tick(
        self,
        added: Passed | None,
        source: str | None,
        accounting: Accounting,
        *,
        peers: Sequence[RankPace] = (),
        all_known: bool = True,
        waits_for_far_ranks: bool = False,
        peer_phase_seconds: float | None = None,
    ) -> StuckRank | None:
        """Add a tick. Returns `stuck`.

        Args:
            added: what has passed since the last tick; None if the process was stopped, also in a debugger.
            source: where batches come from, see `Conditions`.
            accounting: has the training thread's category and step durations.
            peers: the paces of the other ranks.
            all_known: whether these are all.
            waits_for_far_ranks: this rank waits for other ranks, and some of them are on other nodes.
            peer_phase_seconds: see `Moment`.
        """
        tracker, ledger, stats = self._tracker, accounting.ledger, accounting.stats
        waiting, in_phase = ledger.category == DATA_WAIT, ledger.category in {CHECKPOINT, EVALUATION}
        early, stands = stats.steps < MIN_STEPS, added is None or not added.steps
        stack = stack_of(tracker.thread) if stands else ()
        progress: tuple[int, ...] = tracker.progress
        seconds = 0.0 if added is None else added.seconds if in_phase or (early and waiting) else added.loop_seconds
        self._follow_collective(stack, added, progress, fetching=waiting)
        deadlocked = all_known and never_ends(self.awaits, [peer.awaits for peer in peers])
        if early and waiting and added is not None:
            progress = (*progress, *self._work_of_fetches(added))
        moment = Moment(
            progress=progress,
            seconds=seconds,
            over=(tracker.loop_left and not waiting and not in_phase) or (stands and not stack),
            slow=(early and not waiting) or inside(stack, EPOCH_END),
            at_epoch_boundary=waiting and ledger.at_epoch_boundary,
            waits_for_far_ranks=waits_for_far_ranks,
            phase_at=stack_hash(stack) if in_phase else None,
            loop_at=None if in_phase or tracker.batch_seen or tracker.explicit else stack_hash(stack),
            peer_phase_seconds=peer_phase_seconds,
            deadlock_seconds=self._stands_seconds if deadlocked else None,
        )
        kind = self._watch.update(moment, stats)
        self._waited_seconds = self._watch.seconds or self._waited_seconds
        self._left_seconds += 0.0 if added is None else added.seconds
        if self._left_seconds > _LEFT_SECONDS or not stands:
            self.left = None
        if kind == "opened":
            # A new loader counts, too, although it may turn out to evaluate.
            longest = max((worker.seconds or 0.0 for worker in live_workers(tracker.loaders)), default=0.0)
            cause = stuck_cause(ledger.category, source, longest, self.seconds)
            self.fetch, first = None, not ledger.batches
            self.stuck = StuckRank("opened", cause, ledger.category, self.seconds, place(stack), first_batch=first)
        elif kind is not None and self.stuck is not None:
            self.stuck = replace(self.stuck, kind=kind, seconds=max(self.stuck.seconds, self.seconds))
            if kind == "closed" and stands:
                self.left, self._left_seconds = self.stuck, 0.0
        else:
            self.stuck = None
        return self.stuck

    @property
    def seconds(self) -> float:
        """Seconds since the hooks last saw the training thread do anything."""
        return self._watch.seconds

    def in_debugger(self) -> bool:
        """Whether a person has stopped the training thread in a debugger."""
        return inside(stack_of(self._tracker.thread), DEBUGGER)

    def blame(self, stuck: StuckRank, missing: RankPace) -> StuckRank:
        """Add the rank that the stuck one waits for."""
        self.stuck = replace(stuck, cause="straggler", missing=missing)
        return self.stuck

    def stacks(self) -> list[str]:
        """The stacks of all threads and workers, each as a text. Takes at most 1.5 s."""
        workers = live_workers(self._tracker.loaders)
        texts = all_stacks(self._tracker.thread, workers)
        self.fetch = fetch_in(workers)
        if self.stuck is not None:
            self.stuck = replace(self.stuck, worker=self.fetch)
        return texts

    def timed_out(self, *, first_batch: bool) -> StuckRank:
        """The rank as it was stuck until the DataLoader's ``timeout`` ended the wait. It is kept in ``left``."""
        waited, self._left_seconds = self._waited_seconds, 0.0
        self.left = self.stuck = StuckRank("opened", "worker_stuck", DATA_WAIT, waited, "", first_batch=first_batch)
        return self.stuck

    def _follow_collective(
        self, stack: Stack, added: Passed | None, progress: tuple[int, ...], *, fetching: bool
    ) -> None:
        """See whether the training thread stands in a collective, once it has been at one place for some time."""
        here = (progress, stack_hash(stack)) if stack and added is not None else ()
        self._stands_seconds = self._stands_seconds + added.seconds if added and here == self._stands_at else 0.0
        before, self.awaits, self._stands_at = self.awaits, None, here
        if here and self._stands_seconds >= self._least / 2:
            state = thread_state("self", self._tracker.native_thread)
            found = awaited(stack, state, fetching=fetching)
            if found.waits:
                own = found.collective or Collective("")
                self.awaits = own if own.sequence is not None else structs.replace(own, name=f"{own.name} {here[1]}")
            if before is not None and before != self.awaits:  # a loop of collectives
                self._stands_seconds, self.awaits = 0.0, None

    def _work_of_fetches(self, added: Passed) -> tuple[int, int]:
        """What fetches have done so far: tenths of a second of CPU time, and bytes read from storage.

        Without workers the fetch is on the training thread. Then each tick counts in which the process has computed.
        """
        pids = [pid for loader in self._tracker.loaders.live() for pid in loader.pids]
        if pids:
            work = int(10 * sum(stat.cpu_seconds for pid in pids if (stat := read_stat(pid)) is not None))
        else:
            cpu = added.process_cpu_seconds
            work = self._busy_ticks = self._busy_ticks + (cpu is None or cpu > _IDLE_RATIO * added.seconds)
        read = (io.read_bytes for pid in pids or [os.getpid()] if (io := read_io(pid)) is not None)
        return work, sum(read)
