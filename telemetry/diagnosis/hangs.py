"""Decides whether a rank hangs, and why the whole job hangs.

**A rank hangs** if its training thread has made no progress for much longer than a step takes. Time in the training
loop counts: waiting for a batch, and the compute of a step. Startup, phases that the user has named and the time after
a loop do not count. Time in which the agent did not run either does not count: the machine slept, or the process was
stopped. Evaluations and checkpoints have a longer limit, `longest_phase`. A rank is stuck in one if the hooks have
seen nothing for that long, and it then stays at one place. While another rank is in one, the time of a rank that waits
for it does not count before that limit.

**The job hangs** because of the ranks that do not wait: they are the suspects. A process that is gone or stopped comes
first: nothing else matters then. If all ranks wait, and those of one process group are not in the same collective, the
minority are the suspects. Ranks that wait in different process groups, as with tensor and data parallelism, are not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.diagnosis.costs import NAMED_BY_SOURCE
from telemetry.diagnosis.stragglers import absent_rank
from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, STARTUP, Advice, stuck_in_words
from telemetry.util.text import named, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from telemetry.records import RankPace

# -- a rank ------------------------------------------------------------------------------------------------------------

MIN_SECONDS: Final = 30.0
"""A hang is reported after this time at the earliest, unless ``stuck_seconds`` is set."""

TIMES_P99: Final = 20.0
"""A hang is also reported after this multiple of the 99th percentile of step durations at the earliest."""

MIN_TIMES_P99: Final = 4.0
"""If that is longer than `EARLY_SECONDS`, this multiple is enough: the report must come before NCCL's timeout."""

TIMES_LONGEST: Final = 2.0
"""The first batch of an epoch may take this multiple of the longest step so far, because workers have to start."""

MIN_STEPS: Final = 10
"""Until so many steps have ended, `EARLY_SECONDS` holds: the first steps of a run compile and allocate."""

EARLY_SECONDS: Final = 540.0
"""Early in a run, a hang is reported after this time at the earliest. NCCL ends a hung collective after ten minutes;
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
class StepTimes:
    """Durations of the run's steps so far, in seconds; None before the first step."""

    p99: float | None
    longest: float | None


@dataclass(frozen=True, slots=True)
class Moment:
    """The training thread at one tick.

    Attributes:
        loop_seconds: seconds since the last tick that the thread waited for a batch or computed a step.
        progress: it changes with every observed action: a batch request, a batch, an optimizer step, a phase.
        steps: completed steps of the run.
        loop_left: whether the loop of the newest step has been left, for example by ``break``.
        at_epoch_boundary: whether the thread waits for the first batch of an epoch.
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
    waits_for_far_ranks: bool = False
    phase_at: str | None = None
    peer_phase: str | None = None


class HangDetector:
    """Decides for one rank, tick by tick, whether it hangs.

    Args:
        setting: ``stuck_seconds``; None for auto.
        interval: seconds between two ticks.

    Attributes:
        seconds: counted seconds without progress. ``still_seconds``: all of them, even those in a checkpoint.
        excused_seconds: seconds in which another rank was in an evaluation or a checkpoint.
        hanging: whether the run hangs.
        excuses: how many times in a row `excuse` was called.
    """

    def __init__(self, setting: float | None, interval: float) -> None:
        self._setting = setting
        self._most = LATE_TICKS * interval
        self._progress: tuple[int, ...] | None = None
        self.seconds = self.still_seconds = self.excused_seconds = 0.0
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
            was, self.hanging, self.excuses = self.hanging, False, 0
            self.seconds = self.still_seconds = self.excused_seconds = 0.0
            return "closed" if was else None
        self.still_seconds += moment.seconds
        if moment.phase_at is not None:
            # Only time at one place counts, and only after the longest allowed evaluation or checkpoint.
            moved, self._phase_at = moment.phase_at != self._phase_at, moment.phase_at
            late = self.still_seconds > longest_phase(self._setting, self._longest_phase)
            counts = self.hanging or (late and not moved)
            self.seconds = self.seconds + min(moment.seconds, self._most) if counts else 0.0
        elif moment.peer_phase == EXPECTED and not self.hanging:
            self.excused_seconds += min(moment.loop_seconds, self._most)
        else:
            self.seconds += min(moment.loop_seconds, self._most)
        if self.hanging:
            return "held"
        # Once the other rank's evaluation or checkpoint takes too long, the wait for it counts, too.
        without_step = self.seconds + (self.excused_seconds if moment.peer_phase == OVERDUE else 0.0)
        self.hanging = self._is_stuck(moment, without_step, steps)
        if not self.hanging:
            return None
        self.seconds = without_step if moment.phase_at is None else max(self.still_seconds, self.seconds)
        return "opened"

    def _is_stuck(self, moment: Moment, without_step: float, steps: Callable[[], StepTimes]) -> bool:
        least = self._setting or MIN_SECONDS
        if moment.phase_at is not None:
            return self.seconds >= least
        early = EARLY_SECONDS if moment.steps < MIN_STEPS else 0.0
        if moment.waits_for_far_ranks:
            far = FAR_SECONDS if self._setting is None else min(FAR_SECONDS, PHASE_TIMES * self._setting)
            least = max(least, far)
        if self.seconds < least or without_step < early:
            return False
        return without_step >= hang_after_seconds(self._setting, steps(), at_epoch_boundary=moment.at_epoch_boundary)

    def excuse(self) -> None:
        """Start counting again, because the run did not hang."""
        self.seconds, self.hanging = 0.0, False
        self.excuses += 1


def longest_phase(setting: float | None, longest: float) -> float:
    """Seconds for which an evaluation or checkpoint may show no progress. ``longest``: most seconds so far."""
    if setting is not None:
        return max(PHASE_TIMES * setting, TIMES_LONGEST * longest)
    usual = min(TIMES_LONGEST * longest, MAX_PHASE_SECONDS)
    return max(PHASE_SECONDS, usual, TIMES_LONG_PHASE * longest)


def hang_after_seconds(setting: float | None, steps: StepTimes, *, at_epoch_boundary: bool) -> float:
    """Seconds without progress after which a run counts as hanging."""
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


def hang_cause(category: str, source: str | None, fetching_seconds: float, stuck_for_seconds: float) -> str:
    """The cause of a hang.

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


