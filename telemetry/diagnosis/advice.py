"""Advice for each cause: what to change, and the predicted speed-up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.causes import THRESHOLDS, costs, crowded_out, less, own_time, without_own_time
from telemetry.diagnosis.model import (
    best_workers,
    compute_seconds,
    gain_of,
    gain_over_window,
    low_gain,
    predicted_step,
    step_seconds,
    supply_in_order,
    supply_seconds,
    times_less,
    with_transfer,
)
from telemetry.diagnosis.stragglers import straggler
from telemetry.records import Advice
from telemetry.util.text import milliseconds as ms

if TYPE_CHECKING:
    from telemetry.diagnosis.evidence import CpuEvidence, Evidence


# -- throughput --------------------------------------------------------------------------------------------------------
# Advice for data sources that deliver fewer batches than the training loop could use, one function per cause.

ON_CPU: Final = 0.5
"""Workers whose fetches use the CPU for this share of their time hold the GIL most of the time."""

_MIN_MENTIONED_BOUNDARIES: Final = 0.1
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
    if at_boundaries >= _MIN_MENTIONED_BOUNDARIES * each * evidence.steps:
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


# -- advice for batches that are fetched fast enough on average, but arrive late ---------------------------------------
# They are late at the start of an epoch, behind a single slow batch, in the transfer from the worker, or because a
# worker is stuck.

_MAX_PREFETCH: Final = 64
_PREFETCH_HEADROOM: Final = 1.25
"""The advised prefetching covers this multiple of the longest fetch."""

_BOUNDARY_SHARE: Final = 0.05
"""The advised epoch length leaves epoch boundaries this share of the time."""

_NO_COMPUTE: Final = 1e-6
"""Compute of a step, in seconds, that is too short to hide anything behind it."""

_MIN_MENTIONED_SHARE: Final = 0.1
"""The reason mentions a secondary cost from this share of the main one on: waits near epoch boundaries against waits at
them, and the release of a batch against its transfer."""

_MAPPED_BYTE_SECONDS: Final = 0.3e-9
"""Seconds of the training thread per byte of one large tensor: its pages are mapped, touched and released. Measured by
`python -m benchmarks.handover`."""

_SLOW_TRANSFER: Final = 1.1
"""Transfers from busy workers get advice of their own if they make a step longer by at least this factor."""


def startup(evidence: Evidence) -> list[Advice]:
    """Each epoch waits until its workers have started."""
    now, epochs = step_seconds(evidence), evidence.epochs
    if now is None:
        return []
    boundary = (epochs.boundary_wait_seconds + epochs.near_boundary_wait_seconds) / evidence.steps
    often = f"{epochs.boundaries} epochs began in the window"
    if (
        epochs.boundaries < THRESHOLDS.epoch_boundaries
    ):  # epochs are longer than the window, so it holds no fair share of them
        rest = now - epochs.boundary_wait_seconds / evidence.steps
        now = rest / max(1e-9, 1 - epochs.boundary_ratio)
        boundary = now - rest
        often = f"{100 * epochs.boundary_ratio:.0f} % of the loop is spent at epoch boundaries"
    if evidence.settings.get("persistent_workers"):
        return _longer_epochs(evidence, now, boundary, often)
    because = (
        f"{often}: workers were started and stopped for {epochs.boundary_wait_seconds:.1f} s of "
        f"{evidence.loop_seconds:.1f} s"
    )
    # One fetch that was not prefetched remains at each boundary. After an epoch that was left early, kept workers first
    # finish the batches that it had requested.
    asked = int(evidence.settings.get("prefetch_factor") or 2)
    fetches = epochs.boundaries + epochs.left * asked
    first = min(boundary, (evidence.workers.fetch_seconds or 0.0) * fetches / evidence.steps)
    gain = gain_of(evidence, now - boundary + first, now=now)
    if evidence.settings.get("loader_used_again") is False:
        action = "make the DataLoader once, with persistent_workers=True, and iterate over it in every epoch"
        because += "; every epoch made a new DataLoader"
        return [Advice(action, None, None, gain, because)]
    return [Advice("keep the workers between epochs", "persistent_workers", "True", gain, because)]


def _longer_epochs(evidence: Evidence, now: float, boundary: float, often: str) -> list[Advice]:
    """For persistent workers: longer epochs, so that the work at the start of an epoch is done less often."""
    rest, epochs = now - boundary, evidence.epochs
    if rest <= 0:
        return []
    longer = times_less(boundary, rest, _BOUNDARY_SHARE)
    because = (
        f"{often}: {epochs.boundary_wait_seconds:.1f} s of {evidence.loop_seconds:.1f} s were waits for first batches, "
        "although the workers are persistent"
    )
    if epochs.near_boundary_wait_seconds >= _MIN_MENTIONED_SHARE * epochs.boundary_wait_seconds:
        because += (
            f", and {epochs.near_boundary_wait_seconds:.1f} s for batches next to them: "
            "workers start and end one by one"
        )
    action = f"make epochs {longer} times as long, or do the data set's work at the start of an epoch only once"
    return [Advice(action, None, str(longer), gain_of(evidence, rest + boundary / longer, now=now), because)]


def uneven(evidence: Evidence) -> list[Advice]:
    """Single batches are late: some fetches are long, or one worker is always slower."""
    compute, supply, in_order = compute_seconds(evidence), supply_seconds(evidence), supply_in_order(evidence)
    if compute is None or supply is None or in_order is None:
        return []
    because = (
        f"{evidence.workers.count} workers are enough on average (a batch every {ms(supply)}, "
        f"{ms(compute)} of compute), but single batches are late"
    )
    if evidence.delivery.head_of_line_wait_seconds > 0:
        because += (
            f"; for {evidence.delivery.head_of_line_wait_seconds:.1f} s finished batches waited behind a slow one"
        )
    boundary = evidence.epochs.boundary_wait_seconds / evidence.steps
    advice = _further_ahead(evidence, compute, max(compute, in_order) + boundary, because)
    if not evidence.settings.get("in_order") or evidence.workers.count < 2:
        return advice
    transfer_wait = evidence.delivery.transfer_wait_seconds / evidence.steps  # unchanged: no worker prefetches more
    gain = gain_of(evidence, max(compute, supply) + boundary + transfer_wait)
    action = "take batches in the order in which they are finished, if their order does not matter"
    if in_order <= compute:
        return [*advice, Advice(action, "in_order", "False", gain, because)]
    slowest = ms(evidence.workers.slowest_fetch_seconds or 0.0)
    because += f"; one worker takes {slowest} a batch, and the others wait for its turn"
    alike = "give every worker an equal share of the slow data: distribute shards by where they are stored"
    return [Advice(action, "in_order", "False", gain, because), Advice(alike, None, None, gain, because), *advice]


def transferred_by_busy_workers(evidence: Evidence) -> bool:
    """Whether a finished batch has to wait for its worker, which is busy with the next one.

    With the sharing strategy ``file_descriptor`` a thread of the worker sends each tensor when the training process
    asks for it. While a fetch runs Python, that thread gets the GIL only once in 5 ms. (PyTorch docs:
    torch.multiprocessing, sharing strategies.)
    """
    by_descriptor = evidence.settings.get("sharing_strategy") == "file_descriptor"
    return by_descriptor and (evidence.workers.cpu_ratio or 0.0) >= ON_CPU


def _further_ahead(evidence: Evidence, compute: float, step: float, because: str) -> list[Advice]:
    """A larger prefetch factor.

    ``step`` is the predicted step without late batches and without the transfer. Both are added here. With busy workers
    prefetching alone does not help: fetches are no longer late, but transfers are.
    """
    factor = int(evidence.settings.get("prefetch_factor") or 2)
    wanted = _prefetch(evidence, factor, compute)
    if wanted <= factor:
        return []
    because += f"; up to {wanted * evidence.workers.count} batches will then be in memory"
    step += _still_late(evidence, factor, wanted, compute)
    handed_over, idle, busy = (
        with_transfer(evidence, step),
        evidence.delivery.transfer_seconds,
        evidence.delivery.transfer_from_busy_seconds,
    )
    at_once = step + (idle or 0.0) * evidence.batches_per_step
    late = idle is not None and busy is not None and busy > idle and handed_over >= _SLOW_TRANSFER * at_once
    if not late or not transferred_by_busy_workers(evidence):
        action = "let workers prefetch more batches"
        return [Advice(action, "prefetch_factor", str(wanted), gain_of(evidence, handed_over), because)]
    action = (
        "call torch.multiprocessing.set_sharing_strategy('file_system') and let workers prefetch more batches with "
        f"prefetch_factor={wanted}"
    )
    because += f"; a finished batch takes {ms(busy or 0.0)} to transfer while its worker is busy with the next one"
    return [Advice(action, None, None, gain_of(evidence, at_once), because)]


def _prefetch(evidence: Evidence, factor: int, compute: float) -> int:
    """The prefetch factor that hides the longest fetch behind compute.

    A worker starts on a batch when the training thread takes the one ``workers * factor`` before it.
    """
    if evidence.workers.longest_fetch_seconds is None or compute < _NO_COMPUTE:
        return 4 * factor
    wanted = math.ceil(_PREFETCH_HEADROOM * evidence.workers.longest_fetch_seconds / (evidence.workers.count * compute))
    return min(_MAX_PREFETCH, max(2 * factor, wanted))


def _still_late(evidence: Evidence, factor: int, wanted: int, compute: float) -> float:
    """Seconds of a step that remain as waits for late batches with a larger prefetch factor."""
    longest = evidence.workers.longest_fetch_seconds
    if longest is None:
        return 0.0
    hidden_now, hidden = (evidence.workers.count * f * compute for f in (factor, wanted))
    if longest <= hidden_now:
        return 0.0
    late = max(0.0, evidence.mid_epoch_wait_seconds) / evidence.steps
    return late * max(0.0, longest - hidden) / (longest - hidden_now)


def transfer(evidence: Evidence) -> list[Advice]:
    """Finished batches take long to reach the training thread, and to be released.

    Objects that are unpickled on the training thread start garbage collections. Fewer objects start fewer. But a
    collection inside ``next()`` may also be the sampler's, so the prediction is a range if they matter. In the zoo they
    took 4 ms of each step of 69 ms where a batch is hundreds of small tensors.
    """
    collected = 0.0
    if evidence.source == "workers" and evidence.steps:
        collected = own_time(evidence).garbage_seconds / evidence.steps
        evidence = without_own_time(evidence)
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or compute is None:
        return []
    transfer_wait = evidence.delivery.transfer_wait_seconds / evidence.steps
    freed = min(compute, (evidence.delivery.release_seconds or 0.0) * evidence.batches_per_step)
    crowded = _crowded_by_pickling(evidence) * (compute - freed)
    size = _pickled_bytes(evidence) * evidence.batches_per_step
    kept = min(transfer_wait + freed, size * _MAPPED_BYTE_SECONDS)
    if transfer_wait > 0:
        because = f"a finished batch takes {ms(transfer_wait)} of every {ms(now)} to reach the training thread"
        if freed >= _MIN_MENTIONED_SHARE * transfer_wait:
            because += f", and {ms(freed)} to be released"
        if crowded >= _MIN_MENTIONED_SHARE * transfer_wait:
            because += f"; the training thread waits {ms(crowded)} for a core while workers pickle batches"
        if kept >= _MIN_MENTIONED_SHARE * transfer_wait:
            because += f"; {ms(kept)} remain for its {size / 1e6:.1f} MB, however it is sent"
    else:
        ready = evidence.delivery.ready_batches or 0.0
        because = f"{ready:.1f} batches are ready on average, and a step still takes {ms(now)}"
    then, supply = now - transfer_wait - freed - crowded + kept, supply_seconds(evidence) or 0.0
    gain, low = gain_of(evidence, max(then, supply)) if transfer_wait > 0 else None, None
    if transfer_wait > 0 and collected >= _MIN_MENTIONED_SHARE * then > 0:
        because += f"; collections of garbage inside next() take {ms(collected)}, some or all because of its objects"
        gain, low = gain_of(evidence, max(then - collected, supply)), gain
    action = (
        "send less data: few large tensors per batch instead of many small ones or Python objects; "
        "smaller types (uint8)"
    )
    advice = [Advice(action, None, None, gain, because, None if gain == low else low)]
    if evidence.on_gpu and not evidence.settings.get("pin_memory"):
        action = "pin batches in the background and copy them with non_blocking=True"
        background = gain_of(evidence, now - transfer_wait) if transfer_wait > 0 else None
        advice.insert(0, Advice(action, "pin_memory", "True", background, because))
    if transferred_by_busy_workers(evidence):
        action = "share tensors as files: torch.multiprocessing.set_sharing_strategy('file_system')"
        advice.append(
            Advice(
                action,
                None,
                None,
                None,
                "the tensors of finished batches are transferred by workers that are busy with the next ones",
            )
        )
    return advice


def _pickled_bytes(evidence: Evidence) -> float:
    """Bytes of a batch that are written to the pipe now, and would have to be sent in another way."""
    return (evidence.workers.written_bytes or 0.0) / evidence.workers.fetches if evidence.workers.fetches else 0.0


def _crowded_by_pickling(evidence: Evidence) -> float:
    """Share of the compute that is run-queue delay because workers that pickle batches use the cores.

    The run-queue delay is spread evenly over the loop. Pickling is blamed for its share of the load on the cores.
    """
    pickling = evidence.workers.pickling_cores
    if not pickling or not evidence.cpu.run_queue_delay_seconds or evidence.loop_seconds <= 0:
        return 0.0
    fetching = (evidence.workers.busy_ratio or 0.0) * evidence.workers.count * (evidence.workers.cpu_ratio or 0.0)
    beside = max(
        pickling, evidence.cpu.cores_of_others or 0.0
    )  # pickling is not part of a fetch, so the others' cores include it
    return min(1.0, evidence.cpu.run_queue_delay_seconds / evidence.loop_seconds) * pickling / (fetching + beside)


def stuck_worker(evidence: Evidence) -> list[Advice]:
    """One fetch does not end."""
    longest = max(evidence.workers.long_fetch_seconds, default=0.0)
    if evidence.workers.fetching_seconds >= longest:
        because = f"one fetch has been in progress for {evidence.workers.fetching_seconds:.0f} s"
    else:
        because = f"one fetch was in progress for {longest:.0f} s"
    raising = "without a timeout the DataLoader waits forever"
    return [
        Advice("find out what that worker waits for: a lock, a mount, remote storage", None, None, None, because),
        Advice("make the DataLoader raise an error when a worker is stuck", "timeout", "120", None, raising),
    ]


# -- advice for each cause: what to change, and the predicted speed-up -------------------------------------------------
# A change is left out when the model of a step (`diagnosis.model`) predicts no gain from it.

WORTH_IT: Final = 1.05
"""Advice with a smaller predicted speed-up is left out: it is not worth a person's time."""

