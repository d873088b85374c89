"""Makes the `Totals` of a tick from the hooks' figures, the accounting and the samples."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from telemetry.diagnosis.stalls import MIN_STEPS_OF_A_RUN
from telemetry.records import (
    Conditions,
    CpuTotals,
    EpochTotals,
    GarbageTotals,
    GpuTotals,
    OwnTotals,
    SampledTotals,
    SamplerTotals,
    Tick,
    Totals,
    WorkerTotals,
)
from telemetry.util.clock import NS, thread_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.collectors import CollectorPoller
    from telemetry.hooks.tracker import StepTracker
    from telemetry.records import (
        GpuSample,
        HostSample,
        PressureSample,
        ProcessSample,
        RankPace,
        WorkersSample,
    )
    from telemetry.sources.lines import ThreadSampler, ThreadSamples


# -- splits the energy of the GPU over the categories of the ledger ----------------------------------------------------
# The GPU counts its energy itself, so the sum is exact. The split is an estimate: between two readings, each category
# gets the share that it had of the time. A GPU that waits draws less than one that computes. So waits that are short
# against an interval get too much.

MAX_WATTS: Final = 20e3
"""No GPU draws so much. A larger difference is a counter that began anew, or an error of the driver."""

_MARGIN_SECONDS: Final = 1.0
"""The driver counts in steps: it may add the energy of a whole step to a short interval."""


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The GPU's counter at one moment.

    Attributes:
        uuid: of the GPU. ``joules``: of its counter, which began with the driver.
        ledger_seconds: of the run at this moment, by category.
    """

    uuid: str
    joules: float
    ledger_seconds: Mapping[str, float]


def added_energy(
    before: dict[str, float] | None, earlier: EnergyReading, later: EnergyReading
) -> dict[str, float] | None:
    """Joules by category with those between two readings of one GPU added; unchanged if these cannot be used.

    Args:
        before: joules by category so far; None before the first.
        earlier: the reading before ``later``.
        later: the newest reading.
    """
    spent = {
        category: max(0.0, seconds - earlier.ledger_seconds.get(category, 0.0))
        for category, seconds in later.ledger_seconds.items()
    }
    seconds, joules = sum(spent.values()), later.joules - earlier.joules
    if later.uuid != earlier.uuid or seconds <= 0 or not 0 <= joules <= MAX_WATTS * (seconds + _MARGIN_SECONDS):
        return before
    so_far = before or {}
    return {category: so_far.get(category, 0.0) + joules * part / seconds for category, part in spent.items()}


# -- adds samples to counters: a sampled value enters `Totals` as its integral over the time of its tick ---------------
# The meaning of a sample depends on how the time of the tick was spent, for example whether the training loop ran. Only
# this module decides that. Code that reads the totals does not have to.

_ONLY_LOOP: Final = 0.95
"""From this share of a tick in the training loop on, the GPU's activity in the tick counts as the loop's."""

_MOSTLY: Final = 0.5
"""From this share of a tick in the training loop on, what workers and process did in the tick counts as the loop's."""

HELD_BACK: Final = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
"""Reasons for a low clock that are a fault. A GPU at its power cap is not: it reaches the cap when it is used well."""


@dataclass(frozen=True, slots=True)
class Readings:
    """How one tick was spent, and what was sampled at its end. None: not measured.

    Attributes:
        seconds: length of the tick. ``loop_seconds``, ``compute_seconds``, ``garbage_seconds`` and
            ``exposed_wait_seconds`` are parts of it.
        process_cpu_seconds: CPU time of the training process in the tick, without its workers.
        children_cpu_seconds: CPU time of its children that ended in the tick. Workers may be among them.
        fetches, fetch_busy_seconds: batches that the workers finished in the tick, and their time in fetches.
        host_cpu_ratio: use of all cores of the machine, ``host_cores`` of them.
        quota_cores: CPU limit of the cgroup. ``quota_used_cores``: cores that all its processes have used.
        gpu_clock_ratio: clock of the SMs, relative to the clock in this run when the GPU is not throttled.
    """

    seconds: float
    loop_seconds: float = 0.0
    compute_seconds: float = 0.0
    garbage_seconds: float = 0.0
    exposed_wait_seconds: float | None = None
    process_cpu_seconds: float | None = None
    children_cpu_seconds: float | None = None
    fetches: int | None = None
    fetch_busy_seconds: float | None = None
    workers: WorkersSample | None = None
    host_cpu_ratio: float | None = None
    host_cores: int = 0
    quota_cores: float | None = None
    quota_used_cores: float | None = None
    throttled_ratio: float | None = None
    gpu_utilization_ratio: float | None = None
    gpu_clock_ratio: float | None = None
    gpu_throttled: tuple[str, ...] = ()

    @property
    def in_loop(self) -> bool:
        """Whether the tick was mostly spent in the training loop."""
        return self.loop_seconds >= _MOSTLY * self.seconds


