"""Which batches the training took: their numbers, samples and tokens.

A batch has as many samples as indices, whatever the collate function makes of them. Where torch's own samplers decide
it, that is read once per iteration, when its first batch has come (`BatchSizes`). Otherwise samples are counted where
the batch is made, and so are tokens: by the workers (`WorkerCounts`), or by the training thread (`OwnCounts`). The fast
path does nothing for it. On the slow path, `BatchMarks` notes in a batch's entry of the ring which iteration it is of.
The agent thread adds them up (`SampleCounter`).
"""

from __future__ import annotations

import sys
import weakref
from array import array
from bisect import bisect_left
from collections import deque
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.hooks import loaders
from telemetry.hooks.loaders import ON_THREAD, Arrival, BatchSource, LoaderHandle, own_value
from telemetry.hooks.patching import WeakMap, forget_frame, unseen
from telemetry.hooks.ring import BATCH, BEGINS, CLOSES, GAP, JOINS, OPENS, S_DATA_WAIT, STEP
from telemetry.hooks.worker import FetchedSamples, tokens_in
from telemetry.hooks.worker_block import FETCH_BUCKETS, RAISED, UNKNOWN
from telemetry.records import DroppedSpans, Histogram
from telemetry.util.clock import NS
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.hooks.ring import Entry
    from telemetry.hooks.worker_block import WorkerBlock

_SAMPLERS: Final = (
    ("torch.utils.data.sampler", "SequentialSampler"),
    ("torch.utils.data.sampler", "RandomSampler"),
    ("torch.utils.data.sampler", "SubsetRandomSampler"),
    ("torch.utils.data.sampler", "WeightedRandomSampler"),
    ("torch.utils.data.distributed", "DistributedSampler"),
)
"""Samplers whose length is the number of indices that they give. That of another class may be an estimate."""

_FETCHERS: Final = "torch.utils.data._utils.fetch"
_MAX_KEPT: Final = 8192
"""Batches that the agent thread has not taken."""

_MAX_REPLAYED: Final = 1 << 17
"""Steps before it is known how many of them threw their batches away. If it was more, the samples are not known."""

Counts = tuple["int | None", "int | None"]
"""Samples and tokens; None where they are not known."""

# -- the batches of one iteration ----------------------------------------------------------------------------------


class BatchSizes(NamedTuple):
    """What a sampler of torch decides: the size of a full batch, and all samples; None if all batches are full."""

    size: int
    total: int | None

    def of(self, number: int, batches: int) -> int | None:
        """Samples of ``batches`` from this number on; None if the sampler gives more batches than it says."""
        if self.total is None:
            return batches * self.size
        left = self.total - number * self.size
        return min(batches * self.size, left) if left > (batches - 1) * self.size else None


class WorkerCounts:
    """Reads the samples and tokens of the batches that workers have made, on the agent thread.

    Until the first of them is read, it does not keep the block alive: the entry of that batch in the ring does.

    Args:
        block: of the loader. Its iteration is the one under way.
        number: of the newest batch, among those that were delivered. ``index``: by the worker's loop, where batches
            that raised have a number, too. ``first_worker``: the worker that made batch 0.
    """

    def __init__(self, block: WorkerBlock, number: int, index: int, first_worker: int) -> None:
        self._found = weakref.ref(block)
        self._block: WorkerBlock | None = None
        self.iteration = block.head.iteration
        self._index = 0
        self._number = max(0, number - index)  # of batch 0: an iteration may go on from a state
        self._rotation = first_worker
        self._lost = index < 0 or (number > index > 0)  # batches that raised before would shift the numbers

    @property
    def ended(self) -> bool:
        """Whether the iterator is gone, so that there is no more to come than what the ring has now."""
        return self._block is not None and self._block.retired

    def release(self) -> None:
        """Do not keep the block alive any more: `ended`, and all was read."""
        self._block, self._lost = None, True

    def of(self, number: int, batches: int) -> Counts:
        """Counts of ``batches`` from this number on. Numbers must increase."""
        if self._block is None and not self._lost:
            self._block = self._found()
        block = self._block
        if block is None:
            return None, None
        samples: list[int] = []
        tokens: list[int] = []
        while self._number < number + batches and not self._lost:
            found = self._next(block)
            if self._number >= number:
                samples.append(found[0])
                tokens.append(found[1])
            self._number += 1
        none_left = block.head.tokens_left and not block.head.tokens_found
        return self._sum(samples, batches), 0 if none_left else self._sum(tokens, batches)

    def _sum(self, counts: list[int], batches: int) -> int | None:
        return None if self._lost or len(counts) < batches or UNKNOWN in counts else sum(counts)

    def _next(self, block: WorkerBlock) -> tuple[int, int]:
        """The samples and tokens of the next batch that was delivered."""
        while True:
            turn, place = divmod(self._index, block.workers)
            worker = (place + self._rotation) % block.workers
            found = block.batch(self.iteration, turn * block.workers + worker)
            self._index += 1
            if found is None:
                self._lost = True
                return UNKNOWN, UNKNOWN
            if found[0] != RAISED:
                return found


