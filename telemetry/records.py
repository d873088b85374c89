"""The vocabulary: what the parts of the agent hand to one another.

Frozen, slotted and free of behaviour; this module imports nothing of ours. A field that was not measured is
``None``, never 0. Units stand in the names: ``_seconds``, ``_bytes``, ``_ratio`` (0..1), ``_ns``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

STARTUP: Final = "startup"
DATA_WAIT: Final = "data_wait"
COMPUTE: Final = "compute"
EVALUATION: Final = "evaluation"
CHECKPOINT: Final = "checkpoint"
OTHER: Final = "other"

CATEGORIES: Final = (STARTUP, DATA_WAIT, COMPUTE, EVALUATION, CHECKPOINT, OTHER)
"""The categories of the ledger. Every second of a rank is in exactly one of them."""

CAUSES: Final = (
    "loader_on_training_thread",
    "workers_cpu_bound",
    "workers_io_bound",
    "workers_throttled",
    "worker_startup",
    "uneven_batches",
    "batch_transfer",
    "worker_stuck",
    "source_slow",
    "straggler",
    "checkpoint",
    "gc_pause",
    "host_bound",
    "gpu_throttled",
    "unknown",
)
"""Why a run loses time: the values of the ``cause`` label."""

EVENTS: Final = (
    "run_start",
    "window",
    "gpu",
    "host",
    "workers",
    "phase",
    "stall_open",
    "stall_close",
    "snapshot",
    "error",
    "run_end",
)
"""The values of ``event`` in a log line."""


RECORDED: Final = "recorded"
REFUSED: Final = "refused"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"

SNAPSHOT_RESULTS: Final = (RECORDED, REFUSED, FAILED, SKIPPED)
"""How a snapshot ends on a rank, the values of the ``result`` label: its trace is there; something else had to come
first (another profiler, a limit); it went wrong; or its steps did not come here."""

THROTTLE_REASONS: Final = (
    "sw_power_cap",
    "hw_slowdown",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "sync_boost",
    "applications_clocks",
    "display_clocks",
)
"""Why a GPU's clocks can be held back: the values of the ``reason`` label. An idle GPU's low clock is none."""

SLOWER: Final = "slower"
SNAPSHOT_OFF_REASONS: Final = (SLOWER,)
"""Why a run takes no more snapshots: the values of the ``reason`` label. ``slower``: steps stayed slower after one."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is in its job.

    Attributes:
        run: name of the training job, the same on all of its ranks.
        rank: global rank, 0 for a single process.
        local_rank: rank on this node.
        world_size: number of ranks of the job.
        node: name of the machine.
        pid: process id.
        launcher: what the above was read from: ``torchrun``, ``slurm``, ``mpi``, ``lightning``, ``spawn``,
            ``kubernetes`` or ``plain``.
        rank_source: who says so: ``launcher``; ``torch.distributed``; ``default``, nobody; ``assigned``, the rank that
            this process claims is held by another one of its node, and it is shown under a free number.
    """

    run: str
    rank: int
    local_rank: int
    world_size: int
    node: str
    pid: int
    launcher: str
    rank_source: str = "launcher"

    @property
    def told(self) -> bool:
        """Whether a launcher or torch.distributed has said which rank this is."""
        return self.rank_source in {"launcher", "torch.distributed"}


@dataclass(frozen=True, slots=True)
class Step:
    """One closed training step. ``seconds`` = wait + compute; evaluation and checkpoints in it are not counted."""

    seconds: float
    wait_seconds: float
    checkpoint: bool = False
    """Whether one was written in it."""


class DroppedSpans(NamedTuple):
    """What one stretch of spans that found no room in the ring adds up to: from its first span to its newest.

    Stamps are monotonic nanoseconds; categories are indices into `CATEGORIES`.

    Attributes:
        stretch: number of the stretch in this run, from 1. The spans of one stretch follow each other without a span
            that was kept in between.
        start_ns, end_ns: start of its first span, end of its newest.
        ns: time by category. The sum is ``end_ns - start_ns``.
        first, category: what the training thread was in during the first span, and after the newest.
        entered_ns: when it entered ``category``; 0 if it has been in it since the start.
        steps, batches: steps that ended, and training batches that came.
        last_step_ns: when the newest of those steps ended; 0 for none.
        open: whether a step is open after the newest span; ``opened``: whether a step was opened in this stretch.
        wait_ns, compute_ns, checkpoint: of the newest step, the part in this stretch, and whether that part has a
            checkpoint in it.
    """

    stretch: int
    start_ns: int
    end_ns: int
    ns: tuple[int, ...]
    first: int
    category: int
    entered_ns: int
    steps: int
    batches: int
    last_step_ns: int
    open: bool
    opened: bool
    wait_ns: int
    compute_ns: int
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One closed evaluation, checkpoint or named phase, with its start on the monotonic clock."""

    name: str
    category: str
    start_ns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; ``max`` is exact, the others within 1 % of the true value."""

    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of this rank's GPU.

    Attributes:
        sm_active_source: where ``sm_active_ratio`` comes from: ``gpm`` (hardware counters), ``process`` (the share of
            time this process ran a kernel) or None when there is no reading.
        throttled: the reasons the clocks are held back right now, from `THROTTLE_REASONS`.
    """

    index: int
    uuid: str
    name: str
    utilization_ratio: float | None = None
    sm_active_ratio: float | None = None
    sm_active_source: str | None = None
    sm_occupancy_ratio: float | None = None
    tensor_active_ratio: float | None = None
    memory_bandwidth_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    throttled: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class HostSample:
    """CPU and memory of the machine. ``cpu_ratio`` is over all cores, since the previous sample."""

    cpu_ratio: float | None
    cpu_count: int
    memory_used_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """This process.

    Attributes:
        cpu_seconds: user + system time since it began.
        runnable_seconds: how long its training thread could have run, and had no core; None where the kernel does not
            tell.
    """

    cpu_seconds: float
    resident_memory_bytes: int
    threads: int
    runnable_seconds: float | None = None


