"""Windows of the stall detector for tests: slices of time, each with what happened in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from telemetry.diagnosis.evidence import Evidence, RecurringCosts, aggregate
from telemetry.diagnosis.stalls import DetectedStall, StallDetector, StallUpdate
from telemetry.loop.tick_totals import Readings, integrated
from telemetry.model.records import (
    CHECKPOINT,
    COMPUTE,
    DATA_WAIT,
    EVALUATION,
    STARTUP,
    Deliveries,
    FirstFetches,
    GpuSample,
    HostSample,
    LoaderTraits,
    PressureSample,
    RankPace,
    Samples,
    WorkersSample,
)
from telemetry.model.totals import (
    CompileTotals,
    Conditions,
    EpochTotals,
    GarbageTotals,
    SampledTotals,
    StackTotals,
    Tick,
    Totals,
    together,
)
from telemetry.util.clock import NS
from telemetry.util.identity import identify


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
    own_cpu: float | None = None  # unless said: it wanted a core all the time
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
    recompilations: int = 0
    recompile_seconds: dict[str, float] = field(default_factory=dict)
    recompiled_because: str | None = None
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
    parts: dict[str, float] | None = None


_START = Totals(compute_parts={})


def _stacks(part: Slice) -> StackTotals:
    """What samples show of the training thread, one for each nanosecond."""
    waited = part.timed_fetch or (part.wait - part.boundary_wait - part.garbage_wait) * (part.timed_waits > 0)
    timed = (part.batches or part.steps) / part.timed_waits if part.timed_waits else 0.0
    cpu = part.timed_fetch_cpu + timed * (part.timed_sampler_cpu + part.timed_receiving_cpu)
    freeing = (part.batches or part.steps) * part.release / part.releases if part.releases else 0.0
    in_ns = {
        "step": part.compute, "freeing": freeing, "wait": waited, "wait_cpu": cpu,
        "sampler": timed * part.timed_sampler, "sampler_cpu": timed * part.timed_sampler_cpu,
        "boundary": part.boundary_wait, "boundary_sampler": part.boundary_sampler,
        "boundary_sampler_cpu": part.boundary_sampler_cpu,
    }  # fmt: skip
    return StackTotals(
        part.samples, part.in_sync, **{name: max(0, int(NS * seconds)) for name, seconds in in_ns.items()}
    )


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
            gpus=(GpuSample(
                0, "", "", utilization_ratio=part.gpu_utilization_ratio, throttled=part.gpu_throttled,
            ),),
        ),
    )  # fmt: skip
    spent = {
        DATA_WAIT: part.wait, COMPUTE: part.compute, EVALUATION: part.evaluation, CHECKPOINT: part.checkpoint,
        STARTUP: part.startup,
    }  # fmt: skip
    histogram = part.workers and part.workers.fetch_duration
    ran = part.seconds - part.own_runnable if part.own_cpu is None and part.own_runnable is not None else part.own_cpu
    added = Totals(
        wall_seconds=part.seconds, ledger_seconds=spent, steps=part.steps, batches=part.batches or part.steps,
        exposed_wait_seconds=part.exposed, exposed_after_first_seconds=part.exposed,
        outlier_wait_seconds=part.outlier_wait, checkpoint_steps=part.checkpoint_steps,
        checkpoint_steps_compute_seconds=part.checkpoint_steps_compute, wait_seconds_by_source={part.source: part.wait},
        epochs=EpochTotals(part.boundaries, part.left, part.boundary_wait, part.near_boundaries),
        first_fetches=FirstFetches(part.first_fetches, part.first_fetch),
        deliveries=Deliveries(
            matched=part.matched, fetch_wait_seconds=part.fetch_wait, transfer_wait_seconds=part.transfer_wait,
            from_busy=part.from_busy, transfer_wait_busy_worker_seconds=part.transfer_wait_busy,
            transfer_wait_long_fetch_seconds=part.transfer_wait_long, head_of_line_seconds=part.head_of_line,
        ),
        garbage=GarbageTotals(
            part.garbage, part.garbage_wait, part.boundary_garbage, part.collections, part.younger_collections,
        ),
        compiles=CompileTotals(part.recompilations, part.recompile_seconds),
        stacks=_stacks(part),
        process_cpu_seconds=part.process_cpu, run_queue_delay_seconds=part.own_runnable,
        thread_cpu_seconds=ran,
        worker_fetches=part.worker_fetches, worker_fetch_seconds=part.worker_fetch,
        sampled=integrated(SampledTotals(), readings),
    )  # fmt: skip
    totals = replace(
        together(before, added),
        fetch_counts=histogram.counts if histogram else before.fetch_counts,
        compute_parts=None if part.parts is None else together(before.compute_parts or {}, part.parts),
    )
    conditions = Conditions(
        source=part.source, settings=part.settings, traits=part.traits, read_by_thread=part.read_by_thread,
        iterated_at=part.iterated_at, empty_workers=part.empty_workers, same_batches=part.same_batches,
        in_loop=readings.in_loop, where=part.where, recompiled_because=part.recompiled_because,
        fetching_seconds=None if part.workers is None else part.workers.fetching_seconds,
        fetched={} if part.workers is None else part.workers.fetched,
        worker_cores=None if part.workers is None else part.workers.allowed_cores, cores=part.cores,
        quota_cores=part.quota, host_cores=part.host_cores, on_gpu=part.gpu_utilization_ratio is not None,
        peers=part.peers,
    )  # fmt: skip
    return Tick(totals, conditions)


def evidence_over(slices, *, rank=0, cause=None, **recurring: float) -> Evidence:
    """The evidence of slices that follow each other from the start of a run."""
    ticks = [Tick(_START)]
    for part in slices:
        ticks.append(next_tick(ticks[-1].totals, part))
    return aggregate(ticks, rank=rank, cause=cause, recurring=RecurringCosts(**recurring))


class Detector:
    """A `StallDetector` that gets slices instead of ticks."""

    def __init__(self, window: float = 10, enter: float = 0.2, leave: float = 0.1) -> None:
        self._detector = StallDetector(window, enter, leave, identify("r", None, {}))
        self._totals = _START

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

    def open_stuck(self, cause: str, seconds: float, part: Slice) -> DetectedStall:
        return self._detector.open_stuck(cause, seconds, self._tick(part))

    def close_stuck(self, part: Slice) -> None:
        self._detector.close_stuck(self._tick(part))
