"""The probe in a DataLoader worker.

While the constructor of an iterator runs, `hooks.dataloader` lets it read a `WorkerProbe` instead of the loader's
``worker_init_fn``. In each worker the probe wraps the ``fetch`` of torch's fetchers (`timed_fetch`) and starts a thread
that answers requests for the worker's stacks. A worker counts in a `WorkerBlock` of shared memory, which the agent
reads without waiting for anybody.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import threading
import weakref
import zlib
from collections import UserDict
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.patching import WeakMap, around, forget_frame, unseen
from telemetry.hooks.worker_block import EPOCHS, FETCH_BUCKETS, RAISED, RECENT, UNKNOWN, SharedArea, WorkerBlock
from telemetry.util import threads as fork_warning
from telemetry.util.clock import now_ns
from telemetry.util.errors import let_pass
from telemetry.util.files import Descriptor, raised
from telemetry.util.sampling import WorkerSampler
from telemetry.util.stacks import python_threads, stack_text
from telemetry.util.threads import OwnThread, rest, work

if TYPE_CHECKING:
    from collections.abc import Callable


# -- what is in a batch ------------------------------------------------------------------------------------------------

_IDS: Final = "input_ids"
_MAX_PARTS: Final = 16
_LOOKS: Final = 16
"""If the first so many batches have no tokens, a worker stops looking for them."""

_PLAIN: Final = frozenset({int, float, bool, str, bytes, type(None)})
_SEQUENCES: Final = frozenset({list, tuple, range})
"""Other classes may run a method of the user's."""


def tokens_in(batch: object) -> int | None:
    """Count the tokens of a batch: the positions of its ``input_ids``, padding included.

    Only shapes and types are read, never values, and no code of the user's class is called.

    Args:
        batch: a mapping or an object with a tensor of integers as ``input_ids``; or a list, tuple or mapping of these.
            Deeper levels are not searched.

    Returns:
        0 without ``input_ids``. None if unknown: the batch is of an unknown class, or its ``input_ids`` are no tensor
        of integers.
    """
    fields = _fields_of(batch)
    if fields is None:
        return None
    holders = [fields] if _IDS in fields else list(map(_fields_of, [*fields.values()][:_MAX_PARTS]))
    tokens = 0
    for holder in holders:
        if holder is not None and _IDS in holder:
            size = _integers_in(holder[_IDS])
            if size is None:
                return None
            tokens += size
    return tokens


def _fields_of(batch: Any) -> dict[Any, Any] | None:
    """The content of a mapping, a sequence or an object; empty for tensors and plain values; None for anything else."""
    kind = type(batch)
    if issubclass(kind, dict):
        return dict(dict.items(batch))  # without the methods of its class
    if issubclass(kind, (list, tuple)):
        own: Any = tuple if issubclass(kind, tuple) else list
        return dict(enumerate(own.__getitem__(batch, slice(_MAX_PARTS))))
    if kind in _PLAIN or kind in {_class("torch", "Tensor"), _class("numpy", "ndarray")}:
        return {}
    try:
        held = object.__getattribute__(batch, "__dict__")
    except AttributeError:  # it has only slots
        return None
    if UserDict in kind.__mro__:
        held = held.get("data")
        return held if type(held) is dict else None
    return held if _IDS in held else None


def _integers_in(ids: Any) -> int | None:
    """The positions of a tensor or an array of integers; None for anything else."""
    if type(ids) is _class("torch", "Tensor"):
        kind = ids.dtype
        integers = not (kind.is_floating_point or kind.is_complex or kind is sys.modules["torch"].bool)
        return int(ids.numel()) if integers else None
    if type(ids) is _class("numpy", "ndarray"):
        return int(ids.size) if ids.dtype.kind in "iu" else None
    return None