def hang_advice(category: str, seconds: float, at: str, missing: RankPace | None = None) -> tuple[Advice, ...]:
    """Advice for a hang: the place to look at. For the arguments see `telemetry.agent.hangs.Hang`."""
    if missing is not None:
        slow = absent_rank(missing)
        because = f"this rank has waited {seconds:.0f} s in a step for {slow.name}, which {slow.why}"
        return (Advice(f"find out what {slow.name} does", None, None, None, because),)
    because = f"the training thread has been {stuck_in_words(category)} for {seconds:.0f} s"
    action = f"find out what it waits for: {at}" if at else "find out what it waits for"
    return (Advice(action, None, None, None, because),)


# -- the job -----------------------------------------------------------------------------------------------------------

ALIVE: Final = "alive"
STOPPED: Final = "stopped"
GONE: Final = "gone"

LEFT: Final = "left"
"""A state in place of a category of the ledger: the training loop is over, but the process is there."""
ENDED: Final = "ended"
"""Another such state: the agent has ended by itself, as at the end of the script."""

SILENT: Final = "its agent does not answer"
NODE_SILENT: Final = "nothing comes from its node"
"""A thread state in place of the kernel's."""

RANK_GONE: Final = "rank_gone"
RANK_STOPPED: Final = "rank_stopped"
RANK_LEFT: Final = "rank_left"
FETCH: Final = "fetch"
IN_COMPUTE: Final = "compute"
PHASE: Final = "phase"
MISMATCH: Final = "mismatch"
UNKNOWN: Final = "unknown"

HANG_KINDS: Final = (RANK_GONE, RANK_STOPPED, RANK_LEFT, FETCH, IN_COMPUTE, PHASE, MISMATCH, UNKNOWN)
"""Why a job hangs: the values of the ``kind`` label."""


