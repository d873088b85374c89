"""A window of ticks into evidence: the newest totals less the oldest, and the conditions in between."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from telemetry.core.labels import CHECKPOINT, EVALUATION
from telemetry.core.tick import RankPace
from telemetry.core.totals import ROUNDING_SECONDS
from telemetry.core.worker_records import FETCH_BUCKETS
from telemetry.diagnose.evidence import (
    CheckpointEvidence,
    CpuEvidence,
    DeliveryEvidence,
    EpochEvidence,
    Evidence,
    GarbageEvidence,
    GpuEvidence,
    SamplerEvidence,
    WorkerEvidence,
)
from telemetry.diagnose.recurring_costs import RecurringCosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from telemetry.core.tick import Conditions, Tick
    from telemetry.core.totals import GpuTotals, Sampled, Totals, WorkerTotals

_LONG_FETCH_SECONDS: Final = 1.0
"""From here on a fetch is noted by itself: whether it was stuck is to be seen beside the others."""

_ENOUGH_FETCHES: Final = 3
"""Of one worker, before their mean says how slow it is."""

_NEARLY_ALL: Final = 1 - 1e-6

_NO_RECURRING_COSTS: Final = RecurringCosts()


def aggregate(
    ticks: Sequence[Tick],
    *,
    rank: int = 0,
    cause: str | None = None,
    recurring: RecurringCosts = _NO_RECURRING_COSTS,
) -> Evidence:
    """Add up a window.

    Args:
        ticks: of the window, from the one at which it begins to the newest; at least two.
        rank: whose it is, for its `RankPace`.
        cause: of its open stall, for the same.
        recurring: what comes back after longer than a window.
    """
    added = ticks[-1].totals - ticks[0].totals
    conditions = [tick.conditions for tick in ticks][1:]
    source, settings = _waited_for(added, conditions)
    cores, cores_of_others = _cores(added, conditions)
    own, cpu = added.own, added.sampled.cpu
    process_cpu = _of_all(cpu.process_seconds, added.wall_seconds)
    return Evidence(
        seconds=added.wall_seconds,
        steps=added.steps,
        batches_per_step=_batches_per_step(added),
        wait_seconds=added.wait_seconds,
        exposed_wait_seconds=added.exposed_after_first_seconds,
        compute_seconds=added.compute_seconds,
        evaluation_seconds=added.ledger_seconds.get(EVALUATION, 0.0),
        source=source,
        settings=settings,
        own_fetch_cpu_ratio=min(1.0, own.fetch_cpu_seconds / own.fetch_seconds)
        if own.fetch_seconds > ROUNDING_SECONDS
        else None,
        epochs=EpochEvidence(
            boundaries=added.epochs.boundaries,
            left=added.epochs.left,
            boundary_wait_seconds=added.epochs.boundary_wait_seconds,
            near_boundary_wait_seconds=_near_boundaries(added),
            boundary_ratio=recurring.boundary_ratio,
        ),
        delivery=_delivery(added),
        sampler=_sampler(added, recurring),
        checkpoints=_checkpoints(added, recurring),
        garbage=GarbageEvidence(
            seconds=added.garbage.seconds,
            wait_seconds=added.garbage.wait_seconds,
            boundary_wait_seconds=added.garbage.boundary_wait_seconds,
        ),
        workers=_workers(ticks, added, conditions, cores),
        cpu=CpuEvidence(
            cores=cores,
            cores_of_others=cores_of_others,
            host_ratio=cpu.host_ratio.mean,
            process_seconds_per_step=process_cpu / added.steps if process_cpu is not None and added.steps else None,
            run_queue_delay_seconds=added.run_queue_delay_seconds,
            throttled_ratio=cpu.throttled_ratio.mean,
        ),
        gpu=_gpu(added.sampled.gpu),
        pace=_pace(added, conditions, rank, cause),
        peers=next((c.peers for c in reversed(conditions) if c.peers), ()),
    )


def _waited_for(added: Totals, conditions: Sequence[Conditions]) -> tuple[str | None, dict[str, Any]]:
    """The source that was waited for most, and its settings: loops may read two loaders side by side."""
    waits = {source: seconds for source, seconds in added.wait_seconds_by_source.items() if seconds > ROUNDING_SECONDS}
    source = max(waits, key=lambda name: (name is not None, waits[name])) if waits else conditions[-1].source
    return source, next((c.settings for c in reversed(conditions) if c.source == source), {})


def _batches_per_step(added: Totals) -> float:
    batches, steps, sampled = added.batches, added.steps, added.sampled
    if not steps or batches <= steps + 1:  # the newest is of a step that has not ended
        return 1.0
    if sampled.workers.counted_seconds + sampled.idle_workers.counted_seconds <= ROUNDING_SECONDS:
        return batches / steps
    fetches = sampled.workers.fetches + sampled.idle_workers.fetches
    return max(1.0, min(batches, fetches) / steps)  # some are of loaders without workers


def _near_boundaries(added: Totals) -> float:
    """Of the whole window, since those of one epoch may be as much shorter; no more than was waited in mid-epoch."""
    mid_epoch = added.wait_seconds - added.epochs.boundary_wait_seconds
    return max(0.0, min(mid_epoch, added.epochs.near_boundary_wait_seconds))


def _in_the_window(seconds: Mapping[int, float]) -> dict[int, float]:
    """Without keys of which there was nothing in the window. A difference of totals keeps every key of the run."""
    return {key: value for key, value in seconds.items() if value > ROUNDING_SECONDS}


def _delivery(added: Totals) -> DeliveryEvidence:
    took, workers, own, sampler = added.deliveries, _workers_in_use(added), added.own, added.sampler
    from_idle = took.transfer_wait_seconds - took.transfer_wait_busy_worker_seconds
    head_of_line = _in_the_window(workers.head_of_line_seconds)
    return DeliveryEvidence(
        outlier_wait_seconds=added.outlier_wait_seconds,
        fetch_wait_seconds=took.fetch_wait_seconds,
        transfer_wait_seconds=took.transfer_wait_seconds,
        transfer_wait_long_fetch_seconds=took.transfer_wait_long_fetch_seconds,
        head_of_line_wait_seconds=took.head_of_line_wait_seconds,
        head_of_line_worker=max(head_of_line, key=lambda worker: head_of_line[worker], default=None),
        transfer_seconds=_each(from_idle, took.batches - took.from_busy),
        transfer_from_busy_seconds=_each(took.transfer_wait_busy_worker_seconds, took.from_busy),
        release_seconds=_each(own.release_seconds, own.releases),
        receive_cpu_seconds=_each(sampler.receive_cpu_seconds, sampler.timed_batches),
        ready_batches=workers.ready_batches.mean,
        slack_seconds=workers.slack_seconds.mean,
    )


def _sampler(added: Totals, recurring: RecurringCosts) -> SamplerEvidence:
    """Of all workers' batches in mid-epoch, from those that were timed; no more than was waited."""
    timed, epochs = added.sampler, added.epochs
    each = _each(timed.seconds, timed.timed_batches)
    batches = added.deliveries.batches or added.batches - epochs.boundaries
    waited = added.wait_seconds - epochs.boundary_wait_seconds - added.garbage.wait_seconds
    took, on_core = timed.seconds + timed.boundary_seconds, timed.cpu_seconds + timed.boundary_cpu_seconds
    return SamplerEvidence(
        wait_seconds=None if each is None else max(0.0, min(each * batches, waited)),
        boundary_wait_seconds=timed.boundary_seconds,
        boundary_ratio=recurring.sampler_boundary_ratio,
        cpu_ratio=min(1.0, on_core / took) if took > ROUNDING_SECONDS else None,
    )


