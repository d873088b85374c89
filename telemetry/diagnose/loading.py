"""What to change where to fetch a batch takes longer than to use it, and what that is worth.

By the cause that the loader, or whatever the batches come from, has been found to be the trouble for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.causes import THRESHOLDS, crowded_out
from telemetry.diagnose.model import (
    best_workers,
    compute_seconds,
    gain_of,
    ms,
    predicted_step,
    step_seconds,
)
from telemetry.diagnose.own_time import own_time, without_own_time
from telemetry.records import Advice

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence

ON_CPU: Final = 0.5
"""Workers whose fetches run for this share of their time keep their interpreter busy."""

_WORTH_SAYING: Final = 0.1
"""Of the sampler's time, from which on it is said where it is."""

_SIDE_BY_SIDE: Final = 1.1
"""CPU time of work that several processes share, relative to one that does it all: caches and memory are shared too."""

_WORKERS_BATCH_SECONDS: Final = 0.004
"""Of the cores, that a batch costs when a worker fetches it: sent, mapped, and not always there when it is asked for.

Both are measured by `python -m benchmarks.worker_cost`; where there are workers already, all that is in what they take.
"""


def on_training_thread(evidence: Evidence) -> list[Advice]:
    """The training thread does the loader's work: it fetches batches, or runs the sampler for workers that do."""
    return _slow_sampler(evidence) if evidence.source == "workers" else _no_workers(evidence)


def _slow_sampler(evidence: Evidence) -> list[Advice]:
    """Workers fetch, and the training thread runs the sampler for every batch of theirs."""
    now, own = step_seconds(evidence), own_time(evidence)
    if now is None:
        return []
    each, at_edges = own.in_sampler / evidence.steps, own.edge_sampler
    if evidence.edges < THRESHOLDS.edges and evidence.edge_share_of_sampler > 0:
        rest = now - evidence.edge_sampler / evidence.steps  # what the window holds of epochs' starts is no fair part
        now = rest / max(1e-9, 1 - evidence.edge_share_of_sampler)
        each = own.sampler / evidence.steps + now - rest
        at_edges = (now - rest) * evidence.steps
    if each <= 0:
        return []
    cpu = evidence.sampler_cpu_share
    because = f"the sampler takes {ms(each)} of every {ms(now)} on the training thread, however many workers there are"
    if cpu is not None:
        because += f", {100 * cpu:.0f} % of it on the CPU"
    if at_edges >= _WORTH_SAYING * each * evidence.steps:
        because += f"; {100 * at_edges / (each * evidence.steps):.0f} % of it is where epochs begin"
    without = replace(
        without_own_time(evidence),
        compute=evidence.compute + own.collecting,
        process_cpu_per_step=_less_cpu(evidence.process_cpu_per_step, each * (1.0 if cpu is None else cpu)),
    )
    on_its_own, fetch_cpu = _fetch_on_its_own(evidence)
    at_least = predicted_step(without, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=max(1, evidence.workers)) or 0.0
    gain = gain_of(evidence, max(now - own.felt * each, at_least), now=now)
    if cpu is not None and cpu + _no_core(evidence) < ON_CPU:
        action = "let the sampler not wait: keep what it reads in memory, or draw indices ahead on another thread"
    elif at_edges >= ON_CPU * each * evidence.steps:
        action = "make the sampler's start cheaper: draw the indices of an epoch with torch or NumPy, or keep them"
    else:
        action = "make the sampler cheaper: precompute its indices, or draw them with torch or NumPy"
    return [Advice(action, None, None, gain, because)]


def _less_cpu(seconds: float | None, by: float) -> float | None:
    return None if seconds is None else max(0.0, seconds - by)


def _no_workers(evidence: Evidence) -> list[Advice]:
    """Batches are fetched on the training thread."""
    in_workers = _fetch_in_workers(
        evidence, "load batches in worker processes", "the training thread fetches each batch itself"
    )
    return [*in_workers, *_shorter_fetch(evidence)]


def _shorter_fetch(evidence: Evidence) -> list[Advice]:
    """Of batches that the training thread fetches: what is left where the cores are no more than that takes."""
    share, batches = evidence.own_fetch_cpu_share, evidence.steps * evidence.batches_per_step
    if share is None or not batches:
        return []
    fetch = evidence.wait / batches
    share = min(1.0, share + _no_core(evidence))
    if share < ON_CPU:
        return [
            _faster_storage(f"the training thread waits in {100 * (1 - share):.0f} % of the {ms(fetch)} of a batch")
        ]
    return [_cheaper(f"each batch takes {ms(fetch * share)} of CPU time on the training thread", evidence)]


def _no_core(evidence: Evidence) -> float:
    """Share of the time in which the training thread could run and had no core."""
    return min(1.0, (evidence.own_runnable or 0.0) / evidence.seconds) if evidence.seconds > 0 else 0.0