class Collective(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The newest collective of a rank.

    Attributes:
        name: its name, such as ``all_reduce``; empty if only its number is known.
        sequence: its number in its process group; None if nothing counts them.
        group: name of the process group; empty if unknown.
        shapes: shapes and types of its tensors, as text; empty if unknown.
    """

    name: str
    sequence: int | None = None
    group: str = ""
    shapes: str = ""


class HangState(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One rank while the job hangs.

    Attributes:
        node: name of its node.
        doing: a category of the ledger, or `LEFT`, or `ENDED`.
        process: `ALIVE`, `STOPPED` or `GONE`.
        stuck: whether it has ended no step for ``stuck_seconds``.
        seconds: time since the last progress of its training thread.
        waits: whether it waits for other ranks: in a collective, or for one that it has entered.
        where: file and line of the user's own code, such as ``data.py:88``. ``call``: the function called there.
        state: the kernel's state of the thread, in words.
        stack: a hash of the stack; ranks at the same place have the same hash.
        steps: steps that have ended.
        collective: the newest one that the rank has entered.
    """

    rank: int
    node: str
    doing: str
    process: str = ALIVE
    stuck: bool = False
    seconds: float = 0.0
    waits: bool = False
    where: str | None = None
    call: str | None = None
    state: str = ""
    stack: str = ""
    steps: int = 0
    collective: Collective | None = None


MAX_SUSPECTS: Final = 16
"""The most suspects that are named. Their total is given as well."""


@dataclass(frozen=True, slots=True)
class HangSuspect:
    """A rank that the others wait for. ``doing`` completes "rank 3 is ..."."""

    rank: int
    node: str
    where: str | None
    doing: str


@dataclass(frozen=True, slots=True)
class WaitingRanks:
    """Ranks that wait in the same collective."""

    ranks: tuple[int, ...]
    collective: str | None
    sequence: int | None
    shapes: str = ""


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Why a job hangs.

    Attributes:
        kind: one of `HANG_KINDS`.
        suspects: the ranks that the others wait for, at most `MAX_SUSPECTS`; ``suspects_total``: number of all.
        waiting: the ranks that wait, by collective, the largest group first.
        seconds: duration of the hang.
        silent: ranks of the job of which nothing is known.
        sentence: the verdict as one sentence.
    """

    kind: str
    suspects: tuple[HangSuspect, ...]
    suspects_total: int
    waiting: tuple[WaitingRanks, ...]
    seconds: float
    silent: tuple[int, ...]
    sentence: str = ""

    def fields(self) -> dict[str, Any]:
        """The fields of its line in the log. Ranks are ranges of a first and a last rank."""
        return {
            "verdict": self.sentence,
            "kind": self.kind,
            "suspects": [{"rank": s.rank, "node": s.node, "where": s.where, "doing": s.doing} for s in self.suspects],
            "suspects_total": self.suspects_total,
            "waiting": [
                {"ranks": ranges(w.ranks), "collective": w.collective, "sequence": w.sequence}
                for w in self.waiting[:MAX_SUSPECTS]
            ],
            "silent_ranks": len(self.silent),
        }


_SAME_SHAPES: Final = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives whose tensors have the same shape on all ranks."""

_NO_PHASE: Final = {DATA_WAIT: FETCH, COMPUTE: IN_COMPUTE, LEFT: RANK_LEFT, ENDED: RANK_LEFT}
_ORDER: Final = (FETCH, PHASE, IN_COMPUTE)
"""Of two kinds with as many ranks, the first one counts, because it is more specific."""

_Group = list["HangState"]  # ranks that wait in one collective


def decide(states: Iterable[HangState], world_size: int = 0) -> HangVerdict | None:
    """The verdict on a hang; None if no rank is stuck. If a rank has two states, the one that is alive counts."""
    by_rank: dict[int, HangState] = {}
    for state in states:
        known = by_rank.get(state.rank)
        if known is None or (known.process != ALIVE and state.process == ALIVE):
            by_rank[state.rank] = state
    stuck = [state for state in by_rank.values() if state.stuck]
    if not stuck:
        return None
    everyone = [by_rank[rank] for rank in sorted(by_rank)]
    waiting = _waiting(everyone)
    silent = tuple(rank for rank in range(world_size) if rank not in by_rank)
    kind, suspects = _suspects(everyone, waiting, silent=bool(silent))
    blamed = {state.rank for state in suspects}
    groups = [
        WaitingRanks(tuple(s.rank for s in group), newest.name or None, newest.sequence, newest.shapes)
        for group in waiting
        for newest in [_newest(group[0])]
        if kind == MISMATCH or not all(state.rank in blamed for state in group)
    ]
    return HangVerdict(
        kind=kind,
        suspects=tuple(HangSuspect(s.rank, s.node, _place(s), doing(s)) for s in suspects[:MAX_SUSPECTS]),
        suspects_total=len(suspects),
        waiting=tuple(groups),
        seconds=max(state.seconds for state in stuck),
        silent=silent,
    )


def _newest(state: HangState) -> Collective:
    return state.collective or Collective("")


def _waiting(states: Sequence[HangState]) -> list[_Group]:
    """The ranks that wait for others, grouped by collective, the largest group first."""
    groups: dict[object, _Group] = defaultdict(list)
    for state in states:
        if state.process == ALIVE and state.waits:
            newest = _newest(state)
            if newest.sequence is None:
                # Without a number, two calls of one collective differ by the line that makes them.
                groups[newest, state.where].append(state)
            else:
                shapes = newest.shapes if newest.name in _SAME_SHAPES else ""
                groups[newest.group, newest.name, newest.sequence, shapes].append(state)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def _suspects(states: Sequence[HangState], waiting: Sequence[_Group], *, silent: bool) -> tuple[str, list[HangState]]:
    """The kind of the hang, and the ranks that the others wait for, by rank."""
    for process, kind in ((GONE, RANK_GONE), (STOPPED, RANK_STOPPED)):
        found = [state for state in states if state.process == process]
        if found:
            return kind, found
    elsewhere: dict[str, list[HangState]] = defaultdict(list)
    for state in states:
        if not state.waits:
            elsewhere[_NO_PHASE.get(state.doing, PHASE)].append(state)
    left = elsewhere.pop(RANK_LEFT, [])
    if elsewhere:
        _, _, _, kind = min(
            (kind != PHASE and not any(state.stuck for state in found), len(found), _ORDER.index(kind), kind)
            for kind, found in elsewhere.items()
        )
        return kind, elsewhere[kind] if waiting else _minority_of(elsewhere[kind])
    if left and waiting:
        return RANK_LEFT, left
    out = [state for state in states if state.waits and state.doing == LEFT]
    if out and len(waiting) > 1 and any(state.waits and state.doing != LEFT for state in states):
        return RANK_LEFT, out  # its loop is over, and it waits for them elsewhere
    odd = [] if silent else [state for groups in _clashes(waiting) for state in _odd_ones(groups)]
    return (MISMATCH, sorted(odd, key=lambda state: state.rank)) if odd else (UNKNOWN, [])


def _minority_of(states: list[HangState]) -> list[HangState]:
    """The few ranks at another place than the most, if no rank is seen to wait, as on GPUs; else all ranks."""
    places: dict[str, list[HangState]] = defaultdict(list)
    for state in states:
        places[state.stack].append(state)
    most = max(places.values(), key=len)
    return [state for state in states if state not in most] if 2 * len(most) > len(states) > len(most) else states


def _clashes(waiting: Sequence[_Group]) -> list[list[_Group]]:
    """By process group, the ranks that wait in more than one of its collectives. An unknown group may be any."""
    by_process_group: dict[str, list[_Group]] = defaultdict(list)
    for group in waiting:
        by_process_group[_newest(group[0]).group].append(group)
    found = [list(waiting)] if "" in by_process_group else list(by_process_group.values())
    return [groups for groups in found if len(groups) > 1]


def _odd_ones(waiting: list[_Group]) -> list[HangState]:
    """The ranks that are in another collective than the most; all ranks if no collective has most."""
    # Different calls with one number are the clash, and the smallest such number counts. A rank with a higher number
    # has passed it: with gloo, the source of a broadcast does not wait for all.
    calls: dict[tuple[int, str], list[_Group]] = defaultdict(list)
    for group in waiting:
        newest = _newest(group[0])
        if newest.sequence is not None:
            calls[newest.sequence, newest.group].append(group)
    waiting = next((calls[number] for number in sorted(calls) if len(calls[number]) > 1), waiting)
    everyone = [state for group in waiting for state in group]
    if len(waiting[0]) > len(waiting[1]):
        return [state for group in waiting[1:] for state in group]
    numbers = [_newest(state).sequence for state in everyone]
    known = [number for number in numbers if number is not None]
    if len(set(known)) > 1 and len(known) == len(numbers):  # ranks with a lower number have not come to the others
        return [state for state, number in zip(everyone, numbers, strict=True) if number == min(known)]
    return everyone


# -- in words ----------------------------------------------------------------------------------------------------------

_DOING: Final = {
    DATA_WAIT: "in a fetch",
    COMPUTE: "in a step",
    EVALUATION: "in an evaluation",
    CHECKPOINT: "in a checkpoint",
    STARTUP: "starting up",
    LEFT: "out of its training loop",
    ENDED: "at its end: it has left the job by itself",
}
_KERNEL: Final = (
    (SILENT, "and its agent does not answer, as while C code holds the GIL"),
    ("stopped", "stopped"),
    ("uninterruptible", "in uninterruptible sleep, as of storage that does not answer"),
    ("futex", "waiting for a lock"),
    ("nanosleep", "asleep"),
    ("pipe_read", "reading from a pipe"),
    ("pipe_write", "writing to a pipe"),
    ("tcp_recvmsg", "reading from a socket"),
    ("running", "running"),
)
"""The kernel's names of states of a waiting thread, in plain words."""

_MAX_CLAUSES: Final = 3
"""The sentence names this many groups of ranks, and counts the others."""


def doing(state: HangState) -> str:
    """The activity of a rank; it completes "rank 3 is ..."."""
    if state.process == GONE:
        what = "nothing has come from its node for a minute" if state.state == NODE_SILENT else "its process has ended"
        return f"gone: {what}"
    if state.process == STOPPED:
        return "stopped, by a signal or a debugger"
    words = _DOING.get(state.doing, "outside of its training loop")
    if state.doing == LEFT:
        words += f", after {state.steps} steps"
    if state.waits:
        return f"{words}, waiting for the others in {_newest(state).name or 'a collective'}"
    # In a fetch by a worker the training thread waits for the worker, so its state means nothing.
    kernel = next((text for part, text in _KERNEL if part in state.state), "")
    return f"{words}, {kernel}" if kernel and state.doing in {DATA_WAIT, COMPUTE} else words


def _place(state: HangState) -> str | None:
    if state.where is None or state.process == GONE:
        return None
    return f"{state.where} ({state.call})" if state.call else state.where


def with_sentence(verdict: HangVerdict, since: str) -> HangVerdict:
    """Add the sentence to a verdict. ``since``: time of day at which the job stopped to go on."""
    clauses, groups = [], verdict.waiting
    for group in groups[:_MAX_CLAUSES]:
        number = f" #{group.sequence}" if group.sequence is not None else ""
        shapes = f" of {group.shapes}" if group.shapes and verdict.kind == MISMATCH else ""
        has = "has" if len(group.ranks) == 1 else "have"
        what = f"{group.collective or 'a collective'}{number}{shapes}"
        clauses.append(f"{named(group.ranks)} {has} waited in {what} since {since}")
    if len(groups) > _MAX_CLAUSES:
        clauses.append(f"{len(groups) - _MAX_CLAUSES} more groups of ranks wait elsewhere")
    if verdict.kind != MISMATCH:
        clauses += _blamed(verdict, since if not groups else "")
    if verdict.silent:
        clauses.append(f"nothing is known of {named(verdict.silent)}")
    if verdict.kind == MISMATCH:
        clauses.append(f"these are different collectives{_odd_words(verdict)}")
    elif verdict.kind == UNKNOWN and groups and not verdict.silent:
        several = "these are different process groups, and " if len(groups) > 1 else ""
        clauses.append(f"{several}no rank is elsewhere: look at the network between them")
    return replace(verdict, sentence="; ".join(clauses))


def _blamed(verdict: HangVerdict, since: str) -> list[str]:
    """The activities of the suspects. Suspects with the same activity at the same place share a clause."""
    groups: dict[tuple[str, str | None, str], list[int]] = defaultdict(list)
    for suspect in verdict.suspects:
        groups[suspect.doing, suspect.where, suspect.node].append(suspect.rank)
    shown = list(groups.items())[:_MAX_CLAUSES]
    clauses = []
    for (what, where, node), ranks in shown:
        be = "is" if len(ranks) == 1 else "are"
        head, comma, rest = what.partition(",")  # "in a fetch, asleep" becomes "in a fetch at data.py:88, asleep"
        clauses.append(f"{named(ranks)} on {node} {be} {head}{f' at {where}' if where else ''}{comma}{rest}")
    more = verdict.suspects_total - sum(len(ranks) for _, ranks in shown)
    if more > 0:
        clauses.append(f"so are {more} more")
    if clauses and since:
        clauses[-1] += f", since {since}"
    return clauses


def _odd_words(verdict: HangVerdict) -> str:
    ranks = [suspect.rank for suspect in verdict.suspects]
    if not ranks or verdict.suspects_total == sum(len(group.ranks) for group in verdict.waiting):
        return ""
    places, nodes = sorted({s.where for s in verdict.suspects if s.where}), {s.node for s in verdict.suspects}
    on, at = f" on {min(nodes)}" if len(nodes) == 1 else "", f" at {places[0]}" if places else ""
    are = "is the odd one" if len(ranks) == 1 else "are the odd ones"
    return f", and {named(ranks)}{on} {are}{at}"
