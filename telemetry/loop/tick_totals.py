"""Makes the `Totals` of a tick from the hooks' figures, the accounting and the samples."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final, Protocol

from telemetry.model.records import COMPUTE, EnergyView, Samples
from telemetry.model.totals import (
    MIN_STEPS_OF_A_RUN,
    CompileTotals,
    Conditions,
    CpuTotals,
    GarbageTotals,
    GpuTotals,
    Sampled,
    SampledTotals,
    Tick,
    Totals,
    WorkerTotals,
    together,
)
from telemetry.seams.loaders import LoaderHandle
from telemetry.sources.compiles import CompilationReader
from telemetry.util.clock import NS, thread_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.loop.ledger import Accounting
    from telemetry.model.records import GpuSample, LoaderSettings, RankPace, WorkersSample
    from telemetry.seams.tracker import StepTracker
    from telemetry.sources.polling import CollectorPoller
    from telemetry.sources.sampler import Sampler


# -- the energy of a GPU -----------------------------------------------------------------------------------------------

_MAX_WATTS: Final = 20e3
"""No GPU draws so much. After a larger difference the counter has begun anew, or the driver is wrong."""

_MARGIN_SECONDS: Final = 1.0
"""The driver counts in steps, and may add the energy of a whole step to a short interval."""


class GpuEnergy:
    """Splits the energy of one GPU over the categories of the ledger.

    The GPU counts its energy itself, so the sum is exact. The split is an estimate: between two readings, each category
    gets its share of the time. A waiting GPU draws less than a computing one, so waits that are short against an
    interval get too much.

    Attributes:
        joules: energy by category so far; None before the second reading.
        sample: the newest sample of the GPU whose energy is counted, kept while it cannot be read.
    """

    def __init__(self) -> None:
        self.joules: dict[str, float] | None = None
        self.sample: GpuSample | None = None
        self._ledger_seconds: Mapping[str, float] = {}  # at the newest sample

    def view(self) -> EnergyView | None:
        """The energy so far; None before the second reading."""
        return None if self.joules is None or self.sample is None else EnergyView(self.sample, self.joules)

    def add(self, gpu: GpuSample, ledger_seconds: Mapping[str, float]) -> None:
        """Add the energy since the last reading. The same sample again is no new reading, and an unusable one adds 0.

        Args:
            gpu: the newest sample. Its counter began with the driver.
            ledger_seconds: the run's seconds so far, by category.
        """
        if gpu is self.sample or gpu.energy_joules is None:
            return
        before, self.sample, earlier = self.sample, gpu, self._ledger_seconds
        self._ledger_seconds = ledger_seconds
        if before is None or before.energy_joules is None:
            return
        spent = {name: max(0.0, seconds - earlier.get(name, 0.0)) for name, seconds in ledger_seconds.items()}
        seconds, joules = sum(spent.values()), gpu.energy_joules - before.energy_joules
        if seconds > 0 and 0 <= joules <= _MAX_WATTS * (seconds + _MARGIN_SECONDS):
            self.joules = together(self.joules or {}, {name: joules * part / seconds for name, part in spent.items()})


# -- what the samples of one tick add to the counters ------------------------------------------------------------------
# What a sample means depends on how the tick was spent, for example whether the training loop ran. Only this module
# decides that, not the code that reads the totals.

_ONLY_LOOP: Final = 0.95
"""If the loop took at least this share of a tick, the GPU's activity in the tick counts as the loop's."""

_MOSTLY: Final = 0.5
"""If the loop took at least this share of a tick, what workers and process did in the tick counts as the loop's."""

_HELD_BACK: Final = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
"""Reasons for a low clock that are a fault. A power cap is not: a GPU reaches it when it is used well."""