def _checkpoints(added: Totals, recurring: RecurringCosts) -> CheckpointEvidence:
    steps = added.checkpoint_steps
    extra = 0.0
    if 0 < steps < added.steps:  # there is something to compare with
        in_them = added.checkpoint_steps_compute_seconds
        usual = (added.compute_seconds - in_them) / (added.steps - steps)
        if usual > 0:  # not a long one, most of which was before the window
            extra = max(0.0, in_them - steps * usual)
    return CheckpointEvidence(
        seconds=added.ledger_seconds.get(CHECKPOINT, 0.0),
        steps=steps,
        interval_seconds=recurring.checkpoint_interval_seconds if steps < 2 else 0.0,
        first_seconds=recurring.first_checkpoint_seconds,
        extra_compute_seconds=extra,
    )


def _workers_in_use(added: Totals) -> WorkerTotals:
    """While the training loop runs; in a window without it, whatever there is."""
    sampled = added.sampled
    return sampled.workers if sampled.workers.sampled_seconds > ROUNDING_SECONDS else sampled.idle_workers


def _workers(ticks: Sequence[Tick], added: Totals, conditions: Sequence[Conditions], cores: float) -> WorkerEvidence:
    workers = _workers_in_use(added)
    counted = workers.counted_seconds > ROUNDING_SECONDS  # they tell nothing before they have begun
    fetch = _each(workers.fetch_busy_seconds, workers.fetches) if counted else None
    cpu, runnable, blocked = _shares(workers)
    by_count = _in_the_window(workers.seconds_by_count)
    allowed = next((c.worker_cores for c in reversed(conditions) if c.fetching_seconds is not None), None)
    in_loop = [c for c in conditions if c.in_loop] or conditions
    fetching = [c.fetching_seconds for c in in_loop if c.fetching_seconds is not None]
    return WorkerEvidence(
        # Not the most: those of an epoch that has ended may still be there when those of the next have begun.
        count=max(by_count, key=lambda count: (by_count[count], count), default=0),
        allowed_cores=allowed if allowed is not None and allowed < cores else None,
        fetches=workers.fetches if counted else None,
        fetch_seconds=fetch,
        fetch_cpu_seconds=fetch * cpu if fetch is not None and cpu is not None else None,
        longest_fetch_seconds=_longest_fetch(added),
        slowest_fetch_seconds=_slowest_fetch(ticks),
        long_fetch_seconds=_long_fetches(fetching),
        fetching_seconds=fetching[-1] if fetching else 0.0,
        read_bytes=added.sampled.read_bytes.known,
        written_bytes=added.sampled.written_bytes.known,
        busy_ratio=workers.busy_ratio.mean,
        cpu_ratio=cpu,
        runnable_ratio=runnable,
        blocked_ratio=blocked,
        pickling_cores=workers.pickling_cores.mean,
    )


