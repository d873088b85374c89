"""Time that the training thread itself spends while it requests batches: the sampler, and garbage collections.

This is not waiting: more workers or smaller batches do not shorten it. So it is subtracted from the waits before their
causes are found, and added to the compute, during which workers can fetch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Seconds in the window's waits, in mid-epoch and at epoch boundaries.

    Attributes:
        sampler_seconds, boundary_sampler_seconds: in the sampler of a loader with workers.
        garbage_seconds, boundary_garbage_seconds: in garbage collections.
        exposed_ratio: the exposed share of the waits; 1.0 if it is unknown.
    """

    sampler_seconds: float
    boundary_sampler_seconds: float
    garbage_seconds: float
    boundary_garbage_seconds: float
    exposed_ratio: float

    @property
    def all_sampler_seconds(self) -> float:
        """Seconds in the sampler."""
        return self.sampler_seconds + self.boundary_sampler_seconds

    @property
    def all_garbage_seconds(self) -> float:
        """Seconds in garbage collections."""
        return self.garbage_seconds + self.boundary_garbage_seconds


def own_time(evidence: Evidence) -> OwnTime:
    """The own time in a window. At most the wait, because the sampler's time is an estimate."""
    boundary = min(evidence.epochs.boundary_wait_seconds, evidence.wait_seconds)
    middle = evidence.wait_seconds - boundary
    garbage = min(evidence.garbage.wait_seconds, middle)
    boundary_garbage = min(evidence.garbage.boundary_wait_seconds, boundary)
    sampler = boundary_sampler = 0.0
    if evidence.source == "workers":
        sampler = min(evidence.sampler.wait_seconds or 0.0, middle - garbage)
        boundary_sampler = min(evidence.sampler.boundary_wait_seconds, boundary - boundary_garbage)
    exposed = 1.0
    if evidence.exposed_wait_seconds is not None and evidence.wait_seconds > 0:
        exposed = min(1.0, evidence.exposed_wait_seconds / evidence.wait_seconds)
    return OwnTime(sampler, boundary_sampler, garbage, boundary_garbage, exposed)


def without_own_time(evidence: Evidence) -> Evidence:
    """The same window, with the training thread's own time in ``next()`` booked as compute."""
    own, epochs, delivery = own_time(evidence), evidence.epochs, evidence.delivery
    middle = own.sampler_seconds + own.garbage_seconds
    boundary = own.boundary_sampler_seconds + own.boundary_garbage_seconds
    if middle + boundary + evidence.sampler.boundary_ratio <= 0:
        return evidence
    before = delivery.transfer_wait_seconds
    transfer = max(0.0, before - middle)
    batches = evidence.steps * evidence.batches_per_step
    each = middle / batches if batches else 0.0
    exposed = evidence.exposed_wait_seconds
    return replace(
        evidence,
        wait_seconds=evidence.wait_seconds - middle - boundary,
        exposed_wait_seconds=None if exposed is None else max(0.0, exposed - own.exposed_ratio * (middle + boundary)),
        compute_seconds=evidence.compute_seconds + middle + boundary,
        epochs=replace(
            epochs,
            boundary_wait_seconds=max(0.0, epochs.boundary_wait_seconds - boundary),
            boundary_ratio=max(0.0, epochs.boundary_ratio - evidence.sampler.boundary_ratio),
        ),
        delivery=replace(
            delivery,
            transfer_wait_seconds=transfer,
            transfer_wait_long_fetch_seconds=delivery.transfer_wait_long_fetch_seconds
            * (transfer / before if before > 0 else 0.0),
            transfer_seconds=less(delivery.transfer_seconds, each),
            transfer_from_busy_seconds=less(delivery.transfer_from_busy_seconds, each),
        ),
        sampler=replace(evidence.sampler, wait_seconds=0.0, boundary_wait_seconds=0.0, boundary_ratio=0.0),
        garbage=replace(evidence.garbage, wait_seconds=0.0, boundary_wait_seconds=0.0),
    )


def less(seconds: float | None, by: float) -> float | None:
    """Subtract seconds from a figure that may be unknown. Never below 0."""
    return None if seconds is None else max(0.0, seconds - by)
