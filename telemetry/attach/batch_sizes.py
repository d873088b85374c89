"""How many samples and tokens each batch of an iteration has.

A batch has as many samples as indices, whatever the collate function makes of them. Where torch's own samplers decide
it, that is read once per iteration, when its first batch has come. Otherwise samples are counted where the batch is
made, and so are tokens (`batch_table`, `own_counts`). The fast path does nothing for it: the agent thread counts the
batches in the ring.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from telemetry.attach.batch_tokens import tokens_in
from telemetry.attach.own_counts import NO_TOKENS, OwnFetches, follow
from telemetry.attach.worker_counts import WorkerSamples, WorkerTokens
from telemetry.hooks import loaders
from telemetry.hooks.loaders import ON_THREAD, LoaderHandle, own_value
from telemetry.hooks.patching import WeakMap
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from telemetry.hooks.loaders import BatchSource

_SAMPLERS: Final = (
    ("torch.utils.data.sampler", "SequentialSampler"),
    ("torch.utils.data.sampler", "RandomSampler"),
    ("torch.utils.data.sampler", "SubsetRandomSampler"),
    ("torch.utils.data.sampler", "WeightedRandomSampler"),
    ("torch.utils.data.distributed", "DistributedSampler"),
)
"""Samplers whose length is the number of indices that they give. That of another class may be an estimate."""

_MAX_MARKS: Final = 8192


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Of one iteration: ``size`` of a full batch, and ``total`` samples; None if all batches are full."""

    size: int
    total: int | None

    ended: ClassVar[bool] = False

    def release(self) -> None:
        """It keeps nothing alive."""

    def of(self, number: int, batches: int = 1) -> int | None:
        """Samples of some batches.

        Args:
            number: of the first, from 0.
            batches: how many.

        Returns:
            None if there is no such batch: the sampler gives more than it says.
        """
        if self.total is None:
            return batches * self.size
        left = self.total - number * self.size
        return min(batches * self.size, left) if left > (batches - 1) * self.size else None


class BatchCounts(Protocol):
    """The samples, or the tokens, of the batches of one iteration."""

    @property
    def ended(self) -> bool:
        """Whether there is no more to come than what the ring has now."""

    def release(self) -> None:
        """Keep nothing alive: `ended`, and all was read."""

    def of(self, number: int, batches: int = 1, /) -> int | None:
        """Count of some batches; None if it is not known. Asked in the order of the batches.

        Args:
            number: of the first.
            batches: how many.
        """


class BatchMark(NamedTuple):
    """From this position of the ring on, batches are of this iteration.

    Attributes:
        position: ``head`` of the ring before the first of them.
        sizes, tokens: None if they are unknown.
        number: of the first of them in its iteration.
    """

    position: int
    sizes: BatchCounts | None
    tokens: BatchCounts | None
    number: int


