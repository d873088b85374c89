"""The counters of one rank: `Totals`, which the agent makes once a tick.

The endpoint shows the newest `Totals`. The log writes the difference since its last window. The stall monitor compares
the newest with the oldest of its window. All three use ``newest - oldest``.

Two others keep figures of earlier ticks: `TickPace` takes differences of ledgers, because a skipped tick has no
`Totals`, and `RunLosses` adds up the hangs that have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter, sub
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from telemetry.core.labels import COMPUTE, DATA_WAIT, STARTUP
from telemetry.core.worker_records import Deliveries

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_T = TypeVar("_T")

_NUMBERS: Final = frozenset({int, float})

ROUNDING_SECONDS: Final = 1e-6
"""Smaller differences of totals are rounding errors: ``a - (a - b)`` is not exactly ``b``."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The integral of a sampled value (value times seconds), and the seconds over which it was known."""

    integral: float = 0.0
    seconds: float = 0.0

    @property
    def mean(self) -> float | None:
        """Mean over time; None if it was never known."""
        return self.integral / self.seconds if self.seconds > ROUNDING_SECONDS else None

    @property
    def known(self) -> float | None:
        """The integral; None if the value was never known."""
        return self.integral if self.seconds > ROUNDING_SECONDS else None

    def plus(self, value: float | None, seconds: float) -> Sampled:
        """Add one more sample, which stands for this many seconds."""
        return self if value is None else Sampled(self.integral + value * seconds, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class EpochTotals:
    """Epoch boundaries and the waits at them, see `Ledger`.

    Attributes:
        near_boundary_wait_seconds: how much longer than others the batches next to the boundaries were waited for. This
            is the only counter that can decrease.
    """

    boundaries: int = 0
    left: int = 0
    boundary_wait_seconds: float = 0.0
    near_boundary_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GarbageTotals:
    """Garbage collection on the training thread: all of it; during requests in mid-epoch; at epoch boundaries."""

    seconds: float = 0.0
    wait_seconds: float = 0.0
    boundary_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplerTotals:
    """What the training thread itself does in the timed waits for workers' batches, see `SamplerTimer`."""

    timed_batches: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    receive_cpu_seconds: float = 0.0
    boundary_seconds: float = 0.0
    boundary_cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OwnTotals:
    """What the training thread does for a batch outside of its waits, if that was timed.

    Attributes:
        fetch_seconds, fetch_cpu_seconds: its own fetches, wall clock and CPU clock.
        releases, release_seconds: batches of workers that it was seen to free, and the time for that.
        samples, in_sync_samples: how often it was sampled while it computed, and how often while ranks wait for one
            another.
    """

    fetch_seconds: float = 0.0
    fetch_cpu_seconds: float = 0.0
    releases: int = 0
    release_seconds: float = 0.0
    samples: int = 0
    in_sync_samples: int = 0


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """Sums of the samples of the workers.

    Attributes:
        fetches, fetch_busy_seconds: finished batches, and time in fetches, in ticks with both figures;
            ``counted_seconds`` is the length of these ticks.
        cpu_seconds, runnable_seconds, blocked_seconds: time of the mean worker by state, if the kernel reports it.
            ``unscheduled_busy_seconds``, ``unscheduled_cpu_seconds``: in fetches and on a core, if it does not.
        seconds_by_count: time by number of workers. ``head_of_line_seconds``: by the worker that was waited for.
    """

    fetches: int = 0
    fetch_busy_seconds: float = 0.0
    counted_seconds: float = 0.0
    sampled_seconds: float = 0.0
    cpu_seconds: float = 0.0
    runnable_seconds: float = 0.0
    blocked_seconds: float = 0.0
    unscheduled_busy_seconds: float = 0.0
    unscheduled_cpu_seconds: float = 0.0
    busy_ratio: Sampled = Sampled()
    pickling_cores: Sampled = Sampled()
    ready_batches: Sampled = Sampled()
    slack_seconds: Sampled = Sampled()
    seconds_by_count: dict[int, float] = field(default_factory=dict)
    head_of_line_seconds: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CpuTotals:
    """Cores by who used them. The first four only count ticks that were mostly spent in the training loop.

    Attributes:
        process_seconds: CPU time of the training process in the loop. ``used_cores``: including its workers and
            short child processes.
        other_cores: cores used by other processes of the machine. ``other_quota_cores``: by others in the same CPU
            quota.
    """

    process_seconds: Sampled = Sampled()
    used_cores: Sampled = Sampled()
    other_cores: Sampled = Sampled()
    other_quota_cores: Sampled = Sampled()
    host_ratio: Sampled = Sampled()
    throttled_ratio: Sampled = Sampled()


@dataclass(frozen=True, slots=True)
class GpuTotals:
    """The GPU.

    Attributes:
        unused_ratio: share of the time that the GPU was unused while the loop ran. ``exposed_wait_seconds``,
            ``garbage_seconds``: over the same time. NVML and the events do not measure at the same moments, so only
            sums are compared.
        slowed_ratio: share of the compute that was lost because the GPU's clock was throttled.
    """

    utilization_ratio: Sampled = Sampled()
    unused_ratio: Sampled = Sampled()
    exposed_wait_seconds: float = 0.0
    garbage_seconds: float = 0.0
    slowed_ratio: Sampled = Sampled()


@dataclass(frozen=True, slots=True)
class SampledTotals:
    """Everything that is sampled.

    Attributes:
        workers: in ticks that were mostly spent in the training loop. ``idle_workers``: in the others. During an
            evaluation, for example, the training's workers have nothing to do.
    """

    workers: WorkerTotals = WorkerTotals()
    idle_workers: WorkerTotals = WorkerTotals()
    read_bytes: Sampled = Sampled()
    written_bytes: Sampled = Sampled()
    cpu: CpuTotals = CpuTotals()
    gpu: GpuTotals = GpuTotals()


@dataclass(frozen=True, slots=True)
class Passed:
    """The difference of two `Totals`, but only the figures that are needed at every tick. See `Totals`."""

    seconds: float
    wait_seconds: float
    loop_seconds: float
    steps: int
    exposed_after_first_seconds: float | None
    process_cpu_seconds: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters of the run so far. The difference of two is the time between them. None: not measured.

    Attributes:
        ledger_seconds: by category. The categories add up to ``wall_seconds``.
        first_wait_seconds: wait for the first batch of the run.
        exposed_wait_seconds: exposed wait of the run. ``exposed_after_first_seconds``: without the first batch.
        outlier_wait_seconds: wait in single steps that waited much longer than those around them.
        checkpoint_steps: steps in which a checkpoint was written. ``checkpoint_steps_compute_seconds``: their compute.
        wait_seconds_by_source: without the first batch. See `Conditions` for the sources.
        process_cpu_seconds: of the training process. ``run_queue_delay_seconds``: of the training thread.
            ``thread_cpu_seconds``: its time on a core.
        worker_fetches: fetches of all workers. ``fetch_counts``: by bucket of `FETCH_BUCKETS`.
        overhead_seconds: the cost of the agent itself, by thread.
        gpu_energy_joules: of the whole GPU, by category of the ledger; None before its second reading.
        samples, tokens: of the batches that the training took, without those that were thrown away after a restart.
    """

    wall_seconds: float = 0.0
    ledger_seconds: dict[str, float] = field(default_factory=dict)
    first_wait_seconds: float = 0.0
    steps: int = 0
    dropped_steps: int = 0
    unseen_steps: int = 0
    optimizer_steps: int = 0
    batches: int = 0
    exposed_wait_seconds: float | None = 0.0
    exposed_after_first_seconds: float | None = 0.0
    outlier_wait_seconds: float = 0.0
    checkpoint_steps: int = 0
    checkpoint_steps_compute_seconds: float = 0.0
    wait_seconds_by_source: dict[str | None, float] = field(default_factory=dict)
    epochs: EpochTotals = EpochTotals()
    deliveries: Deliveries = Deliveries()
    sampler: SamplerTotals = SamplerTotals()
    garbage: GarbageTotals = GarbageTotals()
    own: OwnTotals = OwnTotals()
    process_cpu_seconds: float | None = 0.0
    run_queue_delay_seconds: float | None = 0.0
    thread_cpu_seconds: float | None = 0.0
    worker_fetches: int = 0
    sampled: SampledTotals = SampledTotals()
    fetch_counts: tuple[int, ...] = ()
    overhead_seconds: dict[str, float] = field(default_factory=dict)
    samples: int | None = None
    tokens: int | None = None
    gpu_energy_joules: dict[str, float] | None = None

    def __sub__(self, earlier: Totals) -> Totals:
        """What was added since ``earlier``."""
        return _fieldwise(self, earlier)

    def passed_since(self, earlier: Totals) -> Passed:
        """The figures of the difference that every tick needs. The whole difference costs ten times as much."""
        return Passed(
            seconds=self.wall_seconds - earlier.wall_seconds,
            wait_seconds=self.wait_seconds - earlier.wait_seconds,
            loop_seconds=self.loop_seconds - earlier.loop_seconds,
            steps=self.steps - earlier.steps,
            exposed_after_first_seconds=difference(
                self.exposed_after_first_seconds, earlier.exposed_after_first_seconds
            ),
            process_cpu_seconds=difference(self.process_cpu_seconds, earlier.process_cpu_seconds),
        )

    @property
    def wait_seconds(self) -> float:
        """Wait for batches, without the first of the run: every run has to start."""
        return max(0.0, self.ledger_seconds.get(DATA_WAIT, 0.0) - self.first_wait_seconds)

    @property
    def compute_seconds(self) -> float:
        """Seconds of compute of the steps."""
        return self.ledger_seconds.get(COMPUTE, 0.0)

    @property
    def loop_seconds(self) -> float:
        """Seconds of the training loop."""
        return self.wait_seconds + self.compute_seconds

    @property
    def startup_seconds(self) -> float:
        """Seconds before the first step."""
        return self.ledger_seconds.get(STARTUP, 0.0) + self.first_wait_seconds


@cache
def _getter(kind: Hashable) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(spec.name for spec in fields(cast("Any", kind))))


def difference(later: _T, earlier: _T) -> _T:
    """Subtract two values. If one of them is None, the result is None.

    Records, and dictionaries and tuples of numbers, are subtracted part by part. A key or index that is missing in the
    earlier value counts as zero there. One that is missing in the later value is dropped.
    """
    if isinstance(later, (int, float)) and isinstance(earlier, (int, float)):
        return later - earlier  # type: ignore[return-value,operator]
    if later is None or earlier is None:
        return None  # type: ignore[return-value]
    if isinstance(later, dict) and isinstance(earlier, dict):
        return {key: value - earlier.get(key, 0) for key, value in later.items()}  # type: ignore[return-value]
    if isinstance(later, tuple) and isinstance(earlier, tuple):
        same_places = len(earlier) == len(later)
        return tuple(map(sub, later, earlier)) if same_places else later  # type: ignore[return-value]
    # The same object: nothing has been counted in this part meanwhile.
    return type(later)() if later is earlier else _fieldwise(later, earlier)


def _fieldwise(later: _T, earlier: _T) -> _T:
    values = _getter(cast("Hashable", type(later)))
    # Most parts are numbers; a call for each would be too slow.
    return type(later)(
        *[
            now - then if type(now) in _NUMBERS and type(then) in _NUMBERS else difference(now, then)
            for now, then in zip(values(later), values(earlier), strict=True)
        ]
    )