def integrated(before: SampledTotals, tick: Readings) -> SampledTotals:
    """The totals with one more tick."""
    workers, in_use, idle = tick.workers, before.workers, before.idle_workers
    read, written = before.read_bytes, before.written_bytes
    if workers is not None:
        if tick.in_loop:
            in_use = _workers(in_use, tick, workers)
        else:
            idle = _workers(idle, tick, workers)
        read = read.plus(workers.read_bytes_per_second, tick.seconds)
        written = written.plus(workers.written_bytes_per_second, tick.seconds)
    return SampledTotals(in_use, idle, read, written, _cpu(before.cpu, tick), _gpu(before.gpu, tick))


def _workers(before: WorkerTotals, tick: Readings, sample: WorkersSample) -> WorkerTotals:
    seconds = tick.seconds
    counted = tick.fetches is not None and tick.fetch_busy_seconds is not None
    scheduled = sample.blocked_ratio is not None
    timed = not scheduled and sample.busy_ratio is not None and sample.cpu_ratio is not None
    cpu, busy = (sample.cpu_ratio or 0.0) * seconds, (sample.busy_ratio or 0.0) * seconds
    pickling = None if sample.pickling_ratio is None else sample.pickling_ratio * sample.training_workers
    return WorkerTotals(
        fetches=before.fetches + (tick.fetches or 0) * counted,
        fetch_busy_seconds=before.fetch_busy_seconds + (tick.fetch_busy_seconds or 0.0) * counted,
        counted_seconds=before.counted_seconds + seconds * counted,
        sampled_seconds=before.sampled_seconds + seconds,
        cpu_seconds=before.cpu_seconds + cpu * scheduled,
        runnable_seconds=before.runnable_seconds + (sample.runnable_ratio or 0.0) * seconds * scheduled,
        blocked_seconds=before.blocked_seconds + (sample.blocked_ratio or 0.0) * seconds,
        unscheduled_busy_seconds=before.unscheduled_busy_seconds + busy * timed,
        unscheduled_cpu_seconds=before.unscheduled_cpu_seconds + cpu * timed,
        busy_ratio=before.busy_ratio.plus(sample.busy_ratio, seconds),
        pickling_cores=before.pickling_cores.plus(pickling, seconds),
        ready_batches=before.ready_batches.plus(sample.ready_batches, seconds),
        slack_seconds=before.slack_seconds.plus(sample.slack_seconds, seconds),
        seconds_by_count=_counted(before.seconds_by_count, sample.training_workers or None, seconds),
        head_of_line_seconds=_counted(before.head_of_line_seconds, sample.head_of_line_worker, seconds),
    )


def _counted(before: dict[int, float], key: int | None, seconds: float) -> dict[int, float]:
    return before if key is None else before | {key: before.get(key, 0.0) + seconds}


