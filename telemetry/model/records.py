"""Records that move between the parts of the agent: readings, counts and decisions."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from telemetry.util.clock import NS

if TYPE_CHECKING:
    from collections.abc import Mapping


# -- the numbers of the log --------------------------------------------------------------------------------------------

_LARGEST: Final = 10**15
"""No seconds, bytes or steps of a run are larger. A field with a larger number is damaged."""

Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
Number = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)] | Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]


# -- label values: the closed sets of categories, causes, events and reasons -------------------------------------------

STARTUP: Final = "startup"

DATA_WAIT: Final = "data_wait"
COMPUTE: Final = "compute"
EVALUATION: Final = "evaluation"
CHECKPOINT: Final = "checkpoint"
OTHER: Final = "other"

CATEGORIES: Final = (STARTUP, DATA_WAIT, COMPUTE, EVALUATION, CHECKPOINT, OTHER)
"""The categories of the ledger. Every second of a rank is in exactly one of them."""

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
COPY: Final = "copy"
COMPILE: Final = "compile"

COMPUTE_PARTS: Final = (COPY, FORWARD, BACKWARD, OPTIMIZER, COMPILE, OTHER)
"""The parts of the compute. ``copy``, of batches to the device, is absent if no framework shows it: forward has it."""

_STUCK_IN: Final = {
    DATA_WAIT: "waiting for a batch",
    COMPUTE: "in the compute of a step",
    EVALUATION: "in an evaluation",
    CHECKPOINT: "in a checkpoint",
}


def stuck_in_words(category: str) -> str:
    """The activity of a training thread that is stuck in a category of the ledger, such as "waiting for a batch"."""
    return _STUCK_IN.get(category, f"in {category}")


PRODUCTIVE: Final = "productive"
REDONE: Final = "redone"
RESTORE: Final = "restore"
REPLAY: Final = "replay"
STUCK: Final = "stuck"
DOWN: Final = "down"

LOST: Final = (REDONE, RESTORE, REPLAY, STARTUP, STUCK, DOWN)
"""Costs of restarts and hangs: the values of the ``category`` label. The rest is the effective training time."""

RECORDED: Final = "recorded"
REFUSED: Final = "refused"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"

SNAPSHOT_RESULTS: Final = (RECORDED, REFUSED, FAILED, SKIPPED)
"""How a snapshot ends on a rank, the values of the ``result`` label: the trace was written; it was not recorded because
of another profiler or a limit; it failed; or this rank did not reach its steps."""

THROTTLE_REASONS: Final = (
    "sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake", "sync_boost", "applications_clocks",
    "display_clocks",
)  # fmt: skip
"""Why a GPU's clocks are reduced: the values of the ``reason`` label. The low clock of an idle GPU does not count."""

CLEANED_UP: Final = 45
"""The Xid error of a GPU that throws a process's work away. It follows the end of a process, or another error."""

XIDS: Final[Mapping[int, str]] = MappingProxyType(
    {
        13: "a kernel of the script has failed",
        31: "a kernel of the script has read or written an address that is not there",
        43: "a kernel of the script has failed, and the GPU has stopped its work",
        CLEANED_UP: "the work of a process was thrown away, as after its end or another error",
        48: "its memory has an error that cannot be corrected",
        63: "a row of its memory is to be replaced",
        64: "a row of its memory could not be replaced",
        68: "its video processor has failed",
        74: "an NVLink has failed",
        79: "it has fallen off the bus",
        92: "its memory has many errors, which are corrected",
        94: "its memory has an error that cannot be corrected, but is contained",
        95: "its memory has an error that cannot be corrected and is not contained",
        109: "it did not change to another context in time",
        119: "its firmware (GSP) does not answer",
        120: "its firmware (GSP) has failed",
        140: "its memory has an error that cannot be corrected",
        154: "it needs a reset, or its node a restart",
    }
)
"""What the commonest Xid errors mean. The driver gives these numbers to errors of a GPU."""

XIDS_OF_SCRIPTS: Final = frozenset({13, 31, 43, CLEANED_UP, 68, 109})
"""Xid errors that scripts cause: the GPU is healthy. NVIDIA's device plugin for Kubernetes leaves them out as well."""

