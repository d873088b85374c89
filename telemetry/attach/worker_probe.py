"""Runs inside the DataLoader workers: times each fetch into a block of shared memory that the agent reads.

The probe replaces the loader's ``worker_init_fn``. With any start method, that runs in every worker before its fetcher
is made. If a worker is a thread of the training process, nothing is patched and its fetches are not timed. The block is
an anonymous file in memory (memfd). A forked worker inherits it, a spawned one opens it through /proc, and it is freed
with the last process that has it open. The agent never waits for a worker. If a worker is killed during a write, at
worst one count misses one fetch.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.sample_area import AREA_BYTES, SampleArea
from telemetry.attach.traceback_frames import forget_frame
from telemetry.core.clock import now_ns
from telemetry.core.filesystem import Descriptor, identity_of, memory_file, raised
from telemetry.core.worker_records import FETCH_BUCKETS, StackPort, WorkerCounters

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.attach.sample_area import SampledFetches

_SLOT_WORDS: Final = 192
"""1.5 KiB per worker, so that no two workers share a cache line."""

_PID, _TID, _EPOCH, _FETCHES, _WALL, _SINCE, _ENDED = range(7)
_COUNTS: Final = struct.Struct("=4q")
"""Fetches, wall, since and ended, which are adjacent."""
_COUNTS_AT: Final = 8 * _FETCHES
_STACK_FORCE, _STACK_FILE, _STACK_INODE, _STACK_ASK = range(10, 14)
_SAMPLE_SESSION, _SAMPLE_UNTIL = 14, 15
_REQUEST: Final = struct.Struct("=2q")
_REQUEST_AT: Final = 8 * _SAMPLE_SESSION
_HISTOGRAM: Final = 16
_EPOCHS: Final = 40
EPOCHS: Final = 8
"""The number of the first fetch is kept for this many epochs."""
_RECENT: Final = 64
RECENT: Final = 64
"""The start and the end are kept for this many of a worker's newest fetches."""

_SPAN: Final = struct.Struct("=2q")

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

    Raises:
        OSError: the kernel gives no such memory.
    """

    _file: Descriptor | None = None

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.owner = os.getpid()
        file = memory_file("telemetry-workers")
        self._file = Descriptor(file)
        try:
            os.ftruncate(file, self._size)
            self._map(file)
        except OSError:
            self.close()
            raise

    @property
    def _size(self) -> int:
        """Bytes of the slots, and of the areas for samples, which take no memory until they are used."""
        return self.workers * _SLOT_WORDS * 8 + min(self.workers, _MAX_SAMPLED) * AREA_BYTES

    def _map(self, file: int) -> None:
        self._memory = mmap.mmap(file, self._size)
        self.words = memoryview(self._memory).cast("q")

    def area(self, worker: int) -> SampleArea:
        """Where a worker writes the profile of its fetches."""
        return SampleArea(self._memory, self.workers * _SLOT_WORDS * 8 + worker * AREA_BYTES)

    def ask_samples(self, session: int, until_ns: int) -> None:
        """Ask workers to sample their fetches until a stamp, for one session. They see it at their next fetch."""
        for worker in range(min(self.workers, _MAX_SAMPLED)):
            _REQUEST.pack_into(self._memory, worker * _SLOT_WORDS * 8 + _REQUEST_AT, session, until_ns)

    def sampled(self) -> list[SampledFetches]:
        """The profiles that the workers have written."""
        areas = (self.area(worker).read() for worker in range(min(self.workers, _MAX_SAMPLED)))
        return [found for found in areas if found is not None]

    def __getstate__(self) -> tuple[int, int, int, tuple[int, int]]:
        number, identity = (self._file.number, self._file.identity) if self._file is not None else (-1, (0, 0))
        return (self.workers, self.owner, number, identity)

    def __setstate__(self, state: tuple[int, int, int, tuple[int, int]]) -> None:
        """In a spawned worker: open the owner's file.

        Raises:
            OSError: it cannot be opened.
            ValueError: the number belongs to another file by now, or ``state`` is not one of our blocks.
        """
        self.workers, self.owner, number, identity = state
        if not 0 < self.workers <= MAX_WORKERS:
            raise ValueError("not a block of ours")
        file = raised(os.open(f"/proc/{self.owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))  # that path is a link
        try:
            if identity_of(file) != identity:
                raise ValueError("the owner has another file under this number now")
            self._map(file)
        finally:
            os.close(file)

    def read(self) -> tuple[WorkerCounters, ...]:
        """The counters of the workers that have begun."""
        counters = []
        for worker in range(self.workers):
            slot = self.words[worker * _SLOT_WORDS : (worker + 1) * _SLOT_WORDS].tolist()
            if not slot[_PID]:
                continue
            counters.append(
                WorkerCounters(
                    worker=worker,
                    pid=slot[_PID],
                    tid=slot[_TID],
                    fetches=slot[_FETCHES],
                    wall_ns=slot[_WALL],
                    fetching_since_ns=slot[_SINCE],
                    epoch=slot[_EPOCH],
                    ended=slot[_ENDED],
                    epoch_began=tuple(slot[_EPOCHS : _EPOCHS + EPOCHS]),
                    histogram=tuple(slot[_HISTOGRAM : _HISTOGRAM + len(FETCH_BUCKETS) + 1]),
                    recent_started_ns=tuple(slot[_RECENT : _RECENT + 2 * RECENT : 2]),
                    recent_finished_ns=tuple(slot[_RECENT + 1 : _RECENT + 2 * RECENT : 2]),
                )
            )
        return tuple(counters)

    def stack_ports(self) -> dict[int, StackPort]:
        """How to ask each worker for its stacks, by pid."""
        ports = {}
        for worker in range(self.workers):
            slot = self.words[worker * _SLOT_WORDS : (worker + 1) * _SLOT_WORDS]
            if slot[_PID] and slot[_STACK_ASK]:
                ports[slot[_PID]] = StackPort(
                    ask=slot[_STACK_ASK],
                    force=slot[_STACK_FORCE],
                    file=slot[_STACK_FILE],
                    inode=slot[_STACK_INODE],
                )
        return ports

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last process that has it mapped."""
        file, self._file = self._file, None
        if file is not None and os.getpid() == self.owner:
            file.close()

    def __del__(self) -> None:
        self.close()


