"""Advice for each cause: what to change, and the predicted speed-up. `telemetry.diagnosis.causes` lists the causes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from telemetry.diagnosis.costs import THRESHOLDS, crowded_out, first_fetch_cost, less, own_time, without_own_time
from telemetry.diagnosis.misuse import SPLIT
from telemetry.diagnosis.model import (
    WORTH_IT,
    Fetch,
    alone_in_worker,
    best_workers,
    gain_of,
    gain_over_window,
    low_gain,
    predicted_step,
    step_with,
    supply_in_order,
    times_less,
    with_transfer,
)
from telemetry.diagnosis.stragglers import straggler
from telemetry.model.records import Advice
from telemetry.util.words import milliseconds as ms
from telemetry.util.words import rounded_percent

if TYPE_CHECKING:
    from telemetry.diagnosis.evidence import Evidence

ON_CPU: Final = 0.5
"""Workers whose fetches use the CPU for this share of their time hold the GIL most of the time."""

_MIN_MENTIONED: Final = 0.1
"""From this share of the main cost on, the reason also mentions a secondary one: epoch boundaries of the sampler's
time, waits next to epoch boundaries, the release of a batch beside its transfer, the time around checkpoints."""

_SHARED_CORES_FACTOR: Final = 1.1
"""Extra CPU time when several processes do the work of one: they compete for caches and memory bandwidth."""

_WORKER_BATCH_SECONDS: Final = 0.004
"""Extra CPU seconds per batch when a worker fetches it: pickling, mapping, waiting for it.