FindingKind = Literal[
    "cores_missing",
    "threads_oversubscribed",
    "gil_held",
    "host_work",
    "reader_thread",
    "own_gc_collect",
    "iterator_per_step",
    "empty_workers",
    "duplicate_samples",
    "step_growth",
    "evaluation_loader",
    "no_sync",
    "debug_switch",
    "slow_setting",
    "between_loops",
    "uneven_steps",
]


# -- switches of torch that may make steps longer ----------------------------------------------------------------------

ANOMALY: Final = "autograd's anomaly mode"
PROFILER: Final = "torch's profiler"
CUDA_BLOCKING: Final = "CUDA_LAUNCH_BLOCKING"
SYNC_DEBUG: Final = "CUDA's debug mode for synchronisation"
DETERMINISTIC: Final = "the choice of deterministic algorithms"

# -- distributions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket, not cumulative: one for each upper bound in ``bounds``, and one for larger values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


FETCH_BUCKETS: Final = tuple((1 << 20 + power) / NS for power in range(17))
"""Upper bounds of the fetch histogram, seconds: 1.05 ms, doubling up to 68.7 s. So a worker finds the bucket from the
highest bit of the nanoseconds."""


# -- the results of reading the ring: steps, phases and checkpoints ----------------------------------------------------


class Step(NamedTuple):
    """One closed training step. A tuple, because one is made for each step of the run.

    Attributes:
        seconds: wait + compute. Evaluation and checkpoints in the step are not counted.
        wait_seconds: the part of ``seconds`` that was the wait for the batch.
        checkpoint: whether a checkpoint was written in the step.
    """

    seconds: float
    wait_seconds: float
    checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One closed evaluation, checkpoint or named phase, with its start on the monotonic clock."""

    name: str
    category: str
    start_ns: int
    seconds: float
    loop_seconds: tuple[float, float] | None = None
    """Data wait and compute of the process until the phase ended; None if the phase does not come from the ledger."""


class SavedCheckpoint(NamedTuple):
    """One checkpoint that was written.

    Attributes:
        start_ns, end_ns: monotonic stamps. An asynchronous checkpoint was complete at ``end_ns``.
        optimizer_steps, steps: steps of this process when the checkpoint began; a step that is open counts.
        complete: whether everything is written: not if the saving function raised, or still writes in the background.
        holds_optimizer: whether it contains an optimizer's state, without which no training is resumed.
        background: whether it was completed on another thread.
    """

    start_ns: int
    end_ns: int
    optimizer_steps: int
    steps: int
    complete: bool
    holds_optimizer: bool
    background: bool = False


# -- how the log summarises the samples of a window --------------------------------------------------------------------

LOG_KIND: Final = "log"
"""Key in the metadata of a sample's field: how the log summarises the samples of a window.

