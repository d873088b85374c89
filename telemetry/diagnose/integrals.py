"""Adds samples to counters: a sampled value enters `Totals` as its integral over the time of its tick.

The meaning of a sample depends on how the time of the tick was spent, for example whether the training loop ran. Only
this module decides that. Code that reads the totals does not have to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.core.totals import CpuTotals, GpuTotals, SampledTotals, WorkerTotals

if TYPE_CHECKING:
    from telemetry.core.worker_records import WorkersSample

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
