"""What to change, and what it is worth.

A change that the model of a step (`diagnose.model`) does not make faster is not advised.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.causes import crowded_out
from telemetry.diagnose.model import (
    best_workers,
    compute_seconds,
    factor,
    gain_of,
    predicted_step,
    step_seconds,
    supply_seconds,
)
from telemetry.diagnose.straggler import straggler
from telemetry.records import Advice

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence

WORTH_IT: Final = 1.05
"""A predicted speed-up below this is not worth a person's time."""

_MOST_ADVICE: Final = 3
_MOST_PREFETCH: Final = 64
_SPARE: Final = 1.25
"""Batches are prefetched for so many times the longest fetch that was seen."""


def advise(cause: str, evidence: Evidence) -> tuple[Advice, ...]:
    """At most three changes, the one to make first in front. Empty where nothing would help."""
    make = _BY_CAUSE.get(cause)
    if make is None:
        return ()
    wanted = make(evidence)
    return tuple(a for a in wanted if a.predicted_speedup is None or a.predicted_speedup >= WORTH_IT)[:_MOST_ADVICE]


def _no_workers(evidence: Evidence) -> list[Advice]:
    return _fetch_in_workers(
        evidence, "load batches in worker processes", "the training thread fetches each batch itself"
    )


def _fetch_in_workers(evidence: Evidence, action: str, why: str) -> list[Advice]:
    now = step_seconds(evidence)
    if now is None:
        return []
    fetch = evidence.wait / evidence.steps
    moved, fetch_cpu = _without_own_fetches(evidence, fetch)
    workers, step = best_workers(moved, fetch, fetch_cpu, edge=0.0)
    if step is None:
        return []
    because = f"{why}: {_ms(fetch)} of every {_ms(now)}{_spent_on(evidence)}"
    return [Advice(action, "num_workers", str(workers), gain_of(evidence, step), because)]


def _without_own_fetches(evidence: Evidence, fetch: float) -> tuple[Evidence, float]:
    """The evidence as it were without the fetches of the training thread's own, and the CPU time of one of them."""
    own_cpu, compute = evidence.process_cpu_per_step, compute_seconds(evidence) or 0.0
    if evidence.own_fetch_cpu_share is not None:
        fetch_cpu = fetch * evidence.own_fetch_cpu_share
    else:  # what the process ran beyond its compute, it ran for them
        fetch_cpu = fetch if own_cpu is None else min(fetch, max(0.0, own_cpu - compute))
    rest = None if own_cpu is None else max(min(own_cpu, compute), own_cpu - fetch_cpu)
    return replace(evidence, process_cpu_per_step=rest), fetch_cpu


def _spent_on(evidence: Evidence) -> str:
    share = evidence.own_fetch_cpu_share
    return "" if share is None else f", {100 * share:.0f} % of it on the CPU"


def _cpu_bound(evidence: Evidence) -> list[Advice]:
    return [*_more_workers(evidence), _cheaper("each batch takes", evidence)]


def _io_bound(evidence: Evidence) -> list[Advice]:
    fetch, blocked = evidence.fetch_seconds, evidence.blocked_share
    advice = _more_workers(evidence)
    if fetch is not None and blocked is not None:
        because = f"workers are blocked for {100 * blocked:.0f} % of the {_ms(fetch)} a batch takes them"
        if evidence.read_bytes and evidence.fetches:
            because += f", and read {evidence.read_bytes / evidence.fetches / 1e6:.1f} MB from storage for it"
        advice.append(Advice("read from faster storage, or cache the data set locally", None, None, None, because))
    return advice


def _throttled(evidence: Evidence) -> list[Advice]:
    share = evidence.runnable_share if evidence.runnable_share is not None else evidence.blocked_share or 0.0
    because = f"workers could run but have no core for {100 * share:.0f} % of their time in fetches"
    more = Advice("give the job more CPU cores; more workers would not help", None, None, None, because)
    return [*_fewer_workers(evidence), more, _cheaper("on the core, each batch takes", evidence)]


def _fewer_workers(evidence: Evidence) -> list[Advice]:
    """Where the workers crowd out the training thread: as many as leave it a core."""
    fetch, fetch_cpu, crowded = evidence.fetch_seconds, evidence.fetch_cpu_seconds, crowded_out(evidence)
    if fetch is None or fetch_cpu is None or not crowded:
        return []
    alone = replace(evidence, compute=max(0.0, evidence.compute - crowded))
    on_its_own = fetch * (1 - (evidence.runnable_share or 0.0))
    steps = {
        workers: step
        for workers in range(1, evidence.workers)
        if (step := predicted_step(alone, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=workers)) is not None
    }
    if not steps:
        return []
    best = min(steps.values())
    fewest = min(workers for workers, step in steps.items() if step <= 1.01 * best)
    because = (
        f"{evidence.workers} workers and the training thread share {evidence.cores:g} cores, and it had none for "
        f"{crowded:.1f} s of {evidence.loop:.1f} s"
    )
    return [Advice("use fewer workers", "num_workers", str(fewest), gain_of(evidence, best), because)]


