"""Counts the tokens of batches that the training thread fetches itself.

There is no worker that could count. So when the first batch of an iteration has ``input_ids``, the ``fetch`` of this
iteration's fetcher is wrapped. Other iterations run torch's own code.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.batch_tokens import tokens_in
from telemetry.attach.traceback_frames import forget_frame

if TYPE_CHECKING:
    from collections.abc import Callable

_FETCHERS: Final = "torch.utils.data._utils.fetch"
_MAX_KEPT: Final = 8192


class OwnTokens:
    """The tokens of the batches of one iteration. The training thread adds them, the agent thread takes them.

    Args:
        number: of the first batch in its iteration.
        tokens: of that batch; None if they are not known.
    """

    __slots__ = ("__weakref__", "_counts", "_lost", "_next")

    def __init__(self, number: int, tokens: int | None) -> None:
        self._next = number
        self._counts: deque[int | None] = deque((tokens,))
        self._lost = False

    ended = False

    def release(self) -> None:
        """It keeps nothing alive."""

    def add(self, batch: object) -> None:
        """A fetch has made the next batch. Never raises."""
        if self._lost or len(self._counts) >= _MAX_KEPT:
            self._lost = True
            return
        try:
            self._counts.append(tokens_in(batch))
        except Exception:
            self._counts.append(None)

    def of(self, number: int, batches: int = 1) -> int | None:
        """Tokens of ``batches`` from this number on; None if they are not known. Numbers must not decrease."""
        while self._next < number and self._counts:
            self._counts.popleft()
            self._next += 1
        if self._next != number or len(self._counts) < batches:
            return None
        self._next += batches
        taken = [self._counts.popleft() for _ in range(batches)]
        known = [count for count in taken if count is not None]
        return sum(known) if len(known) == batches else None


class NoTokens:
    """Batches that have none."""

    __slots__ = ()

    ended = False

    def release(self) -> None:
        """It keeps nothing alive."""

    def of(self, _number: int, _batches: int = 1) -> int | None:
        """Tokens of some batches: 0."""
        return 0


NO_TOKENS: Final = NoTokens()


def count_own(iterator: Any, number: int, batch: object) -> OwnTokens | NoTokens | None:
    """Count the tokens of an iteration without workers from this batch on.

    Args:
        iterator: the DataLoader's iterator.
        number: of the batch in the iteration.
        batch: the newest batch.

    Returns:
        The tokens of its batches. None if they are not known.
    """
    tokens = tokens_in(batch)
    if not tokens:
        return NO_TOKENS if tokens == 0 else None
    fetcher: Any = vars(iterator).get("_dataset_fetcher")
    if type(fetcher).__module__ != _FETCHERS or "fetch" in vars(fetcher):
        return None
    counted = OwnTokens(number, tokens)
    fetcher.fetch = _counting(type(fetcher).fetch, weakref.ref(fetcher), weakref.ref(counted))
    return counted


def _counting(
    original: Callable[[Any, Any], Any], fetcher: Callable[[], Any], counts: Callable[[], OwnTokens | None]
) -> Callable[[Any], Any]:
    """``fetch`` of one fetcher. References are weak: it must not keep the fetcher alive, nor count after `stop`."""

    def fetch(possibly_batched_index: Any) -> Any:
        try:
            batch = original(fetcher(), possibly_batched_index)
        except BaseException as error:
            forget_frame(error)
            raise
        counted = counts()
        if counted is not None:
            counted.add(batch)
        return batch

    return fetch