class OwnCounts:
    """Samples and tokens of the batches that the training thread fetches itself, where there is no worker to count.

    The training thread adds them, the agent thread takes them. Before `begin`, only that of the newest batch is kept.

    Args:
        sizes: tells the samples of each batch; None if nobody needs them here.
    """

    def __init__(self, sizes: FetchedSamples | None) -> None:
        self._sizes = sizes
        self._counts: deque[Counts] = deque()
        self._begun = self._lost = False
        self._looking = True
        self._next = 0

    def made(self, indices: object, batch: object) -> None:
        """A fetch has made the next batch. Never raises."""
        samples = tokens = None
        try:
            samples = None if self._sizes is None else self._sizes.of(indices)
            tokens = tokens_in(batch) if self._looking else 0
        except Exception as error:
            let_pass(error)
        if not self._begun:
            self._counts.clear()
        self._lost = self._lost or len(self._counts) >= _MAX_KEPT
        if not self._lost:
            self._counts.append((samples, tokens))

    def begin(self, number: int) -> None:
        """Batches are taken from now on. ``number``: of the newest one in its iteration."""
        if not self._begun:
            self._begun, self._next = True, number
            self._looking = any(tokens != 0 for _, tokens in self._counts)  # as the first one, so are the others

    def of(self, number: int, batches: int) -> Counts:
        """Counts of ``batches`` from this number on. Numbers must not decrease."""
        while self._next < number and self._counts:
            self._counts.popleft()
            self._next += 1
        if self._next != number or len(self._counts) < batches:
            return None, None
        self._next += batches
        taken = [self._counts.popleft() for _ in range(batches)]
        samples, tokens = zip(*taken, strict=True)
        return (None if None in samples else sum(samples)), (None if None in tokens else sum(tokens))


class BatchCounts(NamedTuple):
    """The samples and tokens of the batches of one iteration.

    Attributes:
        sizes: what the sampler decides; None if it does not.
        counted: those that are counted where batches are made; None if nobody counts them.
        no_tokens: nobody needs to count tokens: the batches have no `input_ids`, or the script tells the number.
    """

    sizes: BatchSizes | None
    counted: WorkerCounts | OwnCounts | None
    no_tokens: bool

    def of(self, number: int, batches: int) -> Counts:
        """Counts of some batches. Asked in the order of the batches.

        Args:
            number: of the first.
            batches: how many.
        """
        samples, tokens = (None, None) if self.counted is None else self.counted.of(number, batches)
        if self.sizes is not None:
            samples = self.sizes.of(number, batches)
        return samples, 0 if self.no_tokens else tokens


def _follow(iterator: Any, *, samples: bool) -> OwnCounts | None:
    """Count the fetches of an iteration without workers.

    Args:
        iterator: the DataLoader's iterator.
        samples: whether to count samples. Then it must not have fetched anything.

    Returns:
        None if the fetcher is not torch's, or somebody else has wrapped it.
    """
    fetcher: Any = own_value(iterator, "_dataset_fetcher")
    if type(fetcher).__module__ != _FETCHERS or "fetch" in vars(fetcher):
        return None
    sizes = FetchedSamples(stream=own_value(iterator, "_dataset_kind") != 0) if samples else None
    if sizes is not None:
        sizes.begin(fetcher)
    counts = OwnCounts(sizes)
    fetcher.fetch = _counted(type(fetcher).fetch, weakref.ref(fetcher), weakref.ref(counts))
    return counts


def _counted(
    original: Callable[[Any, Any], Any], fetcher: Callable[[], Any], counts: Callable[[], OwnCounts | None]
) -> Callable[[Any], Any]:
    """``fetch`` of one fetcher. References are weak: it must not keep the fetcher alive, nor count after `stop`."""

    @unseen
    def fetch(possibly_batched_index: Any) -> Any:
        try:
            batch = original(fetcher(), possibly_batched_index)
        except BaseException as error:
            forget_frame(error)
            raise
        followed = counts()
        if followed is not None:
            followed.made(possibly_batched_index, batch)
        return batch

    return fetch


