"""What to change, and what it is worth.

The model of a step is stated once, in `predicted_step`: the largest of what computing takes, what fetching takes with
so many workers, and what the cores can do at all. A change that this model does not make faster is not advised.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.causes import compute_seconds, supply_seconds
from telemetry.records import Advice

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence

WORTH_IT: Final = 1.05
"""A predicted speed-up below this is not worth a person's time."""

_HEADROOM: Final = 0.8
"""Workers are advised until fetching takes this share of the compute: a loader with no slack stalls on every hiccup."""

_MOST_WORKERS_PER_CORE: Final = 4.0
_MOST_ADVICE: Final = 3


def advise(cause: str, evidence: Evidence) -> tuple[Advice, ...]:
    """At most three changes, the one to make first in front. Empty where nothing would help."""
    make = _BY_CAUSE.get(cause)
    if make is None:
        return ()
    wanted = make(evidence)
    return tuple(a for a in wanted if a.predicted_speedup is None or a.predicted_speedup >= WORTH_IT)[:_MOST_ADVICE]


def step_seconds(evidence: Evidence) -> float | None:
    """Seconds of a step as it is, waits at the edges of epochs included."""
    return evidence.loop / evidence.steps if evidence.steps else None


def predicted_step(
    evidence: Evidence, *, fetch: float, fetch_cpu: float, workers: int, edge: float | None = None
) -> float | None:
    """Seconds of a step with so many workers.

    Args:
        evidence: gives the compute, the CPU time of the training process, and the cores.
        fetch: seconds a worker takes for a batch, alone on its core.
        fetch_cpu: how much of that it needs the core.
        workers: how many.
        edge: seconds a step of waiting at the edges of epochs; as they are now by default.
    """
    compute = compute_seconds(evidence)
    if compute is None or not evidence.steps:
        return None
    own_cpu = evidence.process_cpu_per_step or compute
    on_all_cores = (own_cpu + fetch_cpu) / max(evidence.cores, 1e-9)
    edge = evidence.edge_wait / evidence.steps if edge is None else edge
    return max(compute, fetch / workers, on_all_cores) + edge


def _no_workers(evidence: Evidence) -> list[Advice]:
    steps = evidence.steps
    if not steps:
        return []
    fetch = evidence.wait / steps
    own_cpu = evidence.process_cpu_per_step
    # What the process ran beyond its compute, it ran for the fetches it does itself.
    compute = compute_seconds(evidence) or 0.0
    fetch_cpu = fetch if own_cpu is None else min(fetch, max(0.0, own_cpu - compute))
    moved = replace(evidence, process_cpu_per_step=None if own_cpu is None else max(compute, own_cpu - fetch_cpu))
    workers, step = _best_workers(moved, fetch, fetch_cpu, edge=0.0)
    now = step_seconds(evidence)
    if step is None or now is None:
        return []
    return [
        Advice(
            "load batches in worker processes",
            "num_workers",
            str(workers),
            _gain(now, step),
            f"the training thread fetches each batch itself: {_ms(fetch)} of every {_ms(now)}",
        )
    ]


def _cpu_bound(evidence: Evidence) -> list[Advice]:
    return [*_more_workers(evidence), _cheaper("each batch takes", evidence)]


def _io_bound(evidence: Evidence) -> list[Advice]:
    fetch, blocked = evidence.fetch_seconds, evidence.blocked_share
    advice = _more_workers(evidence)
    if fetch is not None and blocked is not None:
        because = f"workers are blocked for {100 * blocked:.0f} % of the {_ms(fetch)} a batch takes them"
        advice.append(Advice("read from faster storage, or cache the data set locally", None, None, None, because))
    return advice


def _throttled(evidence: Evidence) -> list[Advice]:
    share = evidence.runnable_share or 0.0
    because = f"workers could run but have no core for {100 * share:.0f} % of their time in fetches"
    most = max(1, math.floor(evidence.cores))
    advice = [Advice("give the job more CPU cores; more workers would not help", None, None, None, because)]
    if evidence.workers > most:
        advice.append(
            Advice(
                "use fewer workers",
                "num_workers",
                str(most),
                None,
                f"{evidence.workers} share {evidence.cores:g} cores",
            )
        )
    advice.append(_cheaper("on the core, each batch takes", evidence))
    return advice


def _startup(evidence: Evidence) -> list[Advice]:
    now = step_seconds(evidence)
    if now is None or evidence.settings.get("persistent_workers"):
        return []
    edge = evidence.edge_wait / evidence.steps
    because = f"{evidence.edges} epochs began in the window and cost {evidence.edge_wait:.1f} s of starting workers"
    # What is left at an edge is one fetch that nobody prefetched.
    left = min(edge, (evidence.fetch_seconds or 0.0) * evidence.edges / evidence.steps)
    return [
        Advice(
            "keep the workers between epochs",
            "persistent_workers",
            "True",
            _gain(now, now - edge + left),
            because,
        )
    ]


