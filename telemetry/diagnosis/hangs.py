"""Decides why the whole job hangs.

It hangs because of the ranks that do not wait: they are the suspects. A process that is gone or stopped comes
first: nothing else matters then. If all ranks wait, and those of one process group are not in the same collective, the
minority are the suspects. Ranks that wait in different process groups, as with tensor and data parallelism, are not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.log.lines import ABSENT, HangLine, Suspect, WaitingRanges
from telemetry.model.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, STARTUP, Collective
from telemetry.util.words import named, ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
UNKNOWN_HANG: Final = "unknown"

HANG_KINDS: Final = (RANK_GONE, RANK_STOPPED, RANK_LEFT, FETCH, IN_COMPUTE, PHASE, MISMATCH, UNKNOWN_HANG)
"""Why a job hangs: the values of the ``kind`` label."""


class HangState(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One rank while the job hangs.

    Attributes:
        doing: a category of the ledger, or `LEFT`, or `ENDED`.
        process: `ALIVE`, `STOPPED` or `GONE`.
        stuck: whether it has ended no step for ``stuck_seconds``.
        seconds: time since the last progress of its training thread.
        waits: whether it waits for other ranks: in a collective, or for one that it has entered.
        where: file and line of the user's own code, such as ``data.py:88``. ``call``: the function called there.
        state: the kernel's state of the thread, in words.
        stack: a hash of the stack; ranks at the same place have the same hash.
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

    @property
    def place(self) -> str | None:
        """The user's line and the function called there, such as ``data.py:88 (read)``; None if its process is gone."""
        if self.where is None or self.process == GONE:
            return None
        return f"{self.where} ({self.call})" if self.call else self.where


MAX_SUSPECTS: Final = 16
"""The most suspects that are named. Their total is given as well."""


@dataclass(frozen=True, slots=True)
class WaitingRanks:
    """Ranks that wait in the same collective."""

    ranks: tuple[int, ...]
    collective: str | None
    sequence: int | None
    shapes: str = ""

    def in_words(self, since: str, *, shapes: bool) -> str:
        """Where they have waited, and since which time of day."""
        number = f" #{self.sequence}" if self.sequence is not None else ""
        shape = f" of {self.shapes}" if self.shapes and shapes else ""
        has = "has" if len(self.ranks) == 1 else "have"
        return f"{named(self.ranks)} {has} waited in {self.collective or 'a collective'}{number}{shape} since {since}"


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Why a job hangs.

    Attributes:
        kind: one of `HANG_KINDS`.
        suspects: the ranks that the others wait for, at most `MAX_SUSPECTS`; ``suspects_total``: number of all.
        waiting: the ranks that wait, by collective, the largest group first.
        seconds: duration of the hang.
        silent: ranks of the job of which nothing is known.
    """

    kind: str
    suspects: tuple[HangState, ...]
    suspects_total: int
    waiting: tuple[WaitingRanks, ...]
    seconds: float
    silent: tuple[int, ...]

    @property
    def suspect(self) -> HangState | None:
        """The first of the suspects, if there is one."""
        return next(iter(self.suspects), None)

    def line(self, since: str, recorder: str) -> HangLine:
        """Its line in the log. Ranks are ranges of a first and a last rank."""
        return HangLine(
            since=since,
            verdict=self.sentence(since),
            kind=self.kind,
            over=ABSENT,
            suspects=[Suspect(s.rank, s.node, s.place, _activity(s)) for s in self.suspects],
            suspects_total=self.suspects_total,
            waiting=[WaitingRanges(ranges(w.ranks), w.collective, w.sequence) for w in self.waiting[:MAX_SUSPECTS]],
            silent_ranks=len(self.silent),
            recorder=recorder or ABSENT,
        )

    def sentence(self, since: str) -> str:
        """The verdict in words. ``since``: when the job stopped to go on, ISO-8601."""
        time, groups = since[11:19], self.waiting
        clauses = [group.in_words(time, shapes=self.kind == MISMATCH) for group in groups[:_MAX_CLAUSES]]
        if len(groups) > _MAX_CLAUSES:
            clauses.append(f"{len(groups) - _MAX_CLAUSES} more groups of ranks wait elsewhere")
        if self.kind != MISMATCH:
            clauses += _blamed(self, time if not groups else "")
        if self.silent:
            clauses.append(f"nothing is known of {named(self.silent)}")
        if self.kind == MISMATCH:
            clauses += [f"these are different collectives{_odd_words(self)}", *_apart_words(self)]
        elif self.kind == UNKNOWN_HANG and groups and not self.silent:
            several = "these are different process groups, and " if len(groups) > 1 else ""
            clauses.append(f"{several}no rank is elsewhere: look at the network between them")
        return "; ".join(clauses)

    def over(self, since: str) -> HangLine:
        """The line in the log that the job goes on."""
        own = ("verdict", "suspects", "suspects_total", "waiting", "silent_ranks", "recorder")
        return HangLine(since=since, kind=self.kind, over=True, **dict.fromkeys(own, ABSENT))


_SAME_SHAPES: Final = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives whose tensors have the same shape on all ranks."""

