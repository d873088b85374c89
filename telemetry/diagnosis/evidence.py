"""The evidence from which causes are named: one rank over one window."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.worker_block import FETCH_BUCKETS
from telemetry.records import CHECKPOINT, EVALUATION, OTHER, ROUNDING_SECONDS, RankPace, Totals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from telemetry.records import Conditions, GpuTotals, Sampled, Tick, WorkerTotals


# -- evidence ----------------------------------------------------------------------------------------------------------
# The evidence from which causes are named: one rank over one window; and the same as a field of the log.

_LOG_NAME: Final = "log"


def _log(name: str) -> dict[str, str]:
    """The name of a figure in the log, where it is another one. Users' queries and stored logs rely on these names."""
    return {_LOG_NAME: name}


@dataclass(frozen=True, slots=True)
class EpochEvidence:
    """Epoch boundaries and the waits at them.

    Attributes:
        boundaries: iterations that began. ``left``: iterations that were left before their end.
        boundary_wait_seconds: wait at the boundaries: start and end of an iteration, and its first batch.
        near_boundary_wait_seconds: how much longer than others the first and last batches of epochs were waited for:
            workers start, and end, one by one.
        boundary_ratio: share of the loop spent in waits at boundaries, if one epoch is longer than the window; 0.0 if
            that has not been seen.
    """

    boundaries: int = field(metadata=_log("edges"))
    left: int
    boundary_wait_seconds: float = field(metadata=_log("edge_wait_seconds"))
    near_boundary_wait_seconds: float = field(metadata=_log("around_edges_seconds"))
    boundary_ratio: float = field(metadata=_log("edge_share"))


@dataclass(frozen=True, slots=True)
class DeliveryEvidence:
    """Waits for batches, by what they were for. The sums are 0.0 if no batch could be matched with its fetch.

    Attributes:
        outlier_wait_seconds: wait in single steps that waited much longer than those around them.
        fetch_wait_seconds, transfer_wait_seconds, transfer_wait_long_fetch_seconds, head_of_line_wait_seconds: see
            `Deliveries`. ``blocking_worker`` is the worker that was waited for longest with head-of-line blocking.
        transfer_seconds: mean time to transfer a batch of an idle worker. ``transfer_from_busy_seconds``: of a worker
            that is in another fetch. None if there was no such batch.
        release_seconds: mean time of the training thread to free a batch after the next has come. It is part of the
            compute. None if it was not seen.
        receive_cpu_seconds: mean CPU time of the training thread to receive and unpickle a batch of workers; None if no
            batch was timed.
        ready_batches: mean number of ready batches. ``slack_seconds``: mean time that a batch was ready.
    """

    outlier_wait_seconds: float
    fetch_wait_seconds: float
    transfer_wait_seconds: float
    transfer_wait_long_fetch_seconds: float
    head_of_line_wait_seconds: float = field(metadata=_log("head_of_line_seconds"))
    blocking_worker: int | None
    transfer_seconds: float | None = field(metadata=_log("moving_seconds"))
    transfer_from_busy_seconds: float | None = field(metadata=_log("moving_from_busy_seconds"))
    release_seconds: float | None = field(metadata=_log("freeing_seconds"))
    receive_cpu_seconds: float | None = field(metadata=_log("receiving_cpu_seconds"))
    ready_batches: float | None
    slack_seconds: float | None


@dataclass(frozen=True, slots=True)
class SamplerEvidence:
    """The sampler of a loader with workers. It runs on the training thread.

    Attributes:
        wait_seconds: time in mid-epoch waits, extrapolated from the timed batches; None if no batch was timed.
        boundary_wait_seconds: time in waits at epoch boundaries. ``boundary_ratio``: its part of the epochs'
            `boundary_ratio`.
        cpu_ratio: share of its time on a core.
    """

    wait_seconds: float | None = field(metadata=_log("sampler_seconds"))
    boundary_wait_seconds: float = field(metadata=_log("edge_sampler_seconds"))
    boundary_ratio: float = field(metadata=_log("edge_share_of_sampler"))
    cpu_ratio: float | None = field(metadata=_log("sampler_cpu_ratio"))


