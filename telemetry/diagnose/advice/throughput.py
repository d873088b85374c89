"""Advice for data sources that deliver fewer batches than the training loop could use, one function per cause."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.core.formatting import milliseconds as ms
from telemetry.core.recommendation import Advice
from telemetry.diagnose.causes import THRESHOLDS, crowded_out
from telemetry.diagnose.model import best_workers, compute_seconds, gain_of, low_gain, predicted_step, step_seconds
from telemetry.diagnose.own_time import less, own_time, without_own_time

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import CpuEvidence, Evidence

ON_CPU: Final = 0.5
"""Workers whose fetches use the CPU for this share of their time hold the GIL most of the time."""

_MIN_MENTIONED_SHARE: Final = 0.1
"""The reason mentions epoch boundaries from this share of the sampler's time on."""

_SHARED_CORES_FACTOR: Final = 1.1
"""Extra CPU time when several processes do the work of one: they compete for caches and memory bandwidth."""

_WORKER_BATCH_SECONDS: Final = 0.004
"""Extra CPU seconds per batch when a worker fetches it: pickling, mapping, waiting for it.

Both constants are measured by `python -m benchmarks.worker_cost`. They apply only to a loader without workers, because
the measured times of existing workers include these costs.
"""


def on_training_thread(evidence: Evidence) -> list[Advice]:
    """The training thread does the loader's work: it fetches batches itself, or runs a slow sampler for the workers."""
    return _slow_sampler(evidence) if evidence.source == "workers" else _no_workers(evidence)


def _slow_sampler(evidence: Evidence) -> list[Advice]:
    """Workers fetch, but the training thread runs the sampler for each of their batches."""
    now, own = step_seconds(evidence), own_time(evidence)
    if now is None:
        return []
    each, at_boundaries = own.all_sampler_seconds / evidence.steps, own.boundary_sampler_seconds
    if evidence.epochs.boundaries < THRESHOLDS.epoch_boundaries and evidence.sampler.boundary_ratio > 0:
        rest = (
            now - evidence.sampler.boundary_wait_seconds / evidence.steps
        )  # epochs are longer than the window, so it holds no fair share of their starts
        now = rest / max(1e-9, 1 - evidence.sampler.boundary_ratio)
        each = own.sampler_seconds / evidence.steps + now - rest
        at_boundaries = (now - rest) * evidence.steps
    if each <= 0:
        return []
    cpu = evidence.sampler.cpu_ratio
    because = f"the sampler takes {ms(each)} of every {ms(now)} on the training thread, however many workers there are"
    if cpu is not None:
        because += f", {100 * cpu:.0f} % of it on the CPU"
    if at_boundaries >= _MIN_MENTIONED_SHARE * each * evidence.steps:
        because += f"; {100 * at_boundaries / (each * evidence.steps):.0f} % of it is at epoch boundaries"
    without = replace(
        without_own_time(evidence),
        compute_seconds=evidence.compute_seconds + own.all_garbage_seconds,
        cpu=_with_process_cpu(
            evidence, less(evidence.cpu.process_seconds_per_step, each * (1.0 if cpu is None else cpu))
        ),
    )
    on_its_own, fetch_cpu = fetch_on_its_own(evidence)
    at_least = (
        predicted_step(without, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=max(1, evidence.workers.count)) or 0.0
    )
    gain = gain_of(evidence, max(now - own.exposed_ratio * each, at_least), now=now)
    if cpu is not None and cpu + _run_queue_delay_ratio(evidence) < ON_CPU:
        action = "make the sampler not wait: keep what it reads in memory, or draw indices ahead on another thread"
    elif at_boundaries >= ON_CPU * each * evidence.steps:
        action = "make the sampler's start cheaper: draw the indices of an epoch with torch or NumPy, or reuse them"
    else:
        action = "make the sampler cheaper: precompute its indices, or draw them with torch or NumPy"
    return [Advice(action, None, None, gain, because)]