class WorkerProbe:
    """A ``worker_init_fn`` that times the fetches of its worker, and then runs the user's own function.

    Args:
        user: the loader's ``worker_init_fn``; None if it has none.
        block: gets the counters.
    """

    def __init__(self, user: Callable[[int], None] | None, block: WorkerBlock) -> None:
        self.user = user
        self.block: WorkerBlock | None = block

    def __getstate__(self) -> tuple[Any, Any]:
        return (self.user, self.block.__getstate__() if self.block is not None else None)

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self.user, block = state
        try:
            self.block = WorkerBlock.__new__(WorkerBlock)
            self.block.__setstate__(block)
        except Exception:  # no /proc, or another user's process: the worker runs, but its fetches are not timed
            self.block = None

    def __call__(self, worker_id: int) -> None:
        """Called by the DataLoader in the worker."""
        try:
            if self.block is not None and in_worker_process(self.block.owner):
                _time_fetches(self.block, worker_id)
                _offer_stacks(self.block, worker_id)
        except Exception:
            pass  # it cannot be reported from here; the agent sees a worker without counters
        if self.user is None:
            return
        try:
            self.user(worker_id)
        except BaseException as error:
            forget_frame(error)
            raise


def in_worker_process(maker: int) -> bool:
    """Whether this is the main thread of another process than ``maker``, the pid that made the workers.

    The classes of the fetchers may be patched only there. A worker that is a thread shares them with all other threads.
    """
    return os.getpid() != maker and threading.current_thread() is threading.main_thread()


_wrappers: Final[weakref.WeakKeyDictionary[Any, str]] = weakref.WeakKeyDictionary()
"""The kind of each of our wrappers around a ``fetch``."""


def without_ours(function: Callable[[Any, Any], Any], *kinds: str) -> Callable[[Any, Any], Any]:
    """A ``fetch`` without our wrappers of these kinds. A process may be used for several workers, one after another."""
    while _wrappers.get(function) in kinds:
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def note_wrapper(function: Callable[[Any, Any], Any], kind: str) -> Callable[[Any, Any], Any]:
    """Register a wrapper for `without_ours`. An attribute would not work, because ``functools.wraps`` copies it."""
    _wrappers[function] = kind
    return function