@dataclass(frozen=True, slots=True)
class CheckpointEvidence:
    """Checkpoints.

    Attributes:
        seconds: time to write them. ``steps``: how many steps had one.
        interval_seconds: training time between the newest checkpoint and the one before; 0.0 if the window has
            several.
        first_seconds: mean time of the first checkpoints of the run; 0.0 before there are any.
        extra_compute_seconds: how much longer the compute of their steps took than that of other steps: work for a
            checkpoint other than writing it.
    """

    seconds: float = field(metadata=_log("checkpoint_seconds"))
    steps: int = field(metadata=_log("checkpoints"))
    interval_seconds: float = field(metadata=_log("checkpoint_interval_seconds"))
    first_seconds: float = field(metadata=_log("early_checkpoint_seconds"))
    extra_compute_seconds: float = field(metadata=_log("around_checkpoints_seconds"))


@dataclass(frozen=True, slots=True)
class GarbageEvidence:
    """Garbage collection on the training thread.

    Attributes:
        seconds: time of all collections. ``wait_seconds``: during requests in mid-epoch. ``boundary_wait_seconds``: at
            epoch boundaries.
    """

    seconds: float = field(metadata=_log("garbage_seconds"))
    wait_seconds: float = field(metadata=_log("garbage_wait_seconds"))
    boundary_wait_seconds: float = field(metadata=_log("edge_garbage_seconds"))


@dataclass(frozen=True, slots=True)
class WorkerEvidence:
    """The DataLoader workers.

    Attributes:
        count: number of workers. ``allowed_cores``: number of cores that they may use, if it is lower than that of this
            rank.
        fetches: batches that they finished. ``fetch_seconds``: mean time of a worker for one batch.
            ``fetch_cpu_seconds``: its CPU time.
        longest_fetch_seconds: upper bound of all fetches. ``slowest_fetch_seconds``: mean of the slowest worker.
            ``long_fetch_seconds``: fetches of more than a second, by how long they were in progress when last seen.
            ``fetching_seconds``: how long a fetch has been in progress at the end of the window.
        read_bytes: read from storage by all workers. ``written_bytes``: written, including pickled batches.
        busy_ratio: share of their time in fetches.
        cpu_ratio, runnable_ratio, blocked_ratio: shares of the time in fetches. If the kernel does not separate running
            from run-queue delay, ``runnable_ratio`` is None and the other two come from CPU time alone.
        pickling_cores: cores that they use outside of fetches, to pickle finished batches.
    """

    count: int = field(metadata=_log("workers"))
    allowed_cores: int | None = field(metadata=_log("worker_cores"))
    fetches: int | None
    fetch_seconds: float | None
    fetch_cpu_seconds: float | None
    longest_fetch_seconds: float | None
    slowest_fetch_seconds: float | None
    long_fetch_seconds: tuple[float, ...] = field(metadata=_log("long_fetches"))
    fetching_seconds: float
    read_bytes: float | None
    written_bytes: float | None
    busy_ratio: float | None
    cpu_ratio: float | None = field(metadata=_log("worker_cpu_ratio"))
    runnable_ratio: float | None = field(metadata=_log("worker_runnable_ratio"))
    blocked_ratio: float | None = field(metadata=_log("worker_blocked_ratio"))
    pickling_cores: float | None = field(metadata=_log("packing_cores"))