def _startup(evidence: Evidence) -> list[Advice]:
    now = step_seconds(evidence)
    if now is None or evidence.settings.get("persistent_workers"):
        return []
    edge = evidence.edge_wait / evidence.steps
    because = f"{evidence.edges} epochs began in the window and cost {evidence.edge_wait:.1f} s of starting workers"
    # What is left at an edge is one fetch that nobody prefetched.
    left = min(edge, (evidence.fetch_seconds or 0.0) * evidence.edges / evidence.steps)
    gain = gain_of(evidence, now - edge + left)
    if evidence.settings.get("loader_used_again") is False:
        action = "make the DataLoader once, with persistent_workers=True, and iterate over it in every epoch"
        because += ", each time of a new DataLoader"
        return [Advice(action, None, None, gain, because)]
    return [Advice("keep the workers between epochs", "persistent_workers", "True", gain, because)]


def _uneven(evidence: Evidence) -> list[Advice]:
    compute, supply = compute_seconds(evidence), supply_seconds(evidence)
    if compute is None or supply is None:
        return []
    because = (
        f"{evidence.workers} workers would suffice on average (a batch every {_ms(supply)} against {_ms(compute)} of "
        "compute), but single batches are late"
    )
    if evidence.head_of_line > 0:
        because += f"; for {evidence.head_of_line:.1f} s finished batches waited behind a slow one"
    edge = evidence.edge_wait / evidence.steps
    advice = []
    factor = int(evidence.settings.get("prefetch_factor") or 2)
    wanted = _prefetch(evidence, factor, compute)
    if wanted > factor:
        step = max(compute, supply) + edge + _still_late(evidence, factor, wanted, compute)
        advice.append(
            Advice("let workers run further ahead", "prefetch_factor", str(wanted), gain_of(evidence, step), because)
        )
    if evidence.settings.get("in_order") and evidence.workers > 1:
        action = "take batches as they are finished, where their order does not matter"
        gain = gain_of(evidence, max(compute, supply) + edge)
        advice.append(Advice(action, "in_order", "False", gain, because))
    return advice


def _prefetch(evidence: Evidence, factor: int, compute: float) -> int:
    """The prefetch factor that hides the longest fetch behind compute.

    A worker begins with a batch when the training thread takes the one ``workers * factor`` before it.
    """
    if evidence.longest_fetch is None or compute <= 0:
        return 4 * factor
    wanted = math.ceil(_SPARE * evidence.longest_fetch / (evidence.workers * compute))
    return min(_MOST_PREFETCH, max(2 * factor, wanted))


def _still_late(evidence: Evidence, factor: int, wanted: int, compute: float) -> float:
    """Seconds of a step for which late batches are still waited for with a larger prefetch factor."""
    longest = evidence.longest_fetch
    if longest is None:
        return 0.0
    hidden_now, hidden = (evidence.workers * f * compute for f in (factor, wanted))
    if longest <= hidden_now:
        return 0.0
    late = max(0.0, evidence.wait - evidence.edge_wait) / evidence.steps
    return late * max(0.0, longest - hidden) / (longest - hidden_now)


def _transfer(evidence: Evidence) -> list[Advice]:
    now = step_seconds(evidence)
    if now is None:
        return []
    moved = evidence.moved / evidence.steps
    if moved > 0:
        because = f"a finished batch takes {_ms(moved)} of every {_ms(now)} to reach the training thread"
    else:
        ready = evidence.ready_batches or 0.0
        because = f"{ready:.1f} batches lie ready on average while the training thread waits for {_ms(now)} steps"
    gain = gain_of(evidence, now - moved) if moved > 0 else None
    action = "send less: few large tensors in a batch, not many small ones or Python objects; smaller types (uint8)"
    advice = [Advice(action, None, None, gain, because)]
    if evidence.on_gpu and not evidence.settings.get("pin_memory"):
        action = "pin batches in the background and copy them with non_blocking=True"
        advice.insert(0, Advice(action, "pin_memory", "True", None, because))
    return advice


