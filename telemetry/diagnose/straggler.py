"""Ranks that keep pace lose the time of the slowest: which it is, what it costs, and why it is slow.

In a synchronised job a rank that is done early waits for the others inside its compute, where its own clock cannot
tell waiting from work (design: judged across the ranks of the board). Two signs tell it:

* Steps take all ranks the same. A rank whose compute is shorter than the others' does something else in the rest of
  its steps (it waits for data, it writes a checkpoint), and the others wait for it. Waiting for data that its GPU did
  not feel delays nobody and does not count.
* A rank that is slow in its own compute spends less of it where ranks wait for one another (the calls of
  `torch.distributed`; the backward pass, but on a CPU only while its thread is on no core) than its peers do: from
  samples of where the training threads are. On GPUs its own has to idle besides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.records import RankPace

LEAST_STEPS: Final = 5
_ABREAST: Final = 0.15
"""Ranks whose steps per second differ by less keep pace with one another."""

_MOSTLY: Final = 0.8
"""Share of the looks at a rank from which on it has spent its time waiting for the others."""

_AS_LONG: Final = 0.5
"""Who has not gone on for this share of the time that others have not either may be who they wait for."""

_LEAST_SAMPLES: Final = 30
"""Of where a training thread is: fewer say too little (with 30, a share is known to within 0.09)."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that others wait for. ``lost`` is seconds of each of their steps; ``why`` continues "rank 3 ..."."""

    rank: int
    lost: float
    why: str


def straggler(own: RankPace, others: Iterable[RankPace]) -> Straggler | None:
    """The rank this one waits for most; None where there is none, or nobody keeps pace with this one."""
    found = (_waited_for(own, other) for other in abreast(own, others))
    return max((slow for slow in found if slow is not None), key=lambda slow: slow.lost, default=None)


def abreast(own: RankPace, others: Iterable[RankPace]) -> list[RankPace]:
    """Those of the others that keep pace with this rank: that wait for it, or it for them."""
    if own.steps < LEAST_STEPS:
        return []
    mine = own.seconds / own.steps
    pace = [(other, other.seconds / other.steps) for other in others if other.steps >= LEAST_STEPS]
    return [other for other, theirs in pace if abs(mine - theirs) <= _ABREAST * max(mine, theirs)]


def _waited_for(own: RankPace, other: RankPace) -> Straggler | None:
    """What this rank loses to the other, and the larger part of it as the reason.

    While the other is elsewhere it does not wait where ranks wait for one another either, so `_slow` has all of the
    loss in it, and what is over `_elsewhere` is compute that takes longer.
    """
    elsewhere, slow = _elsewhere(own, other), _slow(own, other)
    if elsewhere is None or slow is None:
        return elsewhere or slow
    return replace(elsewhere if elsewhere.lost >= slow.lost / 2 else slow, lost=max(elsewhere.lost, slow.lost))


def _elsewhere(own: RankPace, other: RankPace) -> Straggler | None:
    """What the other does outside of its compute while this one is in its own."""
    if own.exposed is None or other.exposed is None:
        return None
    waiting = other.exposed / other.steps - own.exposed / own.steps
    absent = other.away / other.steps - own.away / own.steps
    lost = min(own.compute / own.steps - other.compute / other.steps, waiting + absent)
    if not own.on_gpu and own.samples >= _LEAST_SAMPLES:
        lost = min(lost, _together(own))  # the rest of its compute it was seen to work
    if lost <= 0:
        return None
    cause = f" ({other.cause})" if other.cause is not None else ""
    why = f"waits for data{cause}" if waiting >= absent else f"is busy outside of its steps{cause}"
    return Straggler(other.rank, lost, why)


def _slow(own: RankPace, other: RankPace) -> Straggler | None:
    """How much less of its compute the other spends where ranks wait for one another."""
    if min(own.samples, other.samples) < _LEAST_SAMPLES:
        return None
    lost = _together(own) - _together(other)
    if own.on_gpu or other.on_gpu:
        # A host that waits for its own GPU (`.item()`) is in no call of torch.distributed either, and delays nobody.
        # Where its GPU idles meanwhile, and the others' do not, it does.
        if own.gpu_busy is None or other.gpu_busy is None:
            return None
        lost = min(lost, (own.gpu_busy - other.gpu_busy) * own.seconds / own.steps)
    if lost <= 0:
        return None
    where = f", mostly in {other.where}" if other.where is not None else ""
    return Straggler(other.rank, lost, f"takes longer to compute a step{where}")


def _together(pace: RankPace) -> float:
    """Seconds of a step where ranks wait for one another."""
    return pace.compute / pace.steps * pace.in_sync / pace.samples


def held_up_by(own: RankPace, others: Iterable[RankPace]) -> RankPace | None:
    """Of ranks that do not go on: the one that is not where this one waits for the others; None where all are there."""
    if not own.still_in_sync:
        return None
    return next((o for o in others if o.still >= _AS_LONG * own.still and not o.still_in_sync), None)


def mostly_in_sync(samples: int, in_sync: int) -> bool:
    """Whether a rank that was looked at so many times was mostly where ranks wait for one another."""
    return samples > 0 and in_sync >= _MOSTLY * samples


def own_compute(pace: RankPace, everyone: Iterable[RankPace]) -> float:
    """Seconds of compute of a step that are a rank's own, without waiting for others in it; 0.0 before a first step."""
    if not pace.steps:
        return 0.0
    slow = straggler(pace, [other for other in everyone if other.rank != pace.rank])
    return max(0.0, pace.compute / pace.steps - (slow.lost if slow is not None else 0.0))
