"""The block of shared memory in which the DataLoader workers of one iterator count, and which the agent reads.

It is an anonymous file in memory (memfd). A forked worker inherits it, a spawned one opens it through /proc, and it is
freed with the last process that has it open. The agent never waits for a worker. If a worker is killed during a write,
at worst one count misses one fetch.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING, Final

from telemetry.attach.batch_table import TABLE_BYTES, BatchTable
from telemetry.core.sample_area import AREA_BYTES, SampleArea
from telemetry.core.worker_records import FETCH_BUCKETS, StackPort, WorkerCounters
from telemetry.util.files import LOWEST, identity_of, memory_file, raised

if TYPE_CHECKING:
    from telemetry.core.sample_area import SampledFetches

SLOT_WORDS: Final = 192
"""1.5 KiB per worker, so that no two workers share a cache line."""

PID, TID, EPOCH, FETCHES, WALL, SINCE, ENDED = range(7)
COUNTS: Final = struct.Struct("=4q")
"""Fetches, wall, since and ended, which are adjacent."""
COUNTS_AT: Final = 8 * FETCHES
STACK_PIPE, STACK_INODE, STACK_THREAD = range(10, 13)
SAMPLE_SESSION, SAMPLE_UNTIL = 14, 15
_REQUEST: Final = struct.Struct("=2q")
_REQUEST_AT: Final = 8 * SAMPLE_SESSION
HISTOGRAM_AT: Final = 16
EPOCHS_AT: Final = 40
EPOCHS: Final = 8
"""The number of the first fetch is kept for this many epochs."""
RECENT_AT: Final = 64
RECENT: Final = 64
"""The start and the end are kept for this many of a worker's newest fetches."""

SPAN: Final = struct.Struct("=2q")

MAX_WORKERS: Final = 4096
"""A loader with more workers is not probed."""

_MAX_SAMPLED: Final = 16
"""This many workers of a loader are sampled. The others do the same."""


class WorkerBlock:
    """Counters of the workers of one iterator, in shared memory.

    Args:
        workers: number of workers.

    Attributes:
        owner: pid of the process that made it.
        retired: whether the iterator is gone. Set in the process that made it.
        words: all of it as 64-bit integers. ``batches``: the samples and tokens of each.

    Raises:
        OSError: the kernel gives no such memory.
    """

    retired = False

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.owner = os.getpid()
        file = memory_file("telemetry-workers")
        try:
            os.ftruncate(file, self._size)
            self._map(file)
            self._identity = identity_of(file)
        finally:
            os.close(file)

    @property
    def _size(self) -> int:
        """Bytes of the slots, and of the profiles, the batches and the stacks, which take memory only when used."""
        return self._stacks_at + self.workers * AREA_BYTES

    @property
    def _stacks_at(self) -> int:
        return self._batches_at + TABLE_BYTES

    @property
    def _batches_at(self) -> int:
        return self.workers * SLOT_WORDS * 8 + min(self.workers, _MAX_SAMPLED) * AREA_BYTES

    def _map(self, file: int) -> None:
        # `mmap` keeps a duplicate of it, under the lowest free number. That must not be one of a standard stream.
        numbers = [os.dup(file)]
        try:
            while numbers[-1] < LOWEST:
                numbers.append(os.dup(file))
            os.close(numbers.pop())
            self._memory = mmap.mmap(file, self._size)
        finally:
            for number in numbers:
                os.close(number)
        self.words = memoryview(self._memory).cast("q")
        self.batches = BatchTable(self._memory, self._batches_at)

    def area(self, worker: int) -> SampleArea:
        """Where a worker writes the profile of its fetches."""
        return SampleArea(self._memory, self.workers * SLOT_WORDS * 8 + worker * AREA_BYTES)

    def stack_area(self, worker: int) -> SampleArea:
        """Where a worker writes its stacks when it is asked for them."""
        return SampleArea(self._memory, self._stacks_at + worker * AREA_BYTES)

    def ask_samples(self, session: int, until_ns: int) -> None:
        """Ask workers to sample their fetches until a stamp, for one session. They see it at their next fetch."""
        for worker in range(min(self.workers, _MAX_SAMPLED)):
            _REQUEST.pack_into(self._memory, worker * SLOT_WORDS * 8 + _REQUEST_AT, session, until_ns)

    def sampled(self) -> list[SampledFetches]:
        """The profiles that the workers have written."""
        areas = (self.area(worker).read() for worker in range(min(self.workers, _MAX_SAMPLED)))
        return [found for found in areas if found is not None]

    def __getstate__(self) -> tuple[int, int, int, tuple[int, int]]:
        return (self.workers, self.owner, self._descriptor(), self._identity)

    def _descriptor(self) -> int:
        """The descriptor that `mmap` keeps of the file, and closes; -1 if other code has closed it.

        A descriptor of our own would have to be closed by a finalizer in Python, in which Ctrl-C would be lost.
        """
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            try:
                if identity_of(int(name)) == self._identity:
                    return int(name)
            except OSError:
                pass  # that of this listing, or closed meanwhile
        return -1

    def __setstate__(self, state: tuple[int, int, int, tuple[int, int]]) -> None:
        """In a spawned worker: open the owner's file.

        Raises:
            OSError: it cannot be opened.
            ValueError: the number belongs to another file by now, or ``state`` is not one of our blocks.
        """
        self.workers, self.owner, number, self._identity = state
        if not 0 < self.workers <= MAX_WORKERS:
            raise ValueError("not a block of ours")
        file = raised(os.open(f"/proc/{self.owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))  # that path is a link
        try:
            if identity_of(file) != self._identity:
                raise ValueError("the owner has another file under this number now")
            self._map(file)
        finally:
            os.close(file)

    def read(self) -> tuple[WorkerCounters, ...]:
        """The counters of the workers that have begun."""
        counters = []
        for worker in range(self.workers):
            slot = self.words[worker * SLOT_WORDS : (worker + 1) * SLOT_WORDS].tolist()
            if not slot[PID]:
                continue
            counters.append(
                WorkerCounters(
                    worker=worker,
                    pid=slot[PID],
                    tid=slot[TID],
                    fetches=slot[FETCHES],
                    wall_ns=slot[WALL],
                    fetching_since_ns=slot[SINCE],
                    epoch=slot[EPOCH],
                    ended=slot[ENDED],
                    epoch_began=tuple(slot[EPOCHS_AT : EPOCHS_AT + EPOCHS]),
                    histogram=tuple(slot[HISTOGRAM_AT : HISTOGRAM_AT + len(FETCH_BUCKETS) + 1]),
                    recent_started_ns=tuple(slot[RECENT_AT : RECENT_AT + 2 * RECENT : 2]),
                    recent_finished_ns=tuple(slot[RECENT_AT + 1 : RECENT_AT + 2 * RECENT : 2]),
                )
            )
        return tuple(counters)

    def stack_ports(self) -> dict[int, StackPort]:
        """How to ask each worker for its stacks, by pid."""
        ports = {}
        for worker in range(self.workers):
            slot = self.words[worker * SLOT_WORDS : (worker + 1) * SLOT_WORDS]
            if slot[PID] and slot[STACK_PIPE]:
                ports[slot[PID]] = StackPort(
                    slot[STACK_PIPE], slot[STACK_INODE], slot[STACK_THREAD], self.stack_area(worker)
                )
        return ports
