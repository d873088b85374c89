"""Shared memory in which the DataLoader workers of one iterator count, and which the agent reads.

The agent never waits for a worker, and no worker for the agent.
"""

from __future__ import annotations

import mmap
import os
import struct
from ctypes import Array, Structure, c_int64, sizeof
from typing import ClassVar, Final, NamedTuple

from telemetry.model.records import FETCH_BUCKETS
from telemetry.safety.files import LOWEST, identity_of, raised
from telemetry.util.clock import now_ns

EPOCHS: Final = 24
"""For this many epochs, the number of the first fetch is kept."""

RECENT: Final = 256
"""For this many of a worker's newest fetches, start and end are kept."""

MAX_WORKERS: Final = 4096
"""A loader with more workers is not probed."""

_MAX_SAMPLED: Final = 16
"""So many workers of a loader are sampled. The others do the same work."""

_HEAD_BYTES: Final = 64

STACK_REQUEST: Final = struct.Struct("=q")
"""The agent writes this into a worker's pipe: the number of its request, which the answer repeats."""

_COUNTED: Final = (
    *("worker", "pid", "tid", "epoch", "fetches", "wall_ns", "fetching_since_ns", "ended"),
    *("stack_pipe", "stack_inode", "sample_session", "sample_until_ns"),
    *("firsts", "first_wall_ns", "first_wait_ns", "exhausted_epoch", "first_batch", "second_batch"),
    "unsized",
)


class WorkerCounters(Structure):
    """What one DataLoader worker has recorded about itself: in the block, or a copy of it.

    Stamps are monotonic nanoseconds, 0 for none. 5 KiB, so that no two workers share a cache line.

    Attributes:
        wall_ns: time in fetches that have ended. ``fetching_since_ns``: start of the fetch in progress.
        ended: fetches that have ended, including those that raised. The first is number 0.
        epoch: how many epochs it has begun. Epoch ``e`` began with fetch number ``epoch_began[e % EPOCHS]``.
        recent_started_ns, recent_finished_ns: stamps of the newest ended fetches. Number ``n`` is at ``n % RECENT``.
        stack_pipe, stack_inode: how it can be asked for its stacks: its descriptor of a pipe, and the inode that this
            must have. `SharedArea` gets the answer.
        firsts: first fetches of an epoch. ``first_wall_ns``: their time. ``first_wait_ns``: time from the begin of an
            iteration until they began.
        exhausted_epoch: the newest epoch in which an iterable data set has given its last item.
        first_batch, second_batch: see `fingerprint`, for an iterable data set, of the first batches of the epoch.
        epoch_samples, epoch_sized: samples and batches of epoch ``e``, at ``e % EPOCHS``. ``unsized``: batches of all
            epochs whose samples are not known.
        sample_session, sample_until_ns: the newest request for samples of its fetches. The agent writes it.
    """

    _fields_: ClassVar = [
        *((name, c_int64) for name in _COUNTED),
        ("histogram", c_int64 * (len(FETCH_BUCKETS) + 1)),
        *((name, c_int64 * EPOCHS) for name in ("epoch_began", "epoch_samples", "epoch_sized")),
        ("recent_started_ns", c_int64 * RECENT),
        ("recent_finished_ns", c_int64 * RECENT),
        ("unused", c_int64 * (640 - len(_COUNTED) - len(FETCH_BUCKETS) - 1 - 3 * EPOCHS - 2 * RECENT)),
    ]
    worker: int
    pid: int
    tid: int
    epoch: int
    fetches: int
    wall_ns: int
    fetching_since_ns: int
    ended: int
    stack_pipe: int
    stack_inode: int
    sample_session: int
    sample_until_ns: int
    firsts: int
    first_wall_ns: int
    first_wait_ns: int
    exhausted_epoch: int
    first_batch: int
    second_batch: int
    unsized: int
    histogram: Array[c_int64]
    epoch_began: Array[c_int64]
    epoch_samples: Array[c_int64]
    epoch_sized: Array[c_int64]
    recent_started_ns: Array[c_int64]
    recent_finished_ns: Array[c_int64]

    @property
    def made(self) -> int:
        """Fetches of the newest epoch that have ended."""
        return self.ended - self.epoch_began[self.epoch % EPOCHS]