class BatchMarks:
    """Written by the training thread, on the slow path. The agent thread takes them out.

    Attributes:
        taken: the marks, oldest first.
        lost: whether marks were dropped because the agent thread did not take them.
    """

    __slots__ = ("_iterator_id", "_known", "_own", "_own_tokens", "lost", "taken")

    def __init__(self) -> None:
        self.taken: deque[BatchMark] = deque()
        self.lost = False
        self._iterator_id = 0
        self._known: dict[int, tuple[BatchCounts | None, BatchCounts | None]] = {}
        self._own: WeakMap[OwnFetches | None] = WeakMap()
        self._own_tokens: WeakMap[BatchCounts | None] = WeakMap()

    def begun(self) -> None:
        """An iteration begins, maybe with an iterator that has been used before."""
        self._iterator_id = 0
        self._known.clear()

    def made(self, iterator: object) -> None:
        """An iterator was made, or begins again. Without workers, its samples are counted from its first batch on."""
        inside: Any = loaders.unwrapped(iterator)
        if counted_in_fetch(inside) and not own_value(inside, "_num_workers") and inside not in self._own:
            self._own[inside] = follow(inside, samples=True)

    def batch(self, iterator: object, position: int, batch: object, source: BatchSource, *, told: bool) -> None:
        """A training batch of this iterator is about to be written at this position of the ring.

        Args:
            iterator: the iterator that gave it.
            position: ``head`` of the ring.
            batch: the batch.
            source: where it comes from.
            told: whether the script tells its tokens, so that nobody needs to count them.
        """
        key = id(iterator)
        if key == self._iterator_id:
            return
        self._iterator_id = key
        inside: Any = loaders.unwrapped(iterator)
        number = _yielded(inside) - 1
        if key not in self._known:  # two loaders that are asked in turn are looked at once
            tokens = NO_TOKENS if told else self._tokens_of(inside, number, batch, source)
            self._known[key] = self._sizes_of(inside, number, source), tokens
        self._mark(key, number, position)

    def not_training(self, iterator: object, position: int) -> None:
        """A batch of this iterator was not for training: it has a number, but the next one follows in the counts.

        Args:
            iterator: the iterator that gave it.
            position: ``head`` of the ring, after its entry.
        """
        key = id(iterator)
        if key == self._iterator_id:
            self._mark(key, _yielded(loaders.unwrapped(iterator)), position)

    def _mark(self, key: int, number: int, position: int) -> None:
        if len(self.taken) >= _MAX_MARKS:
            self.lost = True
            return
        sizes, tokens = self._known[key]
        self.taken.append(BatchMark(position, sizes if number >= 0 else None, tokens, number))

    def _sizes_of(self, iterator: Any, number: int, source: BatchSource) -> BatchCounts | None:
        if not counted_in_fetch(iterator):
            return sizes_of(iterator)
        if isinstance(source, LoaderHandle):
            if source.block is None or not source.in_order or number < 0:
                return None
            return WorkerSamples(source.block, number, _index(iterator))
        own = self._own.get(iterator) if source is ON_THREAD else None
        if own is None or own.samples is None:
            return None
        own.samples.begin(number)
        return own.samples

    def _tokens_of(self, iterator: Any, number: int, batch: object, source: BatchSource) -> BatchCounts | None:
        if isinstance(source, LoaderHandle):
            if source.block is None or not source.in_order or number < 0:
                return None
            every = own_value(iterator, "_dataset_kind") != 0
            return WorkerTokens(source.block, number, _index(iterator), every=every)
        if source is not ON_THREAD or number < 0:
            return None
        if iterator not in self._own_tokens:
            self._own_tokens[iterator] = self._own_tokens_of(iterator, number, batch)
        return self._own_tokens.get(iterator)

    def _own_tokens_of(self, iterator: Any, number: int, batch: object) -> BatchCounts | None:
        """Count the tokens of an iteration without workers, if this batch has some."""
        tokens = tokens_in(batch)
        if not tokens:
            return NO_TOKENS if tokens == 0 else None
        if iterator not in self._own:
            self._own[iterator] = follow(iterator, samples=False)
        fetches = self._own.get(iterator)
        return None if fetches is None else fetches.count_tokens(number, tokens)

    def forget(self) -> None:
        """The agent stops: count nothing of the training thread's own batches any more."""
        self._own.clear()
        self._own_tokens.clear()


def _yielded(iterator: Any) -> int:
    """How many batches a ``DataLoader``'s iterator has given; 0 for anything else."""
    return int(own_value(iterator, "_num_yielded", 0)) if loaders.is_loader_iterator(iterator) else 0


def _index(iterator: Any) -> int:
    """The number of the newest batch by the worker's loop. Unlike ours, it is 0 again where a state was restored."""
    return int(own_value(iterator, "_rcvd_idx", 0)) - 1


def sizes_of(iterator: Any) -> BatchSizes | None:
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


def counted_in_fetch(iterator: Any) -> bool:
    """Whether the samples of a ``DataLoader``'s iterator are counted in each fetch.

    They are where torch makes the batches, but its sampler does not tell their sizes.

    Without ``batch_size`` it gives what the data set gives, which may be a batch or not.
    """
    return (
        loaders.is_loader_iterator(iterator)
        and own_value(iterator, "_auto_collation") is True
        and not _decided_by_torch(iterator)
    )


def _decided_by_torch(iterator: Any) -> bool:
    """Whether the sampler's settings tell the sizes. An iterable data set may end in the middle of a batch."""
    sampler = own_value(iterator, "_index_sampler")
    map_style = own_value(iterator, "_dataset_kind") == 0
    if not map_style or type(sampler) is not _class("torch.utils.data.sampler", "BatchSampler"):
        return False
    return sampler.drop_last or type(sampler.sampler) in {_class(module, name) for module, name in _SAMPLERS}


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