@dataclass(frozen=True, slots=True)
class Readings:
    """How one tick was spent, and what was sampled at its end. None: not measured.

    Attributes:
        seconds: length of the tick. The other times of the training thread are parts of it.
        samples: the newest samples.
        process_cpu_seconds: CPU time of the training process in the tick, without its workers.
        children_cpu_seconds: CPU time of its children that ended in the tick. Workers may be among them.
        fetches, fetch_busy_seconds: batches that the workers finished in the tick, and their time in fetches.
        gpu_clock_ratio: the SMs' clock, relative to their clock in this run when the GPU is not throttled.
    """

    seconds: float
    loop_seconds: float = 0.0
    compute_seconds: float = 0.0
    garbage_seconds: float = 0.0
    exposed_wait_seconds: float | None = None
    samples: Samples = Samples()
    process_cpu_seconds: float | None = None
    children_cpu_seconds: float | None = None
    fetches: int | None = None
    fetch_busy_seconds: float | None = None
    gpu_clock_ratio: float | None = None

    @property
    def in_loop(self) -> bool:
        """Whether the loop took most of the tick."""
        return self.loop_seconds >= _MOSTLY * self.seconds


def integrated(before: SampledTotals, tick: Readings) -> SampledTotals:
    """The totals with one more tick."""
    sample, workers, idle = tick.samples.workers, before.workers, before.idle_workers
    read, written = before.read_bytes, before.written_bytes
    if sample is not None:
        if tick.in_loop:
            workers = together(workers, _workers(tick, sample))
        else:
            idle = together(idle, _workers(tick, sample))
        read = together(read, Sampled.over(sample.read_bytes_per_second, tick.seconds))
        written = together(written, Sampled.over(sample.written_bytes_per_second, tick.seconds))
    cpu, gpu = together(before.cpu, _cpu(tick)), together(before.gpu, _gpu(tick))
    return SampledTotals(workers, idle, read, written, cpu, gpu)


def _workers(tick: Readings, sample: WorkersSample) -> WorkerTotals:
    seconds = tick.seconds
    counted = tick.fetches is not None and tick.fetch_busy_seconds is not None
    scheduled = sample.blocked_ratio is not None
    timed = not scheduled and sample.busy_ratio is not None and sample.cpu_ratio is not None
    cpu, busy = (sample.cpu_ratio or 0.0) * seconds, (sample.busy_ratio or 0.0) * seconds
    pickling = None if sample.pickling_ratio is None else sample.pickling_ratio * sample.training_workers
    blocking = sample.head_of_line_worker
    return WorkerTotals(
        fetches=(tick.fetches or 0) * counted,
        fetch_busy_seconds=(tick.fetch_busy_seconds or 0.0) * counted,
        counted_seconds=seconds * counted,
        sampled_seconds=seconds,
        cpu_seconds=cpu * scheduled,
        runnable_seconds=(sample.runnable_ratio or 0.0) * seconds * scheduled,
        blocked_seconds=(sample.blocked_ratio or 0.0) * seconds,
        unscheduled_busy_seconds=busy * timed,
        unscheduled_cpu_seconds=cpu * timed,
        busy_ratio=Sampled.over(sample.busy_ratio, seconds),
        pickling_cores=Sampled.over(pickling, seconds),
        ready_batches=Sampled.over(sample.ready_batches, seconds),
        slack_seconds=Sampled.over(sample.slack_seconds, seconds),
        seconds_by_count={sample.training_workers: seconds} if sample.training_workers else {},
        head_of_line_seconds={} if blocking is None else {blocking: seconds},
    )


