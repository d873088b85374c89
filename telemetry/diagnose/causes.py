"""Name the cause: what each cause has cost in a window, from the evidence.

The thresholds stand in `Thresholds`; those of ranks that wait for one another, and of a run that is stuck, beside their
signs in `straggler` and `stuck`. A cause is named only on evidence of its own; lost time that nothing explains
is ``unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.model import compute_seconds, supply_seconds
from telemetry.diagnose.own_time import own_time, without_own_time
from telemetry.diagnose.straggler import straggler
from telemetry.records import CAUSES

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the evidence has to show.

    Attributes:
        starved_supply: workers deliver a batch in at least this share of a step's compute: they are the limit.
        busy: ... or they are in fetches for at least this share of their time.
        runnable: this share of the workers' fetch time without a core: more workers would not help.
        cores_busy: where the kernel does not tell that share: all cores of the machine are busy to this degree.
        throttled: ... or the CPU quota was used up in this share of its periods.
        own_load: workers that are short of cores and run on this share of them crowd out the training thread.
        ready: where batches could not be matched with their fetches: this many lay ready on average while the
            training thread waited, so they wait to be moved.
        late: ... unless single late batches make at least this share of the waiting.
        edges: so many iterations begun in the window before their waits are a pattern, and no single start.
        stuck_fetches: a fetch that lasts this many times the mean of the others ...
        stuck_seconds: ... and at least so long is stuck.
    """

    starved_supply: float = 0.85
    busy: float = 0.85
    runnable: float = 0.35
    cores_busy: float = 0.95
    throttled: float = 0.5
    own_load: float = 0.4
    ready: float = 0.5
    late: float = 0.5
    edges: int = 2
    stuck_fetches: float = 20.0
    stuck_seconds: float = 5.0


THRESHOLDS: Final = Thresholds()

WAITS: Final = frozenset(CAUSES) - {"straggler", "checkpoint", "gc_pause", "host_bound", "gpu_throttled"}
"""What an exposed wait is put down to. A run starves of all of them together, however many share it."""

NAMED_BY_SOURCE: Final = {
    "watched": "source_slow",
    "read_ahead": "source_slow",
    "training_thread": "loader_on_training_thread",
}
"""Where batches come from, where that alone is the cause of waiting for them."""


def costs(evidence: Evidence, at: Thresholds = THRESHOLDS) -> dict[str, float]:
    """Seconds of the window lost, by cause; causes that cost nothing are left out."""
    own, of_others = own_time(evidence), without_own_time(evidence)
    lost = {
        "checkpoint": evidence.checkpoint,
        "gc_pause": max(0.0, evidence.garbage - (1 - own.felt) * own.collecting),  # without what the GPU did not feel
        "host_bound": evidence.gpu_idle or 0.0,
        "gpu_throttled": evidence.gpu_slowed or 0.0,
    }
    slow = straggler(evidence.pace, evidence.peers)
    if slow is not None:
        lost["straggler"] = slow.lost * evidence.steps
    exposed = of_others.exposed
    if exposed is not None:
        lost["loader_on_training_thread"] = own.felt * own.sampler  # a sampler, whatever the workers do
        if evidence.edges >= at.edges:
            lost["loader_on_training_thread"] += own.felt * own.edge_sampler
        else:
            lost["loader_on_training_thread"] += evidence.edge_share_of_sampler * evidence.loop
    if exposed is not None and evidence.source == "workers" and evidence.edges < at.edges:
        # The start of one epoch is no pattern, but that of three is, however long they are.
        lost["worker_startup"] = of_others.edge_share * evidence.loop
    if exposed is not None and exposed > 0 and of_others.wait > 0:
        edge = min(exposed, exposed * min(1.0, of_others.edge_wait / of_others.wait))
        if evidence.source != "workers":
            edge = 0.0  # nothing is started; the first batch is a batch like the others
        elif evidence.edges < at.edges:
            exposed, edge = exposed - edge, 0.0  # it is in that already
        else:
            lost["worker_startup"] = edge
        for cause, share in _steady(of_others, at).items():
            lost[cause] = lost.get(cause, 0.0) + (exposed - edge) * share
    crowded = crowded_out(evidence, at)
    if crowded > 0:
        lost["workers_throttled"] = lost.get("workers_throttled", 0.0) + crowded
    return {cause: seconds for cause, seconds in lost.items() if seconds > 0}


def steady_cause(evidence: Evidence, at: Thresholds = THRESHOLDS) -> str:
    """Why the training thread waits in mid-epoch: what makes most of it."""
    shares = _steady(evidence, at)
    return max(shares, key=lambda cause: shares[cause])


