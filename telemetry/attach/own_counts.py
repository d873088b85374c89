"""Counts the samples and tokens of batches that the training thread fetches itself, where there is no worker to do it.

The ``fetch`` of an iteration's fetcher is wrapped from the start if the sizes do not follow from its sampler; or when
its first batch has ``input_ids``. Other iterations run torch's own code.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.batch_tokens import tokens_in
from telemetry.attach.fetched_samples import FetchedSamples
from telemetry.hooks.loaders import own_value
from telemetry.hooks.patching import forget_frame, unseen
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable

_FETCHERS: Final = "torch.utils.data._utils.fetch"
_MAX_KEPT: Final = 8192


class OwnCounts:
    """Counts of the batches of one iteration. The training thread adds them, the agent thread takes them.

    Before `begin`, only that of the newest batch is kept.
    """

    __slots__ = ("_begun", "_counts", "_lost", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._begun = False
        self._counts: deque[int | None] = deque()
        self._lost = False

    ended = False

    def release(self) -> None:
        """It keeps nothing alive."""

    def begin(self, number: int) -> None:
        """Batches are taken from now on. ``number``: of the newest one in its iteration."""
        if not self._begun:
            self._begun, self._next = True, number

    def add(self, count: int | None) -> None:
        """A fetch has made the next batch."""
        if not self._begun:
            self._counts.clear()
        if self._lost or len(self._counts) >= _MAX_KEPT:
            self._lost = True
            return
        self._counts.append(count)

    def of(self, number: int, batches: int = 1) -> int | None:
        """Count of ``batches`` from this number on; None if it is not known. Numbers must not decrease."""
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


class OwnFetches:
    """The fetches of one iteration.

    Args:
        sizes: tells the samples of each batch; None if nobody needs them here.

    Attributes:
        samples: None without ``sizes``.
        tokens: None until `count_tokens`.
    """

    __slots__ = ("__weakref__", "_sizes", "samples", "tokens")

    def __init__(self, sizes: FetchedSamples | None) -> None:
        self._sizes = sizes
        self.samples = None if sizes is None else OwnCounts()
        self.tokens: OwnCounts | None = None

    def made(self, indices: object, batch: object) -> None:
        """A fetch has made the next batch. Never raises."""
        if self.samples is not None and self._sizes is not None:
            try:
                self.samples.add(self._sizes.of(indices))
            except Exception as error:
                let_pass(error)
                self.samples.add(None)
        if self.tokens is not None:
            try:
                self.tokens.add(tokens_in(batch))
            except Exception as error:
                let_pass(error)
                self.tokens.add(None)

    def count_tokens(self, number: int, tokens: int) -> OwnCounts:
        """Count tokens from the newest batch on, which is ``number`` in its iteration and has ``tokens``."""
        self.tokens = OwnCounts()
        self.tokens.add(tokens)
        self.tokens.begin(number)
        return self.tokens


def follow(iterator: Any, *, samples: bool) -> OwnFetches | None:
    """Follow the fetches of an iteration without workers.

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
    fetches = OwnFetches(sizes)
    fetcher.fetch = _followed(type(fetcher).fetch, weakref.ref(fetcher), weakref.ref(fetches))
    return fetches


def _followed(
    original: Callable[[Any, Any], Any], fetcher: Callable[[], Any], fetches: Callable[[], OwnFetches | None]
) -> Callable[[Any], Any]:
    """``fetch`` of one fetcher. References are weak: it must not keep the fetcher alive, nor count after `stop`."""

    @unseen
    def fetch(possibly_batched_index: Any) -> Any:
        try:
            batch = original(fetcher(), possibly_batched_index)
        except BaseException as error:
            forget_frame(error)
            raise
        followed = fetches()
        if followed is not None:
            followed.made(possibly_batched_index, batch)
        return batch

    return fetch
