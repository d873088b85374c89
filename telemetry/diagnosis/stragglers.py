"""Stragglers of a synchronised job: the slowest rank, its cost for the others, and the reason."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.model.records import CHECKPOINT, EVALUATION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.model.records import RankPace


# -- the numbers -------------------------------------------------------------------------------------------------------
# The jobs of `tests.zoo` and their recorded evidence have the verdicts that they lead to.

MIN_STEPS: Final = 5
"""Steps of a window with which it can be compared."""

_SAME_PACE: Final = 0.15
"""Ranks have the same pace if their step durations differ by less than this ratio."""

_MIN_SAMPLES: Final = 30
"""Minimum samples of a training thread. With 30, a share is known to within 0.09."""

_SURELY: Final = 2.0
"""The cost less this many standard errors of its samples counts as sure."""

_ALIKE: Final = 0.5
"""A node is slow if each of its ranks surely costs the others this share of the cost of its slowest rank."""

_ALL_CORES: Final = 0.9
"""The machine of a rank lacks cores if its cores are used to this degree."""

_FOR_CORES: Final = 0.5
"""The reason is the wait for a core if that is this share of the cost of a rank."""

_STANDSTILL: Final = 0.5
"""A rank can hold up this one if the time since its last step is this share of this rank's time since then."""

_KEPT: Final = 450
"""Own paces that are kept. With five ticks a second they last for longer than the news of other nodes may be old."""

_SAME_TIME: Final = 0.05
"""Two windows are of the same time if one ends at most this share of its steps after the other."""


# -- own paces ---------------------------------------------------------------------------------------------------------


class OwnPaces:
    """The newest paces of one rank, the oldest first, to compare with older ones of other nodes."""

    def __init__(self) -> None:
        self._paces: deque[RankPace] = deque(maxlen=_KEPT)

    def add(self, pace: RankPace) -> None:
        """Add the pace of a tick."""
        if self._paces and pace.last_step < self._paces[-1].last_step:
            self._paces.clear()
        self._paces.append(pace)

    def at_the_time_of(self, peers: Iterable[RankPace]) -> tuple[RankPace, ...]:
        """The earlier paces of this rank whose windows end where windows of its peers end."""
        if not self._paces:
            return ()
        paces, newest = tuple(self._paces), self._paces[-1]
        late = newest.last_step - _SAME_TIME * newest.steps
        places = set()
        for step in {peer.last_step for peer in peers if paces[0].last_step <= peer.last_step < late}:
            after = bisect_left(paces, step, key=lambda pace: pace.last_step)
            places.add(min(after, max(0, after - 1), key=lambda at: abs(paces[at].last_step - step)))
        return tuple(paces[place] for place in sorted(places))


# -- straggler ---------------------------------------------------------------------------------------------------------
# A rank that finishes early waits for the others inside its compute, where its own clock cannot separate waiting from
# work. So the ranks are compared with each other. There are two signs:
#
# * A step takes equally long on all ranks. If the compute of one rank is shorter than that of the others, it does
#   something else in the rest of the step, such as waiting for data or writing a checkpoint, and the others wait for
#   it. Only its exposed wait counts: a hidden wait delays nobody.
# * A rank with slow compute spends less of it in synchronisation than its peers do. This comes from samples of the
#   training threads: calls of `torch.distributed` and the backward pass count as synchronisation, on a CPU the latter
#   only while the thread is off the CPU. On GPUs the slow rank's own GPU must be idle as well.
#
# Both also show a rank whose training thread waits for a core while all cores of its machine are busy.
# Its own work is not slow then, and a moment later another rank may lack a core. So that time does not count.

_AWAY: Final = {EVALUATION: "is in an evaluation", CHECKPOINT: "is in a checkpoint"}
"""Activities of a rank that neither waits for data nor computes a step."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that others wait for.

    Attributes:
        lost: seconds that each of their steps loses.
        why: the reason; it completes "rank 3 ...".
        node: name of its node if it is on another node; None for this node.
        error: the standard error of ``lost``, if it comes from samples; else 0.0.
    """

    rank: int
    lost: float
    why: str
    node: str | None = None
    error: float = 0.0

    @property
    def name(self) -> str:
        """The rank for people: ``rank 3``, or ``rank 3 on n2``."""
        return f"rank {self.rank}" if self.node is None else f"rank {self.rank} on {self.node}"


