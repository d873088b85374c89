"""Name the cause: what each cause has cost in a window, from the evidence.

Every threshold stands in `Thresholds`. A cause is named only on evidence of its own; lost time that nothing explains
is ``unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the evidence has to show.

    Attributes:
        starved_supply: workers deliver a batch in at least this share of a step's compute: they are the limit.
        busy: ... or they are in fetches for at least this share of their time.
        runnable: this share of the workers' fetch time without a core: more workers would not help.
        ready: this many batches ready on average while the training thread waits: they wait to be moved.
        late: single late batches make at least this share of the waiting: they are the trouble, not all of them.
        edges: so many iterations begun in the window before their waits are a pattern, and no single start.
        stuck_fetches: a fetch in progress that lasts this many times the mean ...
        stuck_seconds: ... and at least so long is stuck.
    """

    starved_supply: float = 0.85
    busy: float = 0.85
    runnable: float = 0.35
    ready: float = 0.5
    late: float = 0.5
    edges: int = 2
    stuck_fetches: float = 20.0
    stuck_seconds: float = 5.0


THRESHOLDS: Final = Thresholds()


def costs(evidence: Evidence, at: Thresholds = THRESHOLDS) -> dict[str, float]:
    """Seconds of the window lost, by cause; causes that cost nothing are left out."""
    lost = {"checkpoint": evidence.checkpoint, "gc_pause": evidence.garbage}
    exposed = evidence.exposed
    if exposed is not None and exposed > 0 and evidence.wait > 0:
        edge = min(exposed, exposed * min(1.0, evidence.edge_wait / evidence.wait))
        if evidence.source != "workers":
            edge = 0.0  # nothing is started; the first batch is a batch like the others
        elif evidence.edges < at.edges:
            exposed, edge = exposed - edge, 0.0  # the start of one epoch is no pattern
        else:
            lost["worker_startup"] = edge
        lost[steady_cause(evidence, at)] = exposed - edge
    return {cause: seconds for cause, seconds in lost.items() if seconds > 0}


def steady_cause(evidence: Evidence, at: Thresholds = THRESHOLDS) -> str:
    """Why the training thread waits in mid-epoch."""
    named = {"watched": "source_slow", "training_thread": "loader_on_training_thread"}.get(evidence.source or "")
    if named is not None:
        return named
    if evidence.source != "workers" or evidence.busy_ratio is None:
        return "unknown"
    if _stuck(evidence, at):
        return "worker_stuck"
    if _workers_are_the_limit(evidence, at):
        return _what_limits_them(evidence, at)
    lying_ready = evidence.ready_batches is not None and evidence.ready_batches >= at.ready
    return "batch_transfer" if lying_ready and not _late(evidence, at) else "uneven_batches"


def _late(evidence: Evidence, at: Thresholds) -> bool:
    """Whether single late batches make most of the waiting in mid-epoch. Moving a batch takes every batch its time."""
    return evidence.late_wait >= at.late * max(evidence.wait - evidence.edge_wait, 1e-9)


def supply_seconds(evidence: Evidence) -> float | None:
    """Seconds from one finished batch to the next, were all workers busy all the time."""
    if evidence.fetch_seconds is None or not evidence.workers:
        return None
    return evidence.fetch_seconds / evidence.workers


def compute_seconds(evidence: Evidence) -> float | None:
    """Seconds of compute of one step."""
    return evidence.compute / evidence.steps if evidence.steps else None


def _stuck(evidence: Evidence, at: Thresholds) -> bool:
    usual = evidence.fetch_seconds or 0.0
    return evidence.stuck_seconds >= max(at.stuck_seconds, at.stuck_fetches * usual)


def _workers_are_the_limit(evidence: Evidence, at: Thresholds) -> bool:
    supply, compute = supply_seconds(evidence), compute_seconds(evidence)
    if evidence.busy_ratio is not None and evidence.busy_ratio >= at.busy:
        return True
    return supply is not None and compute is not None and supply >= compute / at.starved_supply


def _what_limits_them(evidence: Evidence, at: Thresholds) -> str:
    if evidence.cpu_share is None or evidence.runnable_share is None or evidence.blocked_share is None:
        return "unknown"  # the kernel keeps no schedstat: busy, but nobody can tell with what
    if evidence.runnable_share >= at.runnable:
        return "workers_throttled"
    return "workers_io_bound" if evidence.blocked_share > evidence.cpu_share else "workers_cpu_bound"
