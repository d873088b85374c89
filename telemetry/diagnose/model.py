"""What a step takes, and what it would take: the model behind every predicted speed-up.

A step is the largest of what computing takes, what fetching takes with so many workers, and what the cores can do at
all; and in a job whose ranks keep pace, no less than what the slowest of the others needs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.straggler import abreast, own_compute

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence

_HEADROOM: Final = 0.8
"""Workers are advised until fetching takes this share of the compute: a loader with no slack stalls on every hiccup."""

_WORTH_A_WORKER: Final = 1.01
"""One worker more has to shorten the step by more than this factor."""

_MOST_WORKERS_PER_CORE: Final = 4.0
_MOST_WORKERS: Final = 32
"""Each takes memory, and what they wait for has to serve them all: to ask for more at once is a leap in the dark."""


def step_seconds(evidence: Evidence) -> float | None:
    """Seconds of a step as it is, waits at the edges of epochs included."""
    return evidence.loop / evidence.steps if evidence.steps else None


def compute_seconds(evidence: Evidence) -> float | None:
    """Seconds of compute of one step."""
    return evidence.compute / evidence.steps if evidence.steps else None


def supply_seconds(evidence: Evidence) -> float | None:
    """Seconds from the batches of one step to those of the next, were all workers busy all the time."""
    if evidence.fetch_seconds is None or not evidence.workers:
        return None
    return evidence.fetch_seconds * evidence.batches_per_step / evidence.workers


def supply_in_order(evidence: Evidence) -> float | None:
    """The same where batches are taken in turn: a worker that is always slower than the others sets their pace."""
    supply = supply_seconds(evidence)
    if supply is None or evidence.slowest_fetch is None or not evidence.settings.get("in_order", True):
        return supply
    return max(supply, evidence.slowest_fetch * evidence.batches_per_step / evidence.workers)


def predicted_step(
    evidence: Evidence, *, fetch: float, fetch_cpu: float, workers: int, edge: float | None = None
) -> float | None:
    """Seconds of a step with so many workers.

    Args:
        evidence: gives the compute, the CPU time of the training process, and the cores: its own, and its workers'.
        fetch: seconds a worker takes for the batches of a step, alone on its core.
        fetch_cpu: how much of that it needs the core.
        workers: how many.
        edge: seconds a step of waiting at the edges of epochs; as they are now by default.
    """
    compute = compute_seconds(evidence)
    if compute is None or not evidence.steps:
        return None
    edge = evidence.edge_wait / evidence.steps if edge is None else edge
    return max(compute, fetch / workers, _on_the_cores(evidence, compute, fetch_cpu)) + edge


def _on_the_cores(evidence: Evidence, compute: float, fetch_cpu: float) -> float:
    """Seconds the cores take for a step at least, however many workers there are."""
    cpu = (evidence.process_cpu_per_step or compute) + fetch_cpu
    on_their_cores = fetch_cpu / evidence.worker_cores if evidence.worker_cores else 0.0
    return max(cpu / max(evidence.cores, 1e-9), _with_their_peers(evidence, cpu), on_their_cores)


def _with_their_peers(evidence: Evidence, cpu: float) -> float:
    """Seconds the node's cores take for a step of all its ranks: those that keep pace will need them as often."""
    now, others = step_seconds(evidence), evidence.cores_of_others
    if now is None or not others or not abreast(evidence.pace, evidence.peers):
        return 0.0
    return (cpu + others * now) / (evidence.cores + others)


def with_moving(evidence: Evidence, step: float) -> float:
    """Seconds of a step that takes ``step`` without moving its batches, which is waited for. The workers keep ahead.

    A batch is moved by its worker too (its tensors' file descriptors are asked for and sent), and that may be busy with
    another one: the more of the time, the shorter the step.
    """
    idle, busy, supply = evidence.moving_seconds, evidence.moving_from_busy_seconds, supply_seconds(evidence)
    if idle is None or busy is None or supply is None or busy <= idle:
        return step + evidence.moved / evidence.steps
    longer = (busy - idle) * evidence.batches_per_step
    step += idle * evidence.batches_per_step
    # Workers are busy for supply / then of the time: then = step + longer * supply / then.
    return (step + math.sqrt(step * step + 4 * longer * supply)) / 2


def best_workers(
    evidence: Evidence, fetch: float, fetch_cpu: float, edge: float | None = None
) -> tuple[int, float | None]:
    """The fewest workers that fetch with headroom, or as fast as the cores allow; and the step with them."""
    most = min(_MOST_WORKERS, max(1, math.ceil(_MOST_WORKERS_PER_CORE * evidence.cores)))
    compute = compute_seconds(evidence)
    if compute is None:
        return 1, None
    # Fetches that just fit under the compute do not on every hiccup: five workers of 109 ms for steps of 22 were
    # promised 5.7 times the steps per second, and brought 4.6 to 5.3.
    enough = max(_HEADROOM * compute, _on_the_cores(evidence, compute, fetch_cpu))
    workers = next((n for n in range(1, most) if fetch / n <= _WORTH_A_WORKER * enough), most)
    return workers, predicted_step(evidence, fetch=fetch, fetch_cpu=fetch_cpu, workers=workers, edge=edge)


def gain_of(evidence: Evidence, then: float, *, but: int | None = None, now: float | None = None) -> float | None:
    """The factor on steps per second, were a step to take ``then`` seconds on this rank.

    Others may take longer; ``but`` is the rank that the change is made on, where it is not this one. ``now`` is what it
    takes: `step_seconds`, where nothing outside of the loop is to change.
    """
    now = step_seconds(evidence) if now is None else now
    if now is None:
        return None
    peers = abreast(evidence.pace, evidence.peers)
    others = [own_compute(peer, (evidence.pace, *peers)) for peer in peers if peer.rank != but]
    slowest = max(others, default=0.0)
    return factor(now, max(then, slowest))


def gain_over_window(evidence: Evidence, then: float, *, now: float) -> float | None:
    """The same, of what all steps of the window take and would take; also of a window in which none has ended."""
    steps = evidence.steps
    return gain_of(evidence, then / steps, now=now / steps) if steps else factor(now, then)


def times_less(part: float, rest: float, share: float) -> int:
    """How many times less of ``part`` leaves it ``share`` of itself and the ``rest``; at least two."""
    return max(2, math.ceil(part * (1 - share) / max(share * rest, 1e-9)))


def factor(now: float, then: float) -> float | None:
    """How many times faster; None where there is nothing left to compare with."""
    return round(now / then, 2) if then > 1e-9 and now > 0 else None


def ms(seconds: float) -> str:
    """As it stands in reasons."""
    return f"{1e3 * seconds:.1f} ms"
