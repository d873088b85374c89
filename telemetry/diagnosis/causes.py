"""Names the cause: computes from the evidence what each cause has cost in a window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.model import compute_seconds, supply_seconds
from telemetry.diagnosis.stragglers import straggler
from telemetry.records import CAUSES
from telemetry.util.text import rounded_percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.diagnosis.evidence import Evidence
    from telemetry.records import Advice


# -- own time ----------------------------------------------------------------------------------------------------------
# Time that the training thread itself spends while it requests batches: the sampler, and garbage collections.
#
# This is not waiting: more workers or smaller batches do not shorten it. So it is subtracted from the waits before
# their causes are found, and added to the compute, during which workers can fetch.


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


# -- names the cause: computes from the evidence what each cause has cost in a window ----------------------------------
# The thresholds are in `Thresholds`. Those of stragglers and of hangs are in `diagnosis.stragglers` and
# `diagnosis.hangs`, next to the code that checks them. A cause is named only if the evidence shows it. Time without an
# explanation is ``unknown``.


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of the evidence.

    Attributes:
        starved_supply: the workers are the limit if the compute of a step is at most this share of the supply time.
        busy: the workers are also the limit if they are in fetches for at least this share of their time.
        runnable: if workers are without a core for this share of their fetch time, more workers do not help.
        cores_busy: if the kernel does not report that share: all cores of the machine are busy to this degree.
        throttled: ... or the CPU quota was used up in this share of its periods.
        own_load: workers that lack cores and use this share of the cores take cores from the training thread.
        ready: if batches could not be matched with their fetches: this many were ready on average while the training
            thread waited. Then the wait is for their transfer.
        late: ... unless single late batches make up at least this share of the wait.
        epoch_boundaries: from this many epoch starts in the window on, their waits are a pattern. Fewer are single
            events.
        stuck_fetches: a fetch that lasts this many times the mean of the others ...
        stuck_fetch_seconds: ... and at least this long means that its worker is stuck.
    """

    starved_supply: float = 0.85
    busy: float = 0.85
    runnable: float = 0.35
    cores_busy: float = 0.95
    throttled: float = 0.5
    own_load: float = 0.4
    ready: float = 0.5
    late: float = 0.5
    epoch_boundaries: int = 2
    stuck_fetches: float = 20.0
    stuck_fetch_seconds: float = 5.0


THRESHOLDS: Final = Thresholds()

WAITS: Final = frozenset(CAUSES) - {"straggler", "checkpoint", "gc_pause", "host_bound", "gpu_throttled"}
"""The causes of exposed wait. A run is starved by the sum of them, however many contribute."""

NAMED_BY_SOURCE: Final = {
    "watched": "source_slow",
    "read_ahead": "source_slow",
    "training_thread": "loader_on_training_thread",
}
"""If batches come from one of these sources, the source alone is the cause of waiting for them."""


def costs(evidence: Evidence) -> dict[str, float]:
    """Seconds lost in the window by cause. Causes that cost nothing are left out."""
    own, of_others = own_time(evidence), without_own_time(evidence)
    lost = {
        "checkpoint": evidence.checkpoints.seconds,
        # Collections during hidden waits cost nothing.
        "gc_pause": max(0.0, evidence.garbage.seconds - (1 - own.exposed_ratio) * own.all_garbage_seconds),
        "host_bound": evidence.gpu.idle_seconds or 0.0,
        "gpu_throttled": evidence.gpu.slowed_seconds or 0.0,
    }
    slow = straggler(evidence.pace, evidence.peers, evidence.earlier_paces)
    if slow is not None:
        lost["straggler"] = slow.lost * evidence.steps
    exposed = of_others.exposed_wait_seconds
    if exposed is not None:
        lost["loader_on_training_thread"] = (
            own.exposed_ratio * own.sampler_seconds
        )  # a slow sampler costs this time with any number of workers
        if evidence.epochs.boundaries >= THRESHOLDS.epoch_boundaries:
            lost["loader_on_training_thread"] += own.exposed_ratio * own.boundary_sampler_seconds
        else:
            lost["loader_on_training_thread"] += evidence.sampler.boundary_ratio * evidence.loop_seconds
    if (
        exposed is not None
        and evidence.source == "workers"
        and evidence.epochs.boundaries < THRESHOLDS.epoch_boundaries
    ):
        # The start of one epoch is no pattern, but that of three is, however long they are.
        lost["worker_startup"] = of_others.epochs.boundary_ratio * evidence.loop_seconds
    if exposed is not None and exposed > 0 and of_others.wait_seconds > 0:
        boundary = min(exposed, exposed * min(1.0, of_others.epochs.boundary_wait_seconds / of_others.wait_seconds))
        if evidence.source != "workers":
            boundary = 0.0  # nothing is started; the first batch is a batch like the others
        elif evidence.epochs.boundaries < THRESHOLDS.epoch_boundaries:
            exposed, boundary = exposed - boundary, 0.0  # `boundary_ratio` has counted it
        else:
            lost["worker_startup"] = boundary
        for cause, share in _mid_epoch_shares(of_others).items():
            lost[cause] = lost.get(cause, 0.0) + (exposed - boundary) * share
    crowded = crowded_out(evidence)
    if crowded > 0:
        lost["workers_throttled"] = lost.get("workers_throttled", 0.0) + crowded
    return {cause: seconds for cause, seconds in lost.items() if seconds > 0}