def _shares(workers: WorkerTotals) -> tuple[float | None, float | None, float | None]:
    """Of the workers' time in fetches: on a core, runnable, blocked. None where nothing tells."""
    total = workers.cpu_seconds + workers.runnable_seconds + workers.blocked_seconds
    if total > ROUNDING_SECONDS:
        return workers.cpu_seconds / total, workers.runnable_seconds / total, workers.blocked_seconds / total
    if workers.unscheduled_busy_seconds > ROUNDING_SECONDS:
        cpu = min(1.0, workers.unscheduled_cpu_seconds / workers.unscheduled_busy_seconds)
        return cpu, None, 1.0 - cpu
    return None, None, None


def _longest_fetch(added: Totals) -> float | None:
    """The upper bound of the highest bucket that has got one; None where no fetch ended, or above the last bound."""
    return max((bound for bound, count in zip(FETCH_BUCKETS, added.fetch_counts, strict=False) if count), default=None)


def _slowest_fetch(ticks: Sequence[Tick]) -> float | None:
    """Of the workers that are there, each by the better half of the window: one long fetch makes none slow."""
    oldest, middle, newest = (ticks[at].conditions.fetched for at in (0, len(ticks) // 2, -1))
    first, second = _mean_fetches(oldest, middle), _mean_fetches(middle, newest)
    return max((min(mean, second[pid]) for pid, mean in first.items() if pid in second), default=None)


def _mean_fetches(before: dict[int, tuple[int, float]], after: dict[int, tuple[int, float]]) -> dict[int, float]:
    """By the pids of the workers that have fetched enough for a mean."""
    means = {}
    for pid, (fetches, seconds) in after.items():
        fetches_before, seconds_before = before.get(pid, (0, 0.0))
        if fetches - fetches_before >= _ENOUGH_FETCHES:
            means[pid] = (seconds - seconds_before) / (fetches - fetches_before)
    return means


def _long_fetches(in_progress: Sequence[float]) -> tuple[float, ...]:
    """How long each of them had taken when it was last seen in progress."""
    return tuple(now for now, then in pairwise([*in_progress, 0.0]) if now > then and now >= _LONG_FETCH_SECONDS)


def _cores(added: Totals, conditions: Sequence[Conditions]) -> tuple[float, float | None]:
    """Cores this rank may use, less what other processes (other ranks among them) take; and what those take."""
    cpu, theirs = added.sampled.cpu, None
    cores = conditions[-1].cores
    own = max(cpu.used_cores.mean or 0.0, 1.0)
    others, in_quota = cpu.other_cores.mean, cpu.other_quota_cores.mean
    if others is not None:
        theirs = others
        cores = min(cores, max(own, max(c.host_cores for c in conditions) - theirs))
    quota = next((c.quota_cores for c in reversed(conditions) if c.quota_cores is not None), None)
    if in_quota is not None and quota is not None:
        # Of a pod, say: its ranks share it, however many cores of the machine are idle.
        left = max(own, quota - in_quota)
        if left < cores:
            cores, theirs = left, in_quota
    return cores, theirs


def _gpu(gpu: GpuTotals) -> GpuEvidence:
    unused = gpu.unused_ratio.known
    idle = None if unused is None else max(0.0, unused - gpu.exposed_wait_seconds - gpu.garbage_seconds)
    return GpuEvidence(gpu.utilization_ratio.mean, idle, gpu.slowed_ratio.known)


def _pace(added: Totals, conditions: Sequence[Conditions], rank: int, cause: str | None) -> RankPace:
    seconds, compute = added.wall_seconds - added.startup_seconds, added.compute_seconds
    return RankPace(
        rank=rank,
        seconds=seconds,
        steps=added.steps,
        compute_seconds=compute,
        exposed_wait_seconds=added.exposed_after_first_seconds,
        away_seconds=max(0.0, seconds - compute - added.wait_seconds),
        samples=added.own.samples,
        in_sync_samples=added.own.in_sync_samples,
        on_gpu=conditions[-1].on_gpu,
        gpu_busy_ratio=added.sampled.gpu.utilization_ratio.mean,
        cause=cause,
        where=_most_common([c.where for c in conditions]),
    )


def _most_common(values: Sequence[str | None]) -> str | None:
    seen = Counter(value for value in values if value is not None).most_common(1)
    return seen[0][0] if seen else None


def _of_all(sampled: Sampled, seconds: float) -> float | None:
    """The integral, None if it is not known for all of the time."""
    return sampled.integral if sampled.seconds >= _NEARLY_ALL * seconds > 0 else None


def _each(total: float, count: int) -> float | None:
    return total / count if count else None