def _cpu(before: CpuTotals, tick: Readings) -> CpuTotals:
    seconds = tick.seconds
    process, used, others, in_quota = (
        before.process_seconds, before.used_cores, before.other_cores, before.other_quota_cores
    )  # fmt: skip
    if tick.process_cpu_seconds is not None and seconds > 0:
        # The first tick has all that the process used before the agent started.
        process = process.plus(tick.process_cpu_seconds * min(1.0, tick.loop_seconds / seconds) / seconds, seconds)
    if tick.process_cpu_seconds is not None and seconds > 0 and tick.in_loop:
        workers = tick.workers
        by_workers = 0.0 if workers is None else (workers.cpu_ratio or 0.0) * workers.training_workers
        own = tick.process_cpu_seconds / seconds + by_workers
        own += _by_children(tick, own)
        used = used.plus(own, seconds)
        if tick.host_cpu_ratio is not None:
            others = others.plus(max(0.0, tick.host_cpu_ratio * tick.host_cores - own), seconds)
        if tick.quota_cores is not None and tick.quota_used_cores is not None:
            in_quota = in_quota.plus(max(0.0, tick.quota_used_cores - own), seconds)
    return CpuTotals(
        process_seconds=process,
        used_cores=used,
        other_cores=others,
        other_quota_cores=in_quota,
        host_ratio=before.host_ratio.plus(tick.host_cpu_ratio, seconds),
        throttled_ratio=before.throttled_ratio.plus(tick.throttled_ratio, seconds),
    )


def _by_children(tick: Readings, own: float) -> float:
    """Cores that children used which ended in the tick, such as a decoder for each sample: those are no others.

    What one used that lived for longer comes all at once. It is left out if no tick has so much of it, and it is never
    more than was in use beside the process and its workers. So others may be taken for children, but no workers that
    end are counted twice.
    """
    used = (tick.children_cpu_seconds or 0.0) / tick.seconds
    if tick.host_cpu_ratio is None or used > tick.host_cores:
        return 0.0
    return min(used, max(0.0, tick.host_cpu_ratio * tick.host_cores - own))


def _gpu(before: GpuTotals, tick: Readings) -> GpuTotals:
    used, clock, exposed = tick.gpu_utilization_ratio, tick.gpu_clock_ratio, tick.exposed_wait_seconds
    if used is None and clock is None:
        return before
    only_loop = tick.loop_seconds >= _ONLY_LOOP * tick.seconds
    unused, exposed_sum, garbage_sum = before.unused_ratio, before.exposed_wait_seconds, before.garbage_seconds
    if used is not None and exposed is not None and only_loop:
        unused = unused.plus(1.0 - used, tick.seconds)
        exposed_sum += exposed
        garbage_sum += tick.garbage_seconds
    slowed = before.slowed_ratio
    if clock is not None:
        slowed = slowed.plus(max(0.0, 1.0 - clock) if HELD_BACK & {*tick.gpu_throttled} else 0.0, tick.compute_seconds)
    return GpuTotals(
        utilization_ratio=before.utilization_ratio.plus(used, tick.seconds),
        unused_ratio=unused,
        exposed_wait_seconds=exposed_sum,
        garbage_seconds=garbage_sum,
        slowed_ratio=slowed,
    )


# -- the cost of the agent itself --------------------------------------------------------------------------------------


class HasThread(Protocol):
    """A part of the agent with a thread of its own."""

    @property
    def cpu_seconds(self) -> float:
        """CPU time of that thread."""


class Overhead:
    """The cost in seconds, by thread.

    Args:
        tracker: measures the hooks on the training thread.
        parts: the parts of the agent that have threads of their own.

    Attributes:
        agent_thread_seconds: CPU time of the agent thread.
    """

    def __init__(self, tracker: StepTracker, parts: Sequence[HasThread]) -> None:
        self._tracker = tracker
        self._parts = parts
        self.agent_thread_seconds = 0.0

    def measure(self) -> None:
        """Read the CPU time of this thread, the agent's."""
        self.agent_thread_seconds = thread_time()

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds on the training thread, and CPU seconds of the agent's own threads."""
        own = self.agent_thread_seconds + sum(part.cpu_seconds for part in self._parts)
        return {"training": self._tracker.overhead_ns / NS, "agent": own}


# -- makes the `Totals` of a tick from the hooks' figures, the accounting and the samples ------------------------------

_WORKING_RATIO: Final = 0.5
"""If a GPU runs something for at least this share of the time, its clock counts as its working clock."""


