"""Computes from the evidence what each cause has cost in a window.

A cause is named only if the evidence shows it. Time without an explanation is ``unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from telemetry.diagnosis.stragglers import straggler

if TYPE_CHECKING:
    from telemetry.diagnosis.evidence import Evidence


# -- the thresholds ----------------------------------------------------------------------------------------------------
# `diagnosis.stragglers` and `diagnosis.hangs` have their own, and `diagnosis.stalls` those for its open and close.


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of the evidence.

    Attributes:
        starved_supply: the workers are the limit if the compute of a step is at most this share of the supply time.
        busy: the workers are also the limit if they are in fetches for at least this share of their time.
        runnable: if workers lack a core for this share of their fetch time, more workers do not help.
        cores_busy, throttled: if the kernel does not report that share, workers lack cores when all cores of the
            machine are busy to this degree, or when the CPU quota was used up in this share of its periods.
        own_load: workers that lack cores and use this share of the cores take cores from the training thread.
        ready: if batches could not be matched with their fetches and this many were ready on average while the
            training thread waited, it waited for their transfer.
        late: but not if single late batches make up at least this share of the wait.
        epoch_boundaries: minimum of epoch starts in the window whose waits are a pattern, and not single events.
        matched: if batches make up less than this share of the wait that could be matched with their fetches, the rest
            of it is unknown.
        own_collections: collections are the script's own if it has started this share of those of all objects.
        recompilations: minimum of compilations of functions that had code already. A model may need one or two.
        stuck_fetches, stuck_fetch_seconds: a worker is stuck if its fetch lasts this many times the mean of the others
            and at least this long.
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
    matched: float = 0.9
    own_collections: float = 0.5
    recompilations: int = 3
    stuck_fetches: float = 20.0
    stuck_fetch_seconds: float = 5.0


THRESHOLDS: Final = Thresholds()

NAMED_BY_SOURCE: Final = {
    "watched": "source_slow",
    "read_ahead": "source_slow",
    "training_thread": "loader_on_training_thread",
}
"""The sources of batches that are themselves the cause of waiting for them."""


# -- own time ----------------------------------------------------------------------------------------------------------
# Time that the training thread itself spends while it requests batches: the sampler, and garbage collections.
#
# This is not waiting: more workers or smaller batches do not shorten it. So it is subtracted from the waits before
# their causes are found, and added to the compute, during which workers can fetch.


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Own time within the waits of the window, in mid-epoch and at epoch boundaries, in seconds.

    Attributes:
        sampler, edge_sampler: time in the sampler of a loader with workers.
        garbage, edge_garbage: time in garbage collections.
        exposed_ratio: the exposed share of the waits; 1.0 if it is unknown.
    """

    sampler: float
    edge_sampler: float
    garbage: float
    edge_garbage: float
    exposed_ratio: float

    @property
    def all_sampler(self) -> float:
        """Seconds in the sampler, in mid-epoch and at epoch boundaries."""
        return self.sampler + self.edge_sampler

    @property
    def all_garbage(self) -> float:
        """Seconds in garbage collections, in mid-epoch and at epoch boundaries."""
        return self.garbage + self.edge_garbage


def own_time(evidence: Evidence) -> OwnTime:
    """The own time in a window. It is at most the wait, because the sampler's time is an estimate."""
    edge = min(evidence.edge_wait_seconds, evidence.wait_seconds)
    middle = evidence.wait_seconds - edge
    garbage, edge_garbage = min(evidence.garbage_wait_seconds, middle), min(evidence.edge_garbage_seconds, edge)
    sampler = edge_sampler = 0.0
    if evidence.source == "workers":
        sampler = min(evidence.sampler_seconds or 0.0, middle - garbage)
        edge_sampler = min(evidence.edge_sampler_seconds, edge - edge_garbage)
    exposed = 1.0
    if evidence.exposed_seconds is not None and evidence.wait_seconds > 0:
        exposed = min(1.0, evidence.exposed_seconds / evidence.wait_seconds)
    return OwnTime(sampler, edge_sampler, garbage, edge_garbage, exposed)


