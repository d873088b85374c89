"""Counts which batches the training took: their numbers, samples and tokens.

A batch has as many samples as indices, whatever the collate function makes of them. If torch's own samplers decide the
number, it is read once per iteration, when the first batch has come (`BatchSizes`). Otherwise samples are counted where
the batch is made, and so are tokens: by the workers (`WorkerCounts`), or by the training thread (`OwnCounts`). The fast
path does nothing for it. On the slow path, `BatchMarks` notes the iteration in a batch's entry of the ring. The agent
thread adds the counts up (`SampleCounter`).
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
"""Samplers whose length is the number of indices that they give. Another class's length may be an estimate."""

_FETCHERS: Final = "torch.utils.data._utils.fetch"
_MAX_KEPT: Final = 8192
"""So many batches are kept for the agent thread."""

_MAX_REPLAYED: Final = 1 << 17
"""So many steps are kept until the replay is known. If there are more, the samples are unknown."""

Counts = tuple["int | None", "int | None"]
"""Samples and tokens; None if unknown."""

# -- the batches of one iteration ----------------------------------------------------------------------------------


class BatchSizes(NamedTuple):
    """What torch's sampler decides: the size of a full batch, and all samples; None if all batches are full."""

    size: int
    total: int | None

    def of(self, number: int, batches: int) -> int | None:
        """Samples of ``batches`` from this number on; None if the sampler gives more batches than its length."""
        if self.total is None:
            return batches * self.size
        left = self.total - number * self.size
        return min(batches * self.size, left) if left > (batches - 1) * self.size else None


class WorkerCounts:
    """Reads the samples and tokens of the workers' batches, on the agent thread.

    Until it reads the first of them, it does not keep the block alive: the batch's entry in the ring does.

    Args:
        block: the loader's block. It counts for the current iteration.
        number: the number of the newest delivered batch.
        index: that number in the worker's loop, where batches that raised have one, too.
        first_worker: the worker that made batch 0.
    """

    def __init__(self, block: WorkerBlock, number: int, index: int, first_worker: int) -> None:
        self._found = weakref.ref(block)
        self._block: WorkerBlock | None = None
        self.iteration = block.head.iteration
        self._index = 0
        self._number = max(0, number - index)  # the number of batch 0: an iteration may continue from a state
        self._rotation = first_worker
        self._lost = index < 0 or (number > index > 0)  # earlier batches that raised would shift the numbers

    @property
    def ended(self) -> bool:
        """Whether the iterator is gone, so that no batches will come that the ring does not have now."""
        return self._block is not None and self._block.retired

    def release(self) -> None:
        """Let the block go, once `ended` is true and everything was read."""
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
    """Samples and tokens of the batches that the training thread fetches itself, without workers.

    The training thread adds them, the agent thread takes them. Before `begin`, only the newest batch's are kept.

    Args:
        sizes: counts the samples of each batch; None if they are not needed here.
    """

    def __init__(self, sizes: FetchedSamples | None) -> None:
        self._sizes = sizes
        self._counts: deque[Counts] = deque()
        self._begun = self._lost = False
        self._looking = True
        self._next = 0

    def made(self, indices: object, batch: object) -> None:
        """Count the batch that a fetch has made. Never raises."""
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
        """Keep the counts of all batches from now on. ``number``: of the newest batch in its iteration."""
        if not self._begun:
            self._begun, self._next = True, number
            self._looking = any(tokens != 0 for _, tokens in self._counts)  # other batches are like the first

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
        sizes: what the sampler decides; None if it decides nothing.
        counted: counts made where the batches are made; None if nobody counts.
        no_tokens: tokens need no count: the batches have no `input_ids`, or the script reports the number.
    """

    sizes: BatchSizes | None
    counted: WorkerCounts | OwnCounts | None
    no_tokens: bool

    def of(self, number: int, batches: int) -> Counts:
        """Counts of some batches. Ask in the order of the batches.

        Args:
            number: the number of the first.
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
        samples: whether to count samples. Then the iterator must not have fetched anything yet.

    Returns:
        None if the fetcher is not torch's, or other code has wrapped it.
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
    """Wrap one fetcher's ``fetch``. References are weak, so that it neither keeps it alive nor counts after `stop`."""

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
    """The sizes of the batches of a ``DataLoader``'s iterator; None if code that is not torch's decides them."""
    size = loaders.batch_size_of(iterator)
    if size is None or not _decided_by_torch(iterator):
        return None
    sampler = own_value(iterator, "_index_sampler")
    try:
        return BatchSizes(size, None if sampler.drop_last else len(sampler.sampler))
    except Exception as error:  # from the length of the user's data set
        let_pass(error)
        return None