_MIN_MENTIONED_AROUND: Final = 0.1
"""The reason mentions the time around checkpoints from this share of the checkpoint time on."""

_MOSTLY_INSIDE_NEXT: Final = 0.5
"""Share of the collection time inside ``next()`` from which on the advice is about ``next()``."""

_MUCH_LONGER: Final = 1.5
"""The reason mentions that rare checkpoints take longer from this factor on."""

_CHECKPOINT_SHARE: Final = 0.05
"""The advised checkpoint interval leaves checkpoints this share of the time."""

_MAX_ADVICE: Final = 3


def advise(cause: str, evidence: Evidence) -> tuple[Advice, ...]:
    """At most three changes, the most useful first. Empty if no change would help."""
    make = _BY_CAUSE.get(cause)
    if make is None:
        return ()
    own = cause in {"loader_on_training_thread", "gc_pause", "batch_transfer"}  # they look at that time themselves
    if evidence.source == "workers" and not own:
        evidence = without_own_time(evidence)
    wanted = make(evidence)
    return tuple(a for a in wanted if a.predicted_speedup is None or a.predicted_speedup >= WORTH_IT)[:_MAX_ADVICE]


def _checkpoint(evidence: Evidence) -> list[Advice]:
    whole, around = evidence.loop_and_checkpoint_seconds, evidence.checkpoints.extra_compute_seconds
    because = f"checkpoints took {evidence.checkpoints.seconds:.1f} s of {whole:.1f} s"
    if around >= _MIN_MENTIONED_AROUND * evidence.checkpoints.seconds:
        # Renaming a file over the previous one releases the old data: 0.1 s for 250 MB in the page cache.
        because += (
            f", and the steps around them {around:.1f} s more than other steps: "
            "renaming or uploading a file takes time too"
        )
    take = min(whole, evidence.checkpoints.seconds + around)
    without = whole - take
    seldom = times_less(take, without, _CHECKPOINT_SHARE)
    # A rare checkpoint takes as long as the first ones, which had no older file to reuse: torch.save of 250 MB takes
    # 1.0 s into a new file, but 0.3 s just after a file of that size was released.
    rare = max(1, evidence.checkpoints.steps) * evidence.checkpoints.first_seconds
    if rare >= _MUCH_LONGER * take:
        because += (
            f"; the first of them took {evidence.checkpoints.first_seconds:.1f} s each, and rare ones will take as long"
        )
    gain = gain_over_window(evidence, without + max(take, rare) / seldom, now=whole)
    action = f"write a checkpoint {seldom} times less often"
    if evidence.checkpoints.steps > 1 and evidence.steps > evidence.checkpoints.steps:
        every = evidence.steps / evidence.checkpoints.steps
        action = f"write a checkpoint every {seldom * every:.0f} steps, not every {every:.0f}"
    behind = "write checkpoints in the background with torch.distributed.checkpoint.async_save"
    return [Advice(action, None, str(seldom), gain, because), Advice(behind, None, None, None, because)]


