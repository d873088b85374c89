"""The evidence from which causes are named: one rank over one window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telemetry.core.tick import RankPace


@dataclass(frozen=True, slots=True)
class EpochEvidence:
    """Epoch boundaries and the waits at them.

    Attributes:
        boundaries: iterations that began. ``left``: iterations that were left before their end.
        boundary_wait_seconds: wait at the boundaries: start and end of an iteration, and its first batch.
        near_boundary_wait_seconds: how much longer than others the first and last batches of epochs were waited for:
            workers start, and end, one by one.
        boundary_ratio: share of the loop spent in waits at boundaries, if one epoch is longer than the window; 0.0 if
            that has not been seen.
    """

    boundaries: int
    left: int
    boundary_wait_seconds: float
    near_boundary_wait_seconds: float
    boundary_ratio: float


@dataclass(frozen=True, slots=True)
class DeliveryEvidence:
    """Waits for batches, by what they were for. The sums are 0.0 if no batch could be matched with its fetch.

    Attributes:
        outlier_wait_seconds: wait in single steps that waited much longer than those around them.
        fetch_wait_seconds, transfer_wait_seconds, transfer_wait_long_fetch_seconds, head_of_line_wait_seconds: see
            `Deliveries`. ``blocking_worker`` is the worker that was waited for longest with head-of-line blocking.
        transfer_seconds: mean time to transfer a batch of an idle worker. ``transfer_from_busy_seconds``: of a worker
            that is in another fetch. None if there was no such batch.
        release_seconds: mean time of the training thread to free a batch after the next has come. It is part of the
            compute. None if it was not seen.
        receive_cpu_seconds: mean CPU time of the training thread to receive and unpickle a batch of workers; None if no
            batch was timed.
        ready_batches: mean number of ready batches. ``slack_seconds``: mean time that a batch was ready.
    """

    outlier_wait_seconds: float
    fetch_wait_seconds: float
    transfer_wait_seconds: float
    transfer_wait_long_fetch_seconds: float
    head_of_line_wait_seconds: float
    blocking_worker: int | None
    transfer_seconds: float | None
    transfer_from_busy_seconds: float | None
    release_seconds: float | None
    receive_cpu_seconds: float | None
    ready_batches: float | None
    slack_seconds: float | None


@dataclass(frozen=True, slots=True)
class SamplerEvidence:
    """The sampler of a loader with workers. It runs on the training thread.

    Attributes:
        wait_seconds: time in mid-epoch waits, extrapolated from the timed batches; None if no batch was timed.
        boundary_wait_seconds: time in waits at epoch boundaries. ``boundary_ratio``: its part of the epochs'
            `boundary_ratio`.
        cpu_ratio: share of its time on a core.
    """

    wait_seconds: float | None
    boundary_wait_seconds: float
    boundary_ratio: float
    cpu_ratio: float | None


@dataclass(frozen=True, slots=True)
class CheckpointEvidence:
    """Checkpoints.

    Attributes:
        seconds: time to write them. ``steps``: how many steps had one.
        interval_seconds: training time between the newest checkpoint and the one before; 0.0 if the window has
            several.
        first_seconds: mean time of the first checkpoints of the run; 0.0 before there are any.
        extra_compute_seconds: how much longer the compute of their steps took than that of other steps: work for a
            checkpoint other than writing it.
    """

    seconds: float
    steps: int
    interval_seconds: float
    first_seconds: float
    extra_compute_seconds: float


@dataclass(frozen=True, slots=True)
class GarbageEvidence:
    """Garbage collection on the training thread.

    Attributes:
        seconds: time of all collections. ``wait_seconds``: during requests in mid-epoch. ``boundary_wait_seconds``: at
            epoch boundaries.
    """

    seconds: float
    wait_seconds: float
    boundary_wait_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerEvidence:
    """The DataLoader workers.

    Attributes:
        count: number of workers. ``allowed_cores``: number of cores that they may use, if it is lower than that of this
            rank.
        fetches: batches that they finished. ``fetch_seconds``: mean time of a worker for one batch.
            ``fetch_cpu_seconds``: its CPU time.
        longest_fetch_seconds: upper bound of all fetches. ``slowest_fetch_seconds``: mean of the slowest worker.
            ``long_fetch_seconds``: fetches of more than a second, by how long they were in progress when last seen.
            ``fetching_seconds``: how long a fetch has been in progress at the end of the window.
        read_bytes: read from storage by all workers. ``written_bytes``: written, including pickled batches.
        busy_ratio: share of their time in fetches.
        cpu_ratio, runnable_ratio, blocked_ratio: shares of the time in fetches. If the kernel does not separate running
            from run-queue delay, ``runnable_ratio`` is None and the other two come from CPU time alone.
        pickling_cores: cores that they use outside of fetches, to pickle finished batches.
    """

    count: int
    allowed_cores: int | None
    fetches: int | None
    fetch_seconds: float | None
    fetch_cpu_seconds: float | None
    longest_fetch_seconds: float | None
    slowest_fetch_seconds: float | None
    long_fetch_seconds: tuple[float, ...]
    fetching_seconds: float
    read_bytes: float | None
    written_bytes: float | None
    busy_ratio: float | None
    cpu_ratio: float | None
    runnable_ratio: float | None
    blocked_ratio: float | None
    pickling_cores: float | None


@dataclass(frozen=True, slots=True)
class CpuEvidence:
    """The use of the cores.

    Attributes:
        cores: cores that this rank may use and no other process uses. ``cores_of_others``: cores that others use.
        host_ratio: use of all cores of the machine.
        process_seconds_per_step: CPU time of the training process (without its workers) for one step, without startup,
            evaluations and checkpoints.
        run_queue_delay_seconds: how long the training thread was runnable without a core.
        throttled_ratio: share of the periods in which the cgroup's CPU quota was used up.
    """

    cores: float
    cores_of_others: float | None
    host_ratio: float | None
    process_seconds_per_step: float | None
    run_queue_delay_seconds: float | None
    throttled_ratio: float | None


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """The GPU of this rank.

    Attributes:
        idle_seconds: time in the loop without a kernel and without waiting for a batch.
        slowed_seconds: time lost because the GPU's clock was throttled.
    """

    utilization_ratio: float | None
    idle_seconds: float | None
    slowed_seconds: float | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank over one window. Values that were not measured are None.

    Attributes:
        seconds: length of the window: the sum of wait, compute, evaluation and so on.
        batches_per_step: mostly 1. More if a loop takes several batches per step: from loaders side by side, or between
            two calls of ``step()``. If there are loaders with workers, only their batches count.
        source: where batches come from, see `Conditions`. ``settings``: the settings of that loader.
        own_fetch_cpu_ratio: share of the training thread's own fetches that ran on a core.
        pace: the pace of this rank. ``peers``: the other ranks that it may wait for. ``earlier_paces``: of this rank,
            at the time of the peers' paces that are older.
    """

    seconds: float
    steps: int
    batches_per_step: float
    wait_seconds: float
    exposed_wait_seconds: float | None
    compute_seconds: float
    evaluation_seconds: float
    source: str | None
    settings: dict[str, Any]
    own_fetch_cpu_ratio: float | None
    epochs: EpochEvidence
    delivery: DeliveryEvidence
    sampler: SamplerEvidence
    checkpoints: CheckpointEvidence
    garbage: GarbageEvidence
    workers: WorkerEvidence
    cpu: CpuEvidence
    gpu: GpuEvidence
    pace: RankPace
    peers: tuple[RankPace, ...]
    earlier_paces: tuple[RankPace, ...] = ()

    @property
    def loop_seconds(self) -> float:
        """Seconds of the training loop."""
        return self.wait_seconds + self.compute_seconds

    @property
    def loop_and_checkpoint_seconds(self) -> float:
        """Seconds of the loop and of checkpoints, scaled so that the window has as many checkpoints as the run."""
        return max(self.loop_seconds + self.checkpoints.seconds, self.checkpoints.interval_seconds)

    @property
    def mid_epoch_wait_seconds(self) -> float:
        """Seconds of waiting outside of epoch boundaries; below 0.0 if the clocks differ."""
        return self.wait_seconds - self.epochs.boundary_wait_seconds

    @property
    def on_gpu(self) -> bool:
        """Whether the run is known to use a GPU."""
        return self.gpu.utilization_ratio is not None
