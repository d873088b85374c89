"""The probe in a DataLoader worker.

While the constructor of an iterator runs, `hooks.dataloader` lets it read a `WorkerProbe` instead of the loader's
``worker_init_fn``. In each worker the probe wraps the ``fetch`` of torch's fetchers (`timed_fetch`) and starts a thread
that answers requests for the worker's stacks. A worker counts in a `WorkerBlock` of shared memory, which the agent
reads without waiting for anybody.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.batches import BatchCounter, fingerprint
from telemetry.hooks.patching import WeakMap, around, forget_frame, unseen
from telemetry.hooks.worker_block import EPOCHS, RECENT, STACK_REQUEST, SharedArea, WorkerBlock
from telemetry.hooks.worker_lines import WorkerSampler
from telemetry.records import FETCH_BUCKETS
from telemetry.util import threads as fork_warning
from telemetry.util.clock import now_ns
from telemetry.util.errors import let_pass
from telemetry.util.files import Descriptor, raised
from telemetry.util.stacks import python_threads, stack_text
from telemetry.util.threads import OwnThread, rest, work

if TYPE_CHECKING:
    from collections.abc import Callable


# -- in the worker -------------------------------------------------------------------------------------------------


class WorkerProbe:
    """A ``worker_init_fn`` that times the fetches of its worker, and then runs the user's own function.

    With any start method, it runs in every worker before its fetcher is made. If the worker is a thread of the training
    process, it patches nothing, and fetches are not timed.

    Args:
        user: the loader's ``worker_init_fn``, if it has one.
        block: gets the counters.
        nvtx: whether to make each fetch an NVTX range.
    """

    def __init__(self, user: Callable[[int], None] | None, block: WorkerBlock, *, nvtx: bool = False) -> None:
        self.user = user
        self.block: WorkerBlock | None = block
        self._nvtx = nvtx

    def __getstate__(self) -> tuple[Any, Any, bool]:
        return (self.user, self.block.address if self.block is not None else None, self._nvtx)

    def __setstate__(self, state: tuple[Any, Any, bool]) -> None:
        self.user, address, self._nvtx = state
        try:
            self.block = WorkerBlock.opened(address)
        except Exception:  # no /proc, or another user's process: the worker runs, but its fetches are not timed
            self.block = None

    def __call__(self, worker_id: int) -> None:
        """Called by the DataLoader in the worker."""
        block = self.block
        try:
            # Workers that are threads share the fetchers' classes with all other threads.
            alone = threading.current_thread() is threading.main_thread()
            if block is not None and os.getpid() != block.owner and alone:
                _wrap_fetches(block, worker_id, nvtx=self._nvtx)
                _offer_stacks(block, worker_id)
        except Exception as error:
            let_pass(error)  # nothing can report it from here. The agent sees a worker without counters
        if self.user is None:
            return
        try:
            self.user(worker_id)
        except BaseException as error:
            forget_frame(error)
            raise


_wrappers: Final[WeakMap[None]] = WeakMap()
"""Our wrappers around a ``fetch``. Not an attribute: ``functools.wraps`` would copy it to a wrapper of others."""


def _wrap_fetches(block: WorkerBlock, worker: int, *, nvtx: bool) -> None:
    from torch.utils.data._utils import fetch

    counters = block.counters(worker)
    counters.worker, counters.tid = worker, threading.get_native_id()
    counters.pid = os.getpid()  # last: it shows that the worker has begun
    sample = WorkerSampler(block, worker).ask
    ranges = _ranges() if nvtx else None
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        original = kind.fetch
        while original in _wrappers:  # a process may be used for several workers, one after another
            original = original.__wrapped__
        if ranges is not None:
            original = _marked(original, ranges, f"fetch, worker {worker}")
        counter = BatchCounter(block, worker, stream=kind is fetch._IterableDatasetFetcher)
        stream = kind is fetch._IterableDatasetFetcher
        kind.fetch = timed_fetch(original, block, worker, counter, sample, stream=stream)


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


class EpochOpening:
    """Notes the begin of epochs: how long the first fetch takes, and what the first batches of a stream are.

    Args:
        block: the block of the worker's loader.
        worker: the number of the worker.
        stream: whether the data set is iterable. Only then may several workers give the same samples.

    Attributes:
        fetcher: returns the fetcher of the epoch. A strong reference to it would delay its iterator's clean-up.
        to_note: how many of the next batches `fetched` wants.
    """

    def __init__(self, block: WorkerBlock, worker: int, *, stream: bool) -> None:
        self.fetcher: Callable[[], Any] = _nothing
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
        counters.first_batch = counters.second_batch = 0
        counters.epoch = epoch

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


def timed_fetch(
    original: Callable[[Any, Any], Any],
    block: WorkerBlock,
    worker: int,
    counter: BatchCounter | None,
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
        counter: gets each batch, after its fetch was counted.
        sample: called at the start of each fetch while the agent asks for samples.
        stream: whether the data set is iterable.
    """
    counters, last_bucket = block.counters(worker), len(FETCH_BUCKETS)
    histogram, started, finished = counters.histogram, counters.recent_started_ns, counters.recent_finished_ns
    opening = EpochOpening(block, worker, stream=stream)

    @functools.wraps(original)
    @unseen
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        nonlocal counter
        if counters.fetching_since_ns:  # the data set reads another loader: this is a part of the fetch in progress
            return original(self, possibly_batched_index)
        if opening.fetcher() is not self:
            opening.begin(self)
            if counter is not None:
                counter.iteration_begins(self)
        counters.fetching_since_ns = start = now_ns()
        if counters.sample_until_ns > start:
            sample()
        number = counters.ended
        recent = number % RECENT
        try:
            data = original(self, possibly_batched_index)
        except BaseException as error:
            if not isinstance(error, StopIteration):  # the end of an iterable data set is not a batch
                started[recent], finished[recent] = start, now_ns()
                if counter is not None:
                    counter.raised(number)
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
        if counter is not None and not counter.made(number, possibly_batched_index, data):
            counter = None
        return data

    _wrappers[fetch] = None
    return fetch


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
                rest()
                requests = os.read(self.pipe.number, _MAX_REQUESTS_BYTES)
            except OSError:  # the worker's code has closed it at this moment
                return
            finally:
                work()
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
        fork_warning.register()
        fork_warning.begin()
        _responder = _StackResponder(area)
    _responder.area = area
    counters = block.counters(worker)
    counters.stack_inode, counters.stack_thread = _responder.pipe.identity[1], _responder.thread.native
    counters.stack_pipe = _responder.pipe.number  # last: it shows that the others are set


def _own_pipe() -> Descriptor:
    """One descriptor for both ends of a pipe: a read never sees its end, and only one descriptor can leak."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        return Descriptor(raised(os.open(f"/proc/self/fd/{ends[0]}", os.O_RDWR | os.O_CLOEXEC)))
    finally:
        for end in ends:
            os.close(end)