Both constants are measured by `python -m benchmarks.worker_cost`. They apply only to a loader without workers, because
the measured times of existing workers include these costs.
"""

_MAPPED_BYTE_SECONDS: Final = 0.3e-9
"""Seconds of the training thread per byte of one large tensor: its pages are mapped, touched and released. Measured by
`python -m benchmarks.handover`."""

_FEW_TENSORS_BYTES: Final = 1500.0
"""A batch of fewer pickled bytes is three tensors at most, and no other objects. There is nothing that would be less to
send: such a batch is late because a core or the worker is busy."""

_MAX_PREFETCH: Final = 64
_PREFETCH_HEADROOM: Final = 1.25
"""The advised prefetching covers this multiple of the longest fetch."""

_ROW_SECONDS: Final = 100e-6
_MIN_ROWS: Final = 8
"""A sample that takes less CPU time, in a batch of so many, is a row in memory. Decoding one takes a millisecond."""

_ABOUT_SIZES: Final = ("size", "stride", "shape")
"""Words of torch for a failed check that is about the sizes of a tensor."""

_NO_COMPUTE: Final = 1e-6
"""Compute of a step, in seconds, that is too short to hide anything behind it."""

_SLOW_TRANSFER: Final = 1.1
"""Transfers from busy workers get advice of their own if they make a step longer by at least this factor."""

_BOUNDARY_SHARE: Final = 0.05
_CHECKPOINT_SHARE: Final = 0.05
"""The advised length of epochs, or interval of checkpoints, reduces their cost to this share of the time."""

_MUCH_LONGER: Final = 1.5
"""From this factor on, the reason mentions that rare checkpoints take longer than frequent ones."""


def _do(action: str, because: str, gain: float | None = None, low: float | None = None) -> Advice:
    """Advice that is not about a setting. ``low``: the low end of the gain."""
    return Advice(action, None, None, gain, because, None if low == gain else low)


def _cpu_words(share: float | None) -> str:
    return "" if share is None else f", {100 * share:.0f} % of it on the CPU"


# -- advice on workers -------------------------------------------------------------------------------------------------


def _with_workers(evidence: Evidence, action: str, workers: int, gain: float | None, because: str) -> Advice:
    """Advice for a number of workers. Unless each is known to give items of its own, it says how to divide them."""
    divided = evidence.traits.asks_for_its_worker and evidence.same_batches is False
    if evidence.traits.iterable_data and not divided:
        action = f"{SPLIT}; then {action} (num_workers={workers})"
        because += "; without that, each worker gives all items, and the epoch takes as long as now"
        low = 1.0 if gain is not None and gain > 1 else None
        return Advice(action, None, str(workers), gain, because, low)
    return Advice(action, "num_workers", str(workers), gain, because)


WHOLE_BATCHES: Final = (
    "fetch a whole batch at once: give the data set __getitems__, or index it with a list of indices "
    "(sampler=BatchSampler(...), batch_size=None)"
)


def _fetched_row_by_row(evidence: Evidence, batch_cpu: float | None) -> list[Advice]:
    """Advice if samples are so small that their number takes the time. ``batch_cpu``: CPU seconds of a batch."""
    samples = evidence.traits.batch_size
    if batch_cpu is None or not samples or samples < _MIN_ROWS or not evidence.traits.one_by_one:
        return []
    if batch_cpu / samples > _ROW_SECONDS:
        return []
    because = (
        f"a batch is {samples} calls of __getitem__ and their collation, {1e6 * batch_cpu / samples:.0f} us for each; "
        "workers would have to send as much as they fetch"
    )
    return [_do(WHOLE_BATCHES, because)]


# -- sources that deliver fewer batches than the training loop could use -----------------------------------------------


def on_training_thread(evidence: Evidence) -> list[Advice]:
    """Advice if the training thread fetches batches itself, or runs a slow sampler for the workers."""
    if evidence.source == "workers":
        return _slow_sampler(evidence)
    share, batches = evidence.own_fetch_cpu_ratio, evidence.steps * evidence.batches_per_step
    if share is not None and batches and share + _run_queue_delay_ratio(evidence) >= ON_CPU:
        rows = _fetched_row_by_row(evidence, evidence.wait_seconds / batches * share)
        if rows:
            return rows
    why = "the training thread fetches each batch itself"
    advice = _fetch_in_workers(evidence, "load batches in worker processes", why)
    if share is None or not batches:
        return advice
    # More processes may not speed the fetches up: make the fetch itself shorter.
    fetch, share = evidence.wait_seconds / batches, min(1.0, share + _run_queue_delay_ratio(evidence))
    if share < ON_CPU:
        blocked = f"{100 * (1 - share):.0f} % of the {ms(fetch)} that a batch takes"
        return [*advice, _faster_storage(f"the training thread is blocked for {blocked}")]
    return [*advice, _cheaper(f"each batch takes {ms(fetch * share)} of CPU time on the training thread", evidence)]


def _slow_sampler(evidence: Evidence) -> list[Advice]:
    """Advice if the sampler, which the training thread runs for the workers, is slow."""
    now, own, cpu = evidence.step_seconds, own_time(evidence), evidence.sampler_cpu_ratio
    each, at_edges = own.all_sampler / evidence.steps, own.edge_sampler
    if evidence.edges < THRESHOLDS.epoch_boundaries and evidence.edge_share_of_sampler > 0:
        # Epochs are longer than the window, so the starts in it are not representative.
        rest = now - evidence.edge_sampler_seconds / evidence.steps
        now = rest / max(1e-9, 1 - evidence.edge_share_of_sampler)
        each = own.sampler / evidence.steps + now - rest
        at_edges = (now - rest) * evidence.steps
    if each <= 0:
        return []
    because = f"the sampler takes {ms(each)} of every {ms(now)} on the training thread, however many workers there are"
    because += _cpu_words(cpu)
    if at_edges >= _MIN_MENTIONED * each * evidence.steps:
        because += f"; {100 * at_edges / (each * evidence.steps):.0f} % of it is at epoch boundaries"
    on_cpu = 1.0 if cpu is None else cpu
    without = replace(
        without_own_time(evidence),
        compute_seconds=evidence.compute_seconds + own.all_garbage,
        process_cpu_per_step_seconds=less(evidence.process_cpu_per_step_seconds, each * on_cpu),
    )
    at_least = step_with(without, max(1, evidence.workers))
    if cpu is not None and cpu + _run_queue_delay_ratio(evidence) < ON_CPU:
        action = "make the sampler not wait: keep what it reads in memory, or draw indices ahead on another thread"
    elif at_edges >= ON_CPU * each * evidence.steps:
        action = "make the sampler's start cheaper: draw the indices of an epoch with torch or NumPy, or reuse them"
    else:
        action = "make the sampler cheaper: precompute its indices, or draw them with torch or NumPy"
    then = None if at_least is None else max(now - own.exposed_ratio * each, at_least)
    return [_do(action, because, gain_of(evidence, then, now=now))]


def _run_queue_delay_ratio(evidence: Evidence) -> float:
    window = evidence.window_seconds
    return min(1.0, (evidence.own_runnable_seconds or 0.0) / window) if window > 0 else 0.0


def _fetch_in_workers(evidence: Evidence, action: str, why: str, fetch: float | None = None) -> list[Advice]:
    """Advice to fetch in workers. ``fetch``: seconds for the batches of a step; by default the whole wait."""
    fetch = evidence.wait_seconds / evidence.steps if fetch is None else fetch
    moved, in_worker, first = _without_own_fetches(evidence, fetch)
    workers, step = best_workers(moved, in_worker, boundary=first)
    if evidence.edges >= THRESHOLDS.epoch_boundaries and not evidence.traits.has_set_epoch:
        action += " that are kept between epochs (persistent_workers=True)"
    on_cpu = evidence.own_fetch_cpu_ratio
    because = f"{why}: {ms(fetch)} of every {ms(evidence.step_seconds)}{_cpu_words(on_cpu)}"
    low = low_gain(moved, step, in_worker) if on_cpu is not None and on_cpu < ON_CPU else None
    advice = _with_workers(evidence, action, workers, gain_of(evidence, step), because)
    return [replace(advice, predicted_low=low) if advice.predicted_low is None else advice]


def _without_own_fetches(evidence: Evidence, fetch: float) -> tuple[Evidence, Fetch, float]:
    """Move the fetches of the training thread into workers.

    Returns:
        The evidence without them, the fetches in workers, and the seconds per step of the first fetches of epochs,
        which are not prefetched.
    """
    own_cpu, compute = evidence.process_cpu_per_step_seconds, evidence.step_compute_seconds
    if evidence.own_fetch_cpu_ratio is not None:
        fetch_cpu = min(fetch * evidence.own_fetch_cpu_ratio, own_cpu or fetch)
    else:  # CPU time beyond the compute was spent on fetches
        fetch_cpu = fetch if own_cpu is None else min(fetch, max(0.0, own_cpu - compute))
    rest = compute if own_cpu is None else max(min(own_cpu, compute), own_cpu - fetch_cpu)
    in_workers = _SHARED_CORES_FACTOR * fetch_cpu + _WORKER_BATCH_SECONDS * evidence.batches_per_step
    moved = replace(evidence, process_cpu_per_step_seconds=_SHARED_CORES_FACTOR * rest)
    first = evidence.edges * fetch / evidence.batches_per_step / evidence.steps
    return moved, Fetch(fetch, in_workers), first


def cpu_bound(evidence: Evidence) -> list[Advice]:
    """Advice if the workers' CPU time is the limit."""
    rows = _fetched_row_by_row(evidence, evidence.fetch_cpu_seconds)
    return rows or [*_first_fetches(evidence), *_more_workers(evidence), _cheaper_in_worker(evidence)]