def _sizes_of(iterator: Any) -> BatchSizes | None:
    """The sizes of the batches of a ``DataLoader``'s iterator; None if other code than torch's decides them."""
    size = loaders.batch_size_of(iterator)
    if size is None or not _decided_by_torch(iterator):
        return None
    sampler = own_value(iterator, "_index_sampler")
    try:
        return BatchSizes(size, None if sampler.drop_last else len(sampler.sampler))
    except Exception as error:  # the length of the user's data set
        let_pass(error)
        return None


def _decided_by_torch(iterator: Any) -> bool:
    """Whether the sampler's settings tell the sizes. An iterable data set may end in the middle of a batch."""
    sampler = own_value(iterator, "_index_sampler")
    map_style = own_value(iterator, "_dataset_kind") == 0
    if not map_style or type(sampler) is not _class("torch.utils.data.sampler", "BatchSampler"):
        return False
    return sampler.drop_last or type(sampler.sampler) in {_class(module, name) for module, name in _SAMPLERS}


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


# -- on the training thread ----------------------------------------------------------------------------------------


class BatchMark(NamedTuple):
    """In place of the source of a batch in the ring: from this entry on, batches are of this iteration.

    Attributes:
        source: where they come from.
        counts: None if nothing is known of them.
        number: of the first of them in its iteration.
    """

    source: BatchSource
    counts: BatchCounts | None
    number: int


class BatchMarks:
    """Used by the training thread, on the slow path."""

    def __init__(self) -> None:
        self._iterator_id = 0
        self._known: dict[int, BatchCounts | None] = {}
        self._counted: WeakMap[WorkerCounts | OwnCounts | None] = WeakMap()

    def begun(self) -> None:
        """An iteration begins, maybe with an iterator that has been used before."""
        self._iterator_id = 0
        self._known.clear()

    def made(self, iterator: object) -> None:
        """An iterator was made, or begins again. Without workers, its samples are counted from its first batch on."""
        inside: Any = loaders.unwrapped(iterator)
        if self.counts_samples(inside) and not own_value(inside, "_num_workers") and inside not in self._counted:
            self._counted[inside] = _follow(inside, samples=True)

    @staticmethod
    def counts_samples(iterator: Any) -> bool:
        """Whether the samples of a ``DataLoader``'s iterator are counted where its batches are made.

        They are where torch makes the batches, but its sampler does not tell their sizes. Without ``batch_size``, the
        loader gives what the data set gives, which may be a batch or not.
        """
        return (
            loaders.is_loader_iterator(iterator)
            and own_value(iterator, "_auto_collation") is True
            and not _decided_by_torch(iterator)
        )

    def batch(self, iterator: object, batch: object, source: BatchSource, *, told: bool) -> BatchSource | BatchMark:
        """A training batch of this iterator has come. Returns what to write as its source.

        ``told``: whether the script tells its tokens, so that nobody needs to count them.
        """
        key = id(iterator)
        if key == self._iterator_id:
            return source
        self._iterator_id = key
        inside: Any = loaders.unwrapped(iterator)
        number = _yielded(inside) - 1
        if key not in self._known:  # two loaders that are asked in turn are looked at once
            self._known[key] = None if number < 0 else self._counts_of(inside, number, batch, source, told=told)
        return BatchMark(source, self._known[key], number)

    def not_training(self, iterator: object, source: BatchSource) -> BatchSource | BatchMark:
        """A batch was not for training: it has a number, but the next one follows in the counts. Returns as `batch`."""
        if id(iterator) != self._iterator_id:
            return source
        return BatchMark(source, self._known[self._iterator_id], _yielded(loaders.unwrapped(iterator)))

    def forget(self) -> None:
        """The agent stops: count nothing of the training thread's own batches any more."""
        self._counted.clear()

    def _counts_of(
        self, iterator: Any, number: int, batch: object, source: BatchSource, *, told: bool
    ) -> BatchCounts | None:
        """The counts of an iteration. ``batch`` is its newest, with this number."""
        sizes = _sizes_of(iterator)
        if isinstance(source, LoaderHandle):
            return BatchCounts(sizes, self._of_workers(iterator, number, source), told)
        if source is not ON_THREAD:
            return BatchCounts(sizes, None, told)
        tokens = 0 if told else tokens_in(batch)
        if tokens and iterator not in self._counted:
            counts = self._counted[iterator] = _follow(iterator, samples=False)
            if counts is not None:
                counts.made(None, batch)
        own = self._counted.get(iterator)
        if not isinstance(own, OwnCounts):
            return BatchCounts(sizes, None, tokens == 0)
        own.begin(number)
        return BatchCounts(sizes, own, tokens == 0)

    def _of_workers(self, iterator: Any, number: int, loader: LoaderHandle) -> WorkerCounts | None:
        block = loader.block
        if block is None or not loader.in_order:
            return None
        counts = self._counted.get(iterator)
        if not isinstance(counts, WorkerCounts) or counts.iteration != block.head.iteration:
            # Unlike ours, the loop's number is 0 again where a state was restored. torchdata's loader tells the worker.
            index = int(own_value(iterator, "_rcvd_idx", 0)) - 1
            newest = own_value(iterator, "_last_yielded_worker_id")
            first = (newest - index) % block.workers if isinstance(newest, int) else 0
            counts = self._counted[iterator] = WorkerCounts(block, number, index, first)
        return counts


