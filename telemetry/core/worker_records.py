"""What DataLoader workers report, and what is computed from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.core.log_kind import MEAN, NEWEST, SKIP
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from telemetry.core.sample_area import SampleArea
    from telemetry.records import Histogram

FETCH_BUCKETS: Final = tuple((1 << 20 + power) / NS for power in range(17))
"""Upper bounds of the fetch histogram, seconds: 1.05 ms, doubling up to 68.7 s. So a worker finds the bucket from the
highest bit of the nanoseconds."""


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """What one DataLoader worker has recorded about itself. Stamps are monotonic nanoseconds, 0 for none.

    Attributes:
        wall_ns: time of the fetches that have ended. ``fetching_since_ns``: start of the one in progress.
        ended: fetches that have ended, including those that raised. The first is number 0.
        epoch: how many epochs it has begun. Epoch ``e`` began with fetch number ``epoch_began[e % len]``.
        recent_started_ns, recent_finished_ns: stamps of the newest ended fetches. Number ``n`` is at ``n % len``.
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


STACK_REQUEST: Final = Struct("=q")
"""What the agent writes into a worker's pipe: the number of its request, which the answer repeats."""


@dataclass(frozen=True, slots=True)
class StackPort:
    """How a DataLoader worker can be asked for its Python stacks (`attach.worker_stack_responder`).

    Attributes:
        pipe, inode: the worker's descriptor of the pipe, and the inode that it must have.
        thread: the kernel's number of the thread that answers.
        area: gets the answer.
    """

    pipe: int
    inode: int
    thread: int
    area: SampleArea


class Arrival(NamedTuple):
    """A batch that the training thread has taken from its workers. A tuple, because one is made for each batch.

    Attributes:
        epoch: epoch of the loader's iterator, the first is 1. ``number``: of the batch in the epoch, the first is 0.
        requested_ns, arrived_ns: start and end of the wait, monotonic.
    """

    epoch: int
    number: int
    requested_ns: int
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Batches that were taken, by what was waited for. Sums over the batches that could be matched with their fetch.

    Attributes:
        batches: how many. ``slack_seconds``: how long they had been ready when they were requested.
        fetch_wait_seconds: waits until their fetch had ended. ``transfer_wait_seconds``: waits after that (pickling,
            sending, pinning, unpickling).
        from_busy: batches whose worker was in another fetch during their transfer.
            ``transfer_wait_busy_worker_seconds``: the transfer wait for these. ``transfer_wait_long_fetch_seconds``:
            the part of it in which the worker was in a fetch much longer than its usual ones.
        head_of_line_wait_seconds: fetch wait during which a later batch was finished. ``head_of_line_worker_seconds``:
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
        """Add the sums of other batches."""
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

    Ratios are means over the training workers, as shares of the wall clock since the last sample. They are None at the
    first sample, and if the kernel or the workers do not report them.

    Attributes:
        workers: all workers. ``training_workers``: workers of loaders that give training batches, without the idle ones
            of an evaluation. While no loader has given a training batch, all workers.
        busy_ratio: in a fetch. It is the sum of the next three.
        cpu_ratio: running. ``runnable_ratio``: ready to run, without a core. ``blocked_ratio``: waiting for something
            else, mostly storage or network.
        pickling_ratio: running outside of fetches. A thread of each worker pickles its finished batches.
        ready_batches: batches that are ready in the result queues; None if the queue cannot report it.
        fetching_seconds: duration so far of the longest fetch in progress.
        fetches_total, fetch_duration: all workers of the run so far.
        slack_seconds: how long a batch had been ready when it was requested, mean since the last sample.
        deliveries: sums over the run so far.
        head_of_line_batches: finished batches that wait right now behind an unfinished one. ``head_of_line_worker``:
            the worker that fetches it. ``head_of_line_since_seconds``: how long that fetch has taken.
        read_bytes_per_second: read from storage by all workers.
        written_bytes_per_second: written by all workers: files, and the pickled part of batches, which goes through a
            pipe to the training process. The tensors of a batch are in shared memory and do not count.
        fetched: for each training worker, by pid: fetches so far, and their seconds.
        allowed_cores: number of cores that all training workers together may use; None if the kernel does not report
            it.
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