def _mid_epoch_shares(evidence: Evidence) -> dict[str, float]:
    """The causes of the wait in mid-epoch, and the share of each."""
    named = NAMED_BY_SOURCE.get(evidence.source or "")
    if named is not None:
        return {named: 1.0}
    if evidence.source != "workers" or evidence.workers.busy_ratio is None:
        return {"unknown": 1.0}
    stuck_for = _stuck_for(evidence)
    if stuck_for > 0:  # the training thread waited for the whole fetch, and no longer
        stuck = min(1.0, stuck_for / max(evidence.mid_epoch_wait_seconds, 1e-9))
        without = replace(evidence, workers=replace(evidence.workers, long_fetch_seconds=()))
        rest = _mid_epoch_shares(without) if stuck < 1 else {}
        return {"worker_stuck": stuck} | {cause: share * (1.0 - stuck) for cause, share in rest.items()}
    limited = _workers_are_the_limit(evidence)
    limit = _what_limits_them(evidence) if limited else "uneven_batches"
    if limit == "workers_throttled":
        return {limit: 1.0}  # a transfer needs a core, too
    if (
        not limited
        and evidence.workers.runnable_ratio is not None
        and evidence.workers.runnable_ratio >= THRESHOLDS.runnable
    ):
        limit = "workers_throttled"  # too few cores also slow the compute, so supply and compute cannot be compared
    transfer = _transfer_share(evidence)
    # Part of the transfer share is run-queue delay: as much as the training thread had in the whole window.
    no_core = transfer * min(1.0, (evidence.cpu.run_queue_delay_seconds or 0.0) / max(evidence.seconds, 1e-9))
    shares = {"batch_transfer": transfer - no_core, "workers_throttled": no_core}
    shares[limit] = shares.get(limit, 0.0) + 1.0 - transfer
    return {cause: share for cause, share in shares.items() if share > 0}


def _transfer_share(evidence: Evidence) -> float:
    """The share of the wait for batches whose fetch had ended."""
    matched = evidence.delivery.fetch_wait_seconds + evidence.delivery.transfer_wait_seconds
    limited = _workers_are_the_limit(evidence)
    if matched > 0:
        # A batch that a worker transfers late because of a long fetch would have been on time behind a usual fetch.
        transfer = (
            max(0.0, evidence.delivery.transfer_wait_seconds - evidence.delivery.transfer_wait_long_fetch_seconds)
            / matched
        )
        # While one batch is transferred the next is fetched. No step can be shorter than the workers' supply.
        return min(transfer, 1.0 - _short_of_supply(evidence)) if limited else transfer
    if limited:
        return 0.0
    lying_ready = evidence.delivery.ready_batches is not None and evidence.delivery.ready_batches >= THRESHOLDS.ready
    # A slow transfer delays every batch. If only single batches are late, the wait is not for the transfer.
    single = evidence.delivery.outlier_wait_seconds >= THRESHOLDS.late * max(evidence.mid_epoch_wait_seconds, 1e-9)
    return 1.0 if lying_ready and not single else 0.0


def _short_of_supply(evidence: Evidence) -> float:
    """The share of the mid-epoch wait because the workers cannot make batches as fast as they are used."""
    supply, compute = supply_seconds(evidence), compute_seconds(evidence)
    waited = evidence.mid_epoch_wait_seconds
    if supply is None or compute is None or waited <= 0:
        return 0.0
    return min(1.0, max(0.0, supply - compute) * evidence.steps / waited)


def crowded_out(evidence: Evidence) -> float:
    """Seconds of compute in which the training thread had no core because its own workers used them.

    The workers are fast enough, so the training thread waits for no batch. Other processes may use cores, too. So the
    workers get only their share of the delay, and none if they do not lack cores themselves.
    """
    if (
        evidence.cpu.run_queue_delay_seconds is None
        or evidence.workers.runnable_ratio is None
        or evidence.workers.runnable_ratio < THRESHOLDS.runnable
    ):
        return 0.0
    running = (evidence.workers.busy_ratio or 0.0) * evidence.workers.count * (evidence.workers.cpu_ratio or 0.0)
    if running < THRESHOLDS.own_load * evidence.cpu.cores:
        return 0.0
    theirs = running / (running + (evidence.cpu.cores_of_others or 0.0))
    return (
        theirs
        * evidence.cpu.run_queue_delay_seconds
        * evidence.compute_seconds
        / max(evidence.seconds, evidence.loop_seconds, 1e-9)
    )