def _fetch_in_workers(evidence: Evidence, action: str, why: str, fetch: float | None = None) -> list[Advice]:
    """``fetch``: seconds that the batches of a step take; all that is waited for them by default."""
    now = step_seconds(evidence)
    if now is None:
        return []
    fetch = evidence.wait / evidence.steps if fetch is None else fetch
    moved, fetch_cpu = _without_own_fetches(evidence, fetch)
    first = evidence.edges * fetch / evidence.batches_per_step / evidence.steps  # of an epoch: nobody prefetches it
    workers, step = best_workers(moved, fetch, fetch_cpu, edge=first)
    if step is None:
        return []
    if evidence.edges >= THRESHOLDS.edges:
        action += ", kept from epoch to epoch (persistent_workers=True)"
    because = f"{why}: {ms(fetch)} of every {ms(now)}{_spent_on(evidence)}"
    return [Advice(action, "num_workers", str(workers), gain_of(evidence, step), because)]


def _without_own_fetches(evidence: Evidence, fetch: float) -> tuple[Evidence, float]:
    """The evidence as it were without the training thread's own fetches, and the CPU time of a step's in workers."""
    own_cpu, compute = evidence.process_cpu_per_step, compute_seconds(evidence) or 0.0
    if evidence.own_fetch_cpu_share is not None:
        fetch_cpu = min(fetch * evidence.own_fetch_cpu_share, own_cpu or fetch)
    else:  # what the process ran beyond its compute, it ran for them
        fetch_cpu = fetch if own_cpu is None else min(fetch, max(0.0, own_cpu - compute))
    rest = compute if own_cpu is None else max(min(own_cpu, compute), own_cpu - fetch_cpu)
    in_workers = _SIDE_BY_SIDE * fetch_cpu + _WORKERS_BATCH_SECONDS * evidence.batches_per_step
    return replace(evidence, process_cpu_per_step=_SIDE_BY_SIDE * rest), in_workers


def _spent_on(evidence: Evidence) -> str:
    share = evidence.own_fetch_cpu_share
    return "" if share is None else f", {100 * share:.0f} % of it on the CPU"


def cpu_bound(evidence: Evidence) -> list[Advice]:
    """The workers are the limit, and run."""
    return [*_more_workers(evidence), _cheaper(f"each batch takes {_in_a_worker(evidence)}", evidence)]


def io_bound(evidence: Evidence) -> list[Advice]:
    """The workers are the limit, and wait."""
    fetch, blocked = evidence.fetch_seconds, evidence.blocked_share
    advice = _more_workers(evidence, ", if what they wait for can serve more at once")
    if fetch is not None and blocked is not None:
        because = f"workers are blocked for {100 * blocked:.0f} % of the {ms(fetch)} a batch takes them"
        if evidence.read_bytes and evidence.fetches:
            because += f", and read {evidence.read_bytes / evidence.fetches / 1e6:.1f} MB from storage for it"
        advice.append(_faster_storage(because))
    return advice


def throttled(evidence: Evidence) -> list[Advice]:
    """There are not cores enough, or the workers may not use them."""
    share = evidence.runnable_share if evidence.runnable_share is not None else evidence.blocked_share or 0.0
    because = f"workers could run but have no core for {100 * share:.0f} % of their time in fetches"
    if evidence.throttled_ratio:
        used_up = 100 * evidence.throttled_ratio
        because += f"; the CPU quota of {evidence.cores:g} cores was used up in {used_up:.0f} % of its periods"
    if evidence.worker_cores is not None:
        more = _other_cores(evidence, f"{because}: they may run on {evidence.worker_cores} of {evidence.cores:g} cores")
    else:
        more = Advice("give the job more CPU cores; more workers would not help", None, None, None, because)
    return [
        *_fewer_workers(evidence),
        more,
        _cheaper(f"on the core, each batch takes {_in_a_worker(evidence)}", evidence),
    ]


def _other_cores(evidence: Evidence, because: str) -> Advice:
    """Where the workers are held to fewer cores than there are."""
    on_its_own, fetch_cpu = _fetch_on_its_own(evidence)
    free = replace(evidence, worker_cores=None)
    step = predicted_step(free, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=max(1, evidence.workers))
    action = "let the workers run on every core: a worker_init_fn, taskset or OMP_PROC_BIND holds them to a few"
    return Advice(action, None, None, None if step is None else gain_of(evidence, step), because)


def _fetch_on_its_own(evidence: Evidence) -> tuple[float, float]:
    """Seconds a worker with a core to itself takes for the batches of a step, and how many of them on that core."""
    fetch = (evidence.fetch_seconds or 0.0) * evidence.batches_per_step
    on_core = fetch if evidence.fetch_cpu_seconds is None else evidence.fetch_cpu_seconds * evidence.batches_per_step
    return fetch * (1 - (evidence.runnable_share or 0.0)), on_core


