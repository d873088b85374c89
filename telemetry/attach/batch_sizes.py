"""How many samples each batch of an iteration has, where torch's own samplers decide it.

It is read once per iteration, when its first batch has come. The fast path does nothing for it: the agent thread counts
the batches in the ring. A batch has as many samples as indices, whatever the collate function makes of them.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Final, NamedTuple

from telemetry.attach import loader_types

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

    def of(self, number: int) -> int | None:
        """Samples of batch ``number``, from 0; None if there is no such batch: the sampler gives more than it says."""
        if self.total is None:
            return self.size
        left = self.total - number * self.size
        return min(self.size, left) if left > 0 else None


class BatchMark(NamedTuple):
    """From this position of the ring on, batches are of this iteration.

    Attributes:
        position: ``head`` of the ring before the first of them.
        sizes: None if they are unknown.
        number: of the first of them in its iteration.
    """

    position: int
    sizes: BatchSizes | None
    number: int


class BatchMarks:
    """Written by the training thread, on the slow path. The agent thread takes them out.

    Attributes:
        taken: the marks, oldest first.
        lost: whether marks were dropped because the agent thread did not take them.
    """

    __slots__ = ("_iterator_id", "_sizes", "lost", "taken")

    def __init__(self) -> None:
        self.taken: deque[BatchMark] = deque()
        self.lost = False
        self._iterator_id = 0
        self._sizes: dict[int, BatchSizes | None] = {}

    def begun(self) -> None:
        """An iteration begins, maybe with an iterator that has been used before."""
        self._iterator_id = 0
        self._sizes.clear()

    def batch(self, iterator: object, position: int) -> None:
        """A training batch of this iterator is about to be written at this position of the ring."""
        key = id(iterator)
        if key == self._iterator_id:
            return
        self._iterator_id = key
        if len(self.taken) >= _MAX_MARKS:
            self.lost = True
            return
        source: Any = loader_types.unwrapped(iterator)
        if key not in self._sizes:  # two loaders that are asked in turn are looked at once
            self._sizes[key] = sizes_of(source)
        sizes = self._sizes[key]
        number = getattr(source, "_num_yielded", 0) - 1 if sizes is not None else 0
        self.taken.append(BatchMark(position, sizes if number >= 0 else None, number))


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
