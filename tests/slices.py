"""Windows of the stall detector for tests: slices of time, each with what happened in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from telemetry.core.labels import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, STARTUP
from telemetry.core.tick import Conditions, RankPace, Tick
from telemetry.core.totals import EpochTotals, GarbageTotals, OwnTotals, SamplerTotals, Totals
from telemetry.core.worker_records import Deliveries, WorkersSample
from telemetry.diagnose.aggregate import aggregate
from telemetry.diagnose.evidence import Evidence
from telemetry.diagnose.integrals import Readings, integrated
from telemetry.diagnose.recurring_costs import RecurringCosts
from telemetry.diagnose.stall_detector import Change, Stall, StallDetector


@dataclass(frozen=True)
class Slice:
    """What happened between two ticks. In seconds, unless the name says otherwise."""

    seconds: float
    wait: float
    exposed: float | None
    boundary_wait: float
    boundaries: int
    compute: float
    evaluation: float
    checkpoint: float
    garbage: float
    steps: int
    batches: int = 0
    left: int = 0
    near_boundaries: float = 0.0
    late_wait: float = 0.0
    checkpoint_steps: int = 0
    checkpoint_steps_compute: float = 0.0
    source: str | None = None
    process_cpu: float | None = None
    fetches: int | None = None
    fetch_busy: float | None = None
    late: float = 0.0
    moved: float = 0.0
    moved_from_busy: float = 0.0
    moved_from_long: float = 0.0
    head_of_line: float = 0.0
    matched: int = 0
    from_busy: int = 0
    timed_fetch: float = 0.0
    timed_fetch_cpu: float = 0.0
    freeing: float = 0.0
    freed: int = 0
    timed_waits: int = 0
    timed_sampler: float = 0.0
    timed_sampler_cpu: float = 0.0
    timed_receiving_cpu: float = 0.0
    boundary_sampler: float = 0.0
    boundary_sampler_cpu: float = 0.0
    garbage_wait: float = 0.0
    boundary_garbage: float = 0.0
    startup: float = 0.0
    own_runnable: float | None = None
    samples: int = 0
    in_sync: int = 0
    where: str | None = None
    peers: tuple[RankPace, ...] = ()
    workers: WorkersSample | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    cores: float = 1.0
    host_cpu_ratio: float | None = None
    host_cores: int = 0
    throttled_ratio: float | None = None
    quota: float | None = None
    quota_used: float | None = None
    gpu_utilization_ratio: float | None = None
    gpu_clock_ratio: float | None = None
    gpu_throttled: tuple[str, ...] = ()


def plus(before: float | None, more: float | None) -> float | None:
    return None if before is None or more is None else before + more


def next_tick(before: Totals, piece: Slice) -> Tick:
    """The tick at the end of a slice."""
    readings = Readings(
        seconds=piece.seconds, loop_seconds=piece.wait + piece.compute, compute_seconds=piece.compute,
        garbage_seconds=piece.garbage, exposed_wait_seconds=piece.exposed, process_cpu_seconds=piece.process_cpu,
        fetches=piece.fetches, fetch_busy_seconds=piece.fetch_busy, workers=piece.workers,
        host_cpu_ratio=piece.host_cpu_ratio, host_cores=piece.host_cores, quota_cores=piece.quota,
        quota_used_cores=piece.quota_used, throttled_ratio=piece.throttled_ratio,
        gpu_utilization_ratio=piece.gpu_utilization_ratio, gpu_clock_ratio=piece.gpu_clock_ratio,
        gpu_throttled=piece.gpu_throttled,
    )  # fmt: skip
    spent = {
        DATA_WAIT: piece.wait, COMPUTE: piece.compute, EVALUATION: piece.evaluation, CHECKPOINT: piece.checkpoint,
        STARTUP: piece.startup,
    }  # fmt: skip
    waits, histogram = before.wait_seconds_by_source, piece.workers and piece.workers.fetch_duration
    epochs, garbage, own, sampler = before.epochs, before.garbage, before.own, before.sampler
    totals = Totals(
        wall_seconds=before.wall_seconds + piece.seconds,
        ledger_seconds={name: before.ledger_seconds.get(name, 0.0) + seconds for name, seconds in spent.items()},
        steps=before.steps + piece.steps,
        batches=before.batches + piece.batches,
        exposed_wait_seconds=plus(before.exposed_wait_seconds, piece.exposed),
        exposed_after_first_seconds=plus(before.exposed_after_first_seconds, piece.exposed),
        outlier_wait_seconds=before.outlier_wait_seconds + piece.late_wait,
        checkpoint_steps=before.checkpoint_steps + piece.checkpoint_steps,
        checkpoint_steps_compute_seconds=before.checkpoint_steps_compute_seconds + piece.checkpoint_steps_compute,
        wait_seconds_by_source=waits | {piece.source: waits.get(piece.source, 0.0) + piece.wait},
        epochs=EpochTotals(
            epochs.boundaries + piece.boundaries,
            epochs.left + piece.left,
            epochs.boundary_wait_seconds + piece.boundary_wait,
            epochs.near_boundary_wait_seconds + piece.near_boundaries,
        ),
        deliveries=before.deliveries
        + Deliveries(
            batches=piece.matched, fetch_wait_seconds=piece.late, transfer_wait_seconds=piece.moved,
            from_busy=piece.from_busy, transfer_wait_busy_worker_seconds=piece.moved_from_busy,
            transfer_wait_long_fetch_seconds=piece.moved_from_long, head_of_line_wait_seconds=piece.head_of_line,
        ),
        sampler=SamplerTotals(
            sampler.timed_batches + piece.timed_waits,
            sampler.seconds + piece.timed_sampler,
            sampler.cpu_seconds + piece.timed_sampler_cpu,
            sampler.receive_cpu_seconds + piece.timed_receiving_cpu,
            sampler.boundary_seconds + piece.boundary_sampler,
            sampler.boundary_cpu_seconds + piece.boundary_sampler_cpu,
        ),
        garbage=GarbageTotals(
            garbage.seconds + piece.garbage,
            garbage.wait_seconds + piece.garbage_wait,
            garbage.boundary_wait_seconds + piece.boundary_garbage,
        ),
        own=OwnTotals(
            own.fetch_seconds + piece.timed_fetch,
            own.fetch_cpu_seconds + piece.timed_fetch_cpu,
            own.releases + piece.freed,
            own.release_seconds + piece.freeing,
            own.samples + piece.samples,
            own.in_sync_samples + piece.in_sync,
        ),
        process_cpu_seconds=plus(before.process_cpu_seconds, piece.process_cpu),
        run_queue_delay_seconds=plus(before.run_queue_delay_seconds, piece.own_runnable),
        sampled=integrated(before.sampled, readings),
        fetch_counts=histogram.counts if histogram else before.fetch_counts,
    )  # fmt: skip
    conditions = Conditions(
        source=piece.source, settings=piece.settings, in_loop=readings.in_loop, where=piece.where,
        fetching_seconds=None if piece.workers is None else piece.workers.fetching_seconds,
        fetched={} if piece.workers is None else piece.workers.fetched,
        worker_cores=None if piece.workers is None else piece.workers.allowed_cores, cores=piece.cores,
        quota_cores=piece.quota, host_cores=piece.host_cores, on_gpu=piece.gpu_utilization_ratio is not None,
        peers=piece.peers,
    )  # fmt: skip
    return Tick(totals, conditions)


def gather(slices, *, rank=0, cause=None, **recurring: float) -> Evidence:
    """The evidence of slices that follow each other from the start of a run."""
    ticks = [Tick()]
    for piece in slices:
        ticks.append(next_tick(ticks[-1].totals, piece))
    return aggregate(ticks, rank=rank, cause=cause, recurring=RecurringCosts(**recurring))


class Detector:
    """A `StallDetector` that gets slices."""

    def __init__(self, *settings: float) -> None:
        self._detector = StallDetector(*settings)
        self._totals = Totals()

    def _tick(self, piece: Slice) -> Tick:
        tick = next_tick(self._totals, piece)
        self._totals = tick.totals
        return tick

    def update(self, piece: Slice) -> Change | None:
        return self._detector.update(self._tick(piece))

    def skip(self, piece: Slice) -> None:
        self._detector.skip(self._tick(piece))

    def open_hang(self, cause: str, seconds: float, piece: Slice) -> Stall:
        return self._detector.open_hang(cause, seconds, self._tick(piece))

    def close_hang(self, piece: Slice) -> None:
        self._detector.close_hang(self._tick(piece))

    def last(self) -> Change | None:
        return self._detector.last()

    @property
    def stall(self) -> Stall | None:
        return self._detector.stall