FETCH_BUCKETS: Final = tuple((1 << 20 + power) / 1e9 for power in range(17))
"""Upper bounds, seconds, of the fetch histogram: 1.05 ms doubling up to 68.7 s, so that a worker finds the bucket
from the highest bit of the nanoseconds."""


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """What one DataLoader worker has written down of itself. Stamps are monotonic nanoseconds, 0 for none.

    Attributes:
        wall_ns: of the fetches that have ended; ``fetching_since_ns`` is the start of the one in progress.
        ended: fetches that have ended, those that raised included; the first is number 0.
        epoch: how many epochs it has begun; epoch ``e`` began with fetch number ``epoch_began[e % len]``.
        recent_started_ns, recent_finished_ns: of the newest fetches that have ended; number ``n`` is at ``n % len``.
    """

    worker: int
    pid: int
    tid: int
    fetches: int
    wall_ns: int
    fetching_since_ns: int
    epoch: int
    ended: int
    epoch_began: tuple[int, ...]
    histogram: tuple[int, ...]
    recent_started_ns: tuple[int, ...]
    recent_finished_ns: tuple[int, ...]


STACK_END: Final = b"end of stacks\n"
"""What a worker ends its answer with."""


@dataclass(frozen=True, slots=True)
class StackPort:
    """How a DataLoader worker can be asked for its Python stacks (`attach.worker_stacks`).

    Attributes:
        ask: the signal that Python handles. ``force``: the one that is handled while no Python runs.
        file, inode: the worker's descriptor that its stacks go to, and which file that has to be.
    """

    ask: int
    force: int
    file: int
    inode: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch the training thread has taken from its workers.

    Attributes:
        epoch: of its loader's iterator, the first is 1; ``number``: of the batch in the epoch, the first is 0.
        requested_ns, arrived_ns: begin and end of the wait, monotonic.
    """

    epoch: int
    number: int
    requested_ns: int
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Batches that were taken, by what they had behind them. Sums over the batches, seconds.

    Attributes:
        slack: how long they had lain ready when they were asked for.
        late: waits until their fetch had ended. ``moved``: waits from then on (pickling, sending, pinning).
        head_of_line: of ``late``, while a later batch lay finished; ``worker`` is the one waited for most.
        from_busy: batches whose worker was in another fetch as they were moved; ``moved_from_busy``: of ``moved``;
            ``moved_from_long``: of that, those whose worker was in a fetch much longer than its usual ones.
    """

    batches: int
    slack: float
    late: float
    moved: float
    from_busy: int
    moved_from_busy: float
    moved_from_long: float
    head_of_line: float
    worker: int | None


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative-free counts: one per bound of ``bounds``, and one more for what lies above the last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class WorkersSample:
    """The live DataLoader workers of this rank.

    Ratios are means over the training workers, of the wall clock since the last sample; None at the first, and where
    the kernel or the workers do not tell.

    Attributes:
        workers: all of them. ``training_workers``: those of loaders that give training batches (of all, while none
            has), without the idle ones of an evaluation.
        busy_ratio: in a fetch; it is the sum of the next three.
        cpu_ratio: running. ``runnable_ratio``: ready to run, without a core. ``blocked_ratio``: waiting for
            something else, mostly storage or network.
        packing_ratio: running outside of fetches: a thread of each worker packs its finished batches.
        ready_batches: batches that lie ready in the result queues; None where the queue cannot tell.
        fetching_seconds: how long the longest fetch in progress has taken.
        fetches_total, fetch_duration: of all workers of the run so far.
        slack_seconds: how long a batch had lain ready when it was asked for, the mean since the last sample.
        late_seconds_total, moved_seconds_total, head_of_line_seconds_total: of the run so far, see `Deliveries`; of the
            batches that could be matched with their fetches, ``matched_total``. ``from_busy_total``: of those;
            ``moved_from_busy_seconds_total``, ``moved_from_long_seconds_total``: of ``moved``.
        head_of_line_batches: finished batches that wait right now behind one that is not, in ``head_of_line_worker``,
            whose fetch has taken ``head_of_line_since_seconds``.
        read_bytes_per_second: read from storage by all workers.
        written_bytes_per_second: written by all workers: into files, and batches, as far as they are pickled, into the
            pipe to the training process. The tensors of a batch lie in shared memory and are not among them.
        fetched: of each training worker, by its pid: fetches so far, and the seconds they took.
        allowed_cores: on how many the training workers may run, all together; None where the kernel does not tell.
    """

    workers: int
    training_workers: int
    resident_memory_bytes: int
    ready_batches: int | None
    fetching_seconds: float
    fetches_total: int
    fetch_duration: Histogram | None
    cpu_ratio: float | None
    busy_ratio: float | None
    runnable_ratio: float | None
    blocked_ratio: float | None
    read_bytes_per_second: float | None
    slack_seconds: float | None = None
    late_seconds_total: float = 0.0
    moved_seconds_total: float = 0.0
    head_of_line_seconds_total: float = 0.0
    matched_total: int = 0
    from_busy_total: int = 0
    moved_from_busy_seconds_total: float = 0.0
    moved_from_long_seconds_total: float = 0.0
    head_of_line_batches: int = 0
    head_of_line_worker: int | None = None
    head_of_line_since_seconds: float | None = None
    packing_ratio: float | None = None
    written_bytes_per_second: float | None = None
    fetched: dict[int, tuple[int, float]] = field(default_factory=dict)
    allowed_cores: int | None = None