Without it, numbers are averaged; of everything else the newest value is written.
"""

MEAN: Final[Mapping[str, str]] = MappingProxyType({LOG_KIND: "mean"})
"""The mean of the samples. A duration needs this, because its name looks like that of a counter."""

NEWEST: Final[Mapping[str, str]] = MappingProxyType({LOG_KIND: "newest"})
"""The newest known value: a counter over the run, or a number whose mean makes no sense (a worker's number)."""

SKIP: Final[Mapping[str, str]] = MappingProxyType({LOG_KIND: "skip"})
"""Nothing. The value grows during the run, and so would every log line."""


# -- one reading of each polled source ---------------------------------------------------------------------------------


GPM: Final = "gpm"
"""The hardware counters of NVIDIA's GPUs, as the source of a figure."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of a GPU of this rank.

    Attributes:
        utilization_source, sm_active_source: ``nvml``, ``amdsmi`` or ``gpm`` (hardware counters; for the utilization
            only of a MIG device); None without a reading.
        nvlink_…, pcie_…: traffic since the previous sample.
        power_limit_watts: the limit that holds now, of all that are set.
        energy_joules: energy of the whole GPU since its driver was loaded.
        throttled: present reasons for reduced clocks, from `THROTTLE_REASONS`.
        power_violation_seconds, thermal_violation_seconds: time with reduced clocks since the driver was loaded.
        ecc_…_total: errors of the memory since the driver was loaded. ``…_remapped_rows_total``: over the GPU's life.
        xid: the newest Xid error since the agent started; 0 without one.
        row_remap_pending: whether a row is remapped at the next reset. ``row_remap_failure``: whether that has failed.
    """

    index: int
    uuid: str
    name: str
    utilization_ratio: float | None = None
    utilization_source: str | None = None
    sm_active_ratio: float | None = None
    sm_active_source: str | None = None
    sm_occupancy_ratio: float | None = None
    tensor_active_ratio: float | None = None
    memory_bandwidth_ratio: float | None = None
    nvlink_receive_bytes_per_second: int | None = None
    nvlink_transmit_bytes_per_second: int | None = None
    pcie_receive_bytes_per_second: int | None = None
    pcie_transmit_bytes_per_second: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = field(default=None, metadata=NEWEST)
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    memory_clock_hertz: float | None = None
    throttled: tuple[str, ...] | None = None
    power_violation_seconds: float | None = field(default=None, metadata=NEWEST)
    thermal_violation_seconds: float | None = field(default=None, metadata=NEWEST)
    ecc_corrected_errors_total: int | None = field(default=None, metadata=NEWEST)
    ecc_uncorrected_errors_total: int | None = field(default=None, metadata=NEWEST)
    corrected_remapped_rows_total: int | None = field(default=None, metadata=NEWEST)
    uncorrected_remapped_rows_total: int | None = field(default=None, metadata=NEWEST)
    row_remap_pending: int | None = field(default=None, metadata=NEWEST)
    row_remap_failure: int | None = field(default=None, metadata=NEWEST)
    pcie_replays_total: int | None = field(default=None, metadata=NEWEST)
    xid: int | None = field(default=None, metadata=NEWEST)
    xid_errors_total: int | None = field(default=None, metadata=NEWEST)


@dataclass(frozen=True, slots=True)
class HostSample:
    """CPU and memory of the machine. ``cpu_ratio`` is over all cores, since the previous sample."""

    cpu_ratio: float | None
    cpu_count: int
    memory_used_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One reading of this process.

    Attributes:
        cpu_seconds: user + system time since it began. ``children_cpu_seconds``: time of its children that have ended
            and been waited for.
        runnable_seconds: run-queue delay of its training thread; None if the kernel does not report it.
            ``running_seconds``: time of that thread on a core.
    """

    cpu_seconds: float = field(metadata=NEWEST)
    resident_memory_bytes: int
    threads: int
    runnable_seconds: float | None = field(default=None, metadata=NEWEST)
    running_seconds: float | None = field(default=None, metadata=NEWEST)
    children_cpu_seconds: float = field(default=0.0, metadata=NEWEST)


@dataclass(frozen=True, slots=True)
class PressureSample:
    """Pressure stall information and cgroup limits.

    Attributes:
        pressure_ratio: share of time in which some task waited, by resource (``cpu``, ``io``, ``memory``).
        cgroup_cpu_limit: cores the cgroup may use. ``cgroup_cpu_used``: cores that the whole cgroup has used, with
            other ranks. Both are None without a limit.
        cgroup_throttled_ratio: share of the enforcement periods in which the cgroup was throttled.
    """

    pressure_ratio: dict[str, float] = field(default_factory=dict)
    cgroup_cpu_limit: float | None = None
    cgroup_cpu_used: float | None = None
    cgroup_throttled_ratio: float | None = None
    cgroup_memory_limit_bytes: int | None = None
    cgroup_memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TorchMemorySample:
    """The CUDA caching allocator on the training thread's device."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class CollectorHealth:
    """State of one collector. ``up`` is None before its first attempt."""

    name: str
    up: bool | None
    duration_seconds: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Sums over the batches that were taken and could be matched with their fetch, by the reason for their wait.

    Attributes:
        fetch_wait_seconds: waits until their fetch had ended. ``transfer_wait_seconds``: waits after that (pickling,
            sending, pinning, unpickling). ``head_of_line_seconds``: fetch wait during which a later batch was finished.
        matched: number of batches. ``slack_seconds``: how long they had been ready when they were requested.
        from_busy: batches whose worker was in another fetch during their transfer.
            ``transfer_wait_busy_worker_seconds``: the transfer wait for these. ``transfer_wait_long_fetch_seconds``:
            the part of it in which the worker was in a fetch much longer than its usual ones.
    """

    fetch_wait_seconds: float = 0.0
    transfer_wait_seconds: float = 0.0
    head_of_line_seconds: float = 0.0
    matched: int = 0
    from_busy: int = 0
    transfer_wait_busy_worker_seconds: float = 0.0
    transfer_wait_long_fetch_seconds: float = 0.0
    slack_seconds: float = 0.0

    def log_fields(self) -> dict[str, float]:
        """The sums in the log. The slack is there as its mean, see `WorkersSample`."""
        return {f"{spec.name}_total": getattr(self, spec.name) for spec in fields(self) if spec.name != "slack_seconds"}


@dataclass(frozen=True, slots=True)
class FirstFetches:
    """The first fetches of the workers in an iteration, over the run so far.

    ``start_seconds``: time from the begin of the iteration until they began.
    """

    fetches: int = 0
    seconds: float = 0.0
    start_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkersSample:
    """The live DataLoader workers of this rank.

    Ratios are means over the training workers, as shares of the wall clock since the last sample. They are None at the
    first sample, and if the kernel or the workers do not report them.

    Attributes:
        workers: all workers. ``training_workers``: workers of loaders that give training batches, without the idle ones
            of an evaluation. While no loader has given a training batch, all workers.
        busy_ratio: time in a fetch. It is the sum of the next three.
        cpu_ratio: running. ``runnable_ratio``: ready to run, without a core. ``blocked_ratio``: waiting for something
            else, mostly storage or network.
        pickling_ratio: running outside of fetches. A thread of each worker pickles its finished batches.
        ready_batches: batches that are ready in the result queues; None if the queue cannot report it.
        fetching_seconds: duration so far of the longest fetch in progress.
        fetches_total, fetch_duration: fetches of all workers of the run so far.
        slack_seconds: mean time that a batch had been ready when it was requested, since the last sample.
        deliveries: sums over the run so far.
        head_of_line_batches: finished batches that wait right now behind an unfinished one. ``head_of_line_worker``:
            the worker that fetches it. ``head_of_line_since_seconds``: how long that fetch has taken.
        read_bytes_per_second: bytes that all workers read from storage.
        written_bytes_per_second: bytes that all workers wrote: files, and the pickled part of batches, which goes
            through a pipe to the training process. The tensors of a batch are in shared memory and do not count.
        fetched: fetches so far, and their seconds, by pid of each training worker.
        allowed_cores: cores that all training workers together may use; None if the kernel does not report it.
        empty_workers: workers to which the data set gives no item, in the newest epoch that shows it.
            ``same_batches``: whether several workers have begun with the same two batches; None if unknown.
    """

    workers: int
    training_workers: int
    resident_memory_bytes: int
    ready_batches: int | None
    fetching_seconds: float = field(metadata=MEAN)
    fetches_total: int = field(metadata=NEWEST)
    fetch_duration: Histogram | None = field(metadata=SKIP)
    cpu_ratio: float | None
    busy_ratio: float | None
    runnable_ratio: float | None
    blocked_ratio: float | None
    read_bytes_per_second: float | None
    slack_seconds: float | None = field(default=None, metadata=MEAN)
    deliveries: Deliveries = field(default=Deliveries(), metadata=NEWEST)
    head_of_line_batches: int = 0
    head_of_line_worker: int | None = field(default=None, metadata=NEWEST)
    head_of_line_since_seconds: float | None = field(default=None, metadata=NEWEST)
    pickling_ratio: float | None = None
    written_bytes_per_second: float | None = None
    fetched: dict[int, tuple[int, float]] = field(default_factory=dict, metadata=SKIP)
    allowed_cores: int | None = field(default=None, metadata=NEWEST)
    first_fetches: FirstFetches = field(default=FirstFetches(), metadata=SKIP)
    empty_workers: int = field(default=0, metadata=SKIP)
    same_batches: bool | None = field(default=None, metadata=SKIP)


# -- readings of the memory of a run -----------------------------------------------------------------------------------

TRAINING: Final = "training"
WORKERS: Final = "workers"
SHARED_MEMORY: Final = "shared_memory"
CUDA: Final = "cuda"

MEMORY_PARTS: Final = (TRAINING, WORKERS, SHARED_MEMORY, CUDA)
"""Parts whose memory can grow, the values of the ``where`` label: the training process, its DataLoader workers,
/dev/shm, and the tensors on the GPU."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One reading in bytes. None: not measured.

    Attributes:
        training_bytes: anonymous memory of the training process. Pages of files and of shared memory do not count.
        workers_bytes: anonymous memory of all DataLoader workers, without pages that they still share with the
            process that forked them. None without workers.
        workers_shared_bytes: the anonymous memory that they still share. If they write to it, it is copied.
        shared_memory_bytes: shared memory of this process's cgroup; without a cgroup all of /dev/shm that is in use.
            ``shared_memory_free_bytes``: free bytes of /dev/shm for all processes.
        memory_available_bytes: bytes that this process and all others can still allocate before the kernel has to kill
            one: the least that is left on the machine, or in a memory cgroup above this process. Page cache counts as
            available.
        memory_limit_bytes: the limit that leaves least: of a cgroup, or the memory of the machine.
    """

    training_bytes: int | None = None
    workers_bytes: int | None = None
    workers_shared_bytes: int | None = None
    shared_memory_bytes: int | None = None
    shared_memory_free_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """The newest sample of each collector, by its name, but for ``gpus``; None while it is down.

    ``gpus`` has a sample for each GPU of this rank, first the one on which the exposed wait is measured.
    """

    gpus: tuple[GpuSample, ...] | None = None
    host: HostSample | None = None
    process: ProcessSample | None = None
    workers: WorkersSample | None = None
    pressure: PressureSample | None = None
    torch_memory: TorchMemorySample | None = None
    memory: MemorySample | None = None

    @property
    def gpu(self) -> GpuSample | None:
        """The sample of the GPU on which the exposed wait is measured."""
        return self.gpus[0] if self.gpus else None


@dataclass(frozen=True, slots=True)
class EnergyView:
    """The energy that a GPU has used so far, by category of the ledger. ``gpu``: its newest sample."""

    gpu: GpuSample
    joules: dict[str, float]


# -- epochs ------------------------------------------------------------------------------------------------------------


class Epochs(msgspec.Struct, frozen=True):
    """The whole epochs of a rank: passes over its loader, each with the evaluations and checkpoints after it.

    ``count``: how many have ended. ``seconds``: mean duration of one.
    """

    count: int
    seconds: float


# -- the newest collective of a rank, as its flight recorder has it ---------------------------------------------------


class Collective(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The newest collective of a rank.

    Attributes:
        name: its name, such as ``all_reduce``; empty if only its number is known.
        sequence: its number in its process group; None if nothing counts them.
        group: name of the process group; empty if unknown.
        shapes: shapes and types of its tensors, as text; empty if unknown.
    """

    name: str
    sequence: int | None = None
    group: str = ""
    shapes: str = ""


# -- the pace of a rank as its peers see it, and the loader of its batches ---------------------------------------------

DEBUGGED: Final = "debugger"
"""The phase of a rank whose training thread a debugger has paused."""


class WindowPace(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The newest window of one rank. The log has the paces of all ranks that are compared.

    Attributes:
        seconds: length of the window without the start of the run. ``steps``: steps that ended in it. ``last_step``:
            steps of the run that had ended at its end. With it, windows of two ranks are matched in time, because the
            paces of other nodes are some seconds old.
        compute_seconds: compute in the window. ``exposed_wait_seconds``: None if unknown. ``away_seconds``: neither
            wait nor compute.
        stack_samples: samples of the training thread's stack while it computed. ``in_sync_samples``: those in calls in
            which ranks wait for one another.
        on_gpu: whether it trains on a GPU. There, ranks wait for one another wherever the host waits for the GPU.
            ``gpu_busy_ratio``: share of the time in which the GPU ran something. A rank that waits for others keeps its
            GPU busy.
        cause: the cause of the rank's open stall; None without one. ``where``: the line of the user's code in most
            samples, outside of calls in which ranks wait.
        phase: the category of the ledger, if it is an evaluation or a checkpoint, or `DEBUGGED`: other ranks may wait
            for its end.
        seconds_without_step: time since its newest step. ``waits_for_ranks``: whether it has spent this time in calls
            in which ranks wait for one another.
        away_in: the category of the ledger with most of the time that is neither wait nor compute; None without any.
        core_wait_seconds: how long its training thread was runnable without a core, in the window; None if unknown.
            ``cores_busy_ratio``: use of all cores of its machine.
        node: name of its node, for a rank on another node; None for a rank of this node.
    """

    rank: int
    seconds: float
    steps: int
    compute_seconds: float
    exposed_wait_seconds: float | None
    away_seconds: float
    stack_samples: int = 0
    in_sync_samples: int = 0
    on_gpu: bool = False
    cause: str | None = None
    where: str | None = None
    phase: str | None = None
    seconds_without_step: float = 0.0
    waits_for_ranks: bool = False
    gpu_busy_ratio: float | None = None
    away_in: str | None = None
    core_wait_seconds: float | None = None
    cores_busy_ratio: float | None = None
    node: str | None = None
    last_step: int = 0

    @property
    def in_sync_ratio(self) -> float:
        """The share of the stack samples in calls in which ranks wait for one another. There must be a sample."""
        return self.in_sync_samples / self.stack_samples


class RankPace(WindowPace, frozen=True, omit_defaults=True, gc=False):
    """The pace of one rank for its peers, and some figures of its whole run.

    Attributes:
        stuck: whether it has ended no step for ``stuck_seconds``. ``still_seconds``: time since the hooks last saw
            progress of its training thread, of any kind. ``awaits``: the collective in which it has stood since; None
            if it stands elsewhere, or has not stood there for long.
        run_wait_seconds, run_loop_seconds, run_first_wait_seconds: sums of the run so far, see `RankWaits`.
            ``run_exposed_seconds``: None if it is unknown, or batches were not seen.
        run_cause: the cause of its costliest stall of the run; None without one. ``run_lost_seconds``: its cost.
    """

    stuck: bool = False
    still_seconds: float = 0.0
    awaits: Collective | None = None
    run_wait_seconds: float = 0.0
    run_loop_seconds: float = 0.0
    run_first_wait_seconds: float = 0.0
    run_exposed_seconds: float | None = None
    run_cause: str | None = None
    run_lost_seconds: float = 0.0


LoaderSettings = dict[str, str | bool | int | float | None]
"""The settings of a loader by the names of DataLoader's arguments, and some more, see `BatchSource`."""


class LoaderTraits(msgspec.Struct, frozen=True):
    """What a DataLoader's data set and sampler show without being run. None: unknown.

    Attributes:
        iterable_data: whether the data set is an IterableDataset. ``asks_for_its_worker``: whether one of its functions
            uses ``get_worker_info``, as one does that divides the items among the workers.
        shuffled: whether the batches come in random order.
        has_set_epoch: whether the data set has ``set_epoch()``, which workers that are kept do not see.
        one_by_one: whether each sample is fetched by a call of ``__getitem__`` of its own.
        batch_size: samples of a batch. ``own_collate``: whether code that is not torch's makes a batch of them.
        sample_code: file, line and name of the function that makes the samples, if it is the user's: the line that
            yields or returns one.
    """

    iterable_data: bool | None = None
    asks_for_its_worker: bool | None = None
    shuffled: bool | None = None
    has_set_epoch: bool | None = None
    one_by_one: bool | None = None
    batch_size: int | None = None
    own_collate: bool | None = None
    sample_code: tuple[str, int, str] | None = None


# -- what the log and the reports contain: advice, lines of code, stalls, the trend of a short run ---------------------


class Advice(msgspec.Struct, frozen=True):
    """One recommended change.

    Attributes:
        action: what to do, in words; ``setting`` and ``value`` as a person types them, None if no setting is changed.
            A value without a setting is the number named in the action.
        predicted_speedup: factor on the run's steps per second; None if there is no prediction.
        because: the reason, with its figures.
        predicted_low: the low end of the range up to ``predicted_speedup``; None if there is no range.
    """

    action: str
    setting: str | None = None
    value: str | None = None
    predicted_speedup: float | None = None
    because: str = ""
    predicted_low: float | None = None

    @property
    def typed(self) -> str:
        """The setting and its value, such as ``num_workers=2``; empty without a value."""
        return f"{self.setting}={self.value}" if self.setting and self.value else ""

    @property
    def gain(self) -> str:
        """The predicted factor on the steps per second, or a range of factors; empty without a prediction."""
        return "" if self.predicted_speedup is None else factor_text(self.predicted_speedup, self.predicted_low)


class RankedAdvice(Advice, frozen=True):
    """An advice in the list of the whole report. ``about``: for which cause, or where it is from."""

    about: str = ""


def factor_text(high: float, low: float | None) -> str:
    """A factor, such as 1.9, or a range of it, such as 1.2 to 1.9."""
    return f"{high:g}" if low is None or low >= high else f"{low:g} to {high:g}"


class HotLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the user's code, and the library function that it called. ``share_ratio``: share of the time.

    ``part``: the part of the compute that most of its time is in; only for the lines of a loop without loaders.
    """

    file: str
    line: int
    function: str | None = None
    calls: str | None = None
    share_ratio: float
    part: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def named(self) -> str:
        """Such as ``Image.resize at train.py:42``, or ``load at train.py:42`` if it called no library function."""
        return f"{self.calls or self.function or 'code'} at {self.place}"

    @property
    def file_name(self) -> str:
        """Such as ``train.py``."""
        return self.file.rpartition(os.sep)[2]

    @property
    def place(self) -> str:
        """Such as ``train.py:42``."""
        return f"{self.file_name}:{self.line}"


class OtherCause(msgspec.Struct, frozen=True):
    """A cause of similar size at the time of a stall. ``share_ratio``: its share of the time."""

    cause: str
    share_ratio: float = 0.0
    advice: list[Advice] = []


class CodeLines(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The lines of code in which time was spent, the largest share first.

    ``lines_of``: of which time the shares are: fetch, wait, sampler, step or checkpoint. ``line_samples``: the number
    of samples. ``line_verdict``: a sentence on the first line.
    """

    lines: list[HotLine] = []
    lines_of: str = ""
    line_samples: Count = 0
    line_verdict: str = ""


class StallDetails(CodeLines, kw_only=True, omit_defaults=True):
    """The part of a stall's evidence that code reads. What a stall does not have is not in its evidence.

    Attributes:
        lost_seconds: seconds that the stall has cost so far, by cause.
        share_ratio: share of the time that its cause takes, if there are causes of similar size: ``also``, the largest
            first.
        straggler_rank: the rank that this one waits for.
        stuck_for_seconds: time without progress; only in a hang, as the fields after it. ``stuck_in``: category of the
            ledger. ``stuck_at``: the innermost frames of the training thread. ``worker_at``: the place of the worker
            whose fetch takes longest. ``stacks``: of all threads and workers, the training thread first.
    """

    lost_seconds: dict[str, Number] = {}
    share_ratio: Number | None = None
    also: list[OtherCause] = []
    straggler_rank: Count | None = None
    straggler_node: str | None = None
    straggler_reason: str | None = None
    stuck_for_seconds: Number | None = None
    stuck_in: str | None = None
    stuck_at: str | None = None
    worker_at: str = ""
    stacks: list[str] = []


# At the first use msgspec looks for the types of the fields by the module's name, which may be the project's by then.
msgspec.convert({}, StallDetails)


class StallRecord(msgspec.Struct, kw_only=True):
    """A stall of a rank: the record of the log, of the user's callback, of a trace and of the reports.

    Attributes:
        cause: empty in a line of the log that does not name it.
        opened, closed: times, ISO-8601 in UTC; None if it is not known, and while the stall is open.
        first_step, last_step: steps that had ended when it opened and closed.
        evidence: the figures that led to the cause, see docs/output.md, with its `StallDetails`; all plain.
    """

    rank: Count = 0
    cause: str = ""
    opened: str | None = None
    first_step: Count | None = None
    last_step: Count | None = None
    exposed_wait_ratio: Number | None = None
    closed: str | None = None
    evidence: dict[str, Any] = {}
    advice: list[Advice] = []

    @property
    def details(self) -> StallDetails:
        """The part of the evidence that code reads. Raises `msgspec.ValidationError` if it is damaged."""
        return msgspec.convert(self.evidence, StallDetails)

    @property
    def cost_seconds(self) -> float:
        """Seconds that its cause has cost."""
        return self.details.lost_seconds.get(self.cause, 0.0)

    def log_fields(self) -> dict[str, Any]:
        """Its fields in the log and for the user's callback. What has not happened is absent."""
        fields = msgspec.to_builtins(self, enc_hook=repr)
        return {name: value for name, value in fields.items() if name == "exposed_wait_ratio" or value is not None}


STEADY: Final = "steady"
GROWS: Final = "grows"
SLOWER: Final = "slower"
FASTER: Final = "faster"
UNCLEAR: Final = "unclear"


@dataclass(frozen=True, slots=True)
class StepTrend:
    """How the steps of a short run have changed from its begin to its end.

    Attributes:
        kind: `STEADY`; `GROWS`: slower all the time; `SLOWER` and `FASTER`: in another way, as by a single jump;
            `UNCLEAR`: they scatter too much to tell.
        before_seconds, after_seconds: duration of a step at both ends, without the first steps.
        loop_seconds: seconds of the training loop between them.
    """

    kind: str
    before_seconds: float
    after_seconds: float
    loop_seconds: float