def _uneven(evidence: Evidence) -> list[Advice]:
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or compute is None:
        return []
    factor = int(evidence.settings.get("prefetch_factor") or 2)
    supply = supply_seconds(evidence) or 0.0
    because = (
        f"{evidence.workers} workers would suffice on average (a batch every {_ms(supply)} against {_ms(compute)} of "
        "compute), but single batches are late"
    )
    gain = _gain(now, compute + evidence.edge_wait / evidence.steps)
    return [Advice("let workers run further ahead", "prefetch_factor", str(min(32, 4 * factor)), gain, because)]


def _transfer(evidence: Evidence) -> list[Advice]:
    now = step_seconds(evidence)
    ready = evidence.ready_batches or 0.0
    because = f"{ready:.1f} batches lie ready on average while the training thread waits for {_ms(now or 0.0)} steps"
    advice = [
        Advice("send less: smaller types (uint8), fewer and larger tensors in a batch", None, None, None, because)
    ]
    if not evidence.settings.get("pin_memory"):
        action = "pin batches in the background and copy them with non_blocking=True"
        advice.insert(0, Advice(action, "pin_memory", "True", None, because))
    return advice


def _checkpoint(evidence: Evidence) -> list[Advice]:
    whole = evidence.loop + evidence.checkpoint
    gain = _gain(whole, evidence.loop)
    because = f"checkpoints took {evidence.checkpoint:.1f} s of {whole:.1f} s"
    action = "write checkpoints less often, or asynchronously (torch.distributed.checkpoint.async_save)"
    return [Advice(action, None, None, gain, because)]


def _garbage(evidence: Evidence) -> list[Advice]:
    gain = _gain(evidence.loop, evidence.loop - evidence.garbage)
    because = f"garbage collection stopped the training thread for {evidence.garbage:.1f} s of {evidence.loop:.1f} s"
    return [Advice("call gc.freeze() once the model and the data set are built", "gc.freeze()", None, gain, because)]


def _stuck(evidence: Evidence) -> list[Advice]:
    because = f"one fetch has been in progress for {evidence.stuck_seconds:.0f} s"
    return [
        Advice("look at what that worker waits for: a lock, a mount, a remote store", None, None, None, because),
        Advice(
            "let a stuck worker raise", "timeout", "120", None, "a DataLoader with a timeout fails instead of hanging"
        ),
    ]


def _slow_source(evidence: Evidence) -> list[Advice]:
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or not compute:
        return []
    because = f"the watched iterable takes {_ms(now - compute)} of every {_ms(now)}"
    return [
        Advice("read ahead on another thread, or in a DataLoader's workers", None, None, _gain(now, compute), because)
    ]


def _more_workers(evidence: Evidence) -> list[Advice]:
    fetch, now = evidence.fetch_seconds, step_seconds(evidence)
    if fetch is None or now is None:
        return []
    fetch_cpu = evidence.fetch_cpu_seconds if evidence.fetch_cpu_seconds is not None else fetch
    workers, step = _best_workers(evidence, fetch * (1 - (evidence.runnable_share or 0.0)), fetch_cpu)
    if step is None or workers <= evidence.workers:
        return []
    because = (
        f"{evidence.workers} workers of {_ms(fetch)} a batch deliver one every {_ms(fetch / max(1, evidence.workers))}"
    )
    return [Advice("use more workers", "num_workers", str(workers), _gain(now, step), because)]


def _best_workers(
    evidence: Evidence, fetch: float, fetch_cpu: float, edge: float | None = None
) -> tuple[int, float | None]:
    """The fewest workers that fetch with headroom, or beyond which nothing is gained; and the step with them."""
    most = max(1, math.ceil(_MOST_WORKERS_PER_CORE * evidence.cores))
    compute = compute_seconds(evidence) or 0.0
    best, best_step = 1, predicted_step(evidence, fetch=fetch, fetch_cpu=fetch_cpu, workers=1, edge=edge)
    for workers in range(2, most + 1):
        if best_step is None or fetch / best <= _HEADROOM * compute:
            break
        step = predicted_step(evidence, fetch=fetch, fetch_cpu=fetch_cpu, workers=workers, edge=edge)
        if step is None or (step > 0.99 * best_step and fetch / best <= best_step):
            break
        best, best_step = workers, step
    return best, best_step


def _gain(now: float, then: float) -> float | None:
    """The factor on steps per second; None where there is nothing left to compare with."""
    return round(now / then, 2) if then > 1e-9 and now > 0 else None


def _cheaper(what: str, evidence: Evidence) -> Advice:
    took = evidence.fetch_cpu_seconds or evidence.fetch_seconds or 0.0
    action = "make the transforms cheaper: decode at a smaller size, move augmentation to the GPU, store data prepared"
    return Advice(action, None, None, None, f"{what} {_ms(took)} of CPU time in a worker")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


_BY_CAUSE: Final = {
    "loader_on_training_thread": _no_workers,
    "workers_cpu_bound": _cpu_bound,
    "workers_io_bound": _io_bound,
    "workers_throttled": _throttled,
    "worker_startup": _startup,
    "uneven_batches": _uneven,
    "batch_transfer": _transfer,
    "worker_stuck": _stuck,
    "source_slow": _slow_source,
    "checkpoint": _checkpoint,
    "gc_pause": _garbage,
}