def _fewer_workers(evidence: Evidence) -> list[Advice]:
    """Where the workers crowd out the training thread: as many as leave it a core. It wins no more than it lacked."""
    crowded, now = crowded_out(evidence), step_seconds(evidence)
    if evidence.fetch_seconds is None or evidence.fetch_cpu_seconds is None or now is None or not crowded:
        return []
    alone = replace(evidence, compute=max(0.0, evidence.compute - crowded))
    on_its_own, fetch_cpu = _fetch_on_its_own(evidence)
    steps = {
        workers: step
        for workers in range(1, evidence.workers)
        if (step := predicted_step(alone, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=workers)) is not None
    }
    if not steps:
        return []
    best = min(steps.values())
    fewest = min(workers for workers, step in steps.items() if step <= 1.01 * best)
    best = max(best, now - (evidence.own_runnable or 0.0) / evidence.steps)
    because = (
        f"{evidence.workers} workers and the training thread share {evidence.cores:g} cores, and it had none for "
        f"{crowded:.1f} s of {evidence.loop:.1f} s"
    )
    fewer = max(1, fewest // _loaders(evidence))
    if fewer >= _workers_each(evidence):
        return []
    return [Advice("use fewer workers", "num_workers", str(fewer), gain_of(evidence, best), because)]


def slow_source(evidence: Evidence) -> list[Advice]:
    """Batches come from an iterable that is no DataLoader."""
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or compute is None:
        return []
    if evidence.source == "read_ahead":
        return _slow_threads(evidence, now)
    fetch = evidence.wait / evidence.steps
    because = f"the watched iterable takes {ms(fetch)} of every {ms(now)}{_spent_on(evidence)}"
    advice = _fetch_in_workers(
        evidence, "read it in a DataLoader's workers, as an IterableDataset", "the watched iterable is read in the loop"
    )
    on_cpu = evidence.own_fetch_cpu_share or 0.0
    # Python runs one thread at a time: what a thread that reads ahead runs itself, the training thread waits for.
    step = max(compute, fetch) if on_cpu < 0.5 else compute + fetch * on_cpu
    ahead = Advice("read ahead on another thread, some batches deep", None, None, gain_of(evidence, step), because)
    return sorted([ahead, *advice], key=lambda a: -(a.predicted_speedup or 0.0))


def _slow_threads(evidence: Evidence, now: float) -> list[Advice]:
    """Batches are made ahead on threads of the training process, and not fast enough: those work all the time."""
    if evidence.settings.get("reader") == "DALI":
        because = f"the DALI pipeline is waited for in {ms(evidence.wait / evidence.steps)} of every {ms(now)}"
        action = "give the DALI pipeline more threads, or let it decode on the GPU"
        return [Advice(action, "num_threads", None, None, because)]
    why = "threads of the training process make the batches, one at a time and beside the loop's own Python"
    return _fetch_in_workers(evidence, "load batches in worker processes", why, fetch=now)


def _more_workers(evidence: Evidence, provided: str = "") -> list[Advice]:
    fetch = evidence.fetch_seconds
    if fetch is None or not evidence.steps:
        return []
    workers, step = best_workers(evidence, *_fetch_on_its_own(evidence))
    if step is None or workers <= evidence.workers:
        return []
    because = (
        f"{evidence.workers} workers of {ms(fetch)} a batch deliver one every {ms(fetch / max(1, evidence.workers))}"
        f"; more deliver more{provided}"
    )
    more = math.ceil(workers / _loaders(evidence))
    if more <= _workers_each(evidence):
        return []
    return [Advice("use more workers", "num_workers", str(more), gain_of(evidence, step), because)]


def _loaders(evidence: Evidence) -> int:
    """How many with workers the loop reads side by side: ``num_workers`` is set for each of them."""
    return max(1, round(evidence.workers / _workers_each(evidence)))


def _workers_each(evidence: Evidence) -> int:
    """``num_workers`` as it is, of the loader that is waited for."""
    return int(evidence.settings.get("num_workers") or evidence.workers or 1)


def _in_a_worker(evidence: Evidence) -> str:
    took = evidence.fetch_cpu_seconds or evidence.fetch_seconds or 0.0
    return f"{ms(took)} of CPU time in a worker"


def _cheaper(because: str, evidence: Evidence) -> Advice:
    to_gpu = "move augmentation to the GPU, " if evidence.on_gpu else ""
    action = f"make the transforms cheaper: decode at a smaller size, {to_gpu}store data prepared"
    return Advice(action, None, None, None, because)


def _faster_storage(because: str) -> Advice:
    return Advice("read from faster storage, or cache the data set locally", None, None, None, because)