def _yielded(iterator: Any) -> int:
    """How many batches a ``DataLoader``'s iterator has given; 0 for anything else."""
    return int(own_value(iterator, "_num_yielded", 0)) if loaders.is_loader_iterator(iterator) else 0


# -- on the agent thread -------------------------------------------------------------------------------------------


class SampleCounter:
    """Adds up the samples and tokens of the batches in the ring, on the agent thread.

    One batch of unknown size makes the whole sum unknown.
    """

    def __init__(self) -> None:
        self._counts: BatchCounts | None = None
        self._number = 0
        self._samples = _TrainedSum()
        self._tokens = _TrainedSum()
        self._tokens_before = 0  # that were counted when the script began to tell them
        self._settled = False
        self._in_step = False

    def fold(self, entries: Sequence[Entry]) -> None:
        """Count entries of the ring, in their order."""
        if self._settled and all(code == STEP and source is None for _, _, code, source in entries):
            if entries:
                self._add_batches(len(entries))
            return
        for _start, _end, code, source in entries:
            if isinstance(source, BatchMark):
                _, self._counts, self._number = source
            if code & GAP:
                self._add(None, None)
                continue
            if not self._settled:
                self._note_step(code)
            if code & (BATCH | JOINS):
                self._add_batches(1)

    def _add_batches(self, batches: int) -> None:
        self._add(*((None, None) if self._counts is None else self._counts.of(self._number, batches)))
        self._number += batches

    def _add(self, samples: int | None, tokens: int | None) -> None:
        self._samples.add(samples)
        self._tokens.add(tokens)

    def _note_step(self, code: int) -> None:
        if code & CLOSES:
            if self._in_step:
                self._samples.step_ended()
                self._tokens.step_ended()
            self._in_step = False
        if code & OPENS:
            self._in_step = True

    @property
    def ended(self) -> WorkerCounts | None:
        """The counts of an iteration of which no batch is to come that the ring does not have yet."""
        counted = None if self._counts is None else self._counts.counted
        return counted if isinstance(counted, WorkerCounts) and counted.ended else None

    def forget(self, ended: WorkerCounts | None) -> None:
        """The ring was read since they had `ended`. They would keep the memory of the workers."""
        if ended is not None and self._counts is not None and ended is self._counts.counted:
            self._counts = None
            ended.release()

    def settle(self, replayed_steps: int) -> None:
        """It is known how many of the first steps threw their batches away: the rest was trained."""
        if not self._settled:
            self._settled = True
            self._samples.settle(replayed_steps)
            self._tokens.settle(replayed_steps)

    @property
    def samples(self) -> int | None:
        """Samples of the training batches so far; None if that is not known, or not yet."""
        return self._samples.trained

    def tokens(self, told: int | None) -> int | None:
        """Tokens of the training batches so far; None if that is not known, or not yet.

        Args:
            told: tokens that the script has told, which count instead from then on; None if it tells none.
        """
        if told is not None:
            return self._tokens_before + told
        counted = self._tokens.trained or None  # batches without `input_ids` are no 0 tokens
        self._tokens_before = counted or self._tokens_before
        return counted


