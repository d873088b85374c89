"""What the causes are named from: one rank over one window, added up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telemetry.records import RankPace


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank over one window. Sums are seconds; what nothing told is None.

    Attributes:
        late, moved, moved_from_long, head_of_line: waits for workers' batches, taken apart, see `Deliveries`; zeros
            where none could be matched with its fetch.
        checkpoints: how many steps had one.
        checkpoint_interval: seconds of training between the newest checkpoint and the one before; 0.0 where the window
            has several. ``early_checkpoint``: mean time of the first of the run; 0.0 before there are any.
        around_edges: how much longer the first and last batches of epochs were waited for than others: workers that
            start, and end, one by one.
        edge_share: of the loop, what waits at the edges of epochs take where one epoch is longer than the window; 0.0
            where that has not been seen.
        around_checkpoints: how much longer these took to compute than as many others: what is done for a checkpoint
            besides writing it.
        moving_seconds: mean time to move a batch whose worker is idle; ``moving_from_busy_seconds``: of one whose
            worker is in another fetch. None where there was none.
        freeing_seconds: mean time the training thread takes to free a batch once the next has come, which is in
            ``compute``; None where that was not seen.
        garbage_wait: of ``garbage``, while a batch was asked for in mid-epoch; ``edge_garbage``: where epochs begin.
        sampler: of the waits in mid-epoch, how long the training thread ran the sampler of a loader with workers, by
            the batches that were timed; None where none was. ``edge_sampler``: of ``edge_wait``;
            ``edge_share_of_sampler``: of ``edge_share``. ``sampler_cpu_share``: how much of that ran on a core.
        receiving_cpu_seconds: mean CPU time of the training thread to receive and unpickle a batch of workers; None
            where none was timed.
        own_fetch_cpu_share: of the training thread's own fetches, how much ran on a core.
        batches_per_step: 1, but where a loop takes several: of loaders side by side, between two calls of ``step()``.
            Those of loaders without workers do not count where there are others.
        fetch_seconds: mean time of a worker for one batch; ``fetch_cpu_seconds`` of it on a core. ``longest_fetch``:
            none took longer. ``slowest_fetch``: the mean of the worker that takes longest. ``read_bytes``: read from
            storage by all workers in the window; ``written_bytes``: written by them, pickled batches among it.
        worker_cores: on how many the workers may run, where that is fewer than ``cores``.
        cpu_share, runnable_share, blocked_share: of the time the workers spent in fetches. Where the kernel does not
            tell running from waiting for a core, ``runnable_share`` is None and the other two come from CPU time alone.
        packing_cores: that the workers use outside of fetches, to pack finished batches.
        throttled_ratio: of the periods of the cgroup's CPU quota, those in which it was used up.
        ready_batches: mean number of batches that lay ready.
        stuck_seconds: for how long a fetch has been in progress at the end of the window. ``long_fetches``: those that
            took more than a second, by how long they were in progress when last seen; the one that still is, too.
        process_cpu_per_step: CPU time of the training process (without its workers) for one step; what it took to
            start, to evaluate or to write a checkpoint is not in it.
        own_runnable: how long the training thread could have run, and had no core.
        host_cpu_ratio: of all cores of the machine.
        cores: that this rank may use, and that nobody else on the machine does; ``cores_of_others``: what those use.
        gpu_idle: seconds of the loop without a kernel, though no batch was waited for. ``gpu_slowed``: what the lower
            clock of a GPU that is held back has cost.
        pace: of this rank; ``peers``: of the others on its node.
    """

    seconds: float
    steps: int
    batches_per_step: float
    wait: float
    exposed: float | None
    edge_wait: float
    edges: int
    edge_share: float
    around_edges: float
    left: int
    late_wait: float
    late: float
    moved: float
    moved_from_long: float
    head_of_line: float
    moving_seconds: float | None
    moving_from_busy_seconds: float | None
    freeing_seconds: float | None
    compute: float
    evaluation: float
    checkpoint: float
    checkpoints: int
    checkpoint_interval: float
    early_checkpoint: float
    around_checkpoints: float
    garbage: float
    garbage_wait: float
    edge_garbage: float
    sampler: float | None
    edge_sampler: float
    edge_share_of_sampler: float
    sampler_cpu_share: float | None
    receiving_cpu_seconds: float | None
    source: str | None
    own_fetch_cpu_share: float | None
    workers: int
    worker_cores: int | None
    fetches: int | None
    fetch_seconds: float | None
    fetch_cpu_seconds: float | None
    longest_fetch: float | None
    slowest_fetch: float | None
    read_bytes: float | None
    written_bytes: float | None
    busy_ratio: float | None
    packing_cores: float | None
    cpu_share: float | None
    runnable_share: float | None
    blocked_share: float | None
    ready_batches: float | None
    slack_seconds: float | None
    head_of_line_worker: int | None
    stuck_seconds: float
    long_fetches: tuple[float, ...]
    process_cpu_per_step: float | None
    own_runnable: float | None
    host_cpu_ratio: float | None
    cores: float
    cores_of_others: float | None
    throttled_ratio: float | None
    gpu_utilization_ratio: float | None
    gpu_idle: float | None
    gpu_slowed: float | None
    settings: dict[str, Any]
    pace: RankPace
    peers: tuple[RankPace, ...]

    @property
    def loop(self) -> float:
        """Seconds of the training loop."""
        return self.wait + self.compute

    @property
    def with_checkpoints(self) -> float:
        """Seconds of the loop and of writing checkpoints, over a window that holds as many of them as the run does."""
        return max(self.loop + self.checkpoint, self.checkpoint_interval)

    @property
    def on_gpu(self) -> bool:
        """Whether the run uses a GPU, as far as is known."""
        return self.gpu_utilization_ratio is not None

    def as_log_field(self) -> dict[str, Any]:
        """The figures that are there, with unit suffixes, for the log."""
        seconds = (
            "wait", "exposed", "edge_wait", "late_wait", "late", "moved", "moved_from_long", "head_of_line",
            "compute", "checkpoint", "around_checkpoints", "garbage", "own_runnable", "gpu_idle", "gpu_slowed",
            "longest_fetch", "slowest_fetch", "evaluation", "process_cpu_per_step", "checkpoint_interval",
            "early_checkpoint", "around_edges", "garbage_wait", "edge_garbage", "sampler", "edge_sampler",
        )  # fmt: skip
        plain = (
            "steps", "batches_per_step", "source", "workers", "worker_cores", "edges", "left", "fetch_seconds",
            "fetch_cpu_seconds", "moving_seconds", "moving_from_busy_seconds", "freeing_seconds", "ready_batches",
            "slack_seconds", "head_of_line_worker", "stuck_seconds", "cores", "cores_of_others", "settings",
            "read_bytes", "written_bytes", "fetches", "checkpoints", "edge_share", "packing_cores",
            "receiving_cpu_seconds", "edge_share_of_sampler",
        )  # fmt: skip
        ratios = ("busy_ratio", "throttled_ratio", "gpu_utilization_ratio", "host_cpu_ratio")
        shares = ("cpu_share", "runnable_share", "blocked_share")
        field = {f"{name}_seconds": getattr(self, name) for name in seconds}
        field |= {name: getattr(self, name) for name in (*plain, *ratios)}
        field |= {f"worker_{name.removesuffix('_share')}_ratio": getattr(self, name) for name in shares}
        field["own_fetch_cpu_ratio"] = self.own_fetch_cpu_share
        field["sampler_cpu_ratio"] = self.sampler_cpu_share
        field["window_seconds"] = self.seconds
        field["long_fetches"] = [round(seconds, 3) for seconds in self.long_fetches]
        field["where"] = self.pace.where
        if self.peers:
            field["paces"] = [asdict(pace) for pace in (self.pace, *self.peers)]
        told = {name: round(v, 6) if isinstance(v, float) else v for name, v in field.items() if v is not None}
        if self.cpu_share is not None and self.runnable_share is None:
            told["worker_runnable_ratio"] = None  # no schedstat: what is blocked may be without a core
        return told