def without_own_time(evidence: Evidence) -> Evidence:
    """The same window, with the training thread's own time in ``next()`` counted as compute."""
    own, exposed, before = own_time(evidence), evidence.exposed_seconds, evidence.transfer_wait_seconds
    middle, edge = own.sampler + own.garbage, own.edge_sampler + own.edge_garbage
    if middle + edge + evidence.edge_share_of_sampler <= 0:
        return evidence
    transfer, long_fetch = max(0.0, before - middle), evidence.transfer_wait_long_fetch_seconds
    batches = evidence.steps * evidence.batches_per_step
    each = middle / batches if batches else 0.0
    return replace(
        evidence,
        wait_seconds=evidence.wait_seconds - middle - edge,
        exposed_seconds=None if exposed is None else max(0.0, exposed - own.exposed_ratio * (middle + edge)),
        compute_seconds=evidence.compute_seconds + middle + edge,
        edge_wait_seconds=max(0.0, evidence.edge_wait_seconds - edge),
        edge_share=max(0.0, evidence.edge_share - evidence.edge_share_of_sampler),
        transfer_wait_seconds=transfer,
        transfer_wait_long_fetch_seconds=long_fetch * (transfer / before if before > 0 else 0.0),
        transfer_seconds=less(evidence.transfer_seconds, each),
        transfer_from_busy_seconds=less(evidence.transfer_from_busy_seconds, each),
        sampler_seconds=0.0,
        edge_sampler_seconds=0.0,
        edge_share_of_sampler=0.0,
        garbage_wait_seconds=0.0,
        edge_garbage_seconds=0.0,
    )


def less(seconds: float | None, by: float) -> float | None:
    """Subtract seconds from a figure, but not below 0; None if the figure is unknown."""
    return None if seconds is None else max(0.0, seconds - by)


# -- what each cause has cost ------------------------------------------------------------------------------------------


def costs(evidence: Evidence) -> dict[str, float]:
    """Seconds lost in the window by cause. Causes that cost nothing are left out."""
    own, of_others = own_time(evidence), without_own_time(evidence)
    # The start of one epoch is no pattern. Those of three are, however long they are: then ``edge_share`` counts.
    many_edges = evidence.edges >= THRESHOLDS.epoch_boundaries
    slow = straggler(evidence.pace, evidence.peers, evidence.earlier_paces)
    lost = {
        "checkpoint": evidence.checkpoint_seconds,
        # Collections during hidden waits cost nothing.
        "gc_pause": max(0.0, evidence.garbage_seconds - (1 - own.exposed_ratio) * own.all_garbage),
        "recompiling": _recompiling(evidence),
        "host_bound": evidence.gpu_idle_seconds or 0.0,
        "gpu_throttled": evidence.gpu_slowed_seconds or 0.0,
        "straggler": slow.lost * evidence.steps if slow is not None else 0.0,
    }
    exposed = of_others.exposed_seconds
    if exposed is not None:
        at_edges = own.exposed_ratio * own.edge_sampler
        if not many_edges:
            at_edges = evidence.edge_share_of_sampler * evidence.loop_seconds
        # A slow sampler costs this time with any number of workers.
        lost["loader_on_training_thread"] = own.exposed_ratio * own.sampler + at_edges
        edge = 0.0
        if evidence.source == "workers":  # other sources start nothing; their first batch is like the others
            share = of_others.edge_wait_seconds / of_others.wait_seconds if of_others.wait_seconds > 0 else 0.0
            edge = exposed * min(1.0, share)
            first = first_fetch_cost(of_others)
            lost["worker_startup"] = (edge if many_edges else of_others.edge_share * evidence.loop_seconds) - first
            if first:
                limit = _what_limits_them(of_others)
                lost[limit] = lost.get(limit, 0.0) + first
        if exposed > 0 and of_others.wait_seconds > 0:
            for cause, share in _mid_epoch_shares(of_others).items():
                lost[cause] = lost.get(cause, 0.0) + (exposed - edge) * share
    lost["workers_throttled"] = lost.get("workers_throttled", 0.0) + crowded_out(evidence)
    return {cause: seconds for cause, seconds in lost.items() if seconds > 0}


