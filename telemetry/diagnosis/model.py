"""The model of every predicted speed-up: the seconds of a step now, and after a change.

All but `gain_over_window` need a window in which a step has ended.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.diagnosis.stragglers import at_same_pace, own_compute

if TYPE_CHECKING:
    from telemetry.diagnosis.evidence import Evidence

_HEADROOM: Final = 0.8
"""Workers are added until fetching takes this share of the compute. Without headroom, every delay stalls the loop."""

_WORTH_A_WORKER: Final = 1.01
"""A further worker must shorten the step by more than this factor."""

MAX_WORKERS_PER_CORE: Final = 4
MAX_WORKERS: Final = 32
"""Limits of the advice: each worker takes memory, and the storage has to serve all of them."""


def supply_in_order(evidence: Evidence) -> float | None:
    """`supply_seconds` for batches that are taken in order: the slowest worker limits all."""
    supply, slowest = evidence.supply_seconds, evidence.slowest_fetch_seconds
    if supply is None or slowest is None or not evidence.settings.get("in_order", True):
        return supply
    return max(supply, slowest * evidence.batches_per_step / evidence.workers)


class Fetch(NamedTuple):
    """Seconds and CPU seconds that a worker with a core of its own takes for the batches of a step."""

    seconds: float
    cpu_seconds: float


def predicted_step(evidence: Evidence, fetch: Fetch, workers: int, boundary: float | None = None) -> float:
    """Predicted seconds of a step with a number of workers.

    The evidence has the compute, the CPU time of the training process, and the cores that it and its workers may use.
    ``boundary``: seconds per step of waiting at epoch boundaries; by default as measured.
    """
    boundary = evidence.edge_wait_seconds / evidence.steps if boundary is None else boundary
    supply, on_the_cores = fetch.seconds / workers, _on_the_cores(evidence, fetch)
    return max(evidence.step_compute_seconds, supply, on_the_cores) + boundary


def alone_in_worker(evidence: Evidence) -> Fetch | None:
    """The fetch of a worker with a core of its own; None if fetches were not timed.

    Then nothing about workers can be predicted.
    """
    fetch, cpu = evidence.fetch_seconds, evidence.fetch_cpu_seconds
    if fetch is None:
        return None
    alone = fetch * (1 - (evidence.worker_runnable_ratio or 0.0))
    return Fetch(alone * evidence.batches_per_step, (fetch if cpu is None else cpu) * evidence.batches_per_step)


def step_with(evidence: Evidence, workers: int) -> float | None:
    """Predicted seconds of a step with a number of workers; None without a step, or if fetches were not timed."""
    fetch = alone_in_worker(evidence)
    return predicted_step(evidence, fetch, workers) if fetch is not None and evidence.steps else None


def _on_the_cores(evidence: Evidence, fetch: Fetch) -> float:
    """Minimum seconds of a step on the available cores, with any number of workers."""
    cpu = (evidence.process_cpu_per_step_seconds or evidence.step_compute_seconds) + fetch.cpu_seconds
    on_their_cores = fetch.cpu_seconds / evidence.worker_cores if evidence.worker_cores else 0.0
    # Ranks of this node that keep pace need the cores equally often.
    beside_peers = at_same_pace(evidence.pace, (peer for peer in evidence.peers if peer.node is None))
    with_peers = _with_all_others(evidence, cpu) if beside_peers else 0.0
    return max(cpu / max(evidence.cores, 1e-9), with_peers, on_their_cores)


def _with_all_others(evidence: Evidence, cpu: float) -> float:
    """Least seconds of a step if the other processes of the machine use as much CPU time for each step as now."""
    others = evidence.cores_of_others
    return (cpu + others * evidence.step_seconds) / (evidence.cores + others) if others else 0.0


def low_gain(evidence: Evidence, then: float, fetch: Fetch) -> float | None:
    """The low end of the factor on the steps per second that more fetches at a time bring; None if it is no lower.

    Fetches wait for storage. If a process of this machine serves it, that process needs CPU time for each step. It is
    not known which one that is, so the low end counts all of them. ``then``: the predicted seconds of a step.
    """
    cpu = (evidence.process_cpu_per_step_seconds or evidence.step_compute_seconds) + fetch.cpu_seconds
    longest = min(evidence.step_seconds, _with_all_others(evidence, cpu))
    low, high = gain_of(evidence, max(then, longest)), gain_of(evidence, then)
    return low if low is not None and high is not None and low < high else None


def with_transfer(evidence: Evidence, step: float) -> float:
    """Add the transfer of its batches to the seconds of a step, for workers that are fast enough.

    A transfer needs the worker, too, because it sends the file descriptors of the tensors. A busy worker answers later.
    The shorter the step, the larger the share of time in which the worker is busy.
    """
    idle, busy, supply = evidence.transfer_seconds, evidence.transfer_from_busy_seconds, evidence.supply_seconds
    if idle is None or busy is None or supply is None or busy <= idle:
        return step + evidence.transfer_wait_seconds / evidence.steps
    longer = (busy - idle) * evidence.batches_per_step
    step += idle * evidence.batches_per_step
    # Workers are busy for the share supply / then of the time, so then = step + longer * supply / then.
    return (step + math.sqrt(step * step + 4 * longer * supply)) / 2


def best_workers(evidence: Evidence, fetch: Fetch, boundary: float | None = None) -> tuple[int, float]:
    """The fewest workers that fetch with headroom, or as fast as the cores allow, and the predicted step with them."""
    most = min(MAX_WORKERS, max(1, math.ceil(MAX_WORKERS_PER_CORE * evidence.cores)))
    # Fetches that barely fit under the compute stall on every hiccup. Five workers of 109 ms for steps of 22 ms were
    # predicted to give 5.7 times the steps per second, and gave 4.6 to 5.3.
    enough = max(_HEADROOM * evidence.step_compute_seconds, _on_the_cores(evidence, fetch))
    workers = next((n for n in range(1, most) if fetch.seconds / n <= _WORTH_A_WORKER * enough), most)
    return workers, predicted_step(evidence, fetch, workers, boundary)


def gain_of(
    evidence: Evidence, then: float | None, *, but: int | None = None, now: float | None = None
) -> float | None:
    """The factor on steps per second if a step of this rank takes ``then`` seconds; None if that is not known.

    Other ranks may take longer. ``but`` is the changed rank, if it is not this one. ``now`` is the present duration; by
    default `step_seconds`, which is right for a change inside the loop.
    """
    if then is None:
        return None
    peers = [peer for _, peer in at_same_pace(evidence.pace, evidence.peers)]
    others = [own_compute(peer, (evidence.pace, *peers)) for peer in peers if peer.rank != but]
    return _factor(evidence.step_seconds if now is None else now, max(then, *others, 0.0))


WORTH_IT: Final = 1.05
"""A smaller gain is not worth a person's time: it is not predicted, or its advice is left out."""


def gain_without(evidence: Evidence, share: float) -> float | None:
    """The factor on the steps per second without this share of the loop; None if it is not worth it.

    Workers, or another rank, may then limit the steps.
    """
    now = evidence.step_seconds
    gain = gain_of(evidence, max(now * (1 - share), min(now, evidence.supply_seconds or 0.0)))
    return gain if gain is not None and gain >= WORTH_IT else None


def gain_over_window(evidence: Evidence, then: float, *, now: float) -> float | None:
    """Like `gain_of`, for all steps of the window together. It also works for a window in which no step has ended."""
    steps = evidence.steps
    return gain_of(evidence, then / steps, now=now / steps) if steps else _factor(now, then)


def times_less(part: float, rest: float, share: float) -> int:
    """Factor by which to divide ``part`` so that it becomes ``share`` of itself plus ``rest``; at least 2."""
    return max(2, math.ceil(part * (1 - share) / max(share * rest, 1e-9)))


def _factor(now: float, then: float) -> float | None:
    return round(now / then, 2) if then > 1e-9 and now > 0 else None