@dataclass(frozen=True, slots=True)
class CpuEvidence:
    """The use of the cores.

    Attributes:
        cores: cores that this rank may use and no other process uses. ``cores_of_others``: cores that others use.
        host_ratio: use of all cores of the machine.
        process_seconds_per_step: CPU time of the training process (without its workers) for one step, without startup,
            evaluations and checkpoints.
        run_queue_delay_seconds: how long the training thread was runnable without a core.
        throttled_ratio: share of the periods in which the cgroup's CPU quota was used up.
    """

    cores: float
    cores_of_others: float | None
    host_ratio: float | None = field(metadata=_log("host_cpu_ratio"))
    process_seconds_per_step: float | None = field(metadata=_log("process_cpu_per_step_seconds"))
    run_queue_delay_seconds: float | None = field(metadata=_log("own_runnable_seconds"))
    throttled_ratio: float | None


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """The GPU of this rank.

    Attributes:
        idle_seconds: time in the loop without a kernel and without waiting for a batch.
        slowed_seconds: time lost because the GPU's clock was throttled.
    """

    utilization_ratio: float | None = field(metadata=_log("gpu_utilization_ratio"))
    idle_seconds: float | None = field(metadata=_log("gpu_idle_seconds"))
    slowed_seconds: float | None = field(metadata=_log("gpu_slowed_seconds"))


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank over one window. Values that were not measured are None.

    Attributes:
        seconds: length of the window: the sum of wait, compute, evaluation and so on.
        batches_per_step: mostly 1. More if a loop takes several batches per step: from loaders side by side, or between
            two calls of ``step()``. If there are loaders with workers, only their batches count.
        source: where batches come from, see `Conditions`. ``settings``: the settings of that loader.
        own_fetch_cpu_ratio: share of the training thread's own fetches that ran on a core.
        pace: the pace of this rank. ``peers``: the other ranks that it may wait for. ``earlier_paces``: of this rank,
            at the time of the peers' paces that are older.
    """

    seconds: float = field(metadata=_log("window_seconds"))
    steps: int
    batches_per_step: float
    wait_seconds: float
    exposed_wait_seconds: float | None = field(metadata=_log("exposed_seconds"))
    compute_seconds: float
    evaluation_seconds: float
    source: str | None
    settings: dict[str, Any]
    own_fetch_cpu_ratio: float | None
    epochs: EpochEvidence
    delivery: DeliveryEvidence
    sampler: SamplerEvidence
    checkpoints: CheckpointEvidence
    garbage: GarbageEvidence
    workers: WorkerEvidence
    cpu: CpuEvidence
    gpu: GpuEvidence
    pace: RankPace
    peers: tuple[RankPace, ...]
    earlier_paces: tuple[RankPace, ...] = ()

    @property
    def loop_seconds(self) -> float:
        """Seconds of the training loop."""
        return self.wait_seconds + self.compute_seconds

    @property
    def loop_and_checkpoint_seconds(self) -> float:
        """Seconds of the loop and of checkpoints, scaled so that the window has as many checkpoints as the run."""
        return max(self.loop_seconds + self.checkpoints.seconds, self.checkpoints.interval_seconds)

    @property
    def mid_epoch_wait_seconds(self) -> float:
        """Seconds of waiting outside of epoch boundaries; below 0.0 if the clocks differ."""
        return self.wait_seconds - self.epochs.boundary_wait_seconds

    @property
    def on_gpu(self) -> bool:
        """Whether the run is known to use a GPU."""
        return self.gpu.utilization_ratio is not None


def evidence_field(evidence: Evidence) -> dict[str, Any]:
    """The evidence as a field of the log: the figures that were measured. The others are left out."""
    workers = evidence.workers
    told: dict[str, Any] = {}
    for record in (
        evidence, evidence.epochs, evidence.checkpoints, evidence.garbage, evidence.delivery, evidence.sampler, workers,
        evidence.cpu, evidence.gpu,
    ):  # fmt: skip
        figures = {spec.metadata.get(_LOG_NAME, spec.name): getattr(record, spec.name) for spec in fields(record)}
        told |= {name: value for name, value in figures.items() if not is_dataclass(value)}
    del told["pace"], told["peers"], told["earlier_paces"]
    told |= {
        "where": evidence.pace.where,
        "long_fetches": [round(seconds, 3) for seconds in workers.long_fetch_seconds],
    }
    if evidence.peers:
        told["paces"] = [_pace_fields(pace) for pace in (evidence.pace, *evidence.peers)]
    if evidence.earlier_paces:
        told["earlier_paces"] = [_pace_fields(pace) for pace in evidence.earlier_paces]
    told = {name: round(value, 6) if isinstance(value, float) else value for name, value in told.items()}
    told = {name: value for name, value in told.items() if value is not None}
    if workers.cpu_ratio is not None and workers.runnable_ratio is None:
        told["worker_runnable_ratio"] = None  # no schedstat: blocked time may be run-queue delay
    return told


def _pace_fields(pace: RankPace) -> dict[str, Any]:
    told = {
        "last_step": pace.last_step or None,
        "away_in": pace.away_in,
        "core_wait": pace.core_wait_seconds,
        "cores_busy": pace.cores_busy_ratio,
        "node": pace.node,
        "node_ranks": pace.node_ranks or None,
        "node_fastest": pace.node_fastest or None,
    }
    return {
        "rank": pace.rank,
        "seconds": pace.seconds,
        "steps": pace.steps,
        "compute": pace.compute_seconds,
        "exposed": pace.exposed_wait_seconds,
        "away": pace.away_seconds,
        "samples": pace.samples,
        "in_sync": pace.in_sync_samples,
        "on_gpu": pace.on_gpu,
        "cause": pace.cause,
        "where": pace.where,
        "phase": pace.phase,
        "still": pace.seconds_without_step,
        "still_in_sync": pace.waits_for_ranks,
        "gpu_busy": pace.gpu_busy_ratio,
    } | {name: value for name, value in told.items() if value is not None}


# -- costs that recur less often than once in a window: checkpoints, and epoch boundaries ------------------------------
# A window contains one of them or none, so its share of the window is not that of the run. A checkpoint of 45 s every
# half hour fills a whole window. If workers take 12 s to start for each epoch of a minute, only every other window has
# a start.

_FIRST_CHECKPOINTS: Final = 2
"""The first checkpoints are written to new files. Later ones may reuse space of the file that they replace."""

_MUCH_LONGER: Final = 1.5
"""An epoch that has lasted this many times as long as those before it is assumed to be of another kind."""


@dataclass(frozen=True, slots=True)
class RecurringCosts:
    """The costs of checkpoints and epoch boundaries over the run so far.

    Attributes:
        checkpoint_interval_seconds: training time, with checkpoints, between the newest checkpoint and the one before
            it, or the start.
        first_checkpoint_seconds: mean time of the first checkpoints; 0.0 before there are any.
        boundary_ratio: share of the loop spent in waits at epoch boundaries: the lower value of the newest two epochs.
            0.0 before two epochs have ended, and if the current epoch is much longer than they were.
        sampler_boundary_ratio: the part of it that the training thread has spent in the sampler.
    """

    checkpoint_interval_seconds: float = 0.0
    first_checkpoint_seconds: float = 0.0
    boundary_ratio: float = 0.0
    sampler_boundary_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class _EpochCosts:
    """Seconds of the loop, of the waits at its boundary, and of these in the sampler."""

    loop: float
    boundary: float
    sampler: float

    @property
    def ratio(self) -> float:
        return self.boundary / self.loop if self.loop > 0 else 0.0


class RecurringCostsWatch:
    """Tracks the costs from tick to tick. It keeps the totals at the newest checkpoint and epoch boundary."""

    def __init__(self) -> None:
        self._before = Totals()
        self._writing = False
        self._checkpoint_began = 0.0
        self._interval = 0.0
        self._first_checkpoints = 0
        self._first_seconds = 0.0
        self._epoch_began = Totals()
        self._epochs: deque[_EpochCosts] = deque(maxlen=2)  # epochs that have ended

    def add(self, tick: Tick) -> None:
        """Take in a tick."""
        before, now = self._before, tick.totals
        written = _checkpoint(now) - _checkpoint(before)
        if self._first_checkpoints < _FIRST_CHECKPOINTS:
            self._first_checkpoints, self._first_seconds = now.checkpoint_steps, _checkpoint(now)
        if written > 0 and not self._writing:
            trained = before.loop_seconds + _checkpoint(before)
            self._interval, self._checkpoint_began = trained - self._checkpoint_began, trained
        self._writing = written > 0
        if now.epochs.boundaries > before.epochs.boundaries:
            self._epochs.append(self._epoch(before))
            self._epoch_began = before
        self._before = now

    @property
    def costs(self) -> RecurringCosts:
        """The costs as of the newest tick."""
        first = self._first_seconds / self._first_checkpoints if self._first_checkpoints else 0.0
        epochs = self._epochs
        much_longer = len(epochs) < 2 or self._running_loop > _MUCH_LONGER * max(epoch.loop for epoch in epochs)
        if much_longer:
            return RecurringCosts(self._interval, first)
        epoch = min(epochs, key=lambda epoch: epoch.ratio)
        sampler = min(epoch.boundary, epoch.sampler) / epoch.loop if epoch.loop > 0 else 0.0
        return RecurringCosts(self._interval, first, epoch.ratio, sampler)

    @property
    def _running_loop(self) -> float:
        return self._before.loop_seconds - self._epoch_began.loop_seconds

    def _epoch(self, end: Totals) -> _EpochCosts:
        began = self._epoch_began
        waited = end.epochs.boundary_wait_seconds - began.epochs.boundary_wait_seconds
        garbage = end.garbage.boundary_wait_seconds - began.garbage.boundary_wait_seconds
        sampler = end.sampler.boundary_seconds - began.sampler.boundary_seconds
        return _EpochCosts(end.loop_seconds - began.loop_seconds, max(0.0, waited - garbage), sampler)


def _checkpoint(totals: Totals) -> float:
    return totals.ledger_seconds.get(CHECKPOINT, 0.0)


# -- aggregate ---------------------------------------------------------------------------------------------------------
# Aggregates a window of ticks into evidence: the difference of its last and first totals, and the conditions.

_LONG_FETCH_SECONDS: Final = 1.0
"""A fetch that takes longer than this is recorded on its own, to decide whether it was stuck."""

_ENOUGH_FETCHES: Final = 3
"""Minimum fetches of one worker before their mean shows how slow it is."""

_NEARLY_ALL: Final = 1 - 1e-6

_NO_RECURRING_COSTS: Final = RecurringCosts()


def aggregate(
    ticks: Sequence[Tick],
    *,
    rank: int = 0,
    cause: str | None = None,
    recurring: RecurringCosts = _NO_RECURRING_COSTS,
) -> Evidence:
    """Aggregate a window.

    Args:
        ticks: the ticks of the window, from its start to the newest; at least two.
        rank: the rank, for its `RankPace`.
        cause: the cause of its open stall, for its `RankPace`.
        recurring: costs that recur less often than once in a window.
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
    """The source with the longest wait, and its settings. A loop may read two loaders side by side."""
    waits = {source: seconds for source, seconds in added.wait_seconds_by_source.items() if seconds > ROUNDING_SECONDS}
    source = max(waits, key=lambda name: (name is not None, waits[name])) if waits else conditions[-1].source
    return source, next((c.settings for c in reversed(conditions) if c.source == source), {})