def _decided_by_torch(iterator: Any) -> bool:
    """Whether the sampler's settings decide the sizes. An iterable data set may end in the middle of a batch."""
    sampler = own_value(iterator, "_index_sampler")
    map_style = own_value(iterator, "_dataset_kind") == 0
    if not map_style or type(sampler) is not _class("torch.utils.data.sampler", "BatchSampler"):
        return False
    return sampler.drop_last or type(sampler.sampler) in {_class(module, name) for module, name in _SAMPLERS}


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


# -- on the training thread ----------------------------------------------------------------------------------------


class BatchMark(NamedTuple):
    """Stands for the source of a batch in the ring, and begins an iteration's batches.

    Attributes:
        source: where they come from.
        counts: their counts, if known.
        number: the first batch's number in its iteration.
    """

    source: BatchSource
    counts: BatchCounts | None
    number: int


class BatchMarks:
    """Marks batches with their iteration, on the slow path of the training thread."""

    def __init__(self) -> None:
        self._iterator_id = 0
        self._known: dict[int, BatchCounts | None] = {}
        self._counted: WeakMap[WorkerCounts | OwnCounts | None] = WeakMap()

    def begun(self) -> None:
        """Note that an iteration begins, maybe with an iterator that has been used before."""
        self._iterator_id = 0
        self._known.clear()

    def made(self, iterator: object) -> None:
        """Count an iterator that was made, or begins again, from its first batch on, if it has no workers."""
        inside: Any = loaders.unwrapped(iterator)
        if self.counts_samples(inside) and not own_value(inside, "_num_workers") and inside not in self._counted:
            self._counted[inside] = _follow(inside, samples=True)

    @staticmethod
    def counts_samples(iterator: Any) -> bool:
        """Whether the samples of a ``DataLoader``'s iterator are counted where its batches are made.

        They are if torch makes the batches but its sampler does not decide their sizes. Without ``batch_size``, the
        loader gives the data set's items, which may be batches or not.
        """
        return (
            loaders.is_loader_iterator(iterator)
            and own_value(iterator, "_auto_collation") is True
            and not _decided_by_torch(iterator)
        )

    def batch(self, iterator: object, batch: object, source: BatchSource, *, told: bool) -> BatchSource | BatchMark:
        """Return what to write as the source of a training batch that has come.

        ``told``: whether the script reports its tokens, so that they need no count.
        """
        key = id(iterator)
        if key == self._iterator_id:
            return source
        self._iterator_id = key
        inside: Any = loaders.unwrapped(iterator)
        number = _yielded(inside) - 1
        if key not in self._known:  # two loaders that take turns are looked at once
            self._known[key] = None if number < 0 else self._counts_of(inside, number, batch, source, told=told)
        return BatchMark(source, self._known[key], number)

    def not_training(self, iterator: object, source: BatchSource) -> BatchSource | BatchMark:
        """Return what to write for a batch that was not for training. The next one follows it in the counts."""
        if id(iterator) != self._iterator_id:
            return source
        return BatchMark(source, self._known[self._iterator_id], _yielded(loaders.unwrapped(iterator)))

    def forget(self) -> None:
        """Stop counting the training thread's own batches, because the agent stops."""
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
            # Unlike ours, the loop's number is 0 again in a restored state. torchdata keeps the newest batch's worker.
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
    """Adds up the samples and tokens of the ring's batches, on the agent thread.

    One batch of unknown size makes the whole sum unknown.
    """

    def __init__(self) -> None:
        self._counts: BatchCounts | None = None
        self._number = 0
        self._samples = _TrainedSum()
        self._tokens = _TrainedSum()
        self._tokens_before = 0  # tokens counted before the script began to report them
        self._settled = False
        self._in_step = False

    def fold(self, entries: Sequence[Entry]) -> None:
        """Count entries of the ring in their order."""
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
        """The counts of an iteration, if the ring has all its remaining batches."""
        counted = None if self._counts is None else self._counts.counted
        return counted if isinstance(counted, WorkerCounts) and counted.ended else None

    def forget(self, ended: WorkerCounts | None) -> None:
        """Drop counts that had `ended` before the ring was read. They would keep the workers' memory."""
        if ended is not None and self._counts is not None and ended is self._counts.counted:
            self._counts = None
            ended.release()

    def settle(self, replayed_steps: int) -> None:
        """Take the replayed first steps out of the sums, once their number is known."""
        if not self._settled:
            self._settled = True
            self._samples.settle(replayed_steps)
            self._tokens.settle(replayed_steps)

    @property
    def samples(self) -> int | None:
        """Samples of the training batches so far; None if unknown, or not yet known."""
        return self._samples.trained

    def tokens(self, told: int | None) -> int | None:
        """Tokens of the training batches so far; None if unknown, or not yet known.

        Args:
            told: tokens that the script has reported, which replace later counts; None if it reports none.
        """
        if told is not None:
            return self._tokens_before + told
        counted = self._tokens.trained or None  # without `input_ids`, a batch's tokens are unknown, not 0
        self._tokens_before = counted or self._tokens_before
        return counted


