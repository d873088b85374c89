"""Why a whole job hangs: which ranks wait, and which ones they wait for.

The ranks that do not wait are the suspects. A process that is gone or stopped comes first: nothing else matters then.
If all ranks wait, and those of one process group are not in the same collective, the minority are the suspects. Ranks
that wait in different process groups, as with tensor and data parallelism, are not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.core.hang_records import (
    ALIVE,
    ENDED,
    FETCH,
    GONE,
    IN_COMPUTE,
    LEFT,
    MAX_SUSPECTS,
    MISMATCH,
    NODE_SILENT,
    PHASE,
    RANK_GONE,
    RANK_LEFT,
    RANK_STOPPED,
    SILENT,
    STOPPED,
    UNKNOWN,
    HangSuspect,
    HangVerdict,
    WaitingRanks,
)
from telemetry.core.rank_ranges import named
from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, STARTUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.core.hang_records import HangState

_NO_PHASE: Final = {DATA_WAIT: FETCH, COMPUTE: IN_COMPUTE, LEFT: RANK_LEFT, ENDED: RANK_LEFT}
_ORDER: Final = (FETCH, PHASE, IN_COMPUTE)
"""Of two kinds with as many ranks, the one that says more comes first."""

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
"""What the kernel says of a thread that does not go on, in plain words."""

_SAME_SHAPES: Final = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives whose tensors have the same shape on all ranks."""

_MAX_CLAUSES: Final = 3
"""Groups of ranks that the sentence names; of more, the number."""


def decide(states: Iterable[HangState], world_size: int = 0) -> HangVerdict | None:
    """Why the job hangs; None where no rank is stuck.

    Args:
        states: of all ranks of which something is known. Of two of one rank, the one that is alive counts.
        world_size: number of ranks of the job; 0 where that is not known.
    """
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
        WaitingRanks(tuple(s.rank for s in group), _name(group[0]), _sequence(group[0]), _shapes(group[0]))
        for group in waiting
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


def with_sentence(verdict: HangVerdict, since: str) -> HangVerdict:
    """The verdict with its sentence.

    Args:
        verdict: without one.
        since: the time of the day at which the job stopped to go on.
    """
    waiting = [
        f"{named(group.ranks)} {'has' if len(group.ranks) == 1 else 'have'} waited {_in(group, verdict)} since {since}"
        for group in verdict.waiting[:_MAX_CLAUSES]
    ]
    left = len(verdict.waiting) - _MAX_CLAUSES
    waiting += [f"{left} more groups of ranks wait elsewhere"] if left > 0 else []
    blamed = [] if verdict.kind == MISMATCH else _blamed(verdict, since if not waiting else "")
    more = [f"nothing is known of {named(verdict.silent)}"] if verdict.silent else []
    if verdict.kind == MISMATCH:
        more = [*more, f"these are different collectives{_minority(verdict)}"]
    elif verdict.kind == UNKNOWN and not verdict.silent:
        more = [f"{_in_groups(verdict)}: look at the network between them"] if waiting else more
    return replace(verdict, sentence="; ".join([*waiting, *blamed, *more]))


def doing(state: HangState) -> str:
    """What a rank does, continues "rank 3 is ..."."""
    if state.process == GONE:
        what = "nothing has come from its node for a minute" if state.state == NODE_SILENT else "its process has ended"
        return f"gone: {what}"
    if state.process == STOPPED:
        return "stopped, by a signal or a debugger"
    words = _DOING.get(state.doing, "outside of its training loop")
    if state.doing == LEFT:
        words += f", after {state.steps} steps"
    if state.waits:
        name = state.collective.name if state.collective is not None else ""
        words = f"{words}, waiting for the others in {name or 'a collective'}"
    kernel = next((text for part, text in _KERNEL if part in state.state), "")
    # In a fetch by a worker the training thread waits for the worker, which says nothing.
    said = f", {kernel}" if kernel and not state.waits and state.doing in {DATA_WAIT, COMPUTE} else ""
    return words + said


def _waiting(states: Sequence[HangState]) -> list[list[HangState]]:
    """The ranks that wait for others, those in one collective together, the largest group first."""
    groups: dict[object, list[HangState]] = defaultdict(list)
    for state in states:
        if state.process == ALIVE and state.waits:
            newest = state.collective
            if newest is None or newest.sequence is None:
                # Without a number, two calls of one collective are told apart by the line that makes them.
                groups[newest, state.where].append(state)
            else:
                shapes = newest.shapes if newest.name in _SAME_SHAPES else ""
                groups[newest.group, newest.name, newest.sequence, shapes].append(state)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def _suspects(
    states: Sequence[HangState], waiting: Sequence[Sequence[HangState]], *, silent: bool
) -> tuple[str, list[HangState]]:
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
        kind = min(elsewhere, key=lambda kind: _order(kind, elsewhere[kind]))
        return kind, elsewhere[kind] if waiting else _minority_of(elsewhere[kind])
    if left and waiting:
        return RANK_LEFT, left
    out = [state for group in waiting for state in group if state.doing == LEFT]
    if out and len(waiting) > 1 and any(state.doing != LEFT for group in waiting for state in group):
        return RANK_LEFT, sorted(out, key=lambda state: state.rank)  # its loop is over, and it waits for them elsewhere
    clashes = [] if silent else _clashes(waiting)
    if clashes:
        odd = {state.rank: state for groups in clashes for state in _odd_ones(groups)}
        return MISMATCH, [odd[rank] for rank in sorted(odd)]
    return UNKNOWN, []


