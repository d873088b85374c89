"""What a step would take with other settings of the loader: predictions that `tune` compares with each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.advice.advise import advise
from telemetry.diagnose.advice.latency import transferred_by_busy_workers
from telemetry.diagnose.advice.throughput import fetch_on_its_own, without_own_fetches
from telemetry.diagnose.causes import costs, crowded_out
from telemetry.diagnose.model import compute_seconds, predicted_step, step_seconds

if TYPE_CHECKING:
    from telemetry.core.recommendation import Advice
    from telemetry.diagnose.evidence import Evidence

_NAMES: Final = frozenset({"num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order"})


def step_with_workers(evidence: Evidence, workers: int) -> float | None:
    """Predicted seconds of a step with a number of workers, all loaders together; None if there is no prediction.

    The prediction for the present number is what was measured. The others have the same error as the model has there.
    """
    now = step_seconds(evidence)
    if now is None:
        return None
    present = evidence.workers.count if evidence.source == "workers" else 0
    if workers == present:
        return now
    if evidence.source != "workers":
        return _instead_of_own_fetches(evidence, workers)
    fetch, fetch_cpu = fetch_on_its_own(evidence)
    if not fetch:
        return None
    alone = replace(evidence, compute_seconds=max(0.0, evidence.compute_seconds - crowded_out(evidence)))
    if not workers:
        compute = compute_seconds(alone)
        return None if compute is None else compute + fetch
    as_now = predicted_step(evidence, fetch=fetch, fetch_cpu=fetch_cpu, workers=present)
    then = predicted_step(alone, fetch=fetch, fetch_cpu=fetch_cpu, workers=workers)
    return None if as_now is None or then is None else then * max(1.0, now / as_now)


def _instead_of_own_fetches(evidence: Evidence, workers: int) -> float | None:
    """With workers, for a loop that fetches on the training thread."""
    fetch = evidence.wait_seconds / evidence.steps
    moved, fetch_cpu = without_own_fetches(evidence, fetch)
    first = evidence.epochs.boundaries * fetch / evidence.batches_per_step / evidence.steps
    return predicted_step(moved, fetch=fetch, fetch_cpu=fetch_cpu, workers=workers, boundary=first)


def shortest_step(evidence: Evidence) -> float | None:
    """Seconds of a step without any wait for data, and without waiting for a core that workers use."""
    if not evidence.steps:
        return None
    exposed = evidence.exposed_wait_seconds
    hidden = 0.0 if exposed is None else max(0.0, evidence.wait_seconds - exposed)
    return max(0.0, evidence.compute_seconds + hidden - crowded_out(evidence)) / evidence.steps


def loader_advice(evidence: Evidence) -> list[tuple[str, Advice]]:
    """Advice on settings of the loader, with its cause, that of the costliest cause first."""
    lost = costs(evidence)
    return [
        (cause, advice)
        for cause in sorted(lost, key=lambda cause: -lost[cause])
        for advice in advise(cause, evidence)
        if advice.setting in _NAMES
    ]


def wants_shared_files(evidence: Evidence) -> bool:
    """Whether batches are transferred late by busy workers, so that the sharing strategy ``file_system`` may help."""
    idle, busy = evidence.delivery.transfer_seconds, evidence.delivery.transfer_from_busy_seconds
    late = evidence.delivery.transfer_wait_seconds
    slow = idle is None or (busy is not None and busy > idle)
    return transferred_by_busy_workers(evidence) and slow and late > _SLOW_TRANSFER * evidence.loop_seconds


_SLOW_TRANSFER: Final = 0.05
"""Waits for the transfer matter from this share of the loop on."""
