"""Windows of the stall detector for tests: slices of time, each with what happened in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from telemetry.agent.collectors import Samples
from telemetry.agent.totals import Readings, integrated
from telemetry.diagnosis.evidence import Evidence, RecurringCosts, aggregate
from telemetry.diagnosis.stalls import Stall, StallDetector, StallUpdate
from telemetry.records import (
    CHECKPOINT,
    COMPUTE,
    DATA_WAIT,
    EVALUATION,
    STARTUP,
    Deliveries,
    GpuSample,
    HostSample,
    LoaderTraits,
    PressureSample,
    RankPace,
    WorkersSample,
)
from telemetry.totals import Conditions, EpochTotals, GarbageTotals, OwnTotals, SamplerTotals, Tick, Totals, together
from telemetry.util.processes import identify


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
    outlier_wait: float = 0.0
    checkpoint_steps: int = 0
    checkpoint_steps_compute: float = 0.0
    source: str | None = None
    process_cpu: float | None = None
    fetches: int | None = None
    fetch_busy: float | None = None
    fetch_wait: float = 0.0
    transfer_wait: float = 0.0
    transfer_wait_busy: float = 0.0
    transfer_wait_long: float = 0.0
    head_of_line: float = 0.0
    matched: int = 0
    from_busy: int = 0
    timed_fetch: float = 0.0
    timed_fetch_cpu: float = 0.0
    release: float = 0.0
    releases: int = 0
    timed_waits: int = 0
    timed_sampler: float = 0.0
    timed_sampler_cpu: float = 0.0
    timed_receiving_cpu: float = 0.0
    boundary_sampler: float = 0.0
    boundary_sampler_cpu: float = 0.0
    garbage_wait: float = 0.0
    boundary_garbage: float = 0.0
    collections: int = 0
    younger_collections: int = 0
    startup: float = 0.0
    own_runnable: float | None = None
    samples: int = 0
    in_sync: int = 0
    where: str | None = None
    peers: tuple[RankPace, ...] = ()
    workers: WorkersSample | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    traits: LoaderTraits = LoaderTraits()
    read_by_thread: bool = False
    iterated_at: tuple[str, int, str] | None = None
    empty_workers: int = 0
    same_batches: bool | None = None
    first_fetches: int = 0
    first_fetch: float = 0.0
    worker_fetches: int = 0
    worker_fetch: float = 0.0
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


def next_tick(before: Totals, part: Slice) -> Tick:
    """The tick at the end of a slice."""
    readings = Readings(
        seconds=part.seconds, loop_seconds=part.wait + part.compute, compute_seconds=part.compute,
        garbage_seconds=part.garbage, exposed_wait_seconds=part.exposed, process_cpu_seconds=part.process_cpu,
        fetches=part.fetches, fetch_busy_seconds=part.fetch_busy, gpu_clock_ratio=part.gpu_clock_ratio,
        samples=Samples(
            workers=part.workers,
            host=HostSample(part.host_cpu_ratio, part.host_cores, 0, 0),
            pressure=PressureSample(
                cgroup_cpu_limit=part.quota, cgroup_cpu_used=part.quota_used,
                cgroup_throttled_ratio=part.throttled_ratio,
            ),
            nvml=GpuSample(
                0, "", "", utilization_ratio=part.gpu_utilization_ratio, throttled=part.gpu_throttled,
            ),
        ),
    )  # fmt: skip
    spent = {
        DATA_WAIT: part.wait, COMPUTE: part.compute, EVALUATION: part.evaluation, CHECKPOINT: part.checkpoint,
        STARTUP: part.startup,
    }  # fmt: skip
    waits, histogram = before.wait_seconds_by_source, part.workers and part.workers.fetch_duration
    epochs, garbage, own, sampler = before.epochs, before.garbage, before.own, before.sampler
    totals = Totals(
        wall_seconds=before.wall_seconds + part.seconds,
        ledger_seconds={name: before.ledger_seconds.get(name, 0.0) + seconds for name, seconds in spent.items()},
        steps=before.steps + part.steps,
        batches=before.batches + part.batches,
        exposed_wait_seconds=plus(before.exposed_wait_seconds, part.exposed),
        exposed_after_first_seconds=plus(before.exposed_after_first_seconds, part.exposed),
        outlier_wait_seconds=before.outlier_wait_seconds + part.outlier_wait,
        checkpoint_steps=before.checkpoint_steps + part.checkpoint_steps,
        checkpoint_steps_compute_seconds=before.checkpoint_steps_compute_seconds + part.checkpoint_steps_compute,
        wait_seconds_by_source=waits | {part.source: waits.get(part.source, 0.0) + part.wait},
        epochs=EpochTotals(
            epochs.boundaries + part.boundaries,
            epochs.left + part.left,
            epochs.boundary_wait_seconds + part.boundary_wait,
            epochs.near_boundary_wait_seconds + part.near_boundaries,
            epochs.first_fetches + part.first_fetches,
            epochs.first_fetch_seconds + part.first_fetch,
        ),
        deliveries=together(before.deliveries, Deliveries(
            batches=part.matched, fetch_wait_seconds=part.fetch_wait, transfer_wait_seconds=part.transfer_wait,
            from_busy=part.from_busy, transfer_wait_busy_worker_seconds=part.transfer_wait_busy,
            transfer_wait_long_fetch_seconds=part.transfer_wait_long, head_of_line_wait_seconds=part.head_of_line,
        )),
        sampler=SamplerTotals(
            sampler.timed_batches + part.timed_waits,
            sampler.seconds + part.timed_sampler,
            sampler.cpu_seconds + part.timed_sampler_cpu,
            sampler.receive_cpu_seconds + part.timed_receiving_cpu,
            sampler.boundary_seconds + part.boundary_sampler,
            sampler.boundary_cpu_seconds + part.boundary_sampler_cpu,
        ),
        garbage=GarbageTotals(
            garbage.seconds + part.garbage,
            garbage.wait_seconds + part.garbage_wait,
            garbage.boundary_wait_seconds + part.boundary_garbage,
            garbage.collections + part.collections,
            garbage.younger_collections + part.younger_collections,
        ),
        own=OwnTotals(
            own.fetch_seconds + part.timed_fetch,
            own.fetch_cpu_seconds + part.timed_fetch_cpu,
            own.releases + part.releases,
            own.release_seconds + part.release,
            own.samples + part.samples,
            own.in_sync_samples + part.in_sync,
        ),
        process_cpu_seconds=plus(before.process_cpu_seconds, part.process_cpu),
        run_queue_delay_seconds=plus(before.run_queue_delay_seconds, part.own_runnable),
        worker_fetches=before.worker_fetches + part.worker_fetches,
        worker_fetch_seconds=before.worker_fetch_seconds + part.worker_fetch,
        sampled=integrated(before.sampled, readings),
        fetch_counts=histogram.counts if histogram else before.fetch_counts,
    )  # fmt: skip
    conditions = Conditions(
        source=part.source, settings=part.settings, traits=part.traits, read_by_thread=part.read_by_thread,
        iterated_at=part.iterated_at, empty_workers=part.empty_workers, same_batches=part.same_batches,
        in_loop=readings.in_loop, where=part.where,
        fetching_seconds=None if part.workers is None else part.workers.fetching_seconds,
        fetched={} if part.workers is None else part.workers.fetched,
        worker_cores=None if part.workers is None else part.workers.allowed_cores, cores=part.cores,
        quota_cores=part.quota, host_cores=part.host_cores, on_gpu=part.gpu_utilization_ratio is not None,
        peers=part.peers,
    )  # fmt: skip
    return Tick(totals, conditions)


def with_part(evidence: Evidence, part: str, **changes: Any) -> Evidence:
    """Evidence of which one part has other figures."""
    return structs.replace(evidence, **{part: structs.replace(getattr(evidence, part), **changes)})


def evidence_over(slices, *, rank=0, cause=None, **recurring: float) -> Evidence:
    """The evidence of slices that follow each other from the start of a run."""
    ticks = [Tick()]
    for part in slices:
        ticks.append(next_tick(ticks[-1].totals, part))
    return aggregate(ticks, rank=rank, cause=cause, recurring=RecurringCosts(**recurring))


class Detector:
    """A `StallDetector` that gets slices instead of ticks."""

    def __init__(self, window: float = 10, enter: float = 0.2, leave: float = 0.1) -> None:
        self._detector = StallDetector(window, enter, leave, identify("r", None, {}))
        self._totals = Totals()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._detector, name)

    def _tick(self, part: Slice) -> Tick:
        tick = next_tick(self._totals, part)
        self._totals = tick.totals
        return tick

    def update(self, part: Slice) -> StallUpdate | None:
        return self._detector.update(self._tick(part))

    def play(self, *parts: Slice) -> list[str]:
        """What becomes of the stall with each of these slices, where there is one."""
        return [change.kind for part in parts if (change := self.update(part)) is not None]

    def skip(self, part: Slice) -> None:
        self._detector.skip(self._tick(part))

    def open_stuck(self, cause: str, seconds: float, part: Slice) -> Stall:
        return self._detector.open_stuck(cause, seconds, self._tick(part))

    def close_stuck(self, part: Slice) -> None:
        self._detector.close_stuck(self._tick(part))
