"""The counters of one rank: `Totals`, which the agent makes once a tick, and the difference of two of them.

The endpoint shows the newest `Totals`. The log writes the difference since its last window. The stall monitor compares
the newest with the oldest of its window. All three use ``newest - oldest``. Only `TickPace` takes differences of
ledgers, because a skipped tick has no `Totals`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from operator import add, attrgetter, sub
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from telemetry.model.records import (
    COMPUTE,
    DATA_WAIT,
    STARTUP,
    Deliveries,
    FirstFetches,
    LoaderSettings,
    LoaderTraits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from telemetry.model.records import RankPace
    from telemetry.util.sketch import Percentiles

_T = TypeVar("_T")

_NUMBERS: Final = frozenset({int, float})

ROUNDING_SECONDS: Final = 1e-6
"""Smaller differences of totals are rounding errors: ``a - (a - b)`` is not exactly ``b``."""

MIN_STEPS_OF_A_RUN: Final = 20
"""Minimum steps for a stall if a run ends before its first window is full."""


# -- the sum and the difference of two records of counters -------------------------------------------------------------


def difference(later: _T, earlier: _T) -> _T:
    """Subtract two values, records field by field. If one of them is None, the result is None.

    A key that only ``earlier`` has is dropped, and a tuple of another length counts as zeros.
    """
    return cast("_T", _combined(sub, later, earlier))


def together(one: _T, other: _T) -> _T:
    """Add two values, records field by field. If one of them is None, the result is None."""
    return cast("_T", _combined(add, one, other))


def _combined(operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    if one is None or other is None:
        return None
    if type(one) in _NUMBERS:
        return operation(one, other)
    if isinstance(one, dict):
        other = other or {}  # 0.0 stands for what had not been measured when `StallDetector.skip` was called
        keys = one if operation is sub else one | other
        return {key: operation(one.get(key, 0), other.get(key, 0)) for key in keys}
    if isinstance(one, tuple):
        return tuple(map(operation, one, other)) if len(one) == len(other) else one
    if operation is sub and one is other:  # nothing has been counted in this part since
        return type(one)()
    values = _getter(cast("Hashable", type(one)))
    # Most fields are numbers; a call for each would be too slow.
    return type(one)(
        *[
            operation(mine, theirs)
            if type(mine) in _NUMBERS and type(theirs) in _NUMBERS
            else _combined(operation, mine, theirs)
            for mine, theirs in zip(values(one), values(other), strict=True)
        ]
    )


@cache
def _getter(kind: Hashable) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(spec.name for spec in fields(cast("Any", kind))))


# -- what is counted by the hooks and the accounting -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochTotals:
    """Epoch boundaries and the waits at them, see `Ledger`.

    Attributes:
        near_boundary_wait_seconds: additional wait for the batches next to the boundaries. This is the only counter
            that can decrease.
    """

    boundaries: int = 0
    left: int = 0
    boundary_wait_seconds: float = 0.0
    near_boundary_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GarbageTotals:
    """Garbage collection on the training thread: in total, during requests in mid-epoch, and at epoch boundaries.

    Attributes:
        collections: collections of all objects, on any thread. ``younger_collections``: collections of younger ones.
    """

    seconds: float = 0.0
    wait_seconds: float = 0.0
    boundary_wait_seconds: float = 0.0
    collections: int = 0
    younger_collections: int = 0


@dataclass(frozen=True, slots=True)
class CompileTotals:
    """Compilations by ``torch.compile`` of functions that had been compiled already. ``again_seconds``: by function."""

    again: int = 0
    again_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class StackTotals:
    """The time of the training thread by the samples of its stack, in ns but for the two numbers of samples.

    `Sampler` adds to it, and each `Totals` has a copy.

    Attributes:
        samples: in a job of several ranks, samples in which it computed. ``in_sync``: those of them in which ranks wait
            for one another.
        step: time in the compute of steps. ``freeing``: its part in the statement that asks for batches, which frees
            the one before. Time in which that keeps the GIL counts for the line after.
        wait, wait_cpu: time in waits for batches in mid-epoch; the part in which the thread was not blocked.
            ``sampler``, ``sampler_cpu``: the same of the part in the sampler of a DataLoader.
        boundary, boundary_sampler, boundary_sampler_cpu: the same at epoch boundaries.
    """

    samples: int = 0
    in_sync: int = 0
    step: int = 0
    freeing: int = 0
    wait: int = 0
    wait_cpu: int = 0
    sampler: int = 0
    sampler_cpu: int = 0
    boundary: int = 0
    boundary_sampler: int = 0
    boundary_sampler_cpu: int = 0


# -- what is sampled: each sampled value is added up as its integral over the time of its tick -------------------------


@dataclass(frozen=True, slots=True)
class Sampled:
    """The integral of a sampled value (value times seconds), and the seconds over which it was known."""

    integral: float = 0.0
    seconds: float = 0.0

    @classmethod
    def over(cls, value: float | None, seconds: float) -> Sampled:
        """A sample that stands for this many seconds; None: it was not measured."""
        return cls() if value is None else cls(value * seconds, seconds)

    @property
    def mean(self) -> float | None:
        """Mean over time; None if it was never known."""
        return self.integral / self.seconds if self.seconds > ROUNDING_SECONDS else None

    @property
    def known(self) -> float | None:
        """The integral; None if the value was never known."""
        return self.integral if self.seconds > ROUNDING_SECONDS else None


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """Sums of the samples of the workers.

    Attributes:
        fetches, fetch_busy_seconds: finished batches, and time in fetches, in ticks with both figures;
            ``counted_seconds`` is the length of these ticks.
        cpu_seconds, runnable_seconds, blocked_seconds: time of the mean worker by state, if the kernel reports it.
            ``unscheduled_busy_seconds``, ``unscheduled_cpu_seconds``: time in fetches and on a core, if it does not.
        seconds_by_count: time by number of workers. ``head_of_line_seconds``: wait by worker.
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
    """Cores by their users. The first four only count ticks that were mostly spent in the training loop.

    Attributes:
        process_seconds: CPU time of the training process in the loop. ``used_cores``: including its workers and
            short child processes.
        other_cores: cores used by other processes of the machine. ``other_quota_cores``: by other processes in the
            same CPU quota.
    """

    process_seconds: Sampled = Sampled()
    used_cores: Sampled = Sampled()
    other_cores: Sampled = Sampled()
    other_quota_cores: Sampled = Sampled()
    host_ratio: Sampled = Sampled()
    throttled_ratio: Sampled = Sampled()