class BlockHead(Structure):
    """The part of a block that is about all workers.

    Attributes:
        iteration: how many iterations have begun with these workers. ``began_ns``: when the newest began.
        nvtx: whether each fetch is an NVTX range; set before the workers start.
    """

    _fields_: ClassVar = [(name, c_int64) for name in ("iteration", "began_ns", "nvtx")]
    iteration: int
    began_ns: int
    nvtx: int


class AreaContent(NamedTuple):
    """What a worker has written into a `SharedArea`.

    Attributes:
        session: the stamp of the request. A later stall is another session.
        pid: the worker's pid. ``began_ns``: when its sampling began.
        content: the profile of the session so far, see `StackProfile.packed`; or the stacks, as text.
    """

    session: int
    pid: int
    began_ns: int
    content: bytes


class SharedArea:
    """A part of the block into which one worker writes its profile or stacks, and which the agent reads.

    It has two halves. The worker writes into the unused half, and then into the head, which names the half in use. If
    the head has changed while the agent read, the agent drops what it has read and reads again a second later. The
    kernel gives memory for these pages only when they are written. They outlive the worker.

    Args:
        memory: the block.
        start: offset of the area.
    """

    BYTES: Final = 1 << 16
    HALF_BYTES: Final = (BYTES - _HEAD_BYTES) // 2
    """Maximum size of the content."""

    _HEAD: Final = struct.Struct("=5q")
    __slots__ = ("_memory", "_start")

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._start = start

    def write(self, session: int, pid: int, began_ns: int, content: bytes) -> None:
        """Replace the content. Only one worker at a time may call it."""
        content = content[: self.HALF_BYTES]
        version = self._HEAD.unpack_from(self._memory, self._start)[0] + 1
        at = self._half(version)
        self._memory[at : at + len(content)] = content
        self._HEAD.pack_into(self._memory, self._start, version, session, pid, began_ns, len(content))

    def read(self) -> AreaContent | None:
        """The newest content; None before the first, or if it changed meanwhile."""
        head = self._memory[self._start : self._start + self._HEAD.size]
        version, session, pid, began, length = self._HEAD.unpack(head)
        if not version or not 0 < length <= self.HALF_BYTES:
            return None
        at = self._half(version)
        content = self._memory[at : at + length]
        if self._memory[self._start : self._start + self._HEAD.size] != head:
            return None
        return AreaContent(session, pid, began, content)

    def _half(self, version: int) -> int:
        return self._start + _HEAD_BYTES + (version % 2) * self.HALF_BYTES