def _recompiling(evidence: Evidence) -> float:
    often = (evidence.recompilations or 0) >= THRESHOLDS.recompilations
    return (evidence.recompile_seconds or 0.0) * often


def first_fetch_cost(evidence: Evidence) -> float:
    """Seconds at epoch boundaries in which the first fetches of an iterable data set take longer than others.

    Such a data set begins anew in each iteration: a buffer fills, or an index is read. The first fetch of a map-style
    data set belongs to the start of its worker. At the boundaries of workers that are kept there is nothing else, and
    the advice for `worker_startup` is about that.
    """
    kept = evidence.settings.get("persistent_workers")
    if kept or evidence.source != "workers" or not evidence.traits.iterable_data or evidence.wait_seconds <= 0:
        return 0.0
    at_edges = evidence.edge_share * evidence.loop_seconds
    if evidence.edges >= THRESHOLDS.epoch_boundaries:
        at_edges = (evidence.exposed_seconds or 0.0) * min(1.0, evidence.edge_wait_seconds / evidence.wait_seconds)
    return at_edges * evidence.first_fetch_ratio


def _mid_epoch_shares(evidence: Evidence) -> dict[str, float]:
    named = NAMED_BY_SOURCE.get(evidence.source or "")
    if named is not None:
        return {named: 1.0}
    if evidence.source != "workers" or evidence.worker_busy_ratio is None:
        return {"unknown": 1.0}
    stuck_for = _stuck_for(evidence)
    if stuck_for > 0:  # the training thread waited for the whole fetch, and no longer
        stuck = min(1.0, stuck_for / max(evidence.mid_epoch_wait_seconds, 1e-9))
        usual = replace(evidence, long_fetches=())
        rest = _mid_epoch_shares(usual) if stuck < 1 else {}
        return {"worker_stuck": stuck} | {cause: share * (1.0 - stuck) for cause, share in rest.items()}
    limited = _workers_are_the_limit(evidence)
    limit = _what_limits_them(evidence) if limited else "uneven_batches"
    if limit == "workers_throttled":
        return {limit: 1.0}  # a transfer needs a core, too
    if not limited and (evidence.worker_runnable_ratio or 0.0) >= THRESHOLDS.runnable:
        limit = "workers_throttled"  # too few cores also slow the compute, so supply and compute cannot be compared
    transfer = _transfer_share(evidence, limited=limited)
    # Part of it is run-queue delay: as large a part as of all the time in which the training thread wanted a core.
    delay, ran = evidence.own_runnable_seconds or 0.0, evidence.own_cpu_seconds
    no_core = transfer * min(1.0, delay / max(evidence.window_seconds if ran is None else delay + ran, 1e-9))
    shares = {"batch_transfer": transfer - no_core, "workers_throttled": no_core}
    # Whether the workers are the limit is known without their stamps. Why single batches are late is not.
    unmatched = 0.0 if limited else 1.0 - _matched_share(evidence)
    shares["unknown"] = unmatched
    shares[limit] = shares.get(limit, 0.0) + 1.0 - transfer - unmatched
    return {cause: share for cause, share in shares.items() if share > 0}


def _matched_share(evidence: Evidence) -> float:
    """The share of the wait for batches that could be matched with their fetches; 1.0 if none could be.

    Then other figures show the reason.
    """
    matched, waited = evidence.fetch_wait_seconds + evidence.transfer_wait_seconds, evidence.mid_epoch_wait_seconds
    share = matched / waited if matched > 0 and waited > 0 else 1.0
    return share if share < THRESHOLDS.matched else 1.0