def straggler(own: RankPace, others: Iterable[RankPace], earlier: Iterable[RankPace] = ()) -> Straggler | None:
    """The rank that this one waits for most; None without such a rank, or if no rank has the same pace as this one.

    Args:
        own: the pace of this rank.
        others: the paces of the others. Those of other nodes are some seconds old.
        earlier: earlier paces of this rank. If a rank has just become slow, its steps before and after must not be
            compared with one another.
    """
    others = tuple(others)
    pairs = at_same_pace(own, others, earlier)
    found = {other.rank: slow for mine, other in pairs if (slow := _waited_for(mine, other)) is not None}
    slowest = max(found.values(), key=lambda slow: slow.lost, default=None)
    if slowest is None or slowest.node is None:
        return slowest
    # Either all ranks of a node are known or none. One with another pace is not waited for.
    node = [other for other in others if other.node == slowest.node]
    surely = [slow.lost - _SURELY * slow.error for other in node if (slow := found.get(other.rank)) is not None]
    if len(node) < 2 or len(surely) < len(node) or min(surely) < _ALIKE * slowest.lost:
        return slowest
    return replace(
        slowest, why=f"{slowest.why}; all {len(node)} ranks of that node are waited for, so the node is slow"
    )


def short_of_cores(own: RankPace, others: Iterable[RankPace], earlier: Iterable[RankPace] = ()) -> Straggler | None:
    """The cost for this rank if another rank lacks a core while all cores of its machine are busy; else None.

    `straggler` does not count this: the machine is too small for its load, whichever rank is without a core.
    """
    why = "waits for a core, and all cores of its machine are busy"
    pairs = [(mine, other) for mine, other in at_same_pace(own, others, earlier) if _lacks_cores(other)]
    found = [Straggler(other.rank, _lost_to_cores(mine, other), why, other.node) for mine, other in pairs]
    return max(found, key=lambda slow: slow.lost, default=None)


def at_same_pace(
    own: RankPace, others: Iterable[RankPace], earlier: Iterable[RankPace] = ()
) -> list[tuple[RankPace, RankPace]]:
    """The other ranks with the same pace as this one, each after the pace of this rank at the same time.

    Ranks with the same pace wait for each other.
    """
    known = (own, *earlier)
    pairs = []
    for other in others:
        mine = min(known, key=lambda pace: abs(pace.last_step - other.last_step)) if other.last_step else own
        if min(mine.steps, other.steps) >= MIN_STEPS:
            one, two = mine.seconds / mine.steps, other.seconds / other.steps
            if abs(one - two) <= _SAME_PACE * max(one, two):
                pairs.append((mine, other))
    return pairs


def _waited_for(own: RankPace, other: RankPace) -> Straggler | None:
    """The loss of this rank to the other one, with the larger part of it as the reason.

    While the other rank is outside of its compute, it is not in synchronisation either. So `_slow` includes the loss of
    `_elsewhere`, and the rest of it is slow compute. `_slow` comes from samples: a loss by chance is no reason.
    """
    elsewhere, slow = _elsewhere(own, other), _slow(own, other)
    if elsewhere is None or slow is None:
        found = elsewhere or slow
    else:
        surely_slow = slow.lost - slow.error
        reason = elsewhere if elsewhere.lost >= surely_slow / 2 else slow
        larger = slow if slow.lost > elsewhere.lost else elsewhere
        found = replace(reason, lost=larger.lost, error=larger.error)
    if found is None:
        return None
    for_cores = _lost_to_cores(own, other)
    if _lacks_cores(other):
        return replace(found, lost=found.lost - for_cores) if found.lost > for_cores else None
    if for_cores < _FOR_CORES * found.lost:
        return found
    why = f"{found.why}; its training thread waits for a core, although its machine has idle ones"
    return replace(found, why=why)


def _lost_to_cores(own: RankPace, other: RankPace) -> float:
    """Seconds of a step for which the other rank's training thread waits longer for a core than this rank's."""
    if own.core_wait_seconds is None or other.core_wait_seconds is None:
        return 0.0
    return max(0.0, other.core_wait_seconds / other.steps - own.core_wait_seconds / own.steps)