def _with_process_cpu(evidence: Evidence, seconds_per_step: float | None) -> CpuEvidence:
    return replace(evidence.cpu, process_seconds_per_step=seconds_per_step)


def _no_workers(evidence: Evidence) -> list[Advice]:
    """Batches are fetched on the training thread."""
    in_workers = _fetch_in_workers(
        evidence, "load batches in worker processes", "the training thread fetches each batch itself"
    )
    return [*in_workers, *_shorter_fetch(evidence)]


def _shorter_fetch(evidence: Evidence) -> list[Advice]:
    """For fetches on the training thread that more processes cannot speed up: make the fetch itself shorter."""
    share, batches = evidence.own_fetch_cpu_ratio, evidence.steps * evidence.batches_per_step
    if share is None or not batches:
        return []
    fetch = evidence.wait_seconds / batches
    share = min(1.0, share + _run_queue_delay_ratio(evidence))
    if share < ON_CPU:
        return [
            _faster_storage(
                f"the training thread is blocked for {100 * (1 - share):.0f} % of the {ms(fetch)} that a batch takes"
            )
        ]
    return [_cheaper(f"each batch takes {ms(fetch * share)} of CPU time on the training thread", evidence)]


def _run_queue_delay_ratio(evidence: Evidence) -> float:
    """Run-queue delay of the training thread, as a share of the time."""
    return min(1.0, (evidence.cpu.run_queue_delay_seconds or 0.0) / evidence.seconds) if evidence.seconds > 0 else 0.0


def _fetch_in_workers(evidence: Evidence, action: str, why: str, fetch: float | None = None) -> list[Advice]:
    """Fetch in workers. ``fetch`` is the seconds that the batches of a step take; by default the whole wait."""
    now = step_seconds(evidence)
    if now is None:
        return []
    fetch = evidence.wait_seconds / evidence.steps if fetch is None else fetch
    moved, fetch_cpu = without_own_fetches(evidence, fetch)
    first = (
        evidence.epochs.boundaries * fetch / evidence.batches_per_step / evidence.steps
    )  # the first fetch of an epoch is not prefetched
    workers, step = best_workers(moved, fetch, fetch_cpu, boundary=first)
    if step is None:
        return []
    if evidence.epochs.boundaries >= THRESHOLDS.epoch_boundaries:
        action += ", and keep the workers between epochs (persistent_workers=True)"
    because = f"{why}: {ms(fetch)} of every {ms(now)}{_spent_on(evidence)}"
    on_cpu = evidence.own_fetch_cpu_ratio
    low = low_gain(moved, step, fetch_cpu=fetch_cpu) if on_cpu is not None and on_cpu < ON_CPU else None
    return [Advice(action, "num_workers", str(workers), gain_of(evidence, step), because, low)]


def without_own_fetches(evidence: Evidence, fetch: float) -> tuple[Evidence, float]:
    """The evidence without the fetches on the training thread, and the CPU time of a step's fetches in workers."""
    own_cpu, compute = evidence.cpu.process_seconds_per_step, compute_seconds(evidence) or 0.0
    if evidence.own_fetch_cpu_ratio is not None:
        fetch_cpu = min(fetch * evidence.own_fetch_cpu_ratio, own_cpu or fetch)
    else:  # CPU time beyond the compute was spent on fetches
        fetch_cpu = fetch if own_cpu is None else min(fetch, max(0.0, own_cpu - compute))
    rest = compute if own_cpu is None else max(min(own_cpu, compute), own_cpu - fetch_cpu)
    in_workers = _SHARED_CORES_FACTOR * fetch_cpu + _WORKER_BATCH_SECONDS * evidence.batches_per_step
    return replace(evidence, cpu=_with_process_cpu(evidence, _SHARED_CORES_FACTOR * rest)), in_workers


def _spent_on(evidence: Evidence) -> str:
    share = evidence.own_fetch_cpu_ratio
    return "" if share is None else f", {100 * share:.0f} % of it on the CPU"


def cpu_bound(evidence: Evidence) -> list[Advice]:
    """The workers are the limit, and use the CPU."""
    return [*_more_workers(evidence), _cheaper(f"each batch takes {_in_a_worker(evidence)}", evidence)]