def _batches_per_step(added: Totals) -> float:
    batches, steps, sampled = added.batches, added.steps, added.sampled
    if not steps or batches <= steps + 1:  # the newest batch belongs to a step that has not ended
        return 1.0
    if sampled.workers.counted_seconds + sampled.idle_workers.counted_seconds <= ROUNDING_SECONDS:
        return batches / steps
    fetches = sampled.workers.fetches + sampled.idle_workers.fetches
    return max(1.0, min(batches, fetches) / steps)  # some batches come from loaders without workers


def _near_boundaries(added: Totals) -> float:
    """Extra wait next to epoch boundaries, over the whole window: one epoch varies. At most the mid-epoch wait."""
    mid_epoch = added.wait_seconds - added.epochs.boundary_wait_seconds
    return max(0.0, min(mid_epoch, added.epochs.near_boundary_wait_seconds))


def _in_the_window(seconds: Mapping[int, float]) -> dict[int, float]:
    """Without keys that are zero in the window. A difference of totals keeps every key of the run."""
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
        blocking_worker=max(head_of_line, key=lambda worker: head_of_line[worker], default=None),
        transfer_seconds=_each(from_idle, took.batches - took.from_busy),
        transfer_from_busy_seconds=_each(took.transfer_wait_busy_worker_seconds, took.from_busy),
        release_seconds=_each(own.release_seconds, own.releases),
        receive_cpu_seconds=_each(sampler.receive_cpu_seconds, sampler.timed_batches),
        ready_batches=workers.ready_batches.mean,
        slack_seconds=workers.slack_seconds.mean,
    )