def _stuck_for(evidence: Evidence) -> float:
    """Seconds of fetches in stuck workers. Ended fetches count, too: they were waited for in this window."""
    longest, fetches = max(evidence.workers.long_fetch_seconds, default=0.0), evidence.workers.fetches or 0
    usual = max(0.0, (evidence.workers.fetch_seconds or 0.0) * fetches - longest) / max(
        1, fetches
    )  # without the longest one
    stuck = max(THRESHOLDS.stuck_fetch_seconds, THRESHOLDS.stuck_fetches * usual)
    return sum(seconds for seconds in evidence.workers.long_fetch_seconds if seconds >= stuck)


def _workers_are_the_limit(evidence: Evidence) -> bool:
    supply, compute = supply_seconds(evidence), compute_seconds(evidence)
    if evidence.workers.busy_ratio is not None and evidence.workers.busy_ratio >= THRESHOLDS.busy:
        return True
    return supply is not None and compute is not None and supply >= compute / THRESHOLDS.starved_supply


def _what_limits_them(evidence: Evidence) -> str:
    cpu, blocked = evidence.workers.cpu_ratio, evidence.workers.blocked_ratio
    if cpu is None or blocked is None:
        return "unknown"  # busy, but it is not known with what
    runnable = evidence.workers.runnable_ratio
    if runnable is None:  # not running, and not known whether for lack of a core
        used_up = (evidence.cpu.throttled_ratio or 0.0) >= THRESHOLDS.throttled
        without_core = blocked >= THRESHOLDS.runnable and (
            used_up or (evidence.cpu.host_ratio or 0.0) >= THRESHOLDS.cores_busy
        )
    else:
        without_core = runnable >= THRESHOLDS.runnable
    if without_core:
        return "workers_throttled"
    return "workers_io_bound" if blocked > cpu else "workers_cpu_bound"


# -- two causes at once: those that cost nearly as much as the one that a stall is named after -------------------------

_SIMILAR: Final = 0.5
"""A cause is also named if it costs at least this share of what the first one costs ..."""

_MIN_SHARE: Final = 0.1
"""... and this share of the time."""

_MAX_NAMED: Final = 2


@dataclass(frozen=True, slots=True)
class CauseShare:
    """A cause, the seconds that it cost in the window, and their share of its training loop and checkpoints."""

    cause: str
    seconds: float
    share: float


def shares_of(cause: str, evidence: Evidence) -> tuple[CauseShare, ...]:
    """The cause of a stall, and those of similar size after it, the largest first.

    Args:
        cause: the cause that the stall is named after. It stays the first, even if another costs more in this window.
        evidence: the window.
    """
    whole = evidence.loop_and_checkpoint_seconds
    lost = costs(evidence)
    if whole <= 0 or cause not in lost:
        return ()
    shares = [CauseShare(name, seconds, min(1.0, seconds / whole)) for name, seconds in lost.items()]
    (first,) = [share for share in shares if share.cause == cause]
    similar = [
        share
        for share in shares
        if share.cause not in {cause, "unknown"}
        and share.seconds >= _SIMILAR * first.seconds
        and share.share >= _MIN_SHARE
    ]
    return (first, *sorted(similar, key=lambda share: -share.seconds)[:_MAX_NAMED])


def with_what_remains(advice: Sequence[Advice], others: Sequence[CauseShare], evidence: Evidence) -> tuple[Advice, ...]:
    """Advice for the first cause that also says what the others take after it was followed."""
    if not others:
        return tuple(advice)
    return tuple(replace(one, because=f"{one.because}; {_remains(one, others, evidence)}") for one in advice)


def _remains(advice: Advice, others: Sequence[CauseShare], evidence: Evidence) -> str:
    if advice.predicted_speedup is None:
        return f"{_named((share.cause, share.share) for share in others)} of the time remain"
    whole = evidence.loop_and_checkpoint_seconds / advice.predicted_speedup
    left = _named((share.cause, min(1.0, share.seconds / whole)) for share in others)
    return f"afterwards {left} of the time remain"


def _named(shares: Iterable[tuple[str, float]]) -> str:
    return " and ".join(f"{cause} with {rounded_percent(share)}" for cause, share in shares)