def io_bound(evidence: Evidence) -> list[Advice]:
    """The workers are the limit, and are blocked."""
    fetch, blocked = evidence.workers.fetch_seconds, evidence.workers.blocked_ratio
    advice = _more_workers(evidence, ", if the storage can serve more requests at once")
    if fetch is not None and blocked is not None:
        because = f"workers are blocked for {100 * blocked:.0f} % of the {ms(fetch)} that a batch takes"
        if evidence.workers.read_bytes and evidence.workers.fetches:
            read = evidence.workers.read_bytes / evidence.workers.fetches
            because += f", and read {read / 1e6:.1f} MB from storage for each"
        advice.append(_faster_storage(because))
    return advice


def throttled(evidence: Evidence) -> list[Advice]:
    """There are too few cores, or the workers may not use all of them."""
    share = (
        evidence.workers.runnable_ratio
        if evidence.workers.runnable_ratio is not None
        else evidence.workers.blocked_ratio or 0.0
    )
    because = f"workers wait for a core for {100 * share:.0f} % of their time in fetches"
    if evidence.cpu.throttled_ratio:
        used_up = 100 * evidence.cpu.throttled_ratio
        because += f"; the CPU quota of {evidence.cpu.cores:g} cores was used up in {used_up:.0f} % of its periods"
    if evidence.workers.allowed_cores is not None:
        more = _other_cores(
            evidence, f"{because}: they may run on {evidence.workers.allowed_cores} of {evidence.cpu.cores:g} cores"
        )
    else:
        more = Advice("give the job more CPU cores; more workers would not help", None, None, None, because)
    return [
        *_fewer_workers(evidence),
        more,
        _cheaper(f"each batch takes {_in_a_worker(evidence)}", evidence),
    ]


def _other_cores(evidence: Evidence, because: str) -> Advice:
    """For workers that may use only some of the cores."""
    on_its_own, fetch_cpu = fetch_on_its_own(evidence)
    free = replace(evidence, workers=replace(evidence.workers, allowed_cores=None))
    step = predicted_step(free, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=max(1, evidence.workers.count))
    action = "let the workers run on every core: a worker_init_fn, taskset or OMP_PROC_BIND restricts them to a few"
    return Advice(action, None, None, None if step is None else gain_of(evidence, step), because)


def fetch_on_its_own(evidence: Evidence) -> tuple[float, float]:
    """Seconds and CPU seconds that a worker with a core of its own takes for the batches of a step."""
    fetch = (evidence.workers.fetch_seconds or 0.0) * evidence.batches_per_step
    on_core = (
        fetch
        if evidence.workers.fetch_cpu_seconds is None
        else evidence.workers.fetch_cpu_seconds * evidence.batches_per_step
    )
    return fetch * (1 - (evidence.workers.runnable_ratio or 0.0)), on_core


