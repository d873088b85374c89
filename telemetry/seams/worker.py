"""The probe in a DataLoader worker.

Torch runs the function ``_worker_loop`` in each worker. In its place the constructor of an iterator finds a
`WorkerLoop`, which first wraps the ``fetch`` of torch's fetchers there (`timed_fetch`), and starts a thread that
answers requests for the worker's stacks. A worker counts in a `WorkerBlock` of shared memory, which the agent reads
without waiting for anybody.
"""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import sys
import threading
import weakref
import zlib
from importlib.machinery import PathFinder
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.model.records import FETCH_BUCKETS
from telemetry.safety.errors import let_pass
from telemetry.safety.files import Descriptor, raised
from telemetry.safety.threads import OwnThread
from telemetry.seams.patching import WeakMap, around, forget_frame, unseen
from telemetry.seams.worker_block import EPOCHS, MAX_WORKERS, RECENT, STACK_REQUEST, SharedArea, WorkerBlock
from telemetry.seams.worker_lines import WorkerSampler
from telemetry.util.clock import now_ns
from telemetry.util.stacks import python_threads, stack_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.seams.tracker import StepTracker


class WorkerLoop:
    """Stands for ``_worker_loop``. Its workers are those of the iterators that are made meanwhile.

    Args:
        original: torch's function.
        tracker: knows the newest request for samples.

    Attributes:
        making: the block of the iterator whose constructor runs on this thread.
    """

    def __init__(self, original: Callable[..., Any], tracker: StepTracker) -> None:
        self.original = original
        self._tracker = tracker
        self.making = threading.local()

    def begin(self, workers: int) -> None:
        """Begin to make an iterator with so many workers, on this thread."""
        self.making.block = None
        if 0 < workers <= MAX_WORKERS:
            block = self.making.block = WorkerBlock(workers)
            block.head.nvtx = self._tracker.profiler_ranges.nvtx
            session, until = self._tracker.loaders.sampling
            if until:
                block.ask_samples(session, until)

    def end(self) -> WorkerBlock | None:
        """End it. Returns the block of its workers; None without one."""
        block: WorkerBlock | None = getattr(self.making, "block", None)
        self.making.block = None
        return block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in a worker that was forked."""
        block = getattr(self.making, "block", None)
        # Workers that are threads share the fetchers' classes with all other threads.
        if block is not None and os.getpid() != block.owner and threading.current_thread() is threading.main_thread():
            _time_worker(block, self.original, args, kwargs)
        return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a worker that is spawned. The original is found by its name there: it is not replaced."""
        name = f"{self.original.__module__}:{self.original.__name__}"
        block = getattr(self.making, "block", None)
        if block is None or not _is_found_by_a_child():
            return pkgutil.resolve_name, (name,)
        try:
            if not block.shared_by_file:
                block = self.making.block = block.by_file()
            address = block.address
        except OSError as error:  # no /proc, or no descriptor is left: its fetches are not timed
            let_pass(error)
            return pkgutil.resolve_name, (name,)
        return _SpawnedLoop, (name, address)


def _is_found_by_a_child() -> bool:
    """Whether a new process with this one's ``sys.path`` would import ours: a project may have a module of our name."""
    package = Path(__file__).parents[1]
    found = PathFinder.find_spec(package.name)
    return found is None or found.origin == str(package / "__init__.py")


class _SpawnedLoop:
    """A `WorkerLoop` in a spawned worker, which finds its block by the address."""

    def __init__(self, name: str, address: Any) -> None:
        self._original = pkgutil.resolve_name(name)
        self._address = address

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = getattr(self._original, "original", self._original)
        try:
            block = WorkerBlock.opened(self._address)
        except Exception as error:  # no /proc, or another user's process: its fetches are not timed
            let_pass(error)
            block = None
        if block is not None:
            _time_worker(block, original, args, kwargs)
        return original(*args, **kwargs)