def _cpu(tick: Readings) -> CpuTotals:
    seconds, host, pressure = tick.seconds, tick.samples.host, tick.samples.pressure
    used = tick.process_cpu_seconds if seconds > 0 else None
    process = own = others = in_quota = None
    if used is not None:
        # The first tick contains everything that the process used before the agent started.
        process = used * min(1.0, tick.loop_seconds / seconds) / seconds
    if used is not None and tick.in_loop:
        workers = tick.samples.workers
        own = used / seconds + (0.0 if workers is None else (workers.cpu_ratio or 0.0) * workers.training_workers)
        if host is not None and host.cpu_ratio is not None:
            host_cores = host.cpu_ratio * host.cpu_count
            own += _by_children((tick.children_cpu_seconds or 0.0) / seconds, own, host_cores, host.cpu_count)
            others = max(0.0, host_cores - own)
        if pressure is not None and pressure.cgroup_cpu_limit is not None and pressure.cgroup_cpu_used is not None:
            in_quota = max(0.0, pressure.cgroup_cpu_used - own)
    return CpuTotals(
        process_seconds=Sampled.over(process, seconds),
        used_cores=Sampled.over(own, seconds),
        other_cores=Sampled.over(others, seconds),
        other_quota_cores=Sampled.over(in_quota, seconds),
        host_ratio=Sampled.over(None if host is None else host.cpu_ratio, seconds),
        throttled_ratio=Sampled.over(None if pressure is None else pressure.cgroup_throttled_ratio, seconds),
    )


def _by_children(used: float, own: float, host_used: float, host_cores: int) -> float:
    """Cores used by children that ended in the tick, such as a decoder for each sample. They do not count as others.

    A child that lived for longer adds all its time at once. It is left out if no tick can have so much. The result is
    at most what was in use besides the process and its workers. So others may be taken for children, but no worker that
    ends is counted twice.
    """
    return 0.0 if used > host_cores else min(used, max(0.0, host_used - own))


def _gpu(tick: Readings) -> GpuTotals:
    gpu, clock, exposed = tick.samples.gpu, tick.gpu_clock_ratio, tick.exposed_wait_seconds
    # Layers on several GPUs take turns, so the loop leaves them idle only where their shares of time add up to less.
    shares = [each.utilization_ratio for each in tick.samples.gpus or ()]
    used = min(1.0, sum(share or 0.0 for share in shares)) if shares and None not in shares else None
    only_loop = used is not None and exposed is not None and tick.loop_seconds >= _ONLY_LOOP * tick.seconds
    slowed = None if clock is None else max(0.0, 1.0 - clock) * _is_held_back(gpu)
    return GpuTotals(
        utilization_ratio=Sampled.over(used, tick.seconds),
        unused_ratio=Sampled.over(1.0 - (used or 0.0) if only_loop else None, tick.seconds),
        exposed_wait_seconds=(exposed or 0.0) * only_loop,
        garbage_seconds=tick.garbage_seconds * only_loop,
        slowed_ratio=Sampled.over(slowed, tick.compute_seconds),
    )


def _is_held_back(gpu: GpuSample | None) -> bool:
    return gpu is not None and bool(_HELD_BACK & {*(gpu.throttled or ())})


# -- the cost of the agent itself --------------------------------------------------------------------------------------


class HasThread(Protocol):
    """A part of the agent with its own thread."""

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of that thread."""


class Overhead:
    """The cost of the agent in seconds, by thread.

    Args:
        tracker: measures the hooks on the training thread.
        parts: parts of the agent with their own threads.

    Attributes:
        agent_thread_seconds: CPU time of the agent thread.
    """

    def __init__(self, tracker: StepTracker, parts: Sequence[HasThread]) -> None:
        self._tracker = tracker
        self._parts = parts
        self.agent_thread_seconds = 0.0

    def measure(self) -> None:
        """Read the CPU time of the agent thread, which calls this."""
        self.agent_thread_seconds = thread_time()

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds on the training thread, and CPU seconds of the agent's threads."""
        own = self.agent_thread_seconds + sum(part.cpu_seconds for part in self._parts)
        hooks = self._tracker.overhead_ns + self._tracker.garbage.cost_ns
        return {"training": hooks / NS, "agent": own}


# -- makes the `Totals` of a tick --------------------------------------------------------------------------------------

_WORKING_RATIO: Final = 0.5
"""If a GPU is busy for at least this share of the time, its clock counts as its working clock."""


