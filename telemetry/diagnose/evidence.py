"""What the causes are named from: one rank over one window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telemetry.core.tick import RankPace


@dataclass(frozen=True, slots=True)
class EpochEvidence:
    """Where epochs begin and end.

    Attributes:
        boundaries: iterations that were begun. ``left``: those that were left in the middle.
        boundary_wait_seconds: of the wait, at the boundaries: starting and ending an iteration, and its first batch.
        near_boundary_wait_seconds: how much longer the first and last batches of epochs were waited for than others:
            workers start, and end, one by one.
        boundary_ratio: share of the loop that waits at boundaries take where one epoch is longer than the window; 0.0
            where that has not been seen.
    """

    boundaries: int
    left: int
    boundary_wait_seconds: float
    near_boundary_wait_seconds: float
    boundary_ratio: float


@dataclass(frozen=True, slots=True)
class DeliveryEvidence:
    """Waits for batches, by what they were for. The sums are 0.0 where no batch could be matched with its fetch.

    Attributes:
        outlier_wait_seconds: in single steps that waited much longer than those around them.
        fetch_wait_seconds, transfer_wait_seconds, transfer_wait_long_fetch_seconds, head_of_line_wait_seconds: see
            `Deliveries`. ``head_of_line_worker`` is the worker that was waited for most often.
        transfer_seconds: mean time to transfer a batch whose worker is idle; ``transfer_from_busy_seconds``: of one
            whose worker is in another fetch. None where there was none.
        release_seconds: mean time the training thread takes to free a batch once the next has come, which is in the
            compute; None where that was not seen.
        receive_cpu_seconds: mean CPU time of the training thread to receive and unpickle a batch of workers; None
            where none was timed.
        ready_batches: mean number of batches that lay ready. ``slack_seconds``: mean time that a batch lay ready.
    """

    outlier_wait_seconds: float
    fetch_wait_seconds: float
    transfer_wait_seconds: float
    transfer_wait_long_fetch_seconds: float
    head_of_line_wait_seconds: float
    head_of_line_worker: int | None
    transfer_seconds: float | None
    transfer_from_busy_seconds: float | None
    release_seconds: float | None
    receive_cpu_seconds: float | None
    ready_batches: float | None
    slack_seconds: float | None


@dataclass(frozen=True, slots=True)
class SamplerEvidence:
    """The sampler of a loader with workers, which runs on the training thread.

    Attributes:
        wait_seconds: of the waits in mid-epoch, extrapolated from the batches that were timed; None where none was.
        boundary_wait_seconds: of the waits at epoch boundaries. ``boundary_ratio``: of the epochs' `boundary_ratio`.
        cpu_ratio: how much of that ran on a core.
    """

    wait_seconds: float | None
    boundary_wait_seconds: float
    boundary_ratio: float
    cpu_ratio: float | None


@dataclass(frozen=True, slots=True)
class CheckpointEvidence:
    """Checkpoints.

    Attributes:
        seconds: spent in writing them. ``steps``: how many steps had one.
        interval_seconds: of training, between the newest checkpoint and the one before; 0.0 where the window has
            several.
        first_seconds: mean time of the first of the run; 0.0 before there are any.
        extra_compute_seconds: how much longer their steps took to compute than as many others: what is done for a
            checkpoint besides writing it.
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
        seconds: of it. ``wait_seconds``: of that, while a batch was requested in mid-epoch; ``boundary_wait_seconds``:
            at epoch boundaries.
    """

    seconds: float
    wait_seconds: float
    boundary_wait_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerEvidence:
    """The DataLoader workers.

    Attributes:
        count: how many there are. ``allowed_cores``: on how many cores they may run, where that is fewer than this rank
            may use.
        fetches: batches they finished. ``fetch_seconds``: mean time of a worker for one batch; ``fetch_cpu_seconds``:
            of that, on a core.
        longest_fetch_seconds: no fetch took longer. ``slowest_fetch_seconds``: the mean of the worker that takes
            longest. ``long_fetch_seconds``: the fetches that took more than a second, by how long they were in progress
            when last seen. ``fetching_seconds``: how long a fetch has been in progress at the end of the window.
        read_bytes: read from storage by all workers; ``written_bytes``: written, pickled batches among them.
        busy_ratio: share of their time in fetches.
        cpu_ratio, runnable_ratio, blocked_ratio: shares of the time in fetches. Where the kernel does not tell running
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
    """Who uses the cores.

    Attributes:
        cores: that this rank may use, and no other process does. ``cores_of_others``: those that others use.
        host_ratio: use of all cores of the machine.
        process_seconds_per_step: CPU time of the training process (without its workers) for one step. Start-up,
            evaluations and checkpoints are not in it.
        run_queue_delay_seconds: how long the training thread was runnable and had no core.
        throttled_ratio: share of the periods of the cgroup's CPU quota in which it was used up.
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
        idle_seconds: of the loop without a kernel, though no batch was waited for.
        slowed_seconds: what the lower clock of a GPU that is held back has cost.
    """

    utilization_ratio: float | None
    idle_seconds: float | None
    slowed_seconds: float | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank over one window. What nothing told is None.

    Attributes:
        seconds: length of the window; it is the sum of wait, compute, evaluation and so on.
        batches_per_step: 1, but where a loop takes several: of loaders side by side, between two calls of ``step()``.
            Those of loaders without workers do not count where there are others.
        source: where batches come from, see `Conditions`; ``settings``: of that loader.
        own_fetch_cpu_ratio: of the training thread's own fetches, how much ran on a core.
        pace: of this rank; ``peers``: of the others on its node.
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

    @property
    def loop_seconds(self) -> float:
        """Seconds of the training loop."""
        return self.wait_seconds + self.compute_seconds

    @property
    def loop_and_checkpoint_seconds(self) -> float:
        """Seconds of the loop and of writing checkpoints, over a window that holds as many of them as the run does."""
        return max(self.loop_seconds + self.checkpoints.seconds, self.checkpoints.interval_seconds)

    @property
    def mid_epoch_wait_seconds(self) -> float:
        """Seconds of waiting that are not at an epoch boundary; less than 0.0 where the clocks differ."""
        return self.wait_seconds - self.epochs.boundary_wait_seconds

    @property
    def on_gpu(self) -> bool:
        """Whether the run uses a GPU, as far as is known."""
        return self.gpu.utilization_ratio is not None