@dataclass(frozen=True, slots=True)
class PressureSample:
    """Pressure stall information and cgroup limits.

    Attributes:
        pressure_ratio: by resource (``cpu``, ``io``, ``memory``), the share of time some task waited for it.
        cgroup_cpu_limit: cores the cgroup may use, None without a limit. ``cgroup_cpu_used``: cores that all of it has
            used, other ranks too; None without a limit.
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
class SourceHealth:
    """How one collector fares. ``up`` is None before its first attempt."""

    name: str
    up: bool | None
    duration_seconds: float | None
    reason: str | None


LogFields = dict[str, Any]
"""The event's own fields of a log line: JSON values only."""


@dataclass(frozen=True, slots=True)
class StallView:
    """Stalls so far: the cause of the one that is open (None for none), and by cause their number and seconds lost.

    ``straggler`` is the rank that is waited for, while that is the cause.
    """

    active: str | None
    opened: dict[str, int]
    lost_seconds: dict[str, float]
    straggler: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotsView:
    """Snapshots so far, by how they ended; and why no more are taken, from `SNAPSHOT_OFF_REASONS`, None if they are."""

    results: dict[str, int]
    off: str | None = None


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything the endpoint shows of one rank at one moment. None: not measured, so not shown.

    ``own_fetches``: what the training thread took for each batch that it fetched without workers. ``worker_fetches``:
    what workers took, all there have been, whether or not ``workers`` could be read this time.
    """

    info: dict[str, str]
    ended: bool
    steps: int
    step_duration: Histogram
    wait_duration: Histogram
    ledger_seconds: dict[str, float]
    exposed_wait_seconds: float | None
    last_step_unix_seconds: float | None
    optimizer_steps: int
    overhead_seconds: dict[str, float]
    dropped_steps: int
    errors: dict[str, int]
    stalls: StallView | None = None
    snapshots: SnapshotsView | None = None
    collectors: tuple[SourceHealth, ...] = ()
    gpu: GpuSample | None = None
    host: HostSample | None = None
    process: ProcessSample | None = None
    workers: WorkersSample | None = None
    own_fetches: Histogram | None = None
    worker_fetches: Histogram | None = None
    pressure: PressureSample | None = None
    torch_memory: TorchMemorySample | None = None


@dataclass(frozen=True, slots=True)
class RankPace:
    """One rank over its newest window, as its peers see it. Sums are seconds.

    Attributes:
        steps: that ended in ``seconds``, which includes everything but the start of the run.
        compute: of it. ``exposed``: exposed wait, None where it is not known. ``away``: neither waiting nor computing.
        samples: how often the training thread was looked at while it computed; ``in_sync``: of them, in calls in which
            ranks wait for one another.
        on_gpu: whether it trains on a GPU: there ranks wait for one another wherever the host waits for the GPU.
            ``gpu_busy``: share of the time in which that ran something; a rank that waits for others keeps it busy.
        phase: the category of the ledger it is in, of an evaluation or a checkpoint: the others may wait for its end.
        still: seconds since its newest step; ``still_in_sync``: whether it has spent them where ranks wait for one
            another.
        cause: of the rank's open stall. ``where``: the line of its own code it was seen in most, outside of such calls.
    """

    rank: int
    seconds: float
    steps: int
    compute: float
    exposed: float | None
    away: float
    samples: int = 0
    in_sync: int = 0
    on_gpu: bool = False
    cause: str | None = None
    where: str | None = None
    phase: str | None = None
    still: float = 0.0
    still_in_sync: bool = False
    gpu_busy: float | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """What happened between two ticks: the unit that windows of evidence are made of. Seconds, unless said.

    Attributes:
        wait: for batches, the first of the run not included: every run has to start.
        exposed: of ``wait``; None where nothing can tell.
        edge_wait: of ``wait``, at the edges of epochs: starting and ending an iteration, and its first batch.
        edges: iterations that were begun. ``left``: that were left in the middle, and their workers stopped.
        around_edges: how much longer the batches next to the edges of the epochs that have ended were waited for than
            others of them; negative for shorter.
        startup: of ``seconds``, before the first step.
        batches: training batches that were delivered: a step may take several.
        late_wait: of ``wait``, in single steps that waited much longer than those around them.
        checkpoint_steps: of ``steps``, those in which a checkpoint was written; ``checkpoint_steps_compute``: of
            ``compute``, in those.
        source: where batches come from: ``training_thread`` (a DataLoader without workers), ``workers``, ``watched``
            (an iterable that is no DataLoader), ``read_ahead`` (threads of the training process), None before the
            first batch.
        process_cpu: CPU time of the training process, its workers not included.
        fetches, fetch_busy: batches the workers finished, and their time in fetches; None where they do not tell.
        late, moved, moved_from_busy, moved_from_long, head_of_line: waits for workers' batches, taken apart, see
            `Deliveries`; ``matched``, ``from_busy``: of how many.
        cores: that this rank may use, by its affinity and its cgroup's ``quota``. ``quota_used``: cores that all
            processes under that quota have used.
        timed_fetch, timed_fetch_cpu: fetches of the training thread's own that were timed, and their CPU time.
        freeing: of ``compute``, what it took to free so many workers' batches: those ``freed`` that were followed.
        timed_waits: waits for workers' batches that were timed in parts; of those, ``timed_sampler`` and
            ``timed_sampler_cpu``: in the sampler, by the wall clock and on a core, and ``timed_receiving_cpu``: on a
            core for the rest. ``edge_sampler``, ``edge_sampler_cpu``: of ``edge_wait``, in the sampler.
        garbage_wait: of ``garbage``, while a batch was asked for in mid-epoch; ``edge_garbage``: where epochs begin.
        own_runnable: how long the training thread could have run, and had no core.
        samples, in_sync, where: of where the training thread is, see `RankPace`; ``peers``: the node's other ranks.
        host_cpu_ratio, host_cores: use of all cores of the machine, and how many there are.
        gpu_clock_ratio: clock of the SMs, of what it is in this run where nothing holds it back.
        settings: of the loader in use, by the names of DataLoader's arguments.
    """

    seconds: float
    wait: float
    exposed: float | None
    edge_wait: float
    edges: int
    compute: float
    evaluation: float
    checkpoint: float
    garbage: float
    steps: int
    batches: int = 0
    left: int = 0
    around_edges: float = 0.0
    late_wait: float = 0.0
    checkpoint_steps: int = 0
    checkpoint_steps_compute: float = 0.0
    source: str | None = None
    process_cpu: float | None = None
    fetches: int | None = None
    fetch_busy: float | None = None
    late: float = 0.0
    moved: float = 0.0
    moved_from_busy: float = 0.0
    moved_from_long: float = 0.0
    head_of_line: float = 0.0
    matched: int = 0
    from_busy: int = 0
    timed_fetch: float = 0.0
    timed_fetch_cpu: float = 0.0
    freeing: float = 0.0
    freed: int = 0
    timed_waits: int = 0
    timed_sampler: float = 0.0
    timed_sampler_cpu: float = 0.0
    timed_receiving_cpu: float = 0.0
    edge_sampler: float = 0.0
    edge_sampler_cpu: float = 0.0
    garbage_wait: float = 0.0
    edge_garbage: float = 0.0
    startup: float = 0.0
    own_runnable: float | None = None
    samples: int = 0
    in_sync: int = 0
    where: str | None = None
    peers: tuple[RankPace, ...] = ()
    workers: WorkersSample | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    cores: float = 1.0
    host_cpu_ratio: float | None = None
    host_cores: int = 0
    throttled_ratio: float | None = None
    quota: float | None = None
    quota_used: float | None = None
    gpu_utilization_ratio: float | None = None
    gpu_clock_ratio: float | None = None
    gpu_throttled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """One change to make.

    Attributes:
        action: what to do, in words; ``setting`` and ``value`` as a person types them, None where it is no setting. A
            value without a setting is the factor that stands in the action.
        predicted_speedup: factor on the run's steps per second; None where nothing predicts it.
        because: the reason, with its figures.
    """

    action: str
    setting: str | None
    value: str | None
    predicted_speedup: float | None
    because: str
