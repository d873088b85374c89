"""What DataLoader workers report, and what is read of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from telemetry.core.distribution import Histogram

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
    """How a DataLoader worker can be asked for its Python stacks (`attach.worker_stack_responder`).

    Attributes:
        ask: the signal that Python handles. ``force``: the one that is handled while no Python runs.
        file, inode: the worker's descriptor that its stacks go to, and which file that has to be.
    """

    ask: int
    force: int
    file: int
    inode: int


class Arrival(NamedTuple):
    """A batch the training thread has taken from its workers. A tuple, because one is made for each batch.

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
    """Batches that were taken, by what was waited for. Sums over the batches that could be matched with their fetch.

    Attributes:
        batches: how many. ``slack_seconds``: how long they had lain ready when they were requested.
        fetch_wait_seconds: waits until their fetch had ended. ``transfer_wait_seconds``: waits from then on (pickling,
            sending, pinning, unpickling).
        from_busy: batches whose worker was in another fetch as they were transferred;
            ``transfer_wait_busy_worker_seconds``: the transfer wait for these; ``transfer_wait_long_fetch_seconds``: of
            that, where the worker was in a fetch much longer than its usual ones.
        head_of_line_wait_seconds: of the fetch wait, while a later batch lay finished; ``head_of_line_worker_seconds``:
            by the number of the worker that was waited for.
    """

    batches: int = 0
    slack_seconds: float = 0.0
    fetch_wait_seconds: float = 0.0
    transfer_wait_seconds: float = 0.0
    from_busy: int = 0
    transfer_wait_busy_worker_seconds: float = 0.0
    transfer_wait_long_fetch_seconds: float = 0.0
    head_of_line_wait_seconds: float = 0.0
    head_of_line_worker_seconds: dict[int, float] = field(default_factory=dict)

    def __add__(self, more: Deliveries) -> Deliveries:
        """With those of other batches."""
        by_worker = dict(self.head_of_line_worker_seconds)
        for worker, seconds in more.head_of_line_worker_seconds.items():
            by_worker[worker] = by_worker.get(worker, 0.0) + seconds
        long_fetch = self.transfer_wait_long_fetch_seconds + more.transfer_wait_long_fetch_seconds
        return Deliveries(
            batches=self.batches + more.batches,
            slack_seconds=self.slack_seconds + more.slack_seconds,
            fetch_wait_seconds=self.fetch_wait_seconds + more.fetch_wait_seconds,
            transfer_wait_seconds=self.transfer_wait_seconds + more.transfer_wait_seconds,
            from_busy=self.from_busy + more.from_busy,
            transfer_wait_busy_worker_seconds=self.transfer_wait_busy_worker_seconds
            + more.transfer_wait_busy_worker_seconds,
            transfer_wait_long_fetch_seconds=long_fetch,
            head_of_line_wait_seconds=self.head_of_line_wait_seconds + more.head_of_line_wait_seconds,
            head_of_line_worker_seconds=by_worker,
        )


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
        pickling_ratio: running outside of fetches: a thread of each worker pickles its finished batches.
        ready_batches: batches that lie ready in the result queues; None where the queue cannot tell.
        fetching_seconds: how long the longest fetch in progress has taken.
        fetches_total, fetch_duration: of all workers of the run so far.
        slack_seconds: how long a batch had lain ready when it was asked for, the mean since the last sample.
        deliveries: of the run so far.
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
    deliveries: Deliveries = Deliveries()
    head_of_line_batches: int = 0
    head_of_line_worker: int | None = None
    head_of_line_since_seconds: float | None = None
    pickling_ratio: float | None = None
    written_bytes_per_second: float | None = None
    fetched: dict[int, tuple[int, float]] = field(default_factory=dict)
    allowed_cores: int | None = None