@dataclass(frozen=True, slots=True)
class GpuTotals:
    """The GPU of this rank, or all of them.

    Attributes:
        unused_ratio: share of the time that the GPU was unused while the loop ran. ``exposed_wait_seconds``,
            ``garbage_seconds``: over the same time. The driver and the events do not measure at the same moments, so
            only sums are compared.
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
        workers: the workers in ticks that were mostly spent in the training loop. ``idle_workers``: in the other
            ticks. During an evaluation, for example, the training's workers are idle.
    """

    workers: WorkerTotals = WorkerTotals()
    idle_workers: WorkerTotals = WorkerTotals()
    read_bytes: Sampled = Sampled()
    written_bytes: Sampled = Sampled()
    cpu: CpuTotals = CpuTotals()
    gpu: GpuTotals = GpuTotals()


# -- all of it ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passed:
    """The part of a difference of two `Totals` that every tick needs."""

    seconds: float
    wait_seconds: float
    loop_seconds: float
    steps: int
    exposed_after_first_seconds: float | None
    process_cpu_seconds: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters of the run so far. The difference of two `Totals` is for the time between them. None: not measured.

    Attributes:
        ledger_seconds: seconds by category. The categories add up to ``wall_seconds``.
        estimated_steps: about how many steps there were, by samples of the stack, if neither a batch nor an optimizer's
            step shows them; None if not known.
        open_step_seconds: the part of the wait and compute that belongs to the step that has not ended.
        exposed_after_first_seconds: ``exposed_wait_seconds`` without the first batch.
        outlier_wait_seconds: wait in single steps that waited much longer than those around them.
        checkpoint_steps: steps in which a checkpoint was written. ``checkpoint_steps_compute_seconds``: their compute.
        wait_seconds_by_source: waits without the first batch. See `Conditions` for the sources.
        run_queue_delay_seconds, thread_cpu_seconds: of the training thread.
        fetch_counts: fetches of all workers by bucket of `FETCH_BUCKETS`.
        overhead_seconds: the cost of the agent itself, by thread.
        gpu_energy_joules: energy of the whole GPUs, by category of the ledger; None before its second reading.
        compute_parts: seconds of the compute by part, as the host's stacks show them, see `PartReader`; None before it
            is known.
        samples, tokens: numbers in batches that the training took, without those that a restart threw away.
    """

    wall_seconds: float = 0.0
    ledger_seconds: dict[str, float] = field(default_factory=dict)
    first_wait_seconds: float = 0.0
    open_step_seconds: float = 0.0
    steps: int = 0
    estimated_steps: int | None = None
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
    first_fetches: FirstFetches = FirstFetches()
    deliveries: Deliveries = Deliveries()
    garbage: GarbageTotals = GarbageTotals()
    stacks: StackTotals = field(default_factory=StackTotals)
    process_cpu_seconds: float | None = 0.0
    run_queue_delay_seconds: float | None = 0.0
    thread_cpu_seconds: float | None = 0.0
    worker_fetches: int = 0
    worker_fetch_seconds: float = 0.0
    sampled: SampledTotals = SampledTotals()
    fetch_counts: tuple[int, ...] = ()
    overhead_seconds: dict[str, float] = field(default_factory=dict)
    samples: int | None = None
    tokens: int | None = None
    gpu_energy_joules: dict[str, float] | None = None
    compute_parts: dict[str, float] | None = None
    compiles: CompileTotals = CompileTotals()

    def __sub__(self, earlier: Totals) -> Totals:
        return difference(self, earlier)

    def passed_since(self, earlier: Totals) -> Passed:
        """The part of the difference that every tick needs. The whole difference costs ten times as much."""
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
        """Wait for batches without the first of the run: every run has to start."""
        return max(0.0, self.ledger_seconds.get(DATA_WAIT, 0.0) - self.first_wait_seconds)

    @property
    def compute_seconds(self) -> float:
        """Seconds of compute of the steps."""
        return self.ledger_seconds.get(COMPUTE, 0.0)

    @property
    def waits_unseen(self) -> bool:
        """Whether the loop has run, and no hook has seen a request for a batch: its waits were not measured."""
        ledger = self.ledger_seconds
        return bool(ledger.get(COMPUTE)) and not ledger.get(DATA_WAIT) and self.unseen_steps >= self.steps

    @property
    def measured_seconds(self) -> dict[str, float]:
        """The seconds by category, without waits that were not measured."""
        ledger = self.ledger_seconds
        return {c: ledger[c] for c in ledger if c != DATA_WAIT} if self.waits_unseen else ledger

    @property
    def loop_seconds(self) -> float:
        """Seconds of the training loop."""
        return self.wait_seconds + self.compute_seconds

    @property
    def all_loop_seconds(self) -> float:
        """Seconds of the training loop with the wait for the first batch."""
        return self.ledger_seconds.get(DATA_WAIT, 0.0) + self.compute_seconds

    @property
    def startup_seconds(self) -> float:
        """Seconds before the first step."""
        return self.ledger_seconds.get(STARTUP, 0.0) + self.first_wait_seconds


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions at a tick, which are not counters.

    Attributes:
        source: source of the batches since the last tick: ``training_thread`` (a DataLoader without workers),
            ``workers``, ``watched`` (an iterable that is not a DataLoader), ``read_ahead`` (threads of the training
            process); None before the first batch.
        settings, traits: of the loader in use.
        read_by_thread: whether another thread of this process requests batches of a DataLoader.
        iterated_at: file, line and function in which the newest iterator of a loader was made.
        empty_workers, same_batches: see `WorkersSample`.
        in_loop: whether most of the time since the last tick was spent in the training loop.
        where: the line of the user's code in most samples of the training thread, see `RankPace`.
        fetching_seconds: duration so far of the longest fetch in progress; None without a sample of the workers.
        fetched: fetches so far, and their seconds, by pid of each live training worker.
        worker_cores: number of cores that the workers may use; None if unknown.
        cores: cores that this rank may use, by its affinity and its cgroup's quota. ``quota_cores``: that quota.
        host_cores: cores of the machine, 0 if unknown.
        on_gpu: whether an accelerator is in use, also if there is no reading of it.
        recompiled_because: why the newest function was compiled again, in torch's words.
        peers: the other ranks of this node, and the ranks of other nodes that this one may wait for.
    """

    source: str | None = None
    settings: LoaderSettings = field(default_factory=dict)
    traits: LoaderTraits = LoaderTraits()
    read_by_thread: bool = False
    iterated_at: tuple[str, int, str] | None = None
    empty_workers: int = 0
    same_batches: bool | None = None
    in_loop: bool = True
    where: str | None = None
    fetching_seconds: float | None = None
    fetched: dict[int, tuple[int, float]] = field(default_factory=dict)
    worker_cores: int | None = None
    cores: float = 1.0
    quota_cores: float | None = None
    host_cores: int = 0
    on_gpu: bool = False
    recompiled_because: str | None = None
    peers: tuple[RankPace, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """The counters of the run at one tick, and the conditions."""

    totals: Totals = Totals()
    conditions: Conditions = Conditions()


@dataclass(frozen=True, slots=True)
class LogWindow:
    """The newest window of the log: its totals, and durations and waits of its steps in seconds (None without any)."""

    added: Totals
    step: Percentiles | None
    wait: Percentiles | None