class FetchedSamples:
    """Counts the samples of each batch: its indices, or the items of an iterable data set.

    It looks only at the list that torch's fetcher gets or makes, at no value and no code of the user.

    Args:
        stream: whether the data set is iterable. Then items are counted, because a batch may be shorter than requested.
    """

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._items: int | None = None

    def begin(self, fetcher: Any) -> None:
        """Count the batches that this fetcher makes from now on."""
        if not self._stream:
            return
        collate = fetcher.collate_fn

        @unseen
        def noting(items: Any) -> Any:  # torch's fetcher passes a list
            self._items = len(items) if type(items) is list else None
            try:
                return collate(items)
            except BaseException as error:
                forget_frame(error)
                raise

        fetcher.collate_fn = noting

    def of(self, indices: Any) -> int | None:
        """Samples of the newest batch, if known. ``indices``: the indices that were requested."""
        if self._stream:
            items, self._items = self._items, None
            return items
        if type(indices) in _SEQUENCES:
            return len(indices)
        if type(indices) in {_class("torch", "Tensor"), _class("numpy", "ndarray")}:
            return int(indices.shape[0]) if indices.ndim else None
        return None


def _class(module: str, name: str) -> Any:
    """A class of a library; something that is no class if the library is not imported."""
    return getattr(sys.modules.get(module), name, _class)


class BatchCounter:
    """Notes the samples and tokens of a worker's batches. Its methods never raise.

    Args:
        block: the block of its loader.
        worker: the number of the worker.
        stream: whether the data set is iterable.
    """

    def __init__(self, block: WorkerBlock, worker: int, *, stream: bool) -> None:
        self._block = block
        self._worker = worker
        self._samples = FetchedSamples(stream=stream) if block.head.samples_wanted else None
        self._looking = True
        self._looks_left = _LOOKS

    def iteration_begins(self, fetcher: object) -> None:
        """Note that the worker's next fetch is its first of an iteration."""
        try:
            if self._samples is not None:
                self._samples.begin(fetcher)
        except Exception as error:
            let_pass(error)  # no samples are found, so they are unknown

    def made(self, fetch: int, indices: object, batch: object) -> bool:
        """Count the batch of fetch number ``fetch``. Returns whether to count more of them."""
        samples = tokens = None
        try:
            samples = None if self._samples is None else self._samples.of(indices)
            tokens = self._tokens_of(batch) if self._looking else None
        except Exception as error:
            let_pass(error)
        self._note(fetch, UNKNOWN if samples is None else samples, UNKNOWN if tokens is None else tokens)
        return self._looking or self._samples is not None

    def raised(self, fetch: int) -> None:
        """Note that fetch number ``fetch`` has raised. No other fetch gets its number."""
        self._note(fetch, RAISED, UNKNOWN)

    def _tokens_of(self, batch: object) -> int | None:
        tokens, head = tokens_in(batch), self._block.head
        if tokens != 0:
            self._looks_left = 0
            head.tokens_found = 1
        elif self._looks_left:
            self._looks_left -= 1
            if not self._looks_left and not head.tokens_found:
                head.tokens_left = 1
                self._looking = False
        return tokens

    def _note(self, fetch: int, samples: int, tokens: int) -> None:
        try:
            self._block.note_batch(self._worker, fetch, samples, tokens)
        except Exception as error:
            let_pass(error)  # the batch is not noted, so its counts are unknown


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
    marked = around(original, before=lambda _: nvtx.range_push(name), after=lambda *_: nvtx.range_pop())
    _wrappers[marked] = None
    return marked


def _nothing() -> None:
    return None


_OPENED: Final = 2
_COMPARED: Final = 256
"""So many values of a batch are compared."""


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


def fingerprint(batch: object) -> int:
    """A number that equal batches share; 0 if it is unknown. It comes from the first plain value in the batch.

    No code of the user's class is called, and at most 256 values of a tensor are read.
    """
    for _ in range(_MAX_PARTS):
        fields = _fields_of(batch)
        if not fields:
            break
        batch = next(iter(fields.values()))
    values: object = None
    if type(batch) is _class("torch", "Tensor"):
        tensor: Any = batch
        if tensor.device.type == "cpu" and tensor.layout is sys.modules["torch"].strided and tensor.numel():
            flat = tensor.detach().reshape(-1)
            values = flat[:: max(1, tensor.numel() // _COMPARED)].tolist()
    elif type(batch) is _class("numpy", "ndarray"):
        array: Any = batch
        values = array.reshape(-1)[:: max(1, array.size // _COMPARED)].tolist() if array.dtype.kind in "iufb" else None
    elif type(batch) in _PLAIN and batch is not None:
        values = batch
    return 0 if values is None else zlib.crc32(repr(values).encode()) + 1


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


STACK_REQUEST: Final = struct.Struct("=q")
"""The agent writes this into a worker's pipe: the number of its request, which the answer repeats."""

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