def _lacks_cores(pace: RankPace) -> bool:
    return pace.cores_busy_ratio is not None and pace.cores_busy_ratio >= _ALL_CORES


def _elsewhere(own: RankPace, other: RankPace) -> Straggler | None:
    """Loss while the other rank is outside of its compute and this one is in its own."""
    if own.exposed_wait_seconds is None or other.exposed_wait_seconds is None:
        return None
    waiting = other.exposed_wait_seconds / other.steps - own.exposed_wait_seconds / own.steps
    absent = other.away_seconds / other.steps - own.away_seconds / own.steps
    lost = min(compute_seconds(own) - compute_seconds(other), waiting + absent)
    if not own.on_gpu and own.stack_samples >= _MIN_SAMPLES:
        lost = min(lost, sync_seconds(own))  # in the rest of its compute the samples show work
    if lost <= 0:
        return None
    why = "waits for data" if waiting >= absent else _AWAY.get(other.away_in or "", "is busy outside of its steps")
    why += f" ({other.cause})" if other.cause is not None and other.cause != other.away_in else ""
    return Straggler(other.rank, lost, why, other.node)


def _slow(own: RankPace, other: RankPace) -> Straggler | None:
    """Loss by slow compute: how much less of its compute the other rank spends in synchronisation.

    The steps of a job take equally long on all ranks. So if those of this rank's window take longer, the window began
    or ended at another time and has more delays of the job, such as evaluations. These longer waits accuse nobody.
    """
    if min(own.stack_samples, other.stack_samples) < _MIN_SAMPLES:
        return None
    more_in_window = max(0.0, own.seconds / own.steps - other.seconds / other.steps)
    lost = sync_seconds(own) - sync_seconds(other) - more_in_window
    error = math.hypot(_sync_error(own), _sync_error(other))
    if own.on_gpu or other.on_gpu:
        # A host that waits for its own GPU (`.item()`) is not in torch.distributed either, but delays nobody. It delays
        # the others if its GPU is idle meanwhile and theirs are not.
        if own.gpu_busy_ratio is None or other.gpu_busy_ratio is None:
            return None
        lost = min(lost, (own.gpu_busy_ratio - other.gpu_busy_ratio) * own.seconds / own.steps)
    if lost <= 0:
        return None
    where = f", mostly in {other.where}" if other.where is not None else ""
    return Straggler(other.rank, lost, f"takes longer to compute a step{where}", other.node, error)


def compute_seconds(pace: RankPace) -> float:
    """Seconds of compute of a step."""
    return pace.compute_seconds / pace.steps


def sync_seconds(pace: RankPace) -> float:
    """Seconds of a step in which the rank waits for others. There must be a sample."""
    return compute_seconds(pace) * pace.in_sync_ratio


def _sync_error(pace: RankPace) -> float:
    """The standard error of `sync_seconds`: its share comes from samples."""
    share = min(1.0, pace.in_sync_ratio)
    return compute_seconds(pace) * math.sqrt(share * (1.0 - share) / pace.stack_samples)


def held_up_by(own: RankPace, others: Iterable[RankPace]) -> RankPace | None:
    """During a standstill: a rank that has not reached the synchronisation in which this rank waits; else None."""
    if not own.waits_for_ranks:
        return None
    still = _STANDSTILL * own.seconds_without_step
    return next((o for o in others if o.seconds_without_step >= still and not o.waits_for_ranks), None)


def absent_rank(pace: RankPace) -> Straggler:
    """The result of `held_up_by` as a straggler."""
    where = f"was last seen in {pace.where}" if pace.where is not None else "has not come to where the others wait"
    return Straggler(pace.rank, pace.seconds_without_step, where, pace.node)


def own_compute(pace: RankPace, everyone: Iterable[RankPace]) -> float:
    """Seconds of a step's compute without waiting for other ranks; 0.0 before the first step."""
    if not pace.steps:
        return 0.0
    slow = straggler(pace, [other for other in everyone if other.rank != pace.rank])
    return max(0.0, compute_seconds(pace) - (slow.lost if slow is not None else 0.0))
