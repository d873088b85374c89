"""The table of all metrics: name, type, help, unit, label, and how each is read from the state of a rank.

docs/METRICS.md is made from it, and so are the exposition (`telemetry.node.prometheus`) and the figures that
`telemetry.metrics()` returns. To add a metric, add it to a group here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar

from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.hangs import HANG_KINDS
from telemetry.model.records import (
    CATEGORIES,
    COMPUTE_PARTS,
    LOST,
    MEMORY_PARTS,
    SNAPSHOT_RESULTS,
    THROTTLE_REASONS,
    Histogram,
)

if TYPE_CHECKING:
    from telemetry.diagnosis.hangs import HangVerdict
    from telemetry.diagnosis.memory_outlook import MemoryGrowth
    from telemetry.model.records import (
        CollectorHealth,
        EnergyView,
        GpuSample,
        HostSample,
        PressureSample,
        ProcessSample,
        TorchMemorySample,
        WorkersSample,
    )
    from telemetry.model.totals import StackTotals, Totals

# -- the state of a rank -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StallView:
    """Stalls so far. ``active``: the cause of the open stall. ``straggler``: the rank that causes it, if one does."""

    active: str | None
    opened: dict[str, int]
    lost_seconds: dict[str, float]
    straggler: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotsView:
    """Snapshots so far by result."""

    results: dict[str, int]


@dataclass(frozen=True, slots=True)
class AttemptView:
    """The attempt of the run: its number, how many in a row made no progress, and the run's lost seconds so far."""

    number: int
    without_progress: int
    lost_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything that the endpoint shows of one rank at one moment. None: not measured.

    ``own_fetches`` are durations of the training thread's own fetches, without workers. ``worker_fetches`` are those of
    all workers so far, and ``energy`` is that of ``gpu``; both are there even if ``workers`` or ``gpu`` could not be
    read this time. ``other_gpus``: the same two of each further GPU. See `ChangeDetector` for ``step_change_ratio``.
    ``steps_before``, ``samples_before`` and ``tokens_before`` are the rank's counts in earlier attempts of the run.
    """

    info: dict[str, str]
    started_unix_seconds: float
    ended: bool
    totals: Totals
    step_duration: Histogram
    wait_duration: Histogram
    last_step_unix_seconds: float | None
    errors: dict[str, int]
    stalls: StallView | None = None
    hang: HangVerdict | None = None
    snapshots: SnapshotsView | None = None
    collectors: tuple[CollectorHealth, ...] = ()
    gpu: GpuSample | None = None
    energy: EnergyView | None = None
    other_gpus: tuple[tuple[GpuSample | None, EnergyView | None], ...] = ()
    host: HostSample | None = None
    process: ProcessSample | None = None
    workers: WorkersSample | None = None
    own_fetches: Histogram | None = None
    worker_fetches: Histogram | None = None
    pressure: PressureSample | None = None
    torch_memory: TorchMemorySample | None = None
    memory: MemoryGrowth | None = None
    attempt: AttemptView | None = None
    step_change_ratio: float | None = None
    gpu_hour_price: float | None = None
    steps_before: int = 0
    samples_before: int = 0
    tokens_before: int = 0

    @property
    def samples(self) -> int | None:
        """Samples of this rank over all attempts; None if this attempt's are unknown."""
        return None if self.totals.samples is None else self.samples_before + self.totals.samples

    @property
    def tokens(self) -> int | None:
        """Tokens of this rank over all attempts; None if this attempt's are unknown."""
        return None if self.totals.tokens is None else self.tokens_before + self.totals.tokens


# -- what a metric is ----------------------------------------------------------------------------------------------

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]

NEVER: Final = "never"

Record = TypeVar("Record")
"""The record that a group of metrics reads: a sample of a collector, or the whole view."""

Reading: TypeAlias = float | Mapping[str, float] | tuple[str, ...] | Histogram | None
"""A metric's value at one moment.

- None: not measured. The metric is absent.
- a number: one sample.
- a mapping: one sample for each value of the metric's label.
- a tuple, where the label's values are a closed set: 1 for the label values in it, 0 for the others.
- a histogram: its buckets, sum and count.
"""

