"""Makes the `Totals` of a tick from the hooks' figures, the accounting and the samples."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.clock import NS
from telemetry.core.tick import Conditions, Tick
from telemetry.core.totals import EpochTotals, GarbageTotals, OwnTotals, SamplerTotals, Totals
from telemetry.diagnose.energy import EnergyReading, added_energy
from telemetry.diagnose.integrals import HELD_BACK, Readings, integrated
from telemetry.diagnose.stall_detector import MIN_STEPS_OF_A_RUN

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.collector_poller import CollectorPoller
    from telemetry.agent.overhead import Overhead
    from telemetry.attach.step_tracker import StepTracker
    from telemetry.collect.thread_sampler import ThreadSampler, ThreadSamples
    from telemetry.core.samples import GpuSample, HostSample, PressureSample, ProcessSample
    from telemetry.core.tick import RankPace
    from telemetry.core.worker_records import WorkersSample

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
        source = tracker.sources.newest()
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