class _TrainedSum:
    def __init__(self) -> None:
        self._sum = 0
        self._known: bool | None = None  # None before the first batch
        self._settled = False
        self._first: array[int] = array("q")  # the sum after each step, until `settle`

    def add(self, number: int | None) -> None:
        if number is None:
            self._known = False
        elif self._known is not False:
            self._known = True
            self._sum += number

    def step_ended(self) -> None:
        if len(self._first) < _MAX_REPLAYED:
            self._first.append(self._sum)

    def settle(self, replayed_steps: int) -> None:
        if replayed_steps > len(self._first):
            self._known = False
        elif replayed_steps:
            self._sum -= self._first[replayed_steps - 1]
        self._first = array("q")
        self._settled = True

    @property
    def trained(self) -> int | None:
        """The sum; None if unknown, or not yet known."""
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
        """Number entries of the ring in the order in which they happened."""
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
                    self._batch(start, end, code, current)  # the entry of an ordinary batch has no source
            elif isinstance(source, DroppedSpans):
                self._lost()
            elif code & BEGINS and isinstance(source, LoaderHandle):
                self._begin(source)
            else:
                if code & 7 == S_DATA_WAIT:
                    self._current, current = weakref.ref(source), source
                self._batch(start, end, code, source)

    def _ordinary(self, entries: Sequence[Entry], loader: LoaderHandle) -> None:
        """Number a run of ordinary batches of one iteration with workers, which nearly all entries are."""
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
        """Begin an iteration. Its batches cannot be numbered if starts of other iterations were dropped."""
        seen = self._numbered.get(loader) or 0
        unseen = self._numbered[loader] = loader.unseen
        loader.epoch += 1 + unseen - seen
        unknown = unseen != seen or (loader.resumed and loader.epoch == 1)
        loader.delivered = None if unknown else 0

    def _lost(self) -> None:
        """Note dropped entries. Batches cannot be matched with fetches until the next iteration begins."""
        for loader in (*self._numbered.objects(), self._current()):
            if isinstance(loader, LoaderHandle):
                loader.delivered = None
