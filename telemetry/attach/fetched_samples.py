"""How many samples a batch has, told where it is fetched: as many as there were indices, or items of a stream.

It is asked for only where the sizes do not follow from the sampler (`batch_sizes`). No value and no code of the user is
looked at: only the list that torch's fetcher gets, or makes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.patching import forget_frame, unseen

if TYPE_CHECKING:
    from collections.abc import Callable

_SEQUENCES: Final = frozenset({list, tuple, range})
"""Others may have a method of the user's."""


class FetchedSamples:
    """The samples of the batches of one fetcher after another, which have the same data set.

    Args:
        stream: the data set is iterable, so that its items are counted. Such a batch may be shorter than asked for.
    """

    __slots__ = ("_items", "_stream")

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._items: int | None = None

    def begin(self, fetcher: Any) -> None:
        """This fetcher makes the next batches."""
        if self._stream:
            fetcher.collate_fn = self._noting(fetcher.collate_fn)

    def of(self, indices: object) -> int | None:
        """Samples of the batch that was made last; None if that is not known.

        Args:
            indices: what the fetcher was asked for.
        """
        if not self._stream:
            return _length(indices)
        items, self._items = self._items, None
        return items

    def _noting(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's ``collate_fn``. torch's fetcher passes it a list of the items."""

        @unseen
        def noting(items: Any) -> Any:
            self._items = len(items) if type(items) is list else None
            try:
                return collate(items)
            except BaseException as error:
                forget_frame(error)
                raise

        return noting


def _length(indices: Any) -> int | None:
    if type(indices) in _SEQUENCES:
        return len(indices)
    for module, name in (("torch", "Tensor"), ("numpy", "ndarray")):
        if type(indices) is getattr(sys.modules.get(module), name, None):
            return int(indices.shape[0]) if indices.ndim else None
    return None