def _fewer_workers(evidence: Evidence) -> list[Advice]:
    """Fewer workers, so that the training thread has a core. The gain is at most its run-queue delay."""
    crowded, now = crowded_out(evidence), step_seconds(evidence)
    if (
        evidence.workers.fetch_seconds is None
        or evidence.workers.fetch_cpu_seconds is None
        or now is None
        or not crowded
    ):
        return []
    alone = replace(evidence, compute_seconds=max(0.0, evidence.compute_seconds - crowded))
    on_its_own, fetch_cpu = fetch_on_its_own(evidence)
    steps = {
        workers: step
        for workers in range(1, evidence.workers.count)
        if (step := predicted_step(alone, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=workers)) is not None
    }
    if not steps:
        return []
    best = min(steps.values())
    fewest = min(workers for workers, step in steps.items() if step <= 1.01 * best)
    best = max(best, now - (evidence.cpu.run_queue_delay_seconds or 0.0) / evidence.steps)
    because = (
        f"{evidence.workers.count} workers and the training thread share {evidence.cpu.cores:g} cores, and "
        f"that thread waited {crowded:.1f} s of {evidence.loop_seconds:.1f} s for one"
    )
    fewer = max(1, fewest // _loaders(evidence))
    if fewer >= _workers_each(evidence):
        return []
    return [Advice("use fewer workers", "num_workers", str(fewer), gain_of(evidence, best), because)]


def slow_source(evidence: Evidence) -> list[Advice]:
    """Batches come from an iterable that is not a DataLoader."""
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or compute is None:
        return []
    if evidence.source == "read_ahead":
        return _slow_threads(evidence, now)
    fetch = evidence.wait_seconds / evidence.steps
    because = f"the watched iterable takes {ms(fetch)} of every {ms(now)}{_spent_on(evidence)}"
    advice = _fetch_in_workers(
        evidence,
        "read it in the workers of a DataLoader, as an IterableDataset",
        "the training thread reads the watched iterable",
    )
    on_cpu = evidence.own_fetch_cpu_ratio or 0.0
    # Because of the GIL the training thread waits while a thread that reads ahead runs Python.
    step = max(compute, fetch) if on_cpu < 0.5 else compute + fetch * on_cpu
    ahead = Advice("read some batches ahead on another thread", None, None, gain_of(evidence, step), because)
    return sorted([ahead, *advice], key=lambda a: -(a.predicted_speedup or 0.0))


def _slow_threads(evidence: Evidence, now: float) -> list[Advice]:
    """Threads of the training process read ahead, and are too slow although they work all the time."""
    if evidence.settings.get("reader") == "DALI":
        wait = evidence.wait_seconds / evidence.steps
        because = f"the training thread waits for the DALI pipeline {ms(wait)} of every {ms(now)}"
        action = "give the DALI pipeline more threads, or let it decode on the GPU"
        return [Advice(action, "num_threads", None, None, because)]
    why = "threads of the training process fetch the batches, and share the GIL with the training loop"
    return _fetch_in_workers(evidence, "load batches in worker processes", why, fetch=now)


def _more_workers(evidence: Evidence, provided: str = "") -> list[Advice]:
    """More workers. ``provided``: what storage must be able to do for that, which is not known."""
    fetch = evidence.workers.fetch_seconds
    if fetch is None or not evidence.steps:
        return []
    on_its_own, fetch_cpu = fetch_on_its_own(evidence)
    workers, step = best_workers(evidence, on_its_own, fetch_cpu)
    if step is None or workers <= evidence.workers.count:
        return []
    because = (
        f"{evidence.workers.count} workers, each with {ms(fetch)} a batch, deliver one every "
        f"{ms(fetch / max(1, evidence.workers.count))}; more workers deliver more{provided}"
    )
    more = math.ceil(workers / _loaders(evidence))
    if more <= _workers_each(evidence):
        return []
    low = low_gain(evidence, step, fetch_cpu=fetch_cpu) if provided else None
    return [Advice("use more workers", "num_workers", str(more), gain_of(evidence, step), because, low)]


def _loaders(evidence: Evidence) -> int:
    """Number of DataLoaders with workers that the loop reads at once. ``num_workers`` is set for each of them."""
    return max(1, round(evidence.workers.count / _workers_each(evidence)))


def _workers_each(evidence: Evidence) -> int:
    """The present ``num_workers`` of the loader that the training thread waits for."""
    return int(evidence.settings.get("num_workers") or evidence.workers.count or 1)


def _in_a_worker(evidence: Evidence) -> str:
    took = evidence.workers.fetch_cpu_seconds or evidence.workers.fetch_seconds or 0.0
    return f"{ms(took)} of CPU time in a worker"


def _cheaper(because: str, evidence: Evidence) -> Advice:
    to_gpu = "move augmentation to the GPU, " if evidence.on_gpu else ""
    action = f"make the transforms cheaper: decode at a smaller size, {to_gpu}store preprocessed data"
    return Advice(action, None, None, None, because)


def _faster_storage(because: str) -> Advice:
    return Advice("read from faster storage, or cache the data set locally", None, None, None, because)