def _steady(evidence: Evidence, at: Thresholds) -> dict[str, float]:
    """The causes of waiting in mid-epoch, and the share of each."""
    named = NAMED_BY_SOURCE.get(evidence.source or "")
    if named is not None:
        return {named: 1.0}
    if evidence.source != "workers" or evidence.busy_ratio is None:
        return {"unknown": 1.0}
    stuck_for = _stuck_for(evidence, at)
    if stuck_for > 0:  # each was waited for from its begin to its end, and no longer
        stuck = min(1.0, stuck_for / max(evidence.wait - evidence.edge_wait, 1e-9))
        rest = _steady(replace(evidence, long_fetches=()), at) if stuck < 1 else {}
        return {"worker_stuck": stuck} | {cause: share * (1.0 - stuck) for cause, share in rest.items()}
    limited = _workers_are_the_limit(evidence, at)
    limit = _what_limits_them(evidence, at) if limited else "uneven_batches"
    if limit == "workers_throttled":
        return {limit: 1.0}  # moving a batch takes a core too
    if not limited and evidence.runnable_share is not None and evidence.runnable_share >= at.runnable:
        limit = "workers_throttled"  # want of cores makes compute longer too: to compare it with supply says nothing
    moved = _moved_share(evidence, at)
    # Of the time in which a batch was on its way, the training thread had no core for as much as it had none at all.
    no_core = moved * min(1.0, (evidence.own_runnable or 0.0) / max(evidence.seconds, 1e-9))
    shares = {"batch_transfer": moved - no_core, "workers_throttled": no_core}
    shares[limit] = shares.get(limit, 0.0) + 1.0 - moved
    return {cause: share for cause, share in shares.items() if share > 0}


def _moved_share(evidence: Evidence, at: Thresholds) -> float:
    """How much of the waiting was for batches that were made already."""
    matched = evidence.late + evidence.moved
    limited = _workers_are_the_limit(evidence, at)
    if matched > 0:
        # A batch that its worker, in a long fetch, hands over late would have come with ease behind a usual one.
        moved = max(0.0, evidence.moved - evidence.moved_from_long) / matched
        # While one batch is moved the next is fetched: no step can be shorter than the workers' supply of batches.
        return min(moved, 1.0 - _short_of_supply(evidence)) if limited else moved
    if limited:
        return 0.0
    lying_ready = evidence.ready_batches is not None and evidence.ready_batches >= at.ready
    # Moving a batch takes every batch its time; where single ones are late, they are waited for, and not moved.
    single = evidence.late_wait >= at.late * max(evidence.wait - evidence.edge_wait, 1e-9)
    return 1.0 if lying_ready and not single else 0.0


def _short_of_supply(evidence: Evidence) -> float:
    """Share of the waiting in mid-epoch that comes from workers that cannot make batches as fast as they are used."""
    supply, compute = supply_seconds(evidence), compute_seconds(evidence)
    waited = evidence.wait - evidence.edge_wait
    if supply is None or compute is None or waited <= 0:
        return 0.0
    return min(1.0, max(0.0, supply - compute) * evidence.steps / waited)


def crowded_out(evidence: Evidence, at: Thresholds = THRESHOLDS) -> float:
    """Seconds of compute in which the training thread had no core because its own workers were on them.

    They keep ahead of it, so it waits for no batch. What others on the machine take of the cores is none of this run's
    doing: the workers answer for their part of it, and for none where they are not short of cores themselves.
    """
    if evidence.own_runnable is None or evidence.runnable_share is None or evidence.runnable_share < at.runnable:
        return 0.0
    running = (evidence.busy_ratio or 0.0) * evidence.workers * (evidence.cpu_share or 0.0)
    if running < at.own_load * evidence.cores:
        return 0.0
    theirs = running / (running + (evidence.cores_of_others or 0.0))
    return theirs * evidence.own_runnable * evidence.compute / max(evidence.seconds, evidence.loop, 1e-9)


def _stuck_for(evidence: Evidence, at: Thresholds) -> float:
    """Seconds that fetches of the window were stuck, those that are over included: the wait for them has not been."""
    longest, fetches = max(evidence.long_fetches, default=0.0), evidence.fetches or 0
    usual = max(0.0, (evidence.fetch_seconds or 0.0) * fetches - longest) / max(1, fetches)  # without the longest
    stuck = max(at.stuck_seconds, at.stuck_fetches * usual)
    return sum(seconds for seconds in evidence.long_fetches if seconds >= stuck)


def _workers_are_the_limit(evidence: Evidence, at: Thresholds) -> bool:
    supply, compute = supply_seconds(evidence), compute_seconds(evidence)
    if evidence.busy_ratio is not None and evidence.busy_ratio >= at.busy:
        return True
    return supply is not None and compute is not None and supply >= compute / at.starved_supply


def _what_limits_them(evidence: Evidence, at: Thresholds) -> str:
    cpu, blocked = evidence.cpu_share, evidence.blocked_share
    if cpu is None or blocked is None:
        return "unknown"  # busy, but nobody can tell with what
    runnable = evidence.runnable_share
    if runnable is None:  # not running, and nobody can tell whether for want of a core
        used_up = (evidence.throttled_ratio or 0.0) >= at.throttled
        without_core = blocked >= at.runnable and (used_up or (evidence.host_cpu_ratio or 0.0) >= at.cores_busy)
    else:
        without_core = runnable >= at.runnable
    if without_core:
        return "workers_throttled"
    return "workers_io_bound" if blocked > cpu else "workers_cpu_bound"