def io_bound(evidence: Evidence) -> list[Advice]:
    """Advice if the workers wait for storage or the network."""
    fetch, blocked = evidence.fetch_seconds, evidence.worker_blocked_ratio
    advice = _first_fetches(evidence) or _more_workers(evidence, ", if the storage can serve more requests at once")
    if fetch is not None and blocked is not None:
        because = f"workers are blocked for {100 * blocked:.0f} % of the {ms(fetch)} that a batch takes"
        read, count = evidence.read_bytes, evidence.fetches
        if read and count:
            because += f", and read {read / count / 1e6:.1f} MB from storage for each"
        advice.append(_faster_storage(because))
    return advice


def throttled(evidence: Evidence) -> list[Advice]:
    """Advice if there are too few cores, or the workers may not use all of them."""
    runnable, cores = evidence.worker_runnable_ratio, evidence.worker_cores
    share = runnable if runnable is not None else evidence.worker_blocked_ratio or 0.0
    because = f"workers wait for a core for {100 * share:.0f} % of their time in fetches"
    if evidence.throttled_ratio:
        used_up = 100 * evidence.throttled_ratio
        because += f"; the CPU quota of {evidence.cores:g} cores was used up in {used_up:.0f} % of its periods"
    if cores is None:
        more = _do("give the job more CPU cores; more workers would not help", because)
    else:
        because += f": they may run on {cores} of {evidence.cores:g} cores"
        free = replace(evidence, worker_cores=None)
        gain = gain_of(evidence, step_with(free, max(1, evidence.workers)))
        action = "let the workers run on every core: a worker_init_fn, taskset or OMP_PROC_BIND restricts them to a few"
        more = _do(action, because, gain)
    rows = _fetched_row_by_row(evidence, evidence.fetch_cpu_seconds)
    return rows or [*fewer_workers(evidence), more, _cheaper_in_worker(evidence)]


