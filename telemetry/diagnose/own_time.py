"""What the training thread does itself while it asks for batches: the sampler, and collections.

It is no waiting. Nobody else could make it shorter: not more workers, and not smaller batches. So it is taken out of
the waits before those are explained, and stands beside the compute, which workers can fetch behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Seconds of the window's waits: in mid-epoch, and at the edges of epochs.

    Attributes:
        sampler, edge_sampler: in the sampler of a loader with workers.
        garbage, edge_garbage: in collections.
        felt: the share of the waits that is exposed; 1.0 where that is not known.
    """

    sampler: float
    edge_sampler: float
    garbage: float
    edge_garbage: float
    felt: float

    @property
    def in_sampler(self) -> float:
        """Seconds in the sampler."""
        return self.sampler + self.edge_sampler

    @property
    def collecting(self) -> float:
        """Seconds in collections."""
        return self.garbage + self.edge_garbage


def own_time(evidence: Evidence) -> OwnTime:
    """Never more than was waited: what the sampler took is an estimate."""
    edge = min(evidence.edge_wait, evidence.wait)
    middle = evidence.wait - edge
    garbage, edge_garbage = min(evidence.garbage_wait, middle), min(evidence.edge_garbage, edge)
    sampler = edge_sampler = 0.0
    if evidence.source == "workers":
        sampler = min(evidence.sampler or 0.0, middle - garbage)
        edge_sampler = min(evidence.edge_sampler, edge - edge_garbage)
    felt = 1.0
    if evidence.exposed is not None and evidence.wait > 0:
        felt = min(1.0, evidence.exposed / evidence.wait)
    return OwnTime(sampler, edge_sampler, garbage, edge_garbage, felt)


def without_own_time(evidence: Evidence) -> Evidence:
    """The same window, with the training thread's own time in ``next()`` booked as compute."""
    own = own_time(evidence)
    middle, edge = own.sampler + own.garbage, own.edge_sampler + own.edge_garbage
    if middle + edge + evidence.edge_share_of_sampler <= 0:
        return evidence
    moved = max(0.0, evidence.moved - middle)
    batches = evidence.steps * evidence.batches_per_step
    each = middle / batches if batches else 0.0
    return replace(
        evidence,
        wait=evidence.wait - middle - edge,
        exposed=None if evidence.exposed is None else max(0.0, evidence.exposed - own.felt * (middle + edge)),
        edge_wait=max(0.0, evidence.edge_wait - edge),
        compute=evidence.compute + middle + edge,
        moved=moved,
        moved_from_long=evidence.moved_from_long * (moved / evidence.moved if evidence.moved > 0 else 0.0),
        moving_seconds=_less(evidence.moving_seconds, each),
        moving_from_busy_seconds=_less(evidence.moving_from_busy_seconds, each),
        edge_share=max(0.0, evidence.edge_share - evidence.edge_share_of_sampler),
        edge_share_of_sampler=0.0,
        sampler=0.0,
        edge_sampler=0.0,
        garbage_wait=0.0,
        edge_garbage=0.0,
    )


def _less(seconds: float | None, by: float) -> float | None:
    return None if seconds is None else max(0.0, seconds - by)