class TotalsBuilder:
    """Keeps the newest `Totals`, and adds to them.

    Attributes:
        totals: the newest totals.
        energies: the energy of each GPU, by its UUID.
    """

    def __init__(
        self,
        accounting: Accounting,
        tracker: StepTracker,
        collectors: CollectorPoller,
        sampler: Sampler,
        overhead: Overhead,
    ) -> None:
        self._accounting = accounting
        self._tracker = tracker
        self._collectors = collectors
        self._sampler = sampler
        self._overhead = overhead
        self.totals = Totals()
        self._loader: LoaderSettings = {}
        self.energies: dict[str, GpuEnergy] = {}
        self._compiled = CompilationReader()
        self._parts_seen: dict[str, int] = {}
        self._to_split = 0.0  # compute since samples were last taken
        self._ends = False
        self._integrated = self.totals  # the totals when samples were last integrated
        self._process_cpu_seconds = 0.0  # at that time. The first tick adds everything from before
        self._children_cpu_seconds: float | None = None
        self._updated_ns = 0
        self._requests_elsewhere = 0
        self._source_kind: str | None = None  # not the source, so that no loader's queue is kept alive
        self._where: str | None = None
        self._usual_clock: float | None = None
        self._first_wait_to_come = 0.0
        self._exposed: float | None = 0.0  # as the clock measures it, which reads the first wait late

    def tick(self, peers: tuple[RankPace, ...] = ()) -> Tick:
        """Make the totals and conditions of a tick. ``peers``: the newest paces of other ranks."""
        batches_from, before = self._accounting.take_source(), self._integrated
        self._source_kind = None if batches_from is None else batches_from.kind
        self._loader = self._loader if batches_from is None else batches_from.settings
        totals, samples = self.update(), self._collectors.samples
        host, workers, loaders = samples.host, samples.workers, self._tracker.loaders
        quota = None if samples.pressure is None else samples.pressure.cgroup_cpu_limit
        allowed, elsewhere = float(len(os.sched_getaffinity(0))), self._tracker.requests_elsewhere
        seconds, loop_seconds = totals.wall_seconds - before.wall_seconds, totals.loop_seconds - before.loop_seconds
        conditions = Conditions(
            source=self._source_kind,
            settings={} if batches_from is None else batches_from.settings,
            traits=batches_from.traits if isinstance(batches_from, LoaderHandle) else loaders.own_traits,
            iterated_at=loaders.iterated_at,
            read_by_thread=elsewhere > self._requests_elsewhere,
            in_loop=Readings(seconds, loop_seconds).in_loop,
            where=self._where,
            cores=allowed if quota is None else min(allowed, quota),
            quota_cores=quota,
            host_cores=0 if host is None else host.cpu_count,
            on_gpu=self._tracker.accelerator is not None,
            recompiled_because=self._compiled.reason,
            peers=peers,
        )
        if workers is not None:
            conditions = replace(
                conditions,
                empty_workers=workers.empty_workers,
                same_batches=workers.same_batches,
                fetching_seconds=workers.fetching_seconds,
                fetched=workers.fetched,
                worker_cores=workers.allowed_cores,
            )
        self._requests_elsewhere = elsewhere
        return Tick(totals, conditions)

    def end(self) -> Totals:
        """Update the totals at the end of the run. Compute without samples takes the shares of all others."""
        self._ends = True
        return self.update()

    def loader_settings(self) -> LoaderSettings:
        """The settings of the loader of the newest batches, and its batch size; empty before the first batch."""
        size = self._tracker.loaders.batch_size if self._loader else None
        return self._loader if size is None else self._loader | {"batch_size": size}

    def current(self) -> Totals:
        """The newest totals, counted again if more has happened. Only `update` integrates samples."""
        if self._accounting.updated_ns != self._updated_ns:
            self.totals = self._by_source(self._count(), self.totals)
        return self.totals

    def update(self) -> Totals:
        """Update the totals and integrate the samples since the last update. Called once a tick, and at the end."""
        self._where = self._sampler.take_place()
        self.totals = self._with_samples(self._by_source(self._count(), self.totals))
        self._integrated = self.totals
        return self.totals

    def _count(self) -> Totals:
        """Count up to now."""
        self._updated_ns = self._accounting.updated_ns
        accounting, tracker = self._accounting, self._tracker
        ledger, stats, process = accounting.ledger, accounting.stats, self._collectors.samples.process
        first_wait, seconds = ledger.first_wait_ns / NS, ledger.seconds()
        counted = replace(
            self.totals,
            wall_seconds=ledger.wall_seconds,
            ledger_seconds=seconds,
            first_wait_seconds=first_wait,
            open_step_seconds=ledger.open_step_seconds,
            steps=accounting.steps_total,
            estimated_steps=None if accounting.steps_total else self._sampler.loop.pace.steps(seconds[COMPUTE]),
            dropped_steps=ledger.dropped_steps,
            unseen_steps=accounting.unseen_steps,
            optimizer_steps=tracker.optimizer_steps,
            batches=ledger.batches,
            exposed_wait_seconds=accounting.exposed_seconds,
            exposed_after_first_seconds=self._after_first(accounting.exposed.seconds, first_wait, stats.steps),
            outlier_wait_seconds=stats.outlier_wait_seconds,
            checkpoint_steps=stats.checkpoint_steps,
            checkpoint_steps_compute_seconds=stats.checkpoint_steps_compute_seconds,
            garbage=self._garbage(),
            process_cpu_seconds=None if process is None else process.cpu_seconds,
            run_queue_delay_seconds=None if process is None else process.runnable_seconds,
            thread_cpu_seconds=None if process is None else process.running_seconds,
            overhead_seconds=self._overhead.seconds(),
            samples=accounting.trained_samples(),
            tokens=accounting.tokens(),
            compute_parts=self._split(seconds[COMPUTE]),
            compiles=self._compiles(),
            stacks=replace(self._sampler.seen),
        )
        return self._with_loaders(counted)

    def _garbage(self) -> GarbageTotals:
        garbage = self._tracker.garbage
        garbage.read()
        younger, whole = gc.get_stats()[1:3]
        return GarbageTotals(
            seconds=garbage.ns / NS,
            wait_seconds=garbage.wait_ns / NS,
            boundary_wait_seconds=garbage.boundary_wait_ns / NS,
            collections=whole["collections"],
            younger_collections=younger["collections"],
        )

    def _split(self, compute_seconds: float) -> dict[str, float] | None:
        """The compute by part: what came since the last samples takes the shares of the newest ones."""
        before, seen = self.totals, self._sampler.part_ns
        self._to_split += max(0.0, compute_seconds - before.compute_seconds)
        new = {part: ns - self._parts_seen.get(part, 0) for part, ns in seen.items()}
        if self._ends and not any(new.values()):
            new = seen
        whole = sum(new.values())
        if not whole:
            return before.compute_parts
        self._parts_seen = dict(seen)
        added = {part: self._to_split * ns / whole for part, ns in new.items() if ns}
        self._to_split = 0.0
        return together(before.compute_parts or {}, added)

    def _compiles(self) -> CompileTotals:
        """Add what ``torch.compile`` has compiled again since the last call."""
        before = self.totals.compiles
        again = [one for one in self._compiled.take() if one.again]
        if not again:
            return before
        seconds = dict(before.again_seconds)
        for one in again:
            seconds[one.function] = seconds.get(one.function, 0.0) + one.seconds
        return CompileTotals(before.again + len(again), seconds)

    def _with_loaders(self, counted: Totals) -> Totals:
        """Count what the workers have done."""
        ledger = self._accounting.ledger
        workers, epochs = self._collectors.samples.workers, counted.epochs
        epochs = replace(
            epochs,
            boundaries=ledger.epoch_boundaries,
            left=ledger.iterations_left,
            boundary_wait_seconds=ledger.boundary_wait_ns / NS,
            near_boundary_wait_seconds=ledger.near_boundary_wait_ns / NS,
        )
        if workers is not None:
            histogram = workers.fetch_duration
            counted = replace(
                counted,
                first_fetches=workers.first_fetches,
                deliveries=workers.deliveries,
                worker_fetches=workers.fetches_total,
            )
            if histogram is not None:
                counted = replace(counted, worker_fetch_seconds=histogram.total, fetch_counts=histogram.counts)
        return replace(counted, epochs=epochs)

    def _by_source(self, counted: Totals, before: Totals) -> Totals:
        """Attribute the waits since the last totals to the current source of batches."""
        waited = max(0.0, counted.wait_seconds - before.wait_seconds)
        waits = together(before.wait_seconds_by_source, {self._source_kind: waited})
        return replace(counted, wait_seconds_by_source=waits)

    def _with_samples(self, counted: Totals) -> Totals:
        before, samples = self._integrated, self._collectors.samples
        workers, process = samples.workers, samples.process
        used = children = None
        if counted.process_cpu_seconds is not None:
            used = max(0.0, counted.process_cpu_seconds - self._process_cpu_seconds)
            self._process_cpu_seconds = counted.process_cpu_seconds
        if process is not None:
            children = _added(self._children_cpu_seconds, process.children_cpu_seconds)
            self._children_cpu_seconds = process.children_cpu_seconds
        seconds = counted.wall_seconds - before.wall_seconds
        busy = None if workers is None or workers.busy_ratio is None else workers.busy_ratio * workers.training_workers
        readings = Readings(
            seconds=seconds,
            loop_seconds=counted.loop_seconds - before.loop_seconds,
            compute_seconds=counted.compute_seconds - before.compute_seconds,
            garbage_seconds=counted.garbage.seconds - before.garbage.seconds,
            exposed_wait_seconds=_added(before.exposed_after_first_seconds, counted.exposed_after_first_seconds),
            samples=samples,
            process_cpu_seconds=used,
            children_cpu_seconds=children,
            fetches=None if busy is None else counted.worker_fetches - before.worker_fetches,
            fetch_busy_seconds=None if busy is None else busy * seconds,
            gpu_clock_ratio=self._clock_ratio(samples.gpu),
        )
        joules = self._energy(samples.gpus or (), counted.ledger_seconds)
        return replace(counted, sampled=integrated(before.sampled, readings), gpu_energy_joules=joules)

    def _energy(self, gpus: Sequence[GpuSample], ledger_seconds: Mapping[str, float]) -> dict[str, float] | None:
        """Add the energy that these samples show. Returns the sum over all GPUs so far, by category of the ledger."""
        for gpu in gpus:
            self.energies.setdefault(gpu.uuid, GpuEnergy()).add(gpu, ledger_seconds)
        known = [energy.joules for energy in self.energies.values() if energy.joules is not None]
        return reduce(together, known) if known else None

    def _after_first(self, exposed: float | None, first_wait: float, steps: int) -> float | None:
        """The exposed wait without the wait for the first batch.

        The GPU's clock is read some steps after a wait has ended. So the exposed part of the first wait may come later,
        but never after the run has enough steps to be judged.
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
        """The GPU's clock relative to its unthrottled clock in this run, or to its maximum before that is known."""
        if gpu is None or gpu.sm_clock_hertz is None or not gpu.sm_clock_max_hertz:
            return None
        if not _is_held_back(gpu) and (gpu.utilization_ratio or 0.0) >= _WORKING_RATIO:
            before = self._usual_clock
            self._usual_clock = gpu.sm_clock_hertz if before is None else 0.9 * before + 0.1 * gpu.sm_clock_hertz
        return min(1.0, gpu.sm_clock_hertz / (self._usual_clock or gpu.sm_clock_max_hertz))


def _added(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else max(0.0, now - before)