_NO_PHASE: Final = {DATA_WAIT: FETCH, COMPUTE: IN_COMPUTE, LEFT: RANK_LEFT, ENDED: RANK_LEFT}
_ORDER: Final = (FETCH, PHASE, IN_COMPUTE)
"""If two kinds have as many ranks, the first one counts: it is more specific."""

_Group = list[HangState]  # ranks that wait in one collective


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
        suspects=tuple(suspects[:MAX_SUSPECTS]),
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
        calm = {kind: kind != PHASE and not any(s.stuck for s in found) for kind, found in elsewhere.items()}
        kind = min(elsewhere, key=lambda kind: (calm[kind], len(elsewhere[kind]), _ORDER.index(kind)))
        return kind, elsewhere[kind] if waiting else _minority_of(elsewhere[kind])
    if left and waiting:
        return RANK_LEFT, left
    out = [state for state in states if state.waits and state.doing == LEFT]
    if out and len(waiting) > 1 and any(state.waits and state.doing in {COMPUTE, DATA_WAIT} for state in states):
        return RANK_LEFT, out  # its loop is over, theirs is not, and it waits for them elsewhere
    odd = [] if silent else [state for groups in _clashes(waiting) for state in _odd_ones(groups)]
    return (MISMATCH, sorted(odd, key=lambda state: state.rank)) if odd else (UNKNOWN_HANG, [])


def _minority_of(states: list[HangState]) -> list[HangState]:
    """The ranks that are not at the place of most ranks; all if most ranks share no place, or all do."""
    places: dict[str, list[HangState]] = defaultdict(list)
    for state in states:
        places[state.stack].append(state)
    most = max(places.values(), key=len)
    return [state for state in states if state not in most] if 2 * len(most) > len(states) > len(most) else states


def _clashes(waiting: Sequence[_Group]) -> list[list[_Group]]:
    """The process groups whose ranks wait in several collectives. A rank of an unknown group may be in any of them."""
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

_DDP_FORWARD: Final = "_distributed_broadcast_coalesced"
"""In this function the forward pass of DDP sends the buffers of the model."""

_MAX_CLAUSES: Final = 3
"""The sentence names this many groups of ranks, and counts the others."""


def _activity(state: HangState) -> str:
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


def _blamed(verdict: HangVerdict, since: str) -> list[str]:
    """The activities of the suspects. Suspects with the same activity at the same place share a clause."""
    groups: dict[tuple[str, str | None, str], list[int]] = defaultdict(list)
    for suspect in verdict.suspects:
        groups[_activity(suspect), suspect.place, suspect.node].append(suspect.rank)
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
    places, nodes = sorted({s.place for s in verdict.suspects if s.place}), {s.node for s in verdict.suspects}
    on, at = f" on {min(nodes)}" if len(nodes) == 1 else "", f" at {places[0]}" if places else ""
    are = "is the odd one" if len(ranks) == 1 else "are the odd ones"
    return f", and {named(ranks)}{on} {are}{at}"


def _apart_words(verdict: HangVerdict) -> list[str]:
    """What to change if suspects evaluate, or send DDP's buffers, where the other ranks perhaps do not."""
    evaluate = [suspect for suspect in verdict.suspects if suspect.doing == EVALUATION]
    forward = [suspect for suspect in verdict.suspects if suspect.call == _DDP_FORWARD]
    apart = evaluate or forward
    if not apart:
        return []
    who, be = named([each.rank for each in apart]), "is" if len(apart) == 1 else "are"
    what = "an evaluation" if evaluate else "the forward pass of DDP"
    where = f" at {apart[0].place}" if apart[0].place else ""
    fix = "where ranks evaluate alone, they may call no collective; the forward pass of DDP does: use model.module"
    return [f"{who} {be} in {what}{where}: {fix}"]