def fewer_workers(evidence: Evidence) -> list[Advice]:
    """Advice to use fewer workers, so that the training thread has a core. The gain is at most its run-queue delay."""
    crowded = crowded_out(evidence)
    fetch = alone_in_worker(evidence)
    unknown = fetch is None or evidence.fetch_cpu_seconds is None
    if fetch is None or unknown or evidence.workers < 2 or not evidence.steps or not crowded:
        return []
    alone = replace(evidence, compute_seconds=max(0.0, evidence.compute_seconds - crowded))
    steps = {workers: predicted_step(alone, fetch, workers) for workers in range(1, evidence.workers)}
    best = min(steps.values())
    fewest = min(workers for workers, step in steps.items() if step <= 1.01 * best)
    fewer = max(1, fewest // _loaders(evidence))
    if fewer >= _workers_each(evidence):
        return []
    best = max(best, evidence.step_seconds - (evidence.own_runnable_seconds or 0.0) / evidence.steps)
    because = (
        f"{evidence.workers} workers and the training thread share {evidence.cores:g} cores, and "
        f"that thread waited {crowded:.1f} s of {evidence.loop_seconds:.1f} s for one"
    )
    return [Advice("use fewer workers", "num_workers", str(fewer), gain_of(evidence, best), because)]


def slow_source(evidence: Evidence) -> list[Advice]:
    """Advice if an iterable that is no DataLoader, or a thread that reads ahead, is slow."""
    now, compute, fetch = evidence.step_seconds, evidence.step_compute_seconds, evidence.wait_seconds / evidence.steps
    if evidence.source == "read_ahead":  # threads of this process are too slow, although they work all the time
        if evidence.settings.get("reader") == "DALI":
            because = f"the training thread waits for the DALI pipeline {ms(fetch)} of every {ms(now)}"
            return [
                Advice(
                    "give the DALI pipeline more threads, or let it decode on the GPU", "num_threads", because=because
                )
            ]
        why = "threads of the training process fetch the batches, and share the GIL with the training loop"
        return _fetch_in_workers(evidence, "load batches in worker processes", why, fetch=now)
    if evidence.read_by_thread:
        return _read_by_thread(evidence)
    advice = _fetch_in_workers(
        evidence,
        "read it in the workers of a DataLoader, as an IterableDataset",
        "the training thread reads the watched iterable",
    )
    on_cpu, gain = evidence.own_fetch_cpu_ratio, None
    if on_cpu is not None:
        # Because of the GIL the training thread waits while a thread that reads ahead runs Python.
        gain = gain_of(evidence, max(compute, fetch) if on_cpu < ON_CPU else compute + fetch * on_cpu)
    because = f"the watched iterable takes {ms(fetch)} of every {ms(now)}{_cpu_words(on_cpu)}"
    ahead = _do("read some batches ahead on another thread", because, gain)
    return sorted([ahead, *advice], key=lambda a: -(a.predicted_speedup or 0.0))


def _read_by_thread(evidence: Evidence) -> list[Advice]:
    """Advice if another thread reads a DataLoader ahead for the watched iterable: the loader itself is too slow."""
    why = "another thread already reads the DataLoader ahead"
    if evidence.workers:
        return [replace(one, because=f"{why}; {one.because}") for one in _more_workers(evidence)]
    fetch = evidence.step_seconds  # that thread fetches all the time
    because = f"{why}, and fetches each batch itself: {ms(fetch)}"
    workers, _ = best_workers(evidence, Fetch(fetch, fetch))
    return [_with_workers(evidence, "load its batches in worker processes", workers, None, because)]


def _more_workers(evidence: Evidence, provided: str = "") -> list[Advice]:
    """Advice to use more workers. ``provided``: what the storage must be able to do, which is not known."""
    fetch = alone_in_worker(evidence)
    if fetch is None or evidence.fetch_seconds is None or not evidence.steps:
        return []
    workers, step = best_workers(evidence, fetch)
    more = math.ceil(workers / _loaders(evidence))
    if workers <= evidence.workers or more <= _workers_each(evidence):
        return []
    because = (
        f"{evidence.workers} workers, each with {ms(evidence.fetch_seconds)} a batch, deliver one every "
        f"{ms(evidence.fetch_seconds / max(1, evidence.workers))}; more workers deliver more{provided}"
    )
    low = low_gain(evidence, step, fetch) if provided else None
    advice = _with_workers(evidence, "use more workers", more, gain_of(evidence, step), because)
    return [replace(advice, predicted_low=low) if advice.predicted_low is None else advice]


def _loaders(evidence: Evidence) -> int:
    """Number of DataLoaders with workers that the loop reads at once. ``num_workers`` is set for each of them."""
    return max(1, round(evidence.workers / _workers_each(evidence)))


def _workers_each(evidence: Evidence) -> int:
    """Present ``num_workers`` of the loader that the training thread waits for."""
    return int(evidence.settings.get("num_workers") or evidence.workers or 1)


def _cheaper_in_worker(evidence: Evidence) -> Advice:
    took = evidence.fetch_cpu_seconds
    because = "fetches take most of the workers' time on the CPU"
    return _cheaper(because if took is None else f"each batch takes {ms(took)} of CPU time in a worker", evidence)


CHEAPER: Final = "make the transforms cheaper"
"""Begins advice for fetches of which no line is known."""


def _cheaper(because: str, evidence: Evidence) -> Advice:
    to_gpu = "move augmentation to the GPU, " if evidence.on_gpu else ""
    return _do(f"{CHEAPER}: decode at a smaller size, {to_gpu}store preprocessed data", because)


def _faster_storage(because: str) -> Advice:
    return _do("read from faster storage, or cache the data set locally", because)


# -- batches that are fetched fast enough on average, but arrive late --------------------------------------------------
# They are late at the start of an epoch, behind a single slow batch, in the transfer from the worker, or because a
# worker is stuck.


def startup(evidence: Evidence) -> list[Advice]:
    """Advice if workers start and stop at epoch boundaries."""
    now, at_edges, loop = evidence.step_seconds, evidence.edge_wait_seconds, evidence.loop_seconds
    around = evidence.around_edges_seconds
    boundary, often = (at_edges + around) / evidence.steps, f"{evidence.edges} epochs began in the window"
    if evidence.edges < THRESHOLDS.epoch_boundaries:
        # Epochs are longer than the window, so the starts in it are not representative.
        rest = now - at_edges / evidence.steps
        now = rest / max(1e-9, 1 - evidence.edge_share)
        boundary = now - rest
        often = f"{100 * evidence.edge_share:.0f} % of the loop is spent at epoch boundaries"
    if evidence.settings.get("persistent_workers"):
        rest = now - boundary
        if rest <= 0:
            return []
        longer = times_less(boundary, rest, _BOUNDARY_SHARE)
        because = f"{often}: {at_edges:.1f} s of {loop:.1f} s were waits for first batches, although the workers are "
        because += "persistent"
        if evidence.first_fetch_ratio >= _MIN_MENTIONED:
            ratio = 100 * evidence.first_fetch_ratio
            because += f"; for {ratio:.0f} % of it the first fetch takes longer than others"
        if around >= _MIN_MENTIONED * at_edges:
            because += f", and {around:.1f} s for batches next to them: workers start and end one by one"
        action = (
            f"go over the data {longer} times in each epoch, so that fewer epochs begin, or do the data set's work at "
            "the start of an epoch only once"
        )
        return [Advice(action, None, str(longer), gain_of(evidence, rest + boundary / longer, now=now), because)]
    because = f"{often}: workers were started and stopped for {at_edges:.1f} s of {loop:.1f} s"
    least, most = _left_at_boundaries(evidence)
    gain, low = (
        None if left is None else gain_of(evidence, now - boundary + min(boundary, left), now=now)
        for left in (least, most)
    )
    if evidence.settings.get("loader_used_again") is False:
        action = "make the DataLoader once, with persistent_workers=True, and iterate over it in every epoch"
        return [_do(action, f"{because}; every epoch made a new DataLoader", gain, low)]
    if evidence.traits.has_set_epoch:
        action = "keep the workers between epochs (persistent_workers=True), and give them the epoch in shared memory"
        because += "; the data set has set_epoch(), which workers that are kept would not see"
        return [_do(action, because, gain, low)]
    kept = _do("keep the workers between epochs", because, gain, low)
    return [replace(kept, setting="persistent_workers", value="True")]


def _left_at_boundaries(evidence: Evidence) -> tuple[float | None, float | None]:
    """The least and the most seconds per step that kept workers still take at epoch boundaries; None if unknown.

    One fetch that was not prefetched remains at each boundary. Of an iterable data set it is a first fetch, which may
    take longer than others. After an epoch that was left early, kept workers first finish the batches that it had
    requested.
    """
    left = evidence.iterations_left * _prefetch_factor(evidence)
    fetch, longest, first = evidence.fetch_seconds, evidence.longest_fetch_seconds, None
    if evidence.traits.iterable_data:
        first = evidence.first_fetch_seconds
    if fetch is not None:
        seconds = (left * fetch + evidence.edges * (fetch if first is None else first)) / evidence.steps
        return seconds, seconds
    return (None, None) if longest is None else (0.0, (left + evidence.edges) * longest / evidence.steps)


def _first_fetches(evidence: Evidence) -> list[Advice]:
    """Advice if most of the wait is for the first fetches of iterations, which take much longer than others."""
    lost = first_fetch_cost(evidence)
    if not evidence.steps or lost < ON_CPU * (evidence.exposed_seconds or 0.0) or lost <= 0:
        return []
    now, loop = evidence.step_seconds, evidence.loop_seconds
    then, supply = max(now - lost / evidence.steps, evidence.step_compute_seconds), evidence.supply_seconds
    # A buffer that gives its items sooner is filled later: then the workers have as much to do as now.
    low, gain = (None, None) if supply is None else (gain_of(evidence, max(then, supply)), gain_of(evidence, then))
    first, fetch = evidence.first_fetch_seconds, evidence.fetch_seconds
    because = f"the first fetches of epochs take {100 * lost / loop:.0f} % of the loop"
    if first is not None and fetch is not None:
        because += f": {first:.1f} s each, and {ms(fetch)} for the mean of all fetches"
    action = (
        "let the data set give its first batch sooner: yield items before a shuffle buffer is full, and read an index "
        "once, not at the start of each epoch"
    )
    return [_do(action, because, gain, low)]


def _prefetch_factor(evidence: Evidence) -> int:
    return int(evidence.settings.get("prefetch_factor") or 2)


def uneven(evidence: Evidence) -> list[Advice]:
    """Advice if batches are fast enough on average, but single ones are late."""
    compute, supply, in_order = evidence.step_compute_seconds, evidence.supply_seconds, supply_in_order(evidence)
    if supply is None or in_order is None:
        return []
    because = (
        f"{evidence.workers} workers are enough on average (a batch every {ms(supply)}, "
        f"{ms(compute)} of compute), but single batches are late"
    )
    if evidence.head_of_line_seconds > 0:
        because += f"; for {evidence.head_of_line_seconds:.1f} s finished batches waited behind a slow one"
    boundary = evidence.edge_wait_seconds / evidence.steps
    advice = _further_ahead(evidence, max(compute, in_order) + boundary, because)
    in_random_order = evidence.traits.shuffled or evidence.traits.shuffled is None or evidence.traits.iterable_data
    if not evidence.settings.get("in_order") or evidence.workers < 2 or not in_random_order:
        return advice
    transfer_wait = evidence.transfer_wait_seconds / evidence.steps  # unchanged: no worker prefetches more
    gain = gain_of(evidence, max(compute, supply) + boundary + transfer_wait)
    action = "take batches in the order in which they are finished, if their order does not matter"
    if in_order <= compute:
        return [*advice, Advice(action, "in_order", "False", gain, because)]
    slowest = ms(evidence.slowest_fetch_seconds or 0.0)
    because += f"; one worker takes {slowest} a batch, and the others wait for its turn"
    alike = "give every worker an equal share of the slow data: distribute shards by where they are stored"
    return [Advice(action, "in_order", "False", gain, because), _do(alike, because, gain), *advice]


def _transferred_by_busy_workers(evidence: Evidence) -> bool:
    """Whether a finished batch has to wait for its worker, which is busy with the next one.

    With the sharing strategy ``file_descriptor`` a thread of the worker sends each tensor when the training process
    asks for it. While a fetch runs Python, that thread gets the GIL only once in 5 ms. (PyTorch docs:
    torch.multiprocessing, sharing strategies.)
    """
    by_descriptor = evidence.settings.get("sharing_strategy") == "file_descriptor"
    return by_descriptor and (evidence.worker_cpu_ratio or 0.0) >= ON_CPU


def _further_ahead(evidence: Evidence, step: float, because: str) -> list[Advice]:
    """Advice to prefetch more, so that the longest fetch is hidden behind compute.

    A worker starts on a batch when the training thread takes the one ``workers * prefetch_factor`` before it. ``step``
    is the predicted step without late batches and without the transfer. This adds both. With busy workers
    prefetching alone does not help: fetches are no longer late, but transfers are.
    """
    compute, longest, workers = evidence.step_compute_seconds, evidence.longest_fetch_seconds, evidence.workers
    factor = _prefetch_factor(evidence)
    wanted = 4 * factor
    if longest is not None and compute >= _NO_COMPUTE:
        hiding = math.ceil(_PREFETCH_HEADROOM * longest / (workers * compute))
        wanted = min(_MAX_PREFETCH, max(2 * factor, hiding))
    if wanted <= factor:
        return []
    because += f"; up to {wanted * workers} batches will then be in memory"
    hidden_now, hidden = (workers * f * compute for f in (factor, wanted))
    if longest is not None and longest > hidden_now:  # some batches will still be late
        late = max(0.0, evidence.mid_epoch_wait_seconds) / evidence.steps
        step += late * max(0.0, longest - hidden) / (longest - hidden_now)
    idle, busy, moved = evidence.transfer_seconds, evidence.transfer_from_busy_seconds, with_transfer(evidence, step)
    if idle is not None and busy is not None and busy > idle and _transferred_by_busy_workers(evidence):
        at_once = step + idle * evidence.batches_per_step
        if moved >= _SLOW_TRANSFER * at_once:
            action = (
                "call torch.multiprocessing.set_sharing_strategy('file_system') and let workers prefetch more batches "
                f"with prefetch_factor={wanted}"
            )
            because += f"; a finished batch takes {ms(busy)} to transfer while its worker is busy with the next one"
            return [_do(action, because, gain_of(evidence, at_once))]
    action = "let workers prefetch more batches"
    return [Advice(action, "prefetch_factor", str(wanted), gain_of(evidence, moved), because)]


def transfer(evidence: Evidence) -> list[Advice]:
    """Advice if finished batches take long to reach the training thread, and to be released.

    Objects that are unpickled on the training thread start garbage collections, so fewer objects start fewer. But the
    sampler may also start a collection inside ``next()``, so the prediction is a range if they matter. In the zoo they
    took 4 ms of each step of 69 ms where a batch is hundreds of small tensors.
    """
    collected = 0.0
    if evidence.source == "workers":
        collected = own_time(evidence).garbage / evidence.steps
        evidence = without_own_time(evidence)
    now, compute, waited = evidence.step_seconds, evidence.step_compute_seconds, evidence.transfer_wait_seconds
    waited /= evidence.steps
    freed = min(compute, (evidence.freeing_seconds or 0.0) * evidence.batches_per_step)
    crowded = _crowded_by_pickling(evidence) * (compute - freed)
    # Another way must carry the bytes that are written to the pipe now.
    each = (evidence.written_bytes or 0.0) / evidence.fetches if evidence.fetches else 0.0
    size = each * evidence.batches_per_step
    kept = min(waited + freed, size * _MAPPED_BYTE_SECONDS)
    gain = low = background = None
    if waited > 0:
        because = f"a finished batch takes {ms(waited)} of every {ms(now)} to reach the training thread"
        if freed >= _MIN_MENTIONED * waited:
            because += f", and {ms(freed)} to be released"
        if crowded >= _MIN_MENTIONED * waited:
            because += f"; the training thread waits {ms(crowded)} for a core while workers pickle batches"
        if kept >= _MIN_MENTIONED * waited:
            because += f"; {ms(kept)} remain for its {size / 1e6:.1f} MB, however it is sent"
        sent = 0.0 if 0 < each < _FEW_TENSORS_BYTES else waited
        then, supply = now - sent - freed - crowded + kept, evidence.supply_seconds
        background = gain_of(evidence, now - waited)
        gain = None if supply is None else gain_of(evidence, max(then, supply))
        if collected >= _MIN_MENTIONED * then > 0:
            because += (
                f"; collections of garbage inside next() take {ms(collected)}, some or all because of its objects"
            )
            if supply is not None:
                gain, low = gain_of(evidence, max(then - collected, supply)), gain
    else:
        ready = evidence.ready_batches or 0.0
        because = f"{ready:.1f} batches are ready on average, and a step still takes {ms(now)}"
    action = (
        "send less data: few large tensors per batch instead of many small ones or Python objects; "
        "smaller types (uint8)"
    )
    advice = [_do(action, because, gain, low)]
    if evidence.on_gpu and not evidence.settings.get("pin_memory"):
        action = "pin batches in the background and copy them with non_blocking=True"
        advice.insert(0, Advice(action, "pin_memory", "True", background, because))
    if _transferred_by_busy_workers(evidence):
        action = "share tensors as files: torch.multiprocessing.set_sharing_strategy('file_system')"
        busy = "the tensors of finished batches are transferred by workers that are busy with the next ones"
        advice.append(_do(action, busy))
    return advice


def _crowded_by_pickling(evidence: Evidence) -> float:
    """Share of the compute that is run-queue delay because workers that pickle batches use the cores.

    The run-queue delay is spread evenly over the loop. The share of pickling is its share of the load on the cores.
    """
    pickling, delay = evidence.pickling_cores, evidence.own_runnable_seconds
    if not pickling or not delay or evidence.loop_seconds <= 0:
        return 0.0
    fetching = (evidence.worker_busy_ratio or 0.0) * evidence.workers * (evidence.worker_cpu_ratio or 0.0)
    # Pickling is not part of a fetch, so the others' cores include it.
    beside = max(pickling, evidence.cores_of_others or 0.0)
    return min(1.0, delay / evidence.loop_seconds) * pickling / (fetching + beside)


def stuck_worker(evidence: Evidence) -> list[Advice]:
    """Advice if a fetch does not end."""
    fetching, longest = evidence.fetching_seconds, max(evidence.long_fetches, default=0.0)
    for_seconds = f"has been in progress for {fetching:.0f} s"
    if fetching < longest:
        for_seconds = f"was in progress for {longest:.0f} s"
    raising = "without a timeout the DataLoader waits forever"
    return [
        _do("find out what that worker waits for: a lock, a mount, remote storage", f"one fetch {for_seconds}"),
        Advice("make the DataLoader raise an error when a worker is stuck", "timeout", "120", None, raising),
    ]


# -- time that is lost elsewhere ---------------------------------------------------------------------------------------


def checkpoint(evidence: Evidence) -> list[Advice]:
    """Advice if checkpoints take much of the time."""
    whole, saving, around = (
        evidence.loop_and_checkpoint_seconds, evidence.checkpoint_seconds, evidence.around_checkpoints_seconds,
    )  # fmt: skip
    because = f"checkpoints took {saving:.1f} s of {whole:.1f} s"
    if around >= _MIN_MENTIONED * saving:
        # Renaming a file over the previous one releases the old data: 0.1 s for 250 MB in the page cache.
        because += (
            f", and the steps around them {around:.1f} s more than other steps: "
            "renaming or uploading a file takes time too"
        )
    take = min(whole, saving + around)
    without = whole - take
    seldom = times_less(take, without, _CHECKPOINT_SHARE)
    # A rare checkpoint takes as long as the first ones, which had no older file to reuse: torch.save of 250 MB takes
    # 1.0 s into a new file, but 0.3 s just after a file of that size was released.
    early = evidence.early_checkpoint_seconds
    rare = max(1, evidence.checkpoints) * early
    if rare >= _MUCH_LONGER * take:
        because += f"; the first of them took {early:.1f} s each, and rare ones will take as long"
    action = f"write a checkpoint {seldom} times less often"
    if evidence.checkpoints > 1 and evidence.steps > evidence.checkpoints:
        every = evidence.steps / evidence.checkpoints
        action = f"write a checkpoint every {seldom * every:.0f} steps, not every {every:.0f}"
    gain = gain_over_window(evidence, without + max(take, rare) / seldom, now=whole)
    behind = "write checkpoints in the background with torch.distributed.checkpoint.async_save"
    return [Advice(action, None, str(seldom), gain, because), _do(behind, because)]


def garbage(evidence: Evidence) -> list[Advice]:
    """Advice if garbage collections stop the training thread."""
    loop, garbage, inside = evidence.loop_seconds, evidence.garbage_seconds, own_time(evidence).all_garbage
    supply = evidence.supply_seconds if evidence.source == "workers" else 0.0
    gain = None
    if supply is not None:  # a step is never shorter than the workers' supply
        gain = gain_over_window(evidence, max(loop - garbage, supply * evidence.steps), now=loop)
    because = f"garbage collection stopped the training thread for {garbage:.1f} s of {loop:.1f} s"
    freeze, own = "call gc.freeze() after the model and the data set are built", evidence.own_collections_ratio
    if inside >= garbage / 2:
        because += f", {inside:.1f} s of it inside next()"
    if own is not None and own >= THRESHOLDS.own_collections:
        because += f"; the script itself starts {100 * own:.0f} % of the collections of all objects"
        remove = "remove the calls of gc.collect(), or call it once in an epoch"
        # A collection that goes on may walk through objects that are made after the freeze.
        frozen = f"{freeze}, if these calls must stay: they then walk through fewer objects"
        return [_do(remove, because, gain), Advice(frozen, "gc.freeze()", None, None, because)]
    if inside < garbage / 2 or own is not None:
        return [Advice(freeze, "gc.freeze()", None, gain, because)]
    where = "the sampler" if evidence.source == "workers" else "the data set, the sampler or collate_fn"
    calls = f"remove calls of gc.collect() from code that runs inside next() on the training thread: {where}"
    return [Advice(freeze, "gc.freeze()", None, gain, because), _do(calls, because, gain)]


def recompiling(evidence: Evidence) -> list[Advice]:
    """Advice if functions are compiled again and again.

    No speed-up is predicted: what is new after a compilation also takes longer the first time, which is not recorded.
    """
    loop, reason = evidence.loop_seconds, evidence.recompiled_because
    seconds, count = evidence.recompile_seconds or 0.0, evidence.recompilations or 0
    because = (
        f"torch.compile has compiled functions again {count} times, which took {seconds:.1f} s of {loop:.1f} s; "
        f"mostly {evidence.recompiled_function}"
    )
    because += f"; the newest time because of {reason}" if reason else ""
    # Torch compiles for any size once it has seen two, unless the script or a setting forbids it.
    sizes = "compile it once for all sizes: torch.compile(dynamic=True), or torch._dynamo.mark_dynamic for a dimension"
    same = "give it the same sizes each time: pad batches to a few lengths, and drop the last batch (drop_last=True)"
    values = "keep numbers and flags that change from step to step out of the compiled function, or make them tensors"
    by_value = reason is not None and not any(word in reason for word in _ABOUT_SIZES)
    return [_do(action, because) for action in ((values, sizes) if by_value else (sizes, same, values))]


def slow_rank(evidence: Evidence) -> list[Advice]:
    """Advice if this rank waits for another one."""
    slow, now = straggler(evidence.pace, evidence.peers, evidence.earlier_paces), evidence.step_seconds
    if slow is None:
        return []
    because = f"{slow.name} {slow.why}; this rank waits for it {ms(slow.lost)} of every {ms(now)}"
    action = f"make {slow.name} as fast as the others: all ranks run at the pace of the slowest"
    return [_do(action, because, gain_of(evidence, now - slow.lost, but=slow.rank))]


def host_bound(evidence: Evidence) -> list[Advice]:
    """Advice if the GPU has nothing to run although batches are ready."""
    idle, loop = evidence.gpu_idle_seconds or 0.0, evidence.loop_seconds
    because = f"no kernel ran for {idle:.1f} s of {loop:.1f} s, although batches were ready"
    if evidence.pace.where is not None:
        because += f"; the training thread was mostly in {evidence.pace.where}"
    if evidence.compute_parts is not None:
        share, part = max((share, part) for part, share in evidence.compute_parts.items())
        because += f"; {part} takes {rounded_percent(share)} of compute"
    bound = gain_over_window(evidence, loop - idle, now=loop)
    if bound is not None and bound < WORTH_IT:
        return []
    most = "" if bound is None else f"; without that, steps could be {bound:g} times as fast at most"
    return [
        _do("launch fewer, larger kernels: torch.compile, CUDA graphs", because + most),
        _do("remove calls that make the host wait for the GPU: .item(), .cpu(), printing a tensor", because),
    ]


def gpu_throttled(evidence: Evidence) -> list[Advice]:
    """Advice if the GPU's clock is throttled."""
    slowed, loop = evidence.gpu_slowed_seconds or 0.0, evidence.loop_seconds
    because = f"the GPU throttles its clock (temperature or power), which cost {slowed:.1f} s of {loop:.1f} s"
    gain = gain_over_window(evidence, loop - slowed, now=loop)
    return [_do("check the cooling and the power supply of the node, or move the job", because, gain)]