_UNITS: Final = frozenset({
    "batches", "bytes", "celsius", "cores", "errors", "hertz", "joules", "ratio", "samples", "seconds", "steps",
    "threads", "tokens", "watts",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """A label. The metric has one sample for each of its values. ``values`` is empty for an open set."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric(Generic[Record]):
    """One metric.

    Attributes:
        type: counter, gauge or histogram.
        name: name in the exposition, with its unit. A counter's name ends in ``_total``.
        help: one short plain sentence, the HELP text. It is part of every scrape.
        read: gets the reading from the record of the metric's group. Called at each publication, so it must be cheap.
        label: the label that distinguishes its samples, in addition to the group's labels.
        details: more sentences for docs/METRICS.md, in Markdown.
        absent: when there is no sample, if that differs from the group's.
        unit: base unit, by default the last word of the name; empty for a state or a number without a unit.
        from_zero: whether it is a counter that began at 0 when the agent of this process started.
    """

    type: MetricType
    name: str
    help: str
    read: Callable[[Record], Reading]
    label: MetricLabel | None = None
    details: str = ""
    absent: str | None = None
    unit: str = ""
    from_zero: bool = True

    def __post_init__(self) -> None:
        last = self.name.removesuffix("_total").rpartition("_")[2]
        if not self.unit and last in _UNITS:
            object.__setattr__(self, "unit", last)


counter: Final = partial(Metric, "counter")
gauge: Final = partial(Metric, "gauge")
histogram: Final = partial(Metric, "histogram")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricGroup(Generic[Record]):
    """Metrics that are read from one record and carry the same labels.

    Attributes:
        record: gets the record from the view. If it is None, all metrics of the group are absent.
        metrics: the metrics, in the order of the document.
        labels: names of the labels that all of them carry, in addition to ``run`` and ``rank``.
        of_node: whether they are about the machine, which all ranks of a node share. Then they carry ``node`` instead
            of ``rank``, and one rank shows them.
        label_values: returns the values of ``labels``.
        absent: when there is no sample.
    """

    record: Callable[[RunView], Record | None]
    metrics: tuple[Metric[Record], ...]
    labels: tuple[str, ...] = ()
    label_values: Callable[[Record], Mapping[str, str]] = lambda _: MappingProxyType({})
    absent: str = NEVER
    of_node: bool = False

    @property
    def name(self) -> str:
        """The name of the first metric, which identifies the group."""
        return self.metrics[0].name


# -- the table -----------------------------------------------------------------------------------------------------


def _samples(own: StackTotals) -> Reading:
    if not own.samples:
        return None
    return {"own": own.samples - own.in_sync, "in_sync": own.in_sync}


def _place(gpu: GpuSample) -> dict[str, str]:
    return {"gpu": str(gpu.index), "uuid": gpu.uuid}


def _fetches(view: RunView) -> Histogram | None:
    own, workers = view.own_fetches, view.worker_fetches
    if own is None or workers is None:
        return own or workers
    counts = tuple(a + b for a, b in zip(own.counts, workers.counts, strict=True))
    return Histogram(own.bounds, counts, own.total + workers.total)


def _up(view: RunView) -> dict[str, float]:
    return {health.name: health.up for health in view.collectors if health.up is not None}


def _durations(view: RunView) -> dict[str, float]:
    return {h.name: h.duration_seconds for h in view.collectors if h.duration_seconds is not None}


def _hang_place(hang: HangVerdict) -> dict[str, float] | None:
    place = None if hang.suspect is None else hang.suspect.place
    return None if place is None else {place.rpartition("/")[2]: 1.0}


# fmt: off

CATEGORY: Final = MetricLabel("category", CATEGORIES)
SAMPLE_STATE: Final = MetricLabel("state", ("own", "in_sync"))
_INFO: Final = (
    "node", "local_rank", "world_size", "launcher", "telemetry_version", "python_version", "torch_version",
    "job", "user", "account", "partition",
)
RUN_INFO: Final[MetricGroup[RunView]] = MetricGroup(
    record=lambda view: view, labels=_INFO, label_values=lambda view: view.info, metrics=(
    gauge("training_run_info", "Always 1. Where this rank runs and with which versions; join on run and rank.",
          lambda _: 1.0,
          details="`launcher` is `torchrun` (everything that sets `RANK` and `WORLD_SIZE`), `mpi`, `slurm`, "
          "`lightning`, `spawn` (`torch.multiprocessing.spawn`), `kubernetes` or `plain`. `job`, `user`, "
          "`account` and `partition` come from Slurm, LSF, PBS or Kubernetes (`JOB_NAME`, `POD_NAMESPACE`, "
          "`QUEUE_NAME`), or are empty. Prometheus calls the label `job` `exported_job`."),
))
LOOP: Final[MetricGroup[RunView]] = MetricGroup(record=lambda view: view, metrics=(
    gauge("training_run_ended", "1 once this rank has ended by itself, 0 before.", lambda view: view.ended),
    counter("training_steps_total", "Training steps that have ended.",
            lambda view: None if view.totals.waits_unseen and not view.totals.steps else view.totals.steps,
            absent="if only samples of the stack show steps"),
    counter("training_samples_total", "Samples of the batches that the training took.", lambda view: view.samples,
            from_zero=False, absent="if the size of a batch was not known",
            details="Goes on over the attempts of a run, by rank. [Throughput](throughput.md) says what counts."),
    counter("training_tokens_total", "Tokens that the training took.", lambda view: view.tokens, from_zero=False,
            absent="if the script tells none",
            details="As `telemetry.tokens()` told them. Goes on over attempts, too."),
    counter("training_optimizer_steps_total", "Steps of optimizers.", lambda view: view.totals.optimizer_steps,
            details="Fewer than training steps with gradient accumulation, more with several optimizers."),
    histogram("training_step_duration_seconds", "Duration of a training step: wait and compute.",
              lambda view: view.step_duration,
              details="Without evaluations and checkpoints. The setting `step_buckets` gives the bounds."),
    histogram("training_wait_duration_seconds", "Time that a training step waited for its batch.",
              lambda view: None if view.totals.waits_unseen else view.wait_duration,
              absent="in a loop whose batches no hook sees",
              details="The bounds are 1 ms and those of the setting `step_buckets`."),
    counter("training_time_seconds_total",
            "Time of this rank by category; the categories add up to its wall clock.",
            lambda view: view.totals.measured_seconds, label=CATEGORY,
            details="`data_wait` is absent in a loop whose batches no hook sees."),
    counter("training_exposed_wait_seconds_total",
            "Exposed wait: time waiting for data while the device had nothing to run.",
            lambda view: view.totals.exposed_wait_seconds,
            absent="where it [cannot be measured](concepts.md#when-exposed-wait-is-absent)",
            details="Without a GPU the whole wait is exposed."),
    counter("training_compute_samples_total",
            "Samples of the training thread in a step, by whether it waited for other ranks.",
            lambda view: _samples(view.totals.stacks), label=SAMPLE_STATE, absent="in a job of one rank",
            details="`in_sync`: in a call in which ranks wait for one another (a collective, the backward pass of "
            "DDP). `own`: anywhere else. On a GPU, of the host."),
    gauge("training_last_step_timestamp_seconds", "Unix time at which the newest step ended.",
          lambda view: view.last_step_unix_seconds, absent="before the first step has ended"),
))

CAUSE: Final = MetricLabel("cause", tuple(CAUSES))
STALLS: Final[MetricGroup[StallView]] = MetricGroup(record=lambda view: view.stalls, metrics=(
    gauge("training_stall_active", "1 for the cause of the open stall, 0 for the others.",
          lambda stalls: () if stalls.active is None else (stalls.active,), label=CAUSE),
    gauge("training_straggler_rank", "Number of the rank that this one waits for.",
          lambda stalls: stalls.straggler, absent="unless the cause of the open stall is `straggler`"),
    counter("training_stalls_total", "Stalls that have opened, by the cause they opened with.",
            lambda stalls: stalls.opened, label=CAUSE),
    counter("training_stall_lost_seconds_total", "Time that this rank lost in stalls.",
            lambda stalls: stalls.lost_seconds, label=CAUSE,
            details="Multiply it by the number of GPUs to get GPU time."),
))
_NO_HANG: Final = "unless the job hangs; on ranks that do not serve their node"
_NOT_KNOWN: Final = f"{_NO_HANG}; where it is not known"
HANG: Final[MetricGroup[HangVerdict]] = MetricGroup(record=lambda view: view.hang, absent=_NO_HANG, metrics=(
    gauge("training_hang_active", "1 for the kind of the hang, 0 for the others.", lambda hang: (hang.kind,),
          label=MetricLabel("kind", HANG_KINDS),
          details="The log's `hang` lines have the ranks and a sentence."),
    gauge("training_hang_suspect_rank", "Number of the rank that the others wait for while the job hangs.",
          lambda hang: None if hang.suspect is None else hang.suspect.rank,
          absent=_NOT_KNOWN, details="Of several ranks the first."),
    gauge("training_hang_place_info",
          "Always 1. The label has the file and line where that rank is while the job hangs.",
          _hang_place, label=MetricLabel("place"), absent=_NOT_KNOWN,
          details="It names no folder."),
))
SNAPSHOTS: Final[MetricGroup[SnapshotsView]] = MetricGroup(record=lambda view: view.snapshots, metrics=(
    counter("training_snapshots_total", "Snapshots that this rank was asked for, by result.",
            lambda snapshots: snapshots.results, label=MetricLabel("result", SNAPSHOT_RESULTS),
            details="`refused`: something else had priority (the script's own profiler, a limit). `skipped`: this rank "
            "did not reach the steps. The log's `snapshot` lines have the reasons."),
))

COMPUTE_SPLIT: Final[MetricGroup[RunView]] = MetricGroup(
    record=lambda view: None if view.totals.compute_parts is None else view,
    absent="before a backward pass has been seen", metrics=(
    counter("training_compute_seconds_total", "Seconds of the compute, by part.",
            lambda view: view.totals.compute_parts, label=MetricLabel("part", COMPUTE_PARTS),
            details="An estimate from stack samples of the training thread, so on a GPU the host's time. "
            "[More](concepts.md#the-parts-of-the-compute)."),
))
CHANGES: Final[MetricGroup[RunView]] = MetricGroup(record=lambda view: view, metrics=(
    gauge("training_step_change_ratio",
          "Duration of a step now, relative to that before the slow-down that holds on; 1 without one.",
          lambda view: view.step_change_ratio,
          absent="in about the first 15 minutes of training",
          details="1.12: steps take 12 % longer. The log's `change` lines have when, which part, and what changed "
          "with it ([Changes](causes.md#changes))."),
))

ATTEMPTS: Final[MetricGroup[AttemptView]] = MetricGroup(
    record=lambda view: view.attempt, absent="on other ranks than 0", metrics=(
    gauge("training_run_attempt", "Number of this attempt of the run, from 0.", lambda attempt: attempt.number,
          details="A restart in the same run folder, under the same name, is another attempt."),
    gauge("training_run_attempts_without_progress",
          "Attempts in a row that ended without completing a checkpoint.",
          lambda attempt: attempt.without_progress,
          details="0 as soon as this one completes a checkpoint."),
    counter("training_run_lost_seconds_total",
            "Time that restarts and hangs have cost the run, over all its attempts.",
            lambda attempt: attempt.lost_seconds, from_zero=False, label=MetricLabel("category", LOST),
            details="Multiply it by the number of ranks to get GPU time. `redone` is counted when the next attempt "
            "begins. [Goodput](goodput.md) explains the categories."),
))

_NO_READING: Final = "where the GPU or MIG slice does not support it"
_NO_BANDWIDTH: Final = "on NVIDIA's before Hopper"
_NO_GPM: Final = f"{_NO_BANDWIDTH}; on AMD's"
_NO_TRAFFIC: Final = f"{_NO_GPM}; on MIG devices"
_NO_ECC: Final = "without ECC"
_NO_REMAPPING: Final = "before Ampere; where rows are not remapped; on AMD's"
_NOT_AMD: Final = f"{_NO_READING}; on AMD's"

GPU_INFO: Final[MetricGroup[GpuSample]] = MetricGroup(
    record=lambda view: view.gpu, labels=("gpu", "uuid", "name", "sm_active_source", "utilization_source"),
    label_values=lambda gpu: _place(gpu) | {
        "name": gpu.name, "sm_active_source": gpu.sm_active_source or "none",
        "utilization_source": gpu.utilization_source or "none",
    }, metrics=(
    gauge("training_gpu_info", "Always 1. A GPU of this rank and the sources of its figures.", lambda _: 1.0,
          details="`utilization_source`: `nvml`, `amdsmi`, `gpm` (hardware counters, for a MIG device) or `none`. "
          "`sm_active_source`: `gpm` or `none`."),
))
GPU: Final[MetricGroup[GpuSample]] = MetricGroup(
    record=lambda view: view.gpu, labels=("gpu", "uuid"), label_values=_place, absent=_NO_READING, metrics=(
    gauge("training_gpu_utilization_ratio", "Share of time in which any kernel ran: busy, not efficient.",
          lambda gpu: gpu.utilization_ratio, details="One small kernel after another reads 1."),
    gauge("training_gpu_sm_active_ratio", "Share of the SMs that were active.", lambda gpu: gpu.sm_active_ratio,
          absent=_NO_GPM),
    gauge("training_gpu_sm_occupancy_ratio", "Warps resident on the SMs, as a share of the maximum.",
          lambda gpu: gpu.sm_occupancy_ratio, absent=_NO_GPM),
    gauge("training_gpu_tensor_active_ratio", "Share of time in which the tensor cores were active.",
          lambda gpu: gpu.tensor_active_ratio, absent=_NO_GPM),
    gauge("training_gpu_memory_bandwidth_ratio", "Memory bandwidth in use, as a share of the maximum.",
          lambda gpu: gpu.memory_bandwidth_ratio, absent=_NO_BANDWIDTH),
    gauge("training_gpu_nvlink_receive_bytes_per_second", "Data that the GPU receives over all its NVLinks.",
          lambda gpu: gpu.nvlink_receive_bytes_per_second, unit="bytes", absent=_NO_TRAFFIC),
    gauge("training_gpu_nvlink_transmit_bytes_per_second", "Data that the GPU sends over all its NVLinks.",
          lambda gpu: gpu.nvlink_transmit_bytes_per_second, unit="bytes", absent=_NO_TRAFFIC),
    gauge("training_gpu_pcie_receive_bytes_per_second", "Data that the GPU receives over PCIe.",
          lambda gpu: gpu.pcie_receive_bytes_per_second, unit="bytes", absent=_NO_TRAFFIC),
    gauge("training_gpu_pcie_transmit_bytes_per_second", "Data that the GPU sends over PCIe.",
          lambda gpu: gpu.pcie_transmit_bytes_per_second, unit="bytes", absent=_NO_TRAFFIC),
    gauge("training_gpu_memory_used_bytes", "GPU memory in use, by all processes.",
          lambda gpu: gpu.memory_used_bytes),
    gauge("training_gpu_memory_total_bytes", "Total memory of the GPU.", lambda gpu: gpu.memory_total_bytes),
    gauge("training_gpu_power_watts", "Power draw of the GPU.", lambda gpu: gpu.power_watts),
    gauge("training_gpu_power_limit_watts", "Power limit of the GPU that holds now.",
          lambda gpu: gpu.power_limit_watts),
    gauge("training_gpu_temperature_celsius", "Temperature of the GPU.", lambda gpu: gpu.temperature_celsius),
    gauge("training_gpu_memory_temperature_celsius", "Temperature of the GPU's memory.",
          lambda gpu: gpu.memory_temperature_celsius),
    gauge("training_gpu_sm_clock_hertz", "Clock frequency of the SMs.", lambda gpu: gpu.sm_clock_hertz),
    gauge("training_gpu_sm_clock_max_hertz", "Maximum clock frequency of the SMs.",
          lambda gpu: gpu.sm_clock_max_hertz),
    gauge("training_gpu_memory_clock_hertz", "Clock frequency of the GPU's memory.",
          lambda gpu: gpu.memory_clock_hertz),
    gauge("training_gpu_throttled", "1 for each reason that limits the clocks right now, 0 for the others.",
          lambda gpu: gpu.throttled, label=MetricLabel("reason", THROTTLE_REASONS), absent=_NOT_AMD,
          details="A low clock on an idle GPU is not throttling."),
    counter("training_gpu_power_violation_seconds_total", "Time in which the power limit reduced the clocks.",
            lambda gpu: gpu.power_violation_seconds, from_zero=False, absent=_NOT_AMD,
            details="Since the driver was loaded."),
    counter("training_gpu_thermal_violation_seconds_total", "Time in which heat reduced the clocks.",
            lambda gpu: gpu.thermal_violation_seconds, from_zero=False, absent=_NOT_AMD,
            details="Since the driver was loaded."),
    counter("training_gpu_ecc_corrected_errors_total", "Errors of the GPU's memory that ECC has corrected.",
            lambda gpu: gpu.ecc_corrected_errors_total, from_zero=False, absent=_NO_ECC,
            details="Since the driver was loaded."),
    counter("training_gpu_ecc_uncorrected_errors_total", "Errors of the GPU's memory that ECC could not correct.",
            lambda gpu: gpu.ecc_uncorrected_errors_total, from_zero=False, absent=_NO_ECC,
            details="Since the driver was loaded."),
    counter("training_gpu_corrected_remapped_rows_total",
            "Rows of the GPU's memory that were replaced because of corrected errors.",
            lambda gpu: gpu.corrected_remapped_rows_total, from_zero=False, absent=_NO_REMAPPING,
            details="Over the life of the GPU."),
    counter("training_gpu_uncorrected_remapped_rows_total",
            "Rows of the GPU's memory that were replaced because of uncorrected errors.",
            lambda gpu: gpu.uncorrected_remapped_rows_total, from_zero=False, absent=_NO_REMAPPING,
            details="Over the life of the GPU."),
    gauge("training_gpu_row_remap_pending", "1 if a row will be replaced at the next reset of the GPU.",
          lambda gpu: gpu.row_remap_pending, absent=_NO_REMAPPING),
    gauge("training_gpu_row_remap_failure", "1 if a row could not be replaced: the GPU must be exchanged.",
          lambda gpu: gpu.row_remap_failure, absent=_NO_REMAPPING),
    counter("training_gpu_pcie_replays_total", "Packets that had to be sent again over PCIe.",
            lambda gpu: gpu.pcie_replays_total, from_zero=False, details="Since the driver was loaded."),
    gauge("training_gpu_xid", "Newest Xid error of the GPU since the agent started; 0 without one.",
          lambda gpu: gpu.xid, absent=_NOT_AMD, details="45, which follows others, does not replace one. The log's "
          "`gpu_error` lines have all."),
    counter("training_gpu_xid_errors_total", "Xid errors of the GPU since the agent started.",
            lambda gpu: gpu.xid_errors_total, absent=_NOT_AMD),
))
GPU_ENERGY: Final[MetricGroup[EnergyView]] = MetricGroup(
    record=lambda view: view.energy, labels=("gpu", "uuid"), label_values=lambda energy: _place(energy.gpu),
    absent="before Volta; on MIG devices", metrics=(
    counter("training_gpu_energy_joules_total",
            "Energy that the whole GPU has used since the agent's first reading, by category of the ledger.",
            lambda energy: energy.joules, label=MetricLabel("category", CATEGORIES),
            details="Of all processes on it: ranks that share a GPU each show all of it. The split is an estimate by "
            "time."),
))
GPU_PRICE: Final[MetricGroup[RunView]] = MetricGroup(
    record=lambda view: view, absent="without the setting `gpu_hour_price`", metrics=(
    gauge("training_gpu_hour_price", "Price of an hour of one GPU, from the run's settings.",
          lambda view: view.gpu_hour_price,
          details="Use one currency for all runs. One rank counts as one GPU."),
))
TORCH_MEMORY: Final[MetricGroup[TorchMemorySample]] = MetricGroup(
    record=lambda view: view.torch_memory, absent="until a step after CUDA is initialised", metrics=(
    gauge("training_cuda_memory_allocated_bytes", "Memory that tensors occupy on the training thread's device.",
          lambda memory: memory.allocated_bytes),
    gauge("training_cuda_memory_reserved_bytes",
          "Memory that PyTorch's caching allocator has reserved on that device.",
          lambda memory: memory.reserved_bytes),
))

_NO_PROC: Final = "without `/proc`"
_NO_WORKERS: Final = "without workers, and at their first reading"
_NO_FETCH_TIMES: Final = f"{_NO_WORKERS}; for workers started before the agent, or that are threads"
_NO_SCHEDSTAT: Final = "as for `training_loader_worker_busy_ratio`, and where the kernel has no `schedstat`"

FETCHES: Final[MetricGroup[Histogram]] = MetricGroup(
    record=_fetches, absent="before the first fetch that the agent saw end", metrics=(
    histogram("training_loader_fetch_duration_seconds",
              "Time that a worker took to fetch a batch; without workers, that the training thread took.",
              lambda fetches: fetches, details="Covers all workers of the run so far."),
))
WORKERS: Final[MetricGroup[WorkersSample]] = MetricGroup(
    record=lambda view: view.workers, absent=f"{_NO_PROC}, and before the first sample", metrics=(
    gauge("training_loader_workers", "Live DataLoader workers of this rank.", lambda workers: workers.workers,
          unit="processes",
          details="Includes workers that are threads. 0 with `num_workers=0` and between epochs."),
    gauge("training_loader_workers_memory_bytes", "Resident memory of the workers, summed.",
          lambda workers: workers.resident_memory_bytes,
          details="Shared pages are counted once per worker. Workers that are threads count 0."),
    gauge("training_loader_worker_busy_ratio", "Share of time in which the workers were in a fetch.",
          lambda workers: workers.busy_ratio, absent=_NO_FETCH_TIMES,
          details="Mean over the workers. It is the sum of the next three."),
    gauge("training_loader_worker_cpu_ratio", "Share of time in which the workers ran on a core.",
          lambda workers: workers.cpu_ratio, absent=_NO_WORKERS, details="Near 1, the workers are CPU-bound."),
    gauge("training_loader_worker_runnable_ratio",
          "Share of time in which the workers were ready to run but had no core (run-queue delay).",
          lambda workers: workers.runnable_ratio, absent=_NO_SCHEDSTAT,
          details="There are too few cores, or a CPU limit applies."),
    gauge("training_loader_worker_blocked_ratio",
          "Share of time in which the workers were blocked in a fetch: storage, network, locks.",
          lambda workers: workers.blocked_ratio, absent=_NO_SCHEDSTAT),
    gauge("training_loader_ready_batches", "Batches that are ready for the training thread.",
          lambda workers: workers.ready_batches,
          absent=f"{_NO_PROC}; without workers; where the queue cannot report its size"),
    gauge("training_loader_slack_seconds",
          "How long a batch had been ready when it was requested, mean since the last sample.",
          lambda workers: workers.slack_seconds,
          absent="without workers; for workers started before the agent; with `in_order=False`",
          details="It falls before the GPU idles. 0: the training thread waits for every batch."),
    counter("training_loader_fetch_wait_seconds_total",
            "Fetch wait: time waiting for batches whose fetch had not ended when they were requested.",
            lambda workers: workers.deliveries.fetch_wait_seconds,
            details="Up to the end of the fetch. Without the first batch of each epoch."),
    counter("training_loader_transfer_wait_seconds_total",
            "Transfer wait: time waiting for batches whose fetch had ended.",
            lambda workers: workers.deliveries.transfer_wait_seconds,
            details="Pickling, sending, pinning, unpickling, and the sampler and garbage collections in `next()`. Of "
            "the same batches."),
    counter("training_loader_head_of_line_seconds_total",
            "Part of the fetch wait during which a later batch of another worker was ready.",
            lambda workers: workers.deliveries.head_of_line_seconds),
    gauge("training_loader_head_of_line_batches", "Finished batches that wait right now for an earlier batch.",
          lambda workers: workers.head_of_line_batches,
          details="The log's `workers` lines have the worker, and since when."),
))

RESOURCE: Final = MetricLabel("resource", ("cpu", "io", "memory"))
PROCESS: Final[MetricGroup[ProcessSample]] = MetricGroup(record=lambda view: view.process, absent=_NO_PROC, metrics=(
    counter("training_process_cpu_seconds_total", "CPU time of the training process, without its workers.",
            lambda process: process.cpu_seconds, from_zero=False),
    gauge("training_process_resident_memory_bytes", "Resident memory of the training process.",
          lambda process: process.resident_memory_bytes),
    gauge("training_process_threads", "Threads of the training process.", lambda process: process.threads),
))
HOST: Final[MetricGroup[HostSample]] = MetricGroup(record=lambda view: view.host, of_node=True, metrics=(
    gauge("training_host_cpu_ratio", "CPU use of the machine, over all its cores.", lambda host: host.cpu_ratio,
          absent="at the first reading"),
    gauge("training_host_memory_used_bytes", "Memory of the machine that is not available.",
          lambda host: host.memory_used_bytes),
    gauge("training_host_memory_total_bytes", "Total memory of the machine.", lambda host: host.memory_total_bytes),
))
PRESSURE: Final[MetricGroup[PressureSample]] = MetricGroup(
    record=lambda view: view.pressure, of_node=True, metrics=(
    gauge("training_host_pressure_ratio",
          "Share of time in which some task of the machine waited for the resource.",
          lambda pressure: pressure.pressure_ratio or None, label=RESOURCE,
          absent="where the kernel has no `/proc/pressure`; at the first reading"),
    gauge("training_cgroup_cpu_limit_cores", "CPU limit of the cgroup.",
          lambda pressure: pressure.cgroup_cpu_limit, absent="without a limit"),
    gauge("training_cgroup_cpu_throttled_ratio",
          "Share of the enforcement periods in which the cgroup was throttled.",
          lambda pressure: pressure.cgroup_throttled_ratio,
          absent="without a CPU controller; at the first reading"),
    gauge("training_cgroup_memory_limit_bytes", "Memory limit of the cgroup.",
          lambda pressure: pressure.cgroup_memory_limit_bytes, absent="without a limit"),
    gauge("training_cgroup_memory_used_bytes", "Memory in use in the cgroup.",
          lambda pressure: pressure.cgroup_memory_used_bytes, absent="without a memory controller"),
))

WHERE: Final = MetricLabel("where", MEMORY_PARTS)
MEMORY_GROWTH: Final[MetricGroup[MemoryGrowth]] = MetricGroup(
    record=lambda view: view.memory, absent="in the first seconds of training", metrics=(
    gauge("training_memory_growth_bytes_per_second",
          "Lasting growth of memory: 0 for a part that does not grow for good.",
          lambda growth: growth.bytes_per_second, unit="bytes", label=WHERE,
          absent="for a part that the run does not have",
          details="[Memory](causes.md#memory) explains the parts."),
    gauge("training_memory_exhausted_in_seconds",
          "Time until memory is used up, if it goes on growing as it does.",
          lambda growth: growth.exhausted_in_seconds,
          absent="while no memory grows for good, or its end is not in sight",
          details="That of the cgroup, the machine, `/dev/shm` or the GPU, whichever is used up first."),
))

COLLECTOR: Final = MetricLabel(
    "collector", ("nvml", "amdsmi", "host", "process", "workers", "pressure", "torch_memory", "memory")
)
_NO_ATTEMPT: Final = (
    "for a collector that is not used or has nothing to read; before its first attempt"
)

AGENT: Final[MetricGroup[RunView]] = MetricGroup(record=lambda view: view, metrics=(
    counter("telemetry_overhead_seconds_total", "Time that the agent cost, by thread.",
            lambda view: view.totals.overhead_seconds, label=MetricLabel("thread", ("training", "agent")),
            details="`training`: on the training thread, an estimate. `agent`: CPU time of the agent's own threads."),
    counter("telemetry_errors_total", "Failures of the agent's own parts.", lambda view: view.errors,
            label=MetricLabel("source"), absent="for a source that has not failed",
            details="The log's `error` lines have the messages."),
    counter("telemetry_dropped_steps_total", "Steps that the agent dropped because the ring was full.",
            lambda view: view.totals.dropped_steps,
            details="They are in `training_steps_total` and the ledger, but in no histogram."),
    gauge("telemetry_collector_up", "1 if the collector's last attempt worked, else 0.", _up, label=COLLECTOR,
          absent=_NO_ATTEMPT),
    gauge("telemetry_collector_duration_seconds", "Duration of the collector's last attempt.", _durations,
          label=COLLECTOR, absent=_NO_ATTEMPT),
))
# fmt: on

SECTIONS: Final[dict[str, tuple[MetricGroup[Any], ...]]] = {
    "The training loop": (RUN_INFO, LOOP),
    "Compute": (COMPUTE_SPLIT,),
    "Stalls, changes and snapshots": (STALLS, HANG, CHANGES, SNAPSHOTS),
    "Attempts of the run": (ATTEMPTS,),
    "The GPUs of this rank": (GPU_INFO, GPU, GPU_ENERGY, GPU_PRICE, TORCH_MEMORY),
    "The DataLoader and its workers": (WORKERS, FETCHES),
    "The process and the machine": (PROCESS, HOST, PRESSURE, MEMORY_GROWTH),
    "The agent itself": (AGENT,),
}
"""All metrics, in the order of docs/METRICS.md and of the exposition."""

GPU_GROUPS: Final[tuple[MetricGroup[Any], ...]] = (GPU_INFO, GPU, GPU_ENERGY)
"""The groups that each GPU of a rank has."""

GROUPS: Final[tuple[MetricGroup[Any], ...]] = tuple(group for groups in SECTIONS.values() for group in groups)


def metrics() -> Iterator[tuple[MetricGroup[Any], Metric[Any]]]:
    """Each metric with its group, in the order of the table."""
    return ((group, metric) for group in GROUPS for metric in group.metrics)