def _time_worker(
    block: WorkerBlock, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Time the fetches of this worker. Never raises."""
    try:
        worker = inspect.signature(original).bind(*args, **kwargs).arguments["worker_id"]
        _wrap_fetches(block, worker)
        _offer_stacks(block, worker)
    except Exception as error:
        let_pass(error)  # nothing can report it from here. The agent sees a worker without counters


_wrappers: Final[WeakMap[None]] = WeakMap()
"""Our wrappers around a ``fetch``. Not an attribute: ``functools.wraps`` would copy it to a wrapper of others."""


def _wrap_fetches(block: WorkerBlock, worker: int) -> None:
    from torch.utils.data._utils import fetch

    counters = block.counters(worker)
    counters.worker, counters.tid = worker, threading.get_native_id()
    counters.pid = os.getpid()  # last: it shows that the worker has begun
    sample = WorkerSampler(block, worker).ask
    ranges = _ranges() if block.head.nvtx else None
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        original = kind.fetch
        while original in _wrappers:  # a process may be used for several workers, one after another
            original = original.__wrapped__
        if ranges is not None:
            original = _marked(original, ranges, f"fetch, worker {worker}")
        kind.fetch = timed_fetch(original, block, worker, sample, stream=kind is fetch._IterableDatasetFetcher)


def _ranges() -> Any:
    """``torch.cuda.nvtx``; None if this torch has no NVTX."""
    nvtx: Any = sys.modules.get("torch.cuda.nvtx")
    try:
        nvtx.range_push("telemetry")  # if NVTX is missing, this raises now and not during a fetch
        nvtx.range_pop()
    except Exception as error:
        let_pass(error)
        return None
    return nvtx


def _marked(original: Callable[[Any, Any], Any], nvtx: Any, name: str) -> Callable[[Any, Any], Any]:
    marked = around(original, before=lambda *_: nvtx.range_push(name), after=lambda *_: nvtx.range_pop())
    _wrappers[marked] = None
    return marked


def _nothing() -> None:
    return None


_OPENED: Final = 2
_SIZED: Final = frozenset({list, tuple, range})
"""Types of indices whose length is the number of samples. Other classes may run a method of the user's."""


class EpochOpening:
    """Notes the begin of epochs: how long the first fetch takes, and what the first batches of a stream are.

    Args:
        block: the block of the worker's loader.
        worker: the number of the worker.
        stream: whether the data set is iterable. Only then may several workers give the same samples.

    Attributes:
        fetcher: returns the fetcher of the epoch. A strong reference to it would delay its iterator's clean-up.
        place: where the block keeps the figures of the epoch.
        to_note: how many of the next batches `fetched` wants.
    """

    def __init__(self, block: WorkerBlock, worker: int, *, stream: bool) -> None:
        self.fetcher: Callable[[], Any] = _nothing
        self.place = 0
        self.to_note = 0
        self._head = block.head
        self._counters = block.counters(worker)
        self._stream = stream

    def begin(self, fetcher: Any) -> None:
        """Begin an epoch with its fetcher. A worker that gets no index of an epoch makes no batch of it."""
        self.fetcher = weakref.ref(fetcher)
        self.to_note = _OPENED
        counters, epoch = self._counters, self._head.iteration
        for begun in range(min(max(counters.epoch + 1, epoch - EPOCHS + 1), epoch), epoch + 1):
            counters.epoch_began[begun % EPOCHS] = counters.ended
            counters.epoch_samples[begun % EPOCHS] = counters.epoch_sized[begun % EPOCHS] = 0
        counters.first_batch = counters.second_batch = 0
        counters.epoch = epoch
        self.place = epoch % EPOCHS

    def fetched(self, start: int, took: int, batch: object) -> None:
        """Note one of the first batches of an epoch, with the start and the time of its fetch (ns)."""
        counters, first = self._counters, self.to_note == _OPENED
        self.to_note -= 1
        if first:
            counters.firsts += 1
            counters.first_wall_ns += took
            counters.first_wait_ns += max(0, start - self._head.began_ns)
        try:
            print_of = fingerprint(batch) if self._stream else 0
        except Exception as error:
            let_pass(error)  # it is unknown
            return
        if first:
            counters.first_batch = print_of
        else:
            counters.second_batch = print_of


class Asked(list[Any]):
    """The indices of a stream's batch, as its fetcher gets them. It draws a sample for each until the stream ends."""

    iterator: Any = None

    def __iter__(self) -> Any:
        """Begin the iteration whose progress is read later."""
        self.iterator = list.__iter__(self)
        return self.iterator

    def drawn(self, *, ended: bool) -> int:
        """How many samples were drawn. ``ended``: the stream had none for the newest index."""
        return len(self) if self.iterator is None else len(self) - length_hint(self.iterator) - ended


def timed_fetch(
    original: Callable[[Any, Any], Any],
    block: WorkerBlock,
    worker: int,
    sample: Callable[[], None] = _nothing,
    *,
    stream: bool = False,
) -> Callable[[Any, Any], Any]:
    """Wrap ``fetch``, so that the block counts it.

    It does not count CPU time: the kernel does (schedstat), and reading that twice per fetch would double the cost.

    Args:
        original: the fetcher's method.
        block: the block of the worker's loader.
        worker: the number of the worker.
        sample: called at the start of each fetch while the agent asks for samples.
        stream: whether the data set is iterable.
    """
    counters, last_bucket = block.counters(worker), len(FETCH_BUCKETS)
    histogram, started, finished = counters.histogram, counters.recent_started_ns, counters.recent_finished_ns
    samples, sized = counters.epoch_samples, counters.epoch_sized
    opening = EpochOpening(block, worker, stream=stream)

    @functools.wraps(original)
    @unseen
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        if counters.fetching_since_ns:  # the data set reads another loader: this is a part of the fetch in progress
            return original(self, possibly_batched_index)
        if opening.fetcher() is not self:
            opening.begin(self)
        counters.fetching_since_ns = start = now_ns()
        if counters.sample_until_ns > start:
            sample()
        number = counters.ended
        recent = number % RECENT
        if stream and type(possibly_batched_index) is list:
            possibly_batched_index = Asked(possibly_batched_index)
        try:
            data = original(self, possibly_batched_index)
        except BaseException as error:
            if not isinstance(error, StopIteration):  # the end of an iterable data set is not a batch
                started[recent], finished[recent] = start, now_ns()
                counters.ended = number + 1
            else:
                counters.exhausted_epoch = counters.epoch
            counters.fetching_since_ns = 0
            forget_frame(error)
            raise
        end = now_ns()
        took = end - start
        started[recent], finished[recent] = start, end
        histogram[min((took >> 20).bit_length(), last_bucket)] += 1
        counters.fetches += 1
        counters.wall_ns += took
        counters.ended = number + 1
        counters.fetching_since_ns = 0
        if opening.to_note:
            opening.fetched(start, took, data)
        if type(possibly_batched_index) in _SIZED:
            place = opening.place
            samples[place] += len(possibly_batched_index)
            sized[place] += 1
        elif type(possibly_batched_index) is Asked:
            place = opening.place
            samples[place] += possibly_batched_index.drawn(ended=bool(getattr(self, "ended", False)))
            sized[place] += 1
        else:
            counters.unsized += 1
        return data

    _wrappers[fetch] = None
    return fetch


_COMPARED: Final = 256
"""So many values of a batch are compared."""

_MAX_DEPTH: Final = 8


def fingerprint(batch: Any) -> int:
    """A number that equal batches share; 0 if it is unknown. It comes from the first plain value in the batch.

    No code of the user's class is called, and at most 256 values of a tensor are read.
    """
    torch: Any = sys.modules["torch"]
    for _ in range(_MAX_DEPTH):
        kind = type(batch)
        if kind is torch.Tensor:
            if batch.device.type != "cpu" or batch.layout is not torch.strided or not batch.is_contiguous():
                return 0
            flat = batch.detach().view(-1)
            return zlib.crc32(repr(flat[:: max(1, flat.numel() // _COMPARED)].tolist()).encode()) + 1
        if kind in {int, float, bool, str, bytes}:
            return zlib.crc32(repr(batch).encode()) + 1
        if kind is dict and batch:
            batch = next(iter(batch.values()))
        elif kind in {list, tuple} and batch:
            batch = batch[0]
        else:
            return 0
    return 0


_MAX_THREADS: Final = 32
_MAX_REQUESTS_BYTES: Final = 4096


class _StackResponder:
    """A thread of the worker that answers the agent's requests for the worker's stacks. Made on its main thread.

    The agent must not interrupt a worker: a signal makes system calls fail that C libraries do not repeat. So the
    thread waits in a read of a pipe. The agent opens that pipe through /proc and writes the number of its request, and
    the thread writes the stacks into the shared block. It cannot answer while a call of another thread holds the GIL.

    A child that the user's code forks has the pipe, but no thread that reads it.

    Raises:
        OSError: the kernel gives no pipe.
        RuntimeError: no thread can be started.
    """

    def __init__(self, area: SharedArea) -> None:
        self.area = area
        self.pid = os.getpid()
        self.pipe = _own_pipe()
        self._main = threading.get_ident()
        self.thread = OwnThread(self._run, name="telemetry-stacks")
        try:
            self.thread.start()
        except RuntimeError:
            self.pipe.close()
            raise

    def _run(self) -> None:
        while self.pipe.is_ours():
            try:
                requests = os.read(self.pipe.number, _MAX_REQUESTS_BYTES)
            except OSError:  # the worker's code has closed it at this moment
                return
            try:
                (number,) = STACK_REQUEST.unpack(requests[-STACK_REQUEST.size :])
                # No call in here gives up the GIL, so one turn is enough beside a thread that hardly ever gives it up.
                self.area.write(number, self.pid, now_ns(), self._stacks())
            except Exception:
                pass  # nothing can report it from here. The agent times out and goes on

    def _stacks(self) -> bytes:
        """The stacks of all threads. The main thread's come first and have no heading."""
        threads = {thread.ident: thread for thread in python_threads()}
        main = threads.pop(self._main, None)
        parts = [stack_text(main.stack)] if main is not None else []
        parts += [f"thread {thread.name}\n{stack_text(thread.stack)}" for thread in [*threads.values()][:_MAX_THREADS]]
        return "".join(parts).encode("utf-8", "backslashreplace")


_responder: _StackResponder | None = None


def _offer_stacks(block: WorkerBlock, worker: int) -> None:
    """Answer requests for this worker's stacks from now on, and write into the block how to ask.

    A process that serves as several workers, one after another, keeps its thread.
    """
    global _responder  # noqa: PLW0603
    area = block.stack_area(worker)
    if _responder is None or _responder.pid != os.getpid() or not _responder.pipe.is_ours():
        _responder = _StackResponder(area)
    _responder.area = area
    counters = block.counters(worker)
    counters.stack_inode = _responder.pipe.identity[1]
    counters.stack_pipe = _responder.pipe.number  # last: it shows that the other is set


def _own_pipe() -> Descriptor:
    """One descriptor for both ends of a pipe: a read never sees its end, and only one descriptor can leak."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        return Descriptor(raised(os.open(f"/proc/self/fd/{ends[0]}", os.O_RDWR | os.O_CLOEXEC)))
    finally:
        for end in ends:
            os.close(end)