def _garbage(evidence: Evidence) -> list[Advice]:
    supply = (supply_seconds(evidence) or 0.0) * evidence.steps  # a step is never shorter than the workers' supply
    gain = gain_over_window(
        evidence, max(evidence.loop_seconds - evidence.garbage.seconds, supply), now=evidence.loop_seconds
    )
    because = (
        f"garbage collection stopped the training thread for {evidence.garbage.seconds:.1f} s of "
        f"{evidence.loop_seconds:.1f} s"
    )
    inside = own_time(evidence).all_garbage_seconds
    freeze = "call gc.freeze() after the model and the data set are built"
    if inside < _MOSTLY_INSIDE_NEXT * evidence.garbage.seconds:
        return [Advice(freeze, "gc.freeze()", None, gain, because)]
    because += f", {inside:.1f} s of it inside next()"
    where = "the sampler" if evidence.source == "workers" else "the data set, the sampler or collate_fn"
    calls = f"remove calls of gc.collect() from code that runs inside next() on the training thread: {where}"
    return [
        Advice(freeze, "gc.freeze()", None, gain, because),
        Advice(calls, None, None, gain, because),
    ]


def _straggler(evidence: Evidence) -> list[Advice]:
    slow, now = straggler(evidence.pace, evidence.peers, evidence.earlier_paces), step_seconds(evidence)
    if slow is None or now is None:
        return []
    because = f"{slow.name} {slow.why}; this rank waits for it {ms(slow.lost)} of every {ms(now)}"
    action = f"make {slow.name} as fast as the others: all ranks run at the pace of the slowest"
    return [Advice(action, None, None, gain_of(evidence, now - slow.lost, but=slow.rank), because)]


