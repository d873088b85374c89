"""How many samples and tokens each batch of an iteration has: samples where torch's own samplers decide it.

It is read once per iteration, when its first batch has come. The fast path does nothing for it: the agent thread counts
the batches in the ring. A batch has as many samples as indices, whatever the collate function makes of them. Its tokens
are counted where it is made (`token_table`, `own_tokens`).
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from telemetry.attach import loader_types
from telemetry.attach.loader_handle import ON_THREAD, LoaderHandle
from telemetry.attach.own_tokens import NO_TOKENS, count_own
from telemetry.attach.worker_tokens import WorkerTokens

if TYPE_CHECKING:
    from telemetry.attach.loader_handle import BatchSource

_SAMPLERS: Final = (
    ("torch.utils.data.sampler", "SequentialSampler"),
    ("torch.utils.data.sampler", "RandomSampler"),
    ("torch.utils.data.sampler", "SubsetRandomSampler"),
    ("torch.utils.data.sampler", "WeightedRandomSampler"),
    ("torch.utils.data.distributed", "DistributedSampler"),
)
"""Samplers whose length is the number of indices that they give. That of another class may be an estimate."""

_MAX_MARKS: Final = 8192


class BatchSizes(NamedTuple):
    """Of one iteration: ``size`` of a full batch, and ``total`` samples; None if all batches are full."""

    size: int
    total: int | None

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


class BatchTokens(Protocol):
    """The tokens of the batches of one iteration."""

    @property
    def ended(self) -> bool:
        """Whether there is no more to come than what the ring has now."""

    def release(self) -> None:
        """Keep nothing alive: `ended`, and all was read."""

    def of(self, number: int, batches: int = 1, /) -> int | None:
        """Tokens of some batches; None if they are not known. Asked in the order of the batches.

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
    sizes: BatchSizes | None
    tokens: BatchTokens | None
    number: int


class BatchMarks:
    """Written by the training thread, on the slow path. The agent thread takes them out.

    Attributes:
        taken: the marks, oldest first.
        lost: whether marks were dropped because the agent thread did not take them.
    """

    __slots__ = ("_iterator_id", "_known", "_own_tokens", "lost", "taken")

    def __init__(self) -> None:
        self.taken: deque[BatchMark] = deque()
        self.lost = False
        self._iterator_id = 0
        self._known: dict[int, tuple[BatchSizes | None, BatchTokens | None]] = {}
        self._own_tokens: weakref.WeakKeyDictionary[Any, BatchTokens | None] = weakref.WeakKeyDictionary()

    def begun(self) -> None:
        """An iteration begins, maybe with an iterator that has been used before."""
        self._iterator_id = 0
        self._known.clear()

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
        inside: Any = loader_types.unwrapped(iterator)
        number = _yielded(inside) - 1
        if key not in self._known:  # two loaders that are asked in turn are looked at once
            tokens = NO_TOKENS if told else self._tokens_of(inside, number, batch, source)
            self._known[key] = sizes_of(inside), tokens
        self._mark(key, number, position)

    def not_training(self, iterator: object, position: int) -> None:
        """A batch of this iterator was not for training: it has a number, but the next one follows in the counts.

        Args:
            iterator: the iterator that gave it.
            position: ``head`` of the ring, after its entry.
        """
        key = id(iterator)
        if key == self._iterator_id:
            self._mark(key, _yielded(loader_types.unwrapped(iterator)), position)

    def _mark(self, key: int, number: int, position: int) -> None:
        if len(self.taken) >= _MAX_MARKS:
            self.lost = True
            return
        sizes, tokens = self._known[key]
        self.taken.append(BatchMark(position, sizes if number >= 0 else None, tokens, number))

    def _tokens_of(self, iterator: Any, number: int, batch: object, source: BatchSource) -> BatchTokens | None:
        if isinstance(source, LoaderHandle):
            if source.block is None or not source.in_order or number < 0:
                return None
            own = vars(iterator)
            first = own.get("_rcvd_idx", 0) - 1  # unlike ``number``, it is 0 again where a state was restored
            every = own.get("_dataset_kind") != 0
            return WorkerTokens(source.block, number, first, every=every)
        if source is not ON_THREAD or number < 0:
            return None
        if iterator not in self._own_tokens:
            self._own_tokens[iterator] = count_own(iterator, number, batch)
        return self._own_tokens[iterator]

    def forget(self) -> None:
        """The agent stops: count no tokens of the training thread's own batches any more."""
        self._own_tokens.clear()


def _yielded(iterator: Any) -> int:
    """How many batches a ``DataLoader``'s iterator has given; 0 for anything else."""
    return int(vars(iterator).get("_num_yielded", 0)) if loader_types.is_loader_iterator(iterator) else 0


def sizes_of(iterator: Any) -> BatchSizes | None:
    """The sizes of the batches of a ``DataLoader``'s iterator; None if other code than torch's decides them."""
    size = loader_types.batch_size_of(iterator)
    if size is None:
        return None
    own = vars(iterator)
    sampler = own["_index_sampler"]
    if own.get("_dataset_kind") != 0 or type(sampler) is not _class("torch.utils.data.sampler", "BatchSampler"):
        return None  # an iterable data set may end in the middle of a batch
    if sampler.drop_last:
        return BatchSizes(size, None)
    indices = sampler.sampler
    if type(indices) not in {_class(module, name) for module, name in _SAMPLERS}:
        return None
    try:
        return BatchSizes(size, len(indices))
    except Exception:  # the length of the user's data set
        return None


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