def _time_fetches(block: WorkerBlock, worker: int) -> None:
    """Patch the fetchers of this worker process."""
    from torch.utils.data._utils import fetch

    base = worker * _SLOT_WORDS
    words = block.words[base : base + _SLOT_WORDS]
    words[_TID] = threading.get_native_id()
    words[_PID] = os.getpid()
    sample = _sampling(block, worker, words)
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        kind.fetch = note_wrapper(timed_fetch(without_ours(kind.fetch, "timed", "marked"), words, sample), "timed")


def _sampling(block: WorkerBlock, worker: int, words: memoryview) -> Callable[[], None]:
    """What a fetch calls while the agent asks for samples. Code for it is loaded at the first call."""
    ask: Callable[[], None] | None = None

    def sample() -> None:
        nonlocal ask
        try:
            if ask is None:
                from telemetry.attach.worker_line_sampler import WorkerSampler

                ask = _nothing  # if this fails, it is not tried again
                ask = WorkerSampler(
                    lambda: (words[_SAMPLE_SESSION], words[_SAMPLE_UNTIL]),
                    lambda: words[_SINCE] > 0,
                    block.area(worker),
                ).ask
            ask()
        except Exception:
            pass  # it cannot be reported from here; the agent sees a worker without a profile

    return sample


def _offer_stacks(block: WorkerBlock, worker: int) -> None:
    """Prepare this worker for requests of its stacks, and write the port into the block."""
    from telemetry.attach.worker_stack_responder import offer_stacks

    port = offer_stacks()
    base = worker * _SLOT_WORDS
    block.words[base + _STACK_FORCE] = port.force
    block.words[base + _STACK_FILE] = port.file
    block.words[base + _STACK_INODE] = port.inode
    block.words[base + _STACK_ASK] = port.ask  # last: it shows that the others are set


def _nothing() -> None:
    return None


def timed_fetch(
    original: Callable[[Any, Any], Any], words: memoryview, sample: Callable[[], None] = _nothing
) -> Callable[[Any, Any], Any]:
    """``fetch``, counted in one worker's slot.

    The counts are kept in the closure and stored together, because each store into the memory is a call. CPU time is
    not counted here: the kernel counts it (schedstat), and reading it twice per fetch would double the cost.

    Args:
        original: the fetcher's method.
        words: the worker's slot, as 64-bit integers.
        sample: called at the start of each fetch while the agent asks for samples.
    """
    last_bucket = len(FETCH_BUCKETS)
    slot, store, store_span = words.cast("B"), _COUNTS.pack_into, _SPAN.pack_into
    fetches = wall = ended = 0
    current: Callable[[], Any] = _nothing  # weak: a reference to the fetcher would delay the clean-up of its iterator

    @functools.wraps(original)
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        nonlocal fetches, wall, ended, current
        if current() is not self:  # each epoch has a new fetcher
            current = weakref.ref(self)
            epoch = words[_EPOCH] + 1
            words[_EPOCHS + epoch % EPOCHS] = ended
            words[_EPOCH] = epoch
        words[_SINCE] = start = now_ns()
        if words[_SAMPLE_UNTIL] > start:
            sample()
        try:
            data = original(self, possibly_batched_index)
        except BaseException as error:
            if not isinstance(error, StopIteration):  # the end of an iterable data set is not a batch
                store_span(slot, 8 * _RECENT + ended % RECENT * _SPAN.size, start, now_ns())
                ended += 1
            store(slot, _COUNTS_AT, fetches, wall, 0, ended)
            forget_frame(error)
            raise
        end = now_ns()
        took = end - start
        store_span(slot, 8 * _RECENT + ended % RECENT * _SPAN.size, start, end)
        words[_HISTOGRAM + min((took >> 20).bit_length(), last_bucket)] += 1
        ended += 1
        fetches += 1
        wall += took
        store(slot, _COUNTS_AT, fetches, wall, 0, ended)
        return data

    return fetch