def _host_bound(evidence: Evidence) -> list[Advice]:
    idle = evidence.gpu.idle_seconds or 0.0
    because = f"no kernel ran for {idle:.1f} s of {evidence.loop_seconds:.1f} s, although batches were ready"
    if evidence.pace.where is not None:
        because += f"; the training thread was mostly in {evidence.pace.where}"
    bound = gain_over_window(evidence, evidence.loop_seconds - idle, now=evidence.loop_seconds)
    if bound is not None and bound < WORTH_IT:
        return []
    most = "" if bound is None else f"; without that, steps could be {bound:g} times as fast at most"
    return [
        Advice("launch fewer, larger kernels: torch.compile, CUDA graphs", None, None, None, because + most),
        Advice(
            "remove calls that make the host wait for the GPU: .item(), .cpu(), printing a tensor",
            None,
            None,
            None,
            because,
        ),
    ]


def _gpu_throttled(evidence: Evidence) -> list[Advice]:
    slowed = evidence.gpu.slowed_seconds or 0.0
    because = (
        f"the GPU throttles its clock (temperature or power), which cost {slowed:.1f} s of "
        f"{evidence.loop_seconds:.1f} s"
    )
    gain = gain_over_window(evidence, evidence.loop_seconds - slowed, now=evidence.loop_seconds)
    return [Advice("check the cooling and the power supply of the node, or move the job", None, None, gain, because)]


_BY_CAUSE: Final = {
    "loader_on_training_thread": on_training_thread,
    "workers_cpu_bound": cpu_bound,
    "workers_io_bound": io_bound,
    "workers_throttled": throttled,
    "worker_startup": startup,
    "uneven_batches": uneven,
    "batch_transfer": transfer,
    "worker_stuck": stuck_worker,
    "source_slow": slow_source,
    "straggler": _straggler,
    "checkpoint": _checkpoint,
    "gc_pause": _garbage,
    "host_bound": _host_bound,
    "gpu_throttled": _gpu_throttled,
}


# -- what if -----------------------------------------------------------------------------------------------------------
# What a step would take with other settings of the loader: predictions that `tune` compares with each other.

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
    return transferred_by_busy_workers(evidence) and slow and late > _TRANSFER_MATTERS * evidence.loop_seconds


_TRANSFER_MATTERS: Final = 0.05
"""Waits for the transfer matter from this share of the loop on."""