def _sampler(added: Totals, recurring: RecurringCosts) -> SamplerEvidence:
    """The sampler's time for all workers' batches in mid-epoch, from the timed ones; at most the wait."""
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
    if 0 < steps < added.steps:  # there are steps without a checkpoint to compare with
        in_them = added.checkpoint_steps_compute_seconds
        usual = (added.compute_seconds - in_them) / (added.steps - steps)
        if usual > 0:  # 0 if most of a long checkpoint was before the window
            extra = max(0.0, in_them - steps * usual)
    return CheckpointEvidence(
        seconds=added.ledger_seconds.get(CHECKPOINT, 0.0),
        steps=steps,
        interval_seconds=recurring.checkpoint_interval_seconds if steps < 2 else 0.0,
        first_seconds=recurring.first_checkpoint_seconds,
        extra_compute_seconds=extra,
    )


def _workers_in_use(added: Totals) -> WorkerTotals:
    """The workers while the training loop runs; in a window without the loop, the workers at any time."""
    sampled = added.sampled
    return sampled.workers if sampled.workers.sampled_seconds > ROUNDING_SECONDS else sampled.idle_workers


def _workers(ticks: Sequence[Tick], added: Totals, conditions: Sequence[Conditions], cores: float) -> WorkerEvidence:
    workers = _workers_in_use(added)
    counted = workers.counted_seconds > ROUNDING_SECONDS  # before they have begun there are no figures
    fetch = _each(workers.fetch_busy_seconds, workers.fetches) if counted else None
    cpu, runnable, blocked = _shares(workers)
    by_count = _in_the_window(workers.seconds_by_count)
    allowed = next((c.worker_cores for c in reversed(conditions) if c.fetching_seconds is not None), None)
    in_loop = [c for c in conditions if c.in_loop] or conditions
    fetching = [c.fetching_seconds for c in in_loop if c.fetching_seconds is not None]
    return WorkerEvidence(
        # Not the maximum: workers of an ended epoch may still exist when those of the next have begun.
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
    """Shares of the workers' time in fetches: on a core, runnable, blocked. None if the kernel does not report it."""
    total = workers.cpu_seconds + workers.runnable_seconds + workers.blocked_seconds
    if total > ROUNDING_SECONDS:
        return workers.cpu_seconds / total, workers.runnable_seconds / total, workers.blocked_seconds / total
    if workers.unscheduled_busy_seconds > ROUNDING_SECONDS:
        cpu = min(1.0, workers.unscheduled_cpu_seconds / workers.unscheduled_busy_seconds)
        return cpu, None, 1.0 - cpu
    return None, None, None


def _longest_fetch(added: Totals) -> float | None:
    """The upper bound of the highest bucket with a fetch; None if no fetch ended, or one is above the last bound."""
    return max((bound for bound, count in zip(FETCH_BUCKETS, added.fetch_counts, strict=False) if count), default=None)


def _slowest_fetch(ticks: Sequence[Tick]) -> float | None:
    """Mean fetch of the slowest live worker, over the better half of the window, which excludes a single long fetch."""
    oldest, middle, newest = (ticks[at].conditions.fetched for at in (0, len(ticks) // 2, -1))
    first, second = _mean_fetches(oldest, middle), _mean_fetches(middle, newest)
    return max((min(mean, second[pid]) for pid, mean in first.items() if pid in second), default=None)


def _mean_fetches(before: dict[int, tuple[int, float]], after: dict[int, tuple[int, float]]) -> dict[int, float]:
    """Mean fetch seconds by pid, for the workers with enough fetches for a mean."""
    means = {}
    for pid, (fetches, seconds) in after.items():
        fetches_before, seconds_before = before.get(pid, (0, 0.0))
        if fetches - fetches_before >= _ENOUGH_FETCHES:
            means[pid] = (seconds - seconds_before) / (fetches - fetches_before)
    return means


def _long_fetches(in_progress: Sequence[float]) -> tuple[float, ...]:
    """The duration of each long fetch when it was last seen in progress."""
    return tuple(now for now, then in pairwise([*in_progress, 0.0]) if now > then and now >= _LONG_FETCH_SECONDS)


def _cores(added: Totals, conditions: Sequence[Conditions]) -> tuple[float, float | None]:
    """Cores that this rank may use, minus those that other processes (including other ranks) use; and the latter."""
    cpu, theirs = added.sampled.cpu, None
    cores = conditions[-1].cores
    own = max(cpu.used_cores.mean or 0.0, 1.0)
    others, in_quota = cpu.other_cores.mean, cpu.other_quota_cores.mean
    if others is not None:
        theirs = others
        cores = min(cores, max(own, max(c.host_cores for c in conditions) - theirs))
    quota = next((c.quota_cores for c in reversed(conditions) if c.quota_cores is not None), None)
    if in_quota is not None and quota is not None:
        # The quota of a pod, for example: its ranks share it, however many cores of the machine are idle.
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
        away_in=_most_of(added.ledger_seconds, (EVALUATION, CHECKPOINT, OTHER)),
        core_wait_seconds=added.run_queue_delay_seconds,
        cores_busy_ratio=added.sampled.cpu.host_ratio.mean,
        cause=cause,
        where=_most_common([c.where for c in conditions]),
    )


def _most_of(seconds: dict[str, float], categories: Iterable[str]) -> str | None:
    """The category with most of the time; None if none of them has any."""
    most = max(categories, key=lambda category: seconds.get(category, 0.0))
    return most if seconds.get(most, 0.0) > ROUNDING_SECONDS else None


def _most_common(values: Sequence[str | None]) -> str | None:
    seen = Counter(value for value in values if value is not None).most_common(1)
    return seen[0][0] if seen else None


def _of_all(sampled: Sampled, seconds: float) -> float | None:
    """The integral; None if the value is not known for the whole time."""
    return sampled.integral if sampled.seconds >= _NEARLY_ALL * seconds > 0 else None


def _each(total: float, count: int) -> float | None:
    return total / count if count else None
