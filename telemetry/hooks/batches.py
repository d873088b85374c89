"""Follows which batches the training takes, and counts their samples and tokens.

A batch has as many samples as indices, whatever the collate function makes of them. If torch's own samplers decide the
number, it is read once per iteration, when the first batch has come (`BatchSizes`). Otherwise samples are counted where
the batch is made, and so are tokens: by the workers (`BatchCounter`), or by the training thread (`OwnCounts`). The fast
path does nothing for it. On the slow path, `BatchMarks` notes the iteration in a batch's entry of the ring. From there
on the agent thread gives each batch its place in its iteration, and adds the counts up (`TrainedBatches`).
"""

from __future__ import annotations

import sys
import weakref
import zlib
from array import array
from collections import UserDict, deque
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.hooks import loaders
from telemetry.hooks.loaders import ON_THREAD, Arrival, BatchSource, LoaderHandle, own_value
from telemetry.hooks.patching import WeakMap, forget_frame, unseen
from telemetry.hooks.ring import BATCH, BEGINS, CLOSES, GAP, JOINS, OPENS, S_DATA_WAIT, STEP
from telemetry.hooks.worker_block import RAISED, UNKNOWN_COUNT
from telemetry.records import FETCH_BUCKETS, Histogram
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


# -- what is in a batch ------------------------------------------------------------------------------------------------

_IDS: Final = "input_ids"
_MAX_PARTS: Final = 16
_LOOKS: Final = 16
"""If the first so many batches have no tokens, a worker stops looking for them."""

_COMPARED: Final = 256
"""So many values of a batch are compared."""

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


def _class(module: str, name: str) -> Any:
    """A class of a library; something that is no class if the library is not imported."""
    return getattr(sys.modules.get(module), name, _class)