class TotalsBuilder:
    """Keeps the newest `Totals`, and adds to them.

    Args:
        accounting: ledger, steps and exposed wait. ``tracker``: counters of the training thread itself.
        collectors: the newest samples. ``thread_sampler``: samples of the training thread.
        overhead: the cost of the agent itself, seconds by thread.
        peers: returns the newest paces of other ranks, see `Conditions`.

    Attributes:
        totals: the newest totals.
    """

    def __init__(
        self,
        accounting: Accounting,
        tracker: StepTracker,
        collectors: CollectorPoller,
        thread_sampler: ThreadSampler,
        overhead: Overhead,
        *,
        peers: Callable[[], tuple[RankPace, ...]] = tuple,
    ) -> None:
        self._accounting = accounting
        self._tracker = tracker
        self._collectors = collectors
        self._thread_sampler = thread_sampler
        self._overhead = overhead
        self._peers = peers
        self.totals = Totals()
        self._integrated = self.totals  # the totals when the samples were last integrated
        self._process_cpu_seconds = 0.0  # at that time; the first tick has everything that was used before
        self._children_cpu_seconds: float | None = None
        self._updated_ns = 0
        self._source_kind: str | None = None  # not the source: nothing here may keep a loader's queue alive
        self._loader_settings: dict[str, Any] = {}
        self._where: str | None = None
        self._usual_clock: float | None = None
        self._first_wait_to_come = 0.0
        self._energy: EnergyReading | None = None
        self._energy_sample: GpuSample | None = None
        self._exposed: float | None = 0.0  # as measured by the clock, which reads the first wait late

    def tick(self) -> Tick:
        """The current totals and conditions."""
        batches_from = self._accounting.take_source()
        self._source_kind = None if batches_from is None else batches_from.kind
        self._loader_settings = self._loader_settings if batches_from is None else batches_from.settings
        before = self._integrated
        totals = self.update()
        host: HostSample | None = self._collectors.newest("host")
        pressure: PressureSample | None = self._collectors.newest("pressure")
        workers: WorkersSample | None = self._collectors.newest("workers")
        quota = None if pressure is None else pressure.cgroup_cpu_limit
        seconds = totals.wall_seconds - before.wall_seconds
        conditions = Conditions(
            source=self._source_kind,
            settings={} if batches_from is None else batches_from.settings,
            in_loop=Readings(seconds, totals.loop_seconds - before.loop_seconds).in_loop,
            where=self._where,
            fetching_seconds=None if workers is None else workers.fetching_seconds,
            fetched={} if workers is None else workers.fetched,
            worker_cores=None if workers is None else workers.allowed_cores,
            cores=_cores(quota),
            quota_cores=quota,
            host_cores=0 if host is None else host.cpu_count,
            on_gpu=_utilization(self._collectors.newest("nvml")) is not None,
            peers=self._peers(),
        )
        return Tick(totals, conditions)

    def loader_settings(self) -> dict[str, Any]:
        """The settings of the loader that the newest batches came from; empty before the first."""
        return self._loader_settings

    def current(self) -> Totals:
        """The newest totals, updated if more has happened. Samples are only integrated in `update`, once a tick."""
        if self._accounting.updated_ns != self._updated_ns:
            self.totals = self._by_source(self._count(None), self.totals)
        return self.totals

    def update(self) -> Totals:
        """Update the totals, with the samples since the last update. Called once a tick, and at the end."""
        sampled = self._thread_sampler.take()
        self._where = sampled.where
        self.totals = self._with_samples(self._by_source(self._count(sampled), self.totals))
        self._integrated = self.totals
        return self.totals

    def _count(self, sampled: ThreadSamples | None) -> Totals:
        """The current counters. ``sampled``: the samples of the training thread that were not counted yet."""
        self._updated_ns = self._accounting.updated_ns
        accounting, tracker, before = self._accounting, self._tracker, self.totals
        ledger, stats = accounting.ledger, accounting.stats
        source = tracker.loaders.newest()
        tracker.garbage.read(workers=source is not None and source.kind == "workers")
        process: ProcessSample | None = self._collectors.newest("process")
        workers: WorkersSample | None = self._collectors.newest("workers")
        histogram = None if workers is None else workers.fetch_duration
        timer = tracker.sampler_timer
        first_wait = ledger.first_wait_ns / NS
        return Totals(
            wall_seconds=ledger.wall_seconds,
            ledger_seconds=ledger.seconds(),
            first_wait_seconds=first_wait,
            steps=accounting.steps_total,
            dropped_steps=accounting.dropped_steps,
            unseen_steps=accounting.unseen_steps,
            optimizer_steps=accounting.optimizer_steps,
            batches=ledger.batches,
            exposed_wait_seconds=accounting.exposed_seconds,
            exposed_after_first_seconds=self._after_first(accounting.exposed.seconds, first_wait, stats.steps),
            outlier_wait_seconds=stats.outlier_wait_seconds,
            checkpoint_steps=stats.checkpoint_steps,
            checkpoint_steps_compute_seconds=stats.checkpoint_steps_compute_seconds,
            epochs=EpochTotals(
                boundaries=ledger.epoch_boundaries,
                left=ledger.iterations_left,
                boundary_wait_seconds=ledger.boundary_wait_ns / NS,
                near_boundary_wait_seconds=ledger.near_boundary_wait_ns / NS,
            ),
            deliveries=before.deliveries if workers is None else workers.deliveries,
            sampler=SamplerTotals(
                timed_batches=timer.batches,
                seconds=timer.sampler_ns / NS,
                cpu_seconds=timer.sampler_cpu_ns / NS,
                receive_cpu_seconds=timer.receiving_cpu_ns / NS,
                boundary_seconds=timer.boundary_sampler_ns / NS,
                boundary_cpu_seconds=timer.boundary_sampler_cpu_ns / NS,
            ),
            garbage=GarbageTotals(
                seconds=tracker.garbage.ns / NS,
                wait_seconds=tracker.garbage.wait_ns / NS,
                boundary_wait_seconds=tracker.garbage.boundary_wait_ns / NS,
            ),
            own=OwnTotals(
                fetch_seconds=tracker.timed_fetch_ns / NS,
                fetch_cpu_seconds=tracker.timed_fetch_cpu_ns / NS,
                releases=tracker.batch_release.freed,
                release_seconds=tracker.batch_release.ns / NS,
                samples=before.own.samples + (sampled.samples if sampled is not None else 0),
                in_sync_samples=before.own.in_sync_samples + (sampled.in_sync if sampled is not None else 0),
            ),
            process_cpu_seconds=None if process is None else process.cpu_seconds,
            run_queue_delay_seconds=None if process is None else process.runnable_seconds,
            thread_cpu_seconds=None if process is None else process.running_seconds,
            worker_fetches=before.worker_fetches if workers is None else workers.fetches_total,
            fetch_counts=before.fetch_counts if histogram is None else histogram.counts,
            overhead_seconds=self._overhead.seconds(),
            sampled=before.sampled,
            gpu_energy_joules=before.gpu_energy_joules,
            samples=accounting.trained_samples(),
            tokens=accounting.tokens(),
        )

    def _by_source(self, counted: Totals, before: Totals) -> Totals:
        """Attribute the waits since the last totals to the source that batches come from now."""
        waits, source = before.wait_seconds_by_source, self._source_kind
        waited = max(0.0, counted.wait_seconds - before.wait_seconds)
        return replace(counted, wait_seconds_by_source=waits | {source: waits.get(source, 0.0) + waited})

    def _with_samples(self, counted: Totals) -> Totals:
        """Add the samples since the last integration to the integrals."""
        before = self._integrated
        workers: WorkersSample | None = self._collectors.newest("workers")
        used = None
        if counted.process_cpu_seconds is not None:
            used = max(0.0, counted.process_cpu_seconds - self._process_cpu_seconds)
            self._process_cpu_seconds = counted.process_cpu_seconds
        process: ProcessSample | None = self._collectors.newest("process")
        children = None
        if process is not None:
            children = _added(self._children_cpu_seconds, process.children_cpu_seconds)
            self._children_cpu_seconds = process.children_cpu_seconds
        host: HostSample | None = self._collectors.newest("host")
        pressure: PressureSample | None = self._collectors.newest("pressure")
        gpu: GpuSample | None = self._collectors.newest("nvml")
        seconds = counted.wall_seconds - before.wall_seconds
        busy = None if workers is None or workers.busy_ratio is None else workers.busy_ratio * workers.training_workers
        readings = Readings(
            seconds=seconds,
            loop_seconds=counted.loop_seconds - before.loop_seconds,
            compute_seconds=counted.compute_seconds - before.compute_seconds,
            garbage_seconds=counted.garbage.seconds - before.garbage.seconds,
            exposed_wait_seconds=_added(before.exposed_after_first_seconds, counted.exposed_after_first_seconds),
            process_cpu_seconds=used,
            children_cpu_seconds=children,
            fetches=None if busy is None else counted.worker_fetches - before.worker_fetches,
            fetch_busy_seconds=None if busy is None else busy * seconds,
            workers=workers,
            host_cpu_ratio=None if host is None else host.cpu_ratio,
            host_cores=0 if host is None else host.cpu_count,
            quota_cores=None if pressure is None else pressure.cgroup_cpu_limit,
            quota_used_cores=None if pressure is None else pressure.cgroup_cpu_used,
            throttled_ratio=None if pressure is None else pressure.cgroup_throttled_ratio,
            gpu_utilization_ratio=_utilization(gpu),
            gpu_clock_ratio=self._clock_ratio(gpu),
            gpu_throttled=() if gpu is None else gpu.throttled or (),
        )
        energy = self._with_energy(counted, gpu)
        return replace(counted, sampled=integrated(before.sampled, readings), gpu_energy_joules=energy)

    @property
    def energy_sample(self) -> GpuSample | None:
        """The newest sample of the GPU whose energy is counted, also while NVML is down; None before the first."""
        return self._energy_sample

    def _with_energy(self, counted: Totals, gpu: GpuSample | None) -> dict[str, float] | None:
        """Add the energy since the last reading of the GPU. The same sample again is no new reading."""
        if gpu is None or gpu is self._energy_sample or gpu.energy_joules is None:
            return counted.gpu_energy_joules
        self._energy_sample = gpu
        before, now = self._energy, EnergyReading(gpu.uuid, gpu.energy_joules, counted.ledger_seconds)
        self._energy = now
        return counted.gpu_energy_joules if before is None else added_energy(counted.gpu_energy_joules, before, now)

    def _after_first(self, exposed: float | None, first_wait: float, steps: int) -> float | None:
        """The exposed wait without that for the first batch.

        The GPU's clock is read some steps after a wait has ended. So the exposed part of the first wait may come later,
        but not after the run has enough steps to be judged.
        """
        before = self.totals
        known, so_far = self._exposed, before.exposed_after_first_seconds
        self._exposed = exposed
        if exposed is None or known is None or so_far is None:
            return None
        added = max(0.0, exposed - known)
        self._first_wait_to_come += first_wait - before.first_wait_seconds
        first = min(added, self._first_wait_to_come)
        self._first_wait_to_come = self._first_wait_to_come - first if steps < MIN_STEPS_OF_A_RUN else 0.0
        return so_far + added - first

    def _clock_ratio(self, gpu: GpuSample | None) -> float | None:
        """The GPU's clock relative to its clock in this run when it is not throttled; before that, to its maximum."""
        if gpu is None or gpu.sm_clock_hertz is None or not gpu.sm_clock_max_hertz:
            return None
        if not HELD_BACK & {*(gpu.throttled or ())} and (gpu.utilization_ratio or 0.0) >= _WORKING_RATIO:
            before = self._usual_clock
            self._usual_clock = gpu.sm_clock_hertz if before is None else 0.9 * before + 0.1 * gpu.sm_clock_hertz
        return min(1.0, gpu.sm_clock_hertz / (self._usual_clock or gpu.sm_clock_max_hertz))


def _added(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else max(0.0, now - before)


def _utilization(gpu: GpuSample | None) -> float | None:
    return None if gpu is None else gpu.utilization_ratio


def _cores(limit: float | None) -> float:
    """Cores that this process may use, by its affinity and its cgroup's limit."""
    allowed = float(len(os.sched_getaffinity(0)))
    return min(allowed, limit) if limit is not None else allowed