def _transfer_share(evidence: Evidence, *, limited: bool) -> float:
    """The share of the wait for batches whose fetch had ended. ``limited``: whether the workers are the limit."""
    matched = evidence.fetch_wait_seconds + evidence.transfer_wait_seconds
    waited = evidence.mid_epoch_wait_seconds
    if matched > 0:
        # A batch that a worker transfers late because of a long fetch would have been on time behind a usual fetch.
        transfer = max(0.0, evidence.transfer_wait_seconds - evidence.transfer_wait_long_fetch_seconds) / matched
        transfer *= _matched_share(evidence)
        supply = evidence.supply_seconds
        if not limited or supply is None or not evidence.steps or waited <= 0:
            return transfer
        # While one batch is transferred the next is fetched. No step can be shorter than the workers' supply.
        short = max(0.0, supply - evidence.step_compute_seconds) * evidence.steps / waited
        return min(transfer, 1.0 - min(1.0, short))
    if limited:
        return 0.0
    lying_ready = (evidence.ready_batches or 0.0) >= THRESHOLDS.ready
    # A slow transfer delays every batch. If only single batches are late, the wait is not for the transfer.
    single = evidence.outlier_wait_seconds >= THRESHOLDS.late * max(waited, 1e-9)
    return 1.0 if lying_ready and not single else 0.0


def crowded_out(evidence: Evidence) -> float:
    """Seconds of compute in which the training thread had no core because its own workers used them.

    The workers are fast enough here, so the training thread waits for no batch. Other processes may use cores, too, so
    the workers get only their share of the delay, and none if they do not lack cores themselves.
    """
    delay = evidence.own_runnable_seconds
    if delay is None or (evidence.worker_runnable_ratio or 0.0) < THRESHOLDS.runnable:
        return 0.0
    running = (evidence.worker_busy_ratio or 0.0) * evidence.workers * (evidence.worker_cpu_ratio or 0.0)
    if running < THRESHOLDS.own_load * evidence.cores:
        return 0.0
    theirs = running / (running + (evidence.cores_of_others or 0.0))
    return theirs * delay * evidence.compute_seconds / max(evidence.window_seconds, evidence.loop_seconds, 1e-9)


def _stuck_for(evidence: Evidence) -> float:
    """Seconds of fetches in stuck workers. Fetches that have ended count, too: this window waited for them."""
    longest, fetches = max(evidence.long_fetches, default=0.0), evidence.fetches or 0
    usual = max(0.0, (evidence.fetch_seconds or 0.0) * fetches - longest) / max(1, fetches)  # without the longest one
    stuck = max(THRESHOLDS.stuck_fetch_seconds, THRESHOLDS.stuck_fetches * usual)
    return sum(seconds for seconds in evidence.long_fetches if seconds >= stuck)


def _workers_are_the_limit(evidence: Evidence) -> bool:
    if (evidence.worker_busy_ratio or 0.0) >= THRESHOLDS.busy:
        return True
    supply = evidence.supply_seconds
    return (
        bool(evidence.steps)
        and supply is not None
        and (supply >= evidence.step_compute_seconds / THRESHOLDS.starved_supply)
    )


def _what_limits_them(evidence: Evidence) -> str:
    cpu, blocked, runnable = evidence.worker_cpu_ratio, evidence.worker_blocked_ratio, evidence.worker_runnable_ratio
    if cpu is None or blocked is None:
        return "unknown"  # they are busy, but the reason is not known
    if runnable is None:  # they do not run, but it is not known whether they lack a core
        used_up = (evidence.throttled_ratio or 0.0) >= THRESHOLDS.throttled
        all_busy = (evidence.host_cpu_ratio or 0.0) >= THRESHOLDS.cores_busy
        runnable = blocked if used_up or all_busy else 0.0
    if runnable >= THRESHOLDS.runnable:
        return "workers_throttled"
    return "workers_io_bound" if blocked > cpu else "workers_cpu_bound"