def fingerprint(batch: object) -> int:
    """A number that equal batches share; 0 if it is unknown. It comes from the first plain value in the batch.

    No code of the user's class is called, and at most 256 values of a tensor are read. One that is not contiguous is
    unknown, because all of it would be copied.
    """
    for _ in range(_MAX_PARTS):
        fields = _fields_of(batch)
        if not fields:
            break
        batch = next(iter(fields.values()))
    values: object = None
    if type(batch) is _class("torch", "Tensor"):
        tensor: Any = batch
        strided = tensor.layout is sys.modules["torch"].strided
        if tensor.device.type == "cpu" and strided and tensor.numel() and tensor.is_contiguous():
            flat = tensor.detach().view(-1)
            values = flat[:: max(1, tensor.numel() // _COMPARED)].tolist()
    elif type(batch) is _class("numpy", "ndarray"):
        held: Any = batch
        if held.dtype.kind in "iufb" and held.flags.c_contiguous:
            values = held.reshape(-1)[:: max(1, held.size // _COMPARED)].tolist()
    elif type(batch) in _PLAIN and batch is not None:
        values = batch
    return 0 if values is None else zlib.crc32(repr(values).encode()) + 1


# -- counted where the batch is made: in a worker, or on the training thread -------------------------------------------


class FetchedSamples:
    """Counts the samples of each batch: its indices, or the items of an iterable data set (``stream``).

    A batch of such a data set may be shorter than requested. It looks only at the list that torch's fetcher gets or
    makes, at no value and no code of the user.
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


class BatchCounter:
    """Notes the samples and tokens of a worker's batches. Its methods never raise."""

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
        self._note(fetch, UNKNOWN_COUNT if samples is None else samples, UNKNOWN_COUNT if tokens is None else tokens)
        return self._looking or self._samples is not None

    def raised(self, fetch: int) -> None:
        """Note that fetch number ``fetch`` has raised. No other fetch gets its number."""
        self._note(fetch, RAISED, UNKNOWN_COUNT)

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


class OwnCounts:
    """Samples and tokens of the batches that the training thread fetches itself, without workers.

    The training thread adds them, the agent thread takes them.

    Args:
        sizes: counts the samples of each batch; None if they are not needed here.
    """

    def __init__(self, sizes: FetchedSamples | None) -> None:
        self._sizes = sizes
        self._counts: deque[tuple[int, int | None, int | None]] = deque(maxlen=_MAX_KEPT)  # with the fetch's number
        self._fetches = 0
        self._before: int | None = None  # batches of the iteration before the first fetch
        self._looking = True

    def made(self, indices: object, batch: object) -> None:
        """Count the batch that a fetch has made. Never raises."""
        samples = tokens = None
        try:
            samples = None if self._sizes is None else self._sizes.of(indices)
            tokens = tokens_in(batch) if self._looking else 0
        except Exception as error:
            let_pass(error)
        self._counts.append((self._fetches, samples, tokens))
        self._fetches += 1

    def begin(self, number: int) -> None:
        """Take this as the number of the newest batch in its iteration."""
        if self._before is None:
            self._before = number - (self._fetches - 1)
            self._looking = any(tokens != 0 for _, _, tokens in self._counts)  # other batches are like the first

    def of(self, number: int, batches: int) -> Counts:
        """Counts of ``batches`` from this number on. Numbers must not decrease."""
        first = number - (self._before or 0)
        while self._counts and self._counts[0][0] < first:
            self._counts.popleft()
        if len(self._counts) < batches or self._counts[0][0] != first:
            return None, None
        _, samples, tokens = zip(*(self._counts.popleft() for _ in range(batches)), strict=True)
        return (None if None in samples else sum(samples)), (None if None in tokens else sum(tokens))


def _follow(iterator: Any, *, samples: bool) -> OwnCounts | None:
    """Count the fetches of a DataLoader's iterator without workers.

    ``samples``: whether to count samples, too. Then it must not have fetched anything yet. Returns None if the fetcher
    is not torch's, or other code has wrapped it.
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


# -- how the batches of an iteration are counted -----------------------------------------------------------------------


class BatchSizes(NamedTuple):
    """What torch's sampler decides: the size of a full batch, and all samples; None if all batches are full.

    ``distinct``: whether it draws each index once in an iteration; None if that is not known.
    """

    size: int
    total: int | None
    distinct: bool | None = None

    def of(self, number: int, batches: int) -> int | None:
        """Samples of ``batches`` from this number on; None if the sampler gives more batches than its length."""
        if self.total is None:
            return batches * self.size
        left = self.total - number * self.size
        return min(batches * self.size, left) if left > (batches - 1) * self.size else None


class BatchCounts(NamedTuple):
    """How the samples and tokens of the batches of one iteration are known.

    Attributes:
        sizes: what the sampler decides; None if it decides nothing.
        own: counts of the training thread; None if it does not count.
        first_worker: the worker that makes the first batch; None if no workers count, or their batches are not in turn.
        before: how many batches came before the first one: an iteration may continue from a state.
        no_tokens: tokens need no count: the batches have no `input_ids`, or the script reports the number.
    """

    sizes: BatchSizes | None
    own: OwnCounts | None
    first_worker: int | None
    before: int
    no_tokens: bool

    def of(self, source: BatchSource, place: int, batches: int) -> Counts:
        """Counts of some batches, the first of which has this place in the iteration. Ask in their order."""
        samples = tokens = None
        if self.own is not None:
            samples, tokens = self.own.of(place, batches)
        elif self.first_worker is not None and isinstance(source, LoaderHandle) and source.block is not None:
            none_left = source.block.head.tokens_left and not source.block.head.tokens_found
            if self.sizes is None or not (self.no_tokens or none_left):
                samples, tokens = source.block.counts(source.epoch, place, batches, self.first_worker)
            tokens = 0 if none_left else tokens
        if self.sizes is not None:
            samples = self.sizes.of(place + self.before, batches)
        return samples, 0 if self.no_tokens else tokens


def _sizes_of(iterator: Any) -> BatchSizes | None:
    """The sizes of the batches of a ``DataLoader``'s iterator; None if code that is not torch's decides them."""
    size = loaders.batch_size_of(iterator)
    if size is None or not _decided_by_torch(iterator):
        return None
    sampler = own_value(iterator, "_index_sampler")
    try:
        return BatchSizes(size, None if sampler.drop_last else len(sampler.sampler), _draws_once(sampler.sampler))
    except Exception as error:  # from the length of the user's data set
        let_pass(error)
        return None


def _draws_once(sampler: Any) -> bool | None:
    """Whether a sampler gives each index once. torch's own give some again only with replacement."""
    if type(sampler) not in {_class(module, name) for module, name in _SAMPLERS}:
        return None
    return not getattr(sampler, "replacement", False)


def _decided_by_torch(iterator: Any) -> bool:
    """Whether the sampler's settings decide the sizes. An iterable data set may end in the middle of a batch."""
    sampler = own_value(iterator, "_index_sampler")
    map_style = own_value(iterator, "_dataset_kind") == 0
    if not map_style or type(sampler) is not _class("torch.utils.data.sampler", "BatchSampler"):
        return False
    return sampler.drop_last or type(sampler.sampler) in {_class(module, name) for module, name in _SAMPLERS}


# -- on the training thread ----------------------------------------------------------------------------------------


class BatchMark(NamedTuple):
    """Stands for the source of a batch in the ring, where another iteration's batches begin or go on.

    Attributes:
        source: where they come from.
        counts: how their samples and tokens are known; None if they are not.
        place: the place in its iteration of this batch, or of the next one if the entry has none. None if it is the
            next batch of the iteration before.
        epoch: the number of the iteration, as its workers count them; 0 if none of them count.
    """

    source: BatchSource
    counts: BatchCounts | None
    place: int | None
    epoch: int


def iteration_begins(loader: LoaderHandle) -> BatchMark:
    """The mark of the start of an iteration with workers."""
    return BatchMark(loader, None, 0, _epoch_of(loader))


def _epoch_of(source: BatchSource) -> int:
    return source.block.head.iteration if isinstance(source, LoaderHandle) and source.block is not None else 0


class BatchMarks:
    """Marks batches with their iteration, on the slow path of the training thread."""

    def __init__(self) -> None:
        self._iterator_id = 0
        self._known: dict[int, BatchCounts | None] = {}
        self._own: WeakMap[OwnCounts | None] = WeakMap()

    def begun(self) -> None:
        """Note that an iteration begins, maybe with an iterator that has been used before."""
        self._iterator_id = 0
        self._known.clear()

    def made(self, iterator: object) -> None:
        """Count an iterator that was made, or begins again, from its first batch on, if it has no workers."""
        inside: Any = loaders.unwrapped(iterator)
        if self.counts_samples(inside) and not own_value(inside, "_num_workers") and inside not in self._own:
            self._own[inside] = _follow(inside, samples=True)

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
        place = _place(inside, source)
        if key not in self._known:  # two loaders that take turns are looked at once
            self._known[key] = None if place is None else self._counts_of(inside, place, batch, source, told=told)
        return BatchMark(source, self._known[key], place, _epoch_of(source))

    def not_training(self, iterator: object, source: BatchSource) -> BatchSource | BatchMark:
        """Return what to write for a batch that was not for training. The next one follows it in the counts."""
        if id(iterator) != self._iterator_id:
            return source
        place = _place(loaders.unwrapped(iterator), source)
        return BatchMark(source, self._known[self._iterator_id], place, _epoch_of(source))

    def forget(self) -> None:
        """Stop counting the training thread's own batches, because the agent stops."""
        self._own.clear()

    def _counts_of(
        self, iterator: Any, place: int, batch: object, source: BatchSource, *, told: bool
    ) -> BatchCounts | None:
        """How the counts of an iteration are known. ``batch`` is its newest, at this place."""
        sizes = _sizes_of(iterator)
        before = _yielded(iterator) - 1 - place
        if isinstance(source, LoaderHandle) and source.block is not None and source.in_order:
            # torchdata keeps the newest batch's worker: in a restored state the first batch comes from any.
            newest = own_value(iterator, "_last_yielded_worker_id")
            first = (newest - place) % source.block.workers if isinstance(newest, int) else 0
            return BatchCounts(sizes, None, first, before, told)
        if source is not ON_THREAD:
            return BatchCounts(sizes, None, None, before, told)
        tokens = 0 if told else tokens_in(batch)
        if tokens and iterator not in self._own:
            counts = self._own[iterator] = _follow(iterator, samples=False)
            if counts is not None:
                counts.made(None, batch)
        own = self._own.get(iterator)
        if own is not None:
            own.begin(place)
        return BatchCounts(sizes, own, None, before, tokens == 0)


def _yielded(iterator: Any) -> int:
    """How many batches a ``DataLoader``'s iterator has given; 0 for anything else."""
    return int(own_value(iterator, "_num_yielded", 0)) if loaders.is_loader_iterator(iterator) else 0


def _place(iterator: Any, source: BatchSource) -> int | None:
    """The place of the newest batch in its iteration; None if unknown.

    With workers, batches that raised have a place, too, and an iteration that continues from a state begins at 0.
    """
    if isinstance(source, LoaderHandle) and source.block is not None and source.in_order:
        received = own_value(iterator, "_rcvd_idx", 0)
        return received - 1 if isinstance(received, int) and received > 0 else None
    place = _yielded(iterator) - 1
    return place if place >= 0 else None


# -- on the agent thread -------------------------------------------------------------------------------------------


class TrainedBatches:
    """Follows the batches in the ring: their places, the waits for each source, samples and tokens.

    One batch of unknown size makes the whole sum unknown.

    Attributes:
        sizes: what the sampler of the newest iteration decides; None if it decides nothing.
    """

    def __init__(self) -> None:
        self._source: BatchSource | None = None  # of the newest batches
        self._counts: BatchCounts | None = None
        self.sizes: BatchSizes | None = None
        self._place: int | None = None  # of the next batch
        self._waits: dict[BatchSource, int] = {}
        self._own_counts = [0] * (len(FETCH_BUCKETS) + 1)
        self._own_ns = 0
        self._samples = _TrainedSum()
        self._tokens = _TrainedSum()
        self._tokens_before = 0  # tokens counted before the script began to report them
        self._settled = False
        self._in_step = False

    def fold(self, entries: Sequence[Entry]) -> None:
        """Follow entries of the ring in the order in which they happened."""
        if self._settled and entries and all(code == STEP and source is None for _, _, code, source in entries):
            starts, ends, _, _ = zip(*entries, strict=True)
            self._take(starts, ends)
            return
        for start, end, code, origin in entries:
            if code & GAP:
                self._lost()
                continue
            if not self._settled:
                self._note_step(code)
            if isinstance(origin, BatchMark):
                self._go_on(origin)
            source = self._source if origin is None or isinstance(origin, BatchMark) else origin
            if code & (BATCH | JOINS):
                self._source = source
                self._take((start,), (end,), waited=code & 7 == S_DATA_WAIT)
            elif origin is not None and not code & BEGINS:  # it was not for training, or raised
                if code & 7 == S_DATA_WAIT:
                    self._wait(source, (start,), (end,))
                if source is self._source:
                    self._move(1)

    def _go_on(self, mark: BatchMark) -> None:
        """Begin an iteration, or go on with another one."""
        if mark.place is not None:
            self._place = mark.place
        elif mark.source is not self._source:
            self._place = None
        self._source, self._counts = mark.source, mark.counts
        if mark.counts is not None:
            self.sizes = mark.counts.sizes
        if isinstance(self._source, LoaderHandle):
            self._source.epoch = mark.epoch
        self._move(0)

    def _take(self, starts: Sequence[int], ends: Sequence[int], *, waited: bool = True) -> None:
        """Count consecutive training batches of one iteration. ``waited``: this thread has requested them."""
        source, place, batches = self._source, self._place, len(starts)
        if source is None or place is None or self._counts is None:
            self._add(None, None)
        else:
            self._add(*self._counts.of(source, place, batches))
        if waited:
            self._wait(source, starts, ends)
        self._move(batches)

    def _wait(self, source: BatchSource | None, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Count waits for consecutive batches of one source."""
        if source is None:
            return
        waited = sum(ends) - sum(starts)
        self._waits[source] = self._waits.get(source, 0) + waited
        if source is ON_THREAD:  # without workers the wait is the fetch
            self._own_ns += waited
            counts, last = self._own_counts, len(FETCH_BUCKETS)
            for start, end in zip(starts, ends, strict=True):
                counts[min(((end - start) >> 20).bit_length(), last)] += 1  # as in `hooks.worker`
        elif isinstance(source, LoaderHandle) and source is self._source and source.delivered is not None:
            source.arrivals.extend(map(Arrival, repeat(source.epoch), count(source.delivered), starts, ends))

    def _move(self, batches: int) -> None:
        """Go on by some batches. Those of an iteration that began in the middle have no place among the fetches."""
        if self._place is not None:
            self._place += batches
        if isinstance(self._source, LoaderHandle):
            resumed = self._source.resumed and self._source.epoch == 1
            self._source.delivered = None if resumed else self._place

    def _lost(self) -> None:
        """Note dropped entries. The places of batches are unknown until the next mark."""
        self._place = None
        self._move(0)
        self._add(None, None)

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
    def ended(self) -> LoaderHandle | None:
        """The iterator with workers of the newest batches, if it is gone. Then the ring has all its batches."""
        return self._source if isinstance(self._source, LoaderHandle) and self._source.retired else None

    def forget(self, ended: LoaderHandle | None) -> None:
        """Drop an iterator that had `ended` before the ring was read. It would keep the workers' memory."""
        if ended is not None and ended is self._source:
            self._source = self._counts = self._place = None

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

        ``told``: tokens that the script has reported, which replace later counts; None if it reports none.
        """
        if told is not None:
            return self._tokens_before + told
        counted = self._tokens.trained or None  # without `input_ids`, a batch's tokens are unknown, not 0
        self._tokens_before = counted or self._tokens_before
        return counted

    def own_fetches(self) -> Histogram | None:
        """Durations of the training thread's own fetches; None before the first."""
        if not self._own_ns:
            return None
        return Histogram(FETCH_BUCKETS, tuple(self._own_counts), self._own_ns / NS)

    def take_source(self) -> BatchSource | None:
        """The source with the longest wait since the last call; None without a wait."""
        waits, self._waits = self._waits, {}
        return max(waits, key=lambda source: waits[source], default=None)


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