class WorkerBlock:
    """The counters of an iterator's workers, in shared memory.

    A forked worker inherits it. For workers that are spawned it is an anonymous file in memory (memfd), which they open
    through /proc. It is freed with the last process that has it open. If a worker is killed during a write, at worst
    one count misses one fetch.

    Args:
        workers: number of workers.

    Attributes:
        owner: pid of the process that made it.
        shared_by_file: whether spawned workers can open it.

    Raises:
        OSError: the kernel gives no such memory.
    """

    def __init__(self, workers: int) -> None:
        self.owner = os.getpid()
        self.shared_by_file = False
        self._lay_out(workers)
        self._take(mmap.mmap(-1, self._size))  # no descriptor, so that none can be lost
        self.begin_iteration()

    def by_file(self) -> WorkerBlock:
        """A copy of this block that spawned workers can open. No worker may use this one yet."""
        block = WorkerBlock.__new__(WorkerBlock)
        block.owner, block.shared_by_file = self.owner, True
        block._lay_out(self.workers)
        file = raised(os.memfd_create("telemetry-workers", os.MFD_CLOEXEC))
        try:
            os.ftruncate(file, self._size)
            block._map(file)
        finally:
            os.close(file)
        block._memory[:] = self._memory[:]
        return block

    @classmethod
    def opened(cls, address: tuple[int, int, int, tuple[int, int]]) -> WorkerBlock:
        """Open the owner's block in a spawned worker, from its `address`.

        Raises:
            OSError: the block cannot be opened.
            ValueError: the number belongs to another file by now.
        """
        workers, owner, number, identity = address
        block = cls.__new__(cls)
        block.owner, block.shared_by_file = owner, True
        block._lay_out(workers)
        file = raised(os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))  # that path is a link
        try:
            if identity_of(file) != identity:
                raise ValueError("the owner has another file under this number now")
            block._map(file)
        finally:
            os.close(file)
        return block

    def _lay_out(self, workers: int) -> None:
        """Lay out the slots first, then profiles and stacks, which take memory only when used."""
        self.workers = workers
        self._profiles_at = workers * sizeof(WorkerCounters)
        self._head_at = self._profiles_at + min(workers, _MAX_SAMPLED) * SharedArea.BYTES
        self._stacks_at = self._head_at + _HEAD_BYTES
        self._size = self._stacks_at + workers * SharedArea.BYTES

    def _map(self, file: int) -> None:
        # `mmap` keeps a duplicate of it, under the lowest free number. That must not be a standard stream's.
        numbers = [os.dup(file)]
        try:
            while numbers[-1] < LOWEST:
                numbers.append(os.dup(file))
            os.close(numbers.pop())
            self._take(mmap.mmap(file, self._size))
        finally:
            for number in numbers:
                os.close(number)
        self._identity = identity_of(file)

    def _take(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.head = BlockHead.from_buffer(memory, self._head_at)

    @property
    def address(self) -> tuple[int, int, int, tuple[int, int]]:
        """Where another process finds the block: workers, owner, descriptor, and the identity of the file."""
        return (self.workers, self.owner, self._descriptor(), self._identity)

    def _descriptor(self) -> int:
        """The descriptor of the file that `mmap` keeps and closes; -1 if other code has closed it.

        Our own descriptor would need a finalizer in Python to close it, and Ctrl-C would be lost in there.
        """
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            try:
                if identity_of(int(name)) == self._identity:
                    return int(name)
            except OSError:
                pass  # this listing's own descriptor, or one that was closed meanwhile
        return -1

    def begin_iteration(self) -> None:
        """Note that an iteration begins."""
        self.head.began_ns = now_ns()
        self.head.iteration += 1

    def counters(self, worker: int) -> WorkerCounters:
        """The counters of one worker, in the block."""
        return WorkerCounters.from_buffer(self._memory, worker * sizeof(WorkerCounters))

    def read(self) -> tuple[WorkerCounters, ...]:
        """Copies of the counters of the workers that have begun."""
        size = sizeof(WorkerCounters)
        copies = (WorkerCounters.from_buffer_copy(self._memory, worker * size) for worker in range(self.workers))
        return tuple(each for each in copies if each.pid)

    # -- profiles and stacks

    def ask_samples(self, session: int, until_ns: int) -> None:
        """Ask workers to sample their fetches until a stamp, for one session. They see it at their next fetch."""
        for worker in range(min(self.workers, _MAX_SAMPLED)):
            counters = self.counters(worker)
            counters.sample_session, counters.sample_until_ns = session, until_ns

    def profile_area(self, worker: int) -> SharedArea:
        """The area for the profile of a worker's fetches."""
        return SharedArea(self._memory, self._profiles_at + worker * SharedArea.BYTES)

    def sampled(self) -> list[AreaContent]:
        """The profiles that the workers have written."""
        areas = (self.profile_area(worker).read() for worker in range(min(self.workers, _MAX_SAMPLED)))
        return [found for found in areas if found is not None]

    def stack_area(self, worker: int) -> SharedArea:
        """The area for a worker's stacks when they are requested."""
        return SharedArea(self._memory, self._stacks_at + worker * SharedArea.BYTES)