def _order(kind: str, states: Sequence[HangState]) -> tuple[bool, int, int]:
    return (kind != PHASE and not any(state.stuck for state in states), len(states), _ORDER.index(kind))


def _minority_of(states: list[HangState]) -> list[HangState]:
    """Where no rank is seen to wait, as on GPUs: the few that are at another place than the most; else all."""
    places: dict[str, list[HangState]] = defaultdict(list)
    for state in states:
        places[state.stack].append(state)
    most = max(places.values(), key=len)
    return [state for state in states if state not in most] if 2 * len(most) > len(states) > len(most) else states


def _clashes(waiting: Sequence[Sequence[HangState]]) -> list[Sequence[Sequence[HangState]]]:
    """By process group, the ranks that wait in more than one of its collectives. An unknown group may be any."""
    by_process_group: dict[str, list[Sequence[HangState]]] = defaultdict(list)
    for group in waiting:
        newest = group[0].collective
        by_process_group[newest.group if newest is not None else ""].append(group)
    found: Iterable[Sequence[Sequence[HangState]]] = [waiting] if "" in by_process_group else by_process_group.values()
    return [groups for groups in found if len(groups) > 1]


def _odd_ones(waiting: Sequence[Sequence[HangState]]) -> list[HangState]:
    """The ranks that are not in the collective in which most are; all where no collective has most.

    A rank that is ahead of a clash has come through it: with gloo, the source of a broadcast does not wait for all.
    """
    waiting = _clash(waiting) or waiting
    first, second = waiting[0], waiting[1]
    if len(first) > len(second):
        return sorted((s for group in waiting[1:] for s in group), key=lambda state: state.rank)
    numbers = {state.collective.sequence for group in waiting for state in group if state.collective is not None}
    if len(numbers) > 1 and None not in numbers:  # who is behind has not come to where the others are
        last = min(number for number in numbers if number is not None)
        return [s for group in waiting for s in group if s.collective is not None and s.collective.sequence == last]
    return sorted((s for group in waiting for s in group), key=lambda state: state.rank)


def _clash(waiting: Sequence[Sequence[HangState]]) -> list[Sequence[HangState]]:
    """The groups of ranks that make different calls at one number, at the smallest such number; empty without any."""
    calls: dict[tuple[int, str], list[Sequence[HangState]]] = defaultdict(list)
    for group in waiting:
        newest = group[0].collective
        if newest is not None and newest.sequence is not None:
            calls[newest.sequence, newest.group].append(group)
    return next((calls[number] for number in sorted(calls) if len(calls[number]) > 1), [])


def _place(state: HangState) -> str | None:
    if state.where is None or state.process == GONE:
        return None
    return f"{state.where} ({state.call})" if state.call else state.where


def _name(state: HangState) -> str | None:
    return state.collective.name or None if state.collective is not None else None


def _sequence(state: HangState) -> int | None:
    return state.collective.sequence if state.collective is not None else None


def _shapes(state: HangState) -> str:
    return state.collective.shapes if state.collective is not None else ""


def _in(group: WaitingRanks, verdict: HangVerdict) -> str:
    name = group.collective or "a collective"
    number = f" #{group.sequence}" if group.sequence is not None else ""
    shapes = f" of {group.shapes}" if group.shapes and verdict.kind == MISMATCH else ""
    return f"in {name}{number}{shapes}"


def _in_groups(verdict: HangVerdict) -> str:
    several = len(verdict.waiting) > 1
    return f"{'these are different process groups, and ' if several else ''}no rank is elsewhere"


def _blamed(verdict: HangVerdict, since: str) -> list[str]:
    """What the suspects do, those that do the same at the same place together."""
    groups: dict[tuple[str, str | None, str], list[int]] = defaultdict(list)
    for suspect in verdict.suspects:
        groups[suspect.doing, suspect.where, suspect.node].append(suspect.rank)
    clauses = []
    for (what, where, node), ranks in list(groups.items())[:_MAX_CLAUSES]:
        be = "is" if len(ranks) == 1 else "are"
        at = f" at {where}" if where else ""
        clauses.append(f"{named(ranks)} on {node} {be} {_placed(what, at)}")
    shown = sum(len(ranks) for ranks in list(groups.values())[:_MAX_CLAUSES])
    if verdict.suspects_total > shown:
        clauses.append(f"so are {verdict.suspects_total - shown} more")
    if clauses and since:
        clauses[-1] += f", since {since}"
    return clauses


def _placed(what: str, at: str) -> str:
    """``in a fetch, asleep`` and ``at data.py:88`` as ``in a fetch at data.py:88, asleep``."""
    head, comma, rest = what.partition(",")
    return f"{head}{at}{comma}{rest}"


def _minority(verdict: HangVerdict) -> str:
    ranks = [suspect.rank for suspect in verdict.suspects]
    if not ranks or verdict.suspects_total == sum(len(group.ranks) for group in verdict.waiting):
        return ""
    places = {suspect.where for suspect in verdict.suspects} - {None}
    at = f" at {min(place for place in places if place)}" if places else ""
    nodes = {suspect.node for suspect in verdict.suspects}
    on = f" on {min(nodes)}" if len(nodes) == 1 else ""
    return (
        f", and {named(ranks)}{on} {'is' if len(ranks) == 1 else 'are'} the odd one{'s' if len(ranks) > 1 else ''}{at}"
    )