class _TrainedSum:
    """One sum over the training batches."""

    def __init__(self) -> None:
        self._sum = 0
        self._known: bool | None = None  # None before the first batch
        self._settled = False
        self._first: array[int] = array("q")  # the sum after each step, until `settle`

    def add(self, number: int | None) -> None:
        """Add a batch; None makes the sum unknown."""
        if number is None:
            self._known = False
        elif self._known is not False:
            self._known = True
            self._sum += number

    def step_ended(self) -> None:
        """Keep the sum so far."""
        if len(self._first) < _MAX_REPLAYED:
            self._first.append(self._sum)

    def settle(self, replayed_steps: int) -> None:
        """Take the batches of the first steps out of the sum."""
        if replayed_steps > len(self._first):
            self._known = False
        elif replayed_steps:
            self._sum -= self._first[replayed_steps - 1]
        self._first = array("q")
        self._settled = True

    @property
    def trained(self) -> int | None:
        """The sum; None if it is not known, or not yet."""
        return self._sum if self._known and self._settled else None


class BatchNumbering:
    """Numbers the batches in the ring, and sums the waits by source."""

    def __init__(self) -> None:
        self._current: Callable[[], BatchSource | None] = lambda: None  # or a weak reference
        self._waits: dict[BatchSource, int] = {}
        self._own_counts = [0] * (len(FETCH_BUCKETS) + 1)
        self._own_ns = 0
        self._numbered: WeakMap[int] = WeakMap()

    def fold(self, entries: Sequence[Entry]) -> None:
        """Number entries of the ring, in the order in which they happened."""
        if not entries:
            return
        current = self._current()
        if isinstance(current, LoaderHandle) and all(c == STEP and source is None for _, _, c, source in entries):
            self._ordinary(entries, current)
            return
        for start, end, code, origin in entries:
            source = origin.source if isinstance(origin, BatchMark) else origin
            if source is None:
                if code & BATCH:
                    self._batch(start, end, code, current)  # an ordinary batch has no source in its entry
            elif isinstance(source, DroppedSpans):
                self._lost()
            elif code & BEGINS and isinstance(source, LoaderHandle):
                self._begin(source)
            else:
                if code & 7 == S_DATA_WAIT:
                    self._current, current = weakref.ref(source), source
                self._batch(start, end, code, source)

    def _ordinary(self, entries: Sequence[Entry], loader: LoaderHandle) -> None:
        """The next batches of an iteration with workers, which is what nearly all entries are."""
        starts, ends, _, _ = zip(*entries, strict=True)
        self._waits[loader] = self._waits.get(loader, 0) + sum(ends) - sum(starts)
        if loader.delivered is not None:
            loader.arrivals.extend(map(Arrival, repeat(loader.epoch), count(loader.delivered), starts, ends))
            loader.delivered += len(entries)

    def _batch(self, start: int, end: int, code: int, source: BatchSource | None) -> None:
        if source is None:
            return
        waited = code & 7 == S_DATA_WAIT
        if waited:
            self._waits[source] = self._waits.get(source, 0) + end - start
            if source is ON_THREAD:  # without workers the wait is the fetch
                self._own_counts[bisect_left(FETCH_BUCKETS, (end - start) / NS)] += 1
                self._own_ns += end - start
        if isinstance(source, LoaderHandle) and source.delivered is not None:
            if waited:
                source.arrivals.append(Arrival(source.epoch, source.delivered, start, end))
            source.delivered += 1

    def own_fetches(self) -> Histogram | None:
        """Durations of the training thread's own fetches; None before the first."""
        if not self._own_ns:
            return None
        return Histogram(FETCH_BUCKETS, tuple(self._own_counts), self._own_ns / NS)

    def take_source(self) -> BatchSource | None:
        """The source with the longest wait since the last call; None without a wait."""
        waits, self._waits = self._waits, {}
        return max(waits, key=lambda source: waits[source], default=None)

    def _begin(self, loader: LoaderHandle) -> None:
        """Begin an iteration. Its batches cannot be numbered if the starts of others were dropped."""
        seen = self._numbered.get(loader) or 0
        unseen = self._numbered[loader] = loader.unseen
        loader.epoch += 1 + unseen - seen
        unknown = unseen != seen or (loader.resumed and loader.epoch == 1)
        loader.delivered = None if unknown else 0

    def _lost(self) -> None:
        """Note that entries were dropped. Batches cannot be matched with fetches until the next iteration begins."""
        for loader in (*self._numbered.objects(), self._current()):
            if isinstance(loader, LoaderHandle):
                loader.delivered = None