def _checkpoint(evidence: Evidence) -> list[Advice]:
    whole = evidence.loop + evidence.checkpoint
    because = f"checkpoints took {evidence.checkpoint:.1f} s of {whole:.1f} s"
    action = "write checkpoints less often, or asynchronously (torch.distributed.checkpoint.async_save)"
    return [Advice(action, None, None, factor(whole, evidence.loop), because)]


def _garbage(evidence: Evidence) -> list[Advice]:
    gain = factor(evidence.loop, evidence.loop - evidence.garbage)
    because = f"garbage collection stopped the training thread for {evidence.garbage:.1f} s of {evidence.loop:.1f} s"
    return [Advice("call gc.freeze() once the model and the data set are built", "gc.freeze()", None, gain, because)]


def _stuck(evidence: Evidence) -> list[Advice]:
    because = f"one fetch has been in progress for {evidence.stuck_seconds:.0f} s"
    raising = "a DataLoader with a timeout fails instead of hanging"
    return [
        Advice("look at what that worker waits for: a lock, a mount, a remote store", None, None, None, because),
        Advice("let a stuck worker raise", "timeout", "120", None, raising),
    ]


def _slow_source(evidence: Evidence) -> list[Advice]:
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or compute is None:
        return []
    fetch = evidence.wait / evidence.steps
    because = f"the watched iterable takes {_ms(fetch)} of every {_ms(now)}{_spent_on(evidence)}"
    advice = _fetch_in_workers(
        evidence, "read it in a DataLoader's workers, as an IterableDataset", "the watched iterable is read in the loop"
    )
    on_cpu = evidence.own_fetch_cpu_share or 0.0
    # Python runs one thread at a time: what a thread that reads ahead runs itself, the training thread waits for.
    step = max(compute, fetch) if on_cpu < 0.5 else compute + fetch * on_cpu
    ahead = Advice("read ahead on another thread, some batches deep", None, None, gain_of(evidence, step), because)
    return sorted([ahead, *advice], key=lambda a: -(a.predicted_speedup or 0.0))


def _straggler(evidence: Evidence) -> list[Advice]:
    slow, now = straggler(evidence.pace, evidence.peers), step_seconds(evidence)
    if slow is None or now is None:
        return []
    because = f"rank {slow.rank} {slow.why}; this rank waits {_ms(slow.lost)} of every {_ms(now)} for it"
    action = f"look at rank {slow.rank}: it is the slowest, and all others have its pace"
    return [Advice(action, None, None, gain_of(evidence, now - slow.lost, but=slow.rank), because)]


def _host_bound(evidence: Evidence) -> list[Advice]:
    idle = evidence.gpu_idle or 0.0
    because = f"no kernel ran for {idle:.1f} s of {evidence.loop:.1f} s, though no batch was waited for"
    if evidence.pace.where is not None:
        because += f"; the training thread was mostly in {evidence.pace.where}"
    bound = factor(evidence.loop, evidence.loop - idle)
    return [
        Advice("launch fewer, larger kernels: torch.compile, CUDA graphs, a larger batch", None, None, bound, because),
        Advice(
            "remove what makes the host wait for the GPU: .item(), .cpu(), print of a tensor", None, None, None, because
        ),
    ]


def _gpu_throttled(evidence: Evidence) -> list[Advice]:
    slowed = evidence.gpu_slowed or 0.0
    because = f"the GPU's clock is held back (heat or power supply), which cost {slowed:.1f} s of {evidence.loop:.1f} s"
    gain = factor(evidence.loop, evidence.loop - slowed)
    return [Advice("have the node's cooling and power supply looked at, or move the job", None, None, gain, because)]


def _more_workers(evidence: Evidence) -> list[Advice]:
    fetch = evidence.fetch_seconds
    if fetch is None or not evidence.steps:
        return []
    fetch_cpu = evidence.fetch_cpu_seconds if evidence.fetch_cpu_seconds is not None else fetch
    workers, step = best_workers(evidence, fetch * (1 - (evidence.runnable_share or 0.0)), fetch_cpu)
    if step is None or workers <= evidence.workers:
        return []
    because = (
        f"{evidence.workers} workers of {_ms(fetch)} a batch deliver one every {_ms(fetch / max(1, evidence.workers))}"
    )
    return [Advice("use more workers", "num_workers", str(workers), gain_of(evidence, step), because)]


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
    "straggler": _straggler,
    "checkpoint": _checkpoint,
    "gc_pause": _garbage,
    "host_bound": _host_bound,
    "gpu_throttled": _gpu_throttled,
}
