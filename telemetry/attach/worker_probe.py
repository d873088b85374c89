"""Runs inside the DataLoader workers: times each fetch into the shared block, and counts what its batch has.

The probe replaces the loader's ``worker_init_fn``. With any start method, that runs in every worker before its fetcher
is made. If a worker is a thread of the training process, nothing is patched and its fetches are not timed.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.batch_table import BatchWriter
from telemetry.attach.worker_block import (
    COUNTS,
    COUNTS_AT,
    EPOCH,
    EPOCHS,
    EPOCHS_AT,
    HISTOGRAM_AT,
    PID,
    RECENT,
    RECENT_AT,
    SAMPLE_SESSION,
    SAMPLE_UNTIL,
    SINCE,
    SLOT_WORDS,
    SPAN,
    STACK_INODE,
    STACK_PIPE,
    STACK_THREAD,
    TID,
    WorkerBlock,
)
from telemetry.core.worker_records import FETCH_BUCKETS
from telemetry.hooks.patching import WeakMap, forget_frame, unseen
from telemetry.util.clock import now_ns
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable


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
        except Exception as error:
            let_pass(error)  # it cannot be reported from here; the agent sees a worker without counters
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


_wrappers: Final[WeakMap[str]] = WeakMap()
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

    base = worker * SLOT_WORDS
    words = block.words[base : base + SLOT_WORDS]
    words[TID] = threading.get_native_id()
    words[PID] = os.getpid()
    sample = _sampling(block, worker, words)
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        batches = BatchWriter(block.batches, stream=kind is fetch._IterableDatasetFetcher)
        own = without_ours(kind.fetch, "timed", "marked")
        kind.fetch = note_wrapper(timed_fetch(own, words, sample, batches), "timed")


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
                    lambda: (words[SAMPLE_SESSION], words[SAMPLE_UNTIL]),
                    lambda: words[SINCE] > 0,
                    block.area(worker),
                ).ask
            ask()
        except Exception as error:
            let_pass(error)  # it cannot be reported from here; the agent sees a worker without a profile

    return sample


def _offer_stacks(block: WorkerBlock, worker: int) -> None:
    """Prepare this worker for requests of its stacks, and write the port into the block."""
    from telemetry.attach.worker_stack_responder import offer_stacks

    offer = offer_stacks(block.stack_area(worker))
    base = worker * SLOT_WORDS
    block.words[base + STACK_INODE] = offer.inode
    block.words[base + STACK_THREAD] = offer.thread
    block.words[base + STACK_PIPE] = offer.pipe  # last: it shows that the others are set


def _nothing() -> None:
    return None


def timed_fetch(
    original: Callable[[Any, Any], Any],
    words: memoryview,
    sample: Callable[[], None] = _nothing,
    batches: BatchWriter | None = None,
) -> Callable[[Any, Any], Any]:
    """``fetch``, counted in one worker's slot.

    The counts are kept in the closure and stored together, because each store into the memory is a call. CPU time is
    not counted here: the kernel counts it (schedstat), and reading it twice per fetch would double the cost.

    Args:
        original: the fetcher's method.
        words: the worker's slot, as 64-bit integers.
        sample: called at the start of each fetch while the agent asks for samples.
        batches: gets each batch, after its fetch was counted.
    """
    last_bucket = len(FETCH_BUCKETS)
    slot, store, store_span = words.cast("B"), COUNTS.pack_into, SPAN.pack_into
    fetches = wall = ended = 0
    current: Callable[[], Any] = _nothing  # weak: a reference to the fetcher would delay the clean-up of its iterator

    @functools.wraps(original)
    @unseen
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        nonlocal fetches, wall, ended, current, batches
        if words[SINCE]:  # of a loader that the data set reads: a part of the fetch in progress
            return original(self, possibly_batched_index)
        if current() is not self:  # each epoch has a new fetcher
            current = weakref.ref(self)
            epoch = words[EPOCH] + 1
            words[EPOCHS_AT + epoch % EPOCHS] = ended
            words[EPOCH] = epoch
            if batches is not None:
                batches.iteration_begins(self)
        words[SINCE] = start = now_ns()
        if words[SAMPLE_UNTIL] > start:
            sample()
        try:
            data = original(self, possibly_batched_index)
        except BaseException as error:
            if not isinstance(error, StopIteration):  # the end of an iterable data set is not a batch
                store_span(slot, 8 * RECENT_AT + ended % RECENT * SPAN.size, start, now_ns())
                ended += 1
                if batches is not None:
                    batches.raised()
            store(slot, COUNTS_AT, fetches, wall, 0, ended)
            forget_frame(error)
            raise
        end = now_ns()
        took = end - start
        store_span(slot, 8 * RECENT_AT + ended % RECENT * SPAN.size, start, end)
        words[HISTOGRAM_AT + min((took >> 20).bit_length(), last_bucket)] += 1
        ended += 1
        fetches += 1
        wall += took
        store(slot, COUNTS_AT, fetches, wall, 0, ended)
        if batches is not None and not batches.made(possibly_batched_index, data):
            batches = None
        return data

    return fetch
