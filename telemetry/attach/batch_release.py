"""How long the training thread takes to free a batch.

``for batch in loader`` frees a batch when the next one replaces it. That time is measured as compute, although it is a
cost of the batch: to unmap hundreds of small tensors takes 13 ms where the step itself takes 9 ms. So one batch a tick
is followed with weak references, whose callbacks record when it is freed. A batch that is freed in another way (kept,
moved to a GPU, taken apart) is not counted.

The advice `batch_transfer` needs this. In the zoo, sending one large graph instead of hundreds of small tensors made
steps 10.0 times faster. The prediction was 9.3 with this figure, and would be 4.1 without it.
"""

from __future__ import annotations

import sys
import weakref
from collections import UserDict, deque
from functools import partial
from itertools import takewhile
from operator import attrgetter, itemgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.ring import MASK, S_DATA_WAIT, STRIDE
from telemetry.core.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from telemetry.attach.ring import Ring

    _Seen = tuple[int, int, int, tuple[int, int], tuple[CodeType, int]]
    """The thread; monotonic ns; the ring's head; end and code of the entry after the batch's own; the statement."""

_FRAMES: Final = 10
"""How many frames up to search for the statement that holds the batch: our own, tqdm's, a generator's, the loop's."""

_DEPTH: Final = 8
"""How deep nested containers are searched."""

_MAX_FOLLOWED: Final = 8
"""Maximum number of followed batches that the agent thread has not read yet."""


class BatchRelease:
    """Follows one batch at a time: `follow` on the training thread, `read` on the agent thread.

    Args:
        ring: shows when the next batch came.

    Attributes:
        wanted: whether to follow the next batch of workers. Set on the agent thread.
        freed: how many batches were seen to be freed.
        ns: how long that took, nanoseconds.
    """

    __slots__ = ("_followed", "_ring", "freed", "ns", "wanted")

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._followed: deque[_Followed] = deque(maxlen=_MAX_FOLLOWED)
        self.wanted = False
        self.freed = 0
        self.ns = 0

    def follow(self, batch: object) -> None:
        """Follow this batch, which has just come."""
        self.wanted = False
        self._followed.append(_Followed(batch, self._ring))

    def forget(self) -> None:
        """Stop following. Must be called before the interpreter exits: then no statement frees the last batches."""
        self.wanted = False
        self._followed = deque(maxlen=_MAX_FOLLOWED)

    def read(self) -> None:
        """Add up what was seen, except for the newest batch, which may not be freed yet."""
        followed = self._followed  # `forget` may replace it
        while len(followed) > 1:
            took = followed.popleft().took_ns()
            if took is not None:
                self.freed += 1
                self.ns += took


class _Followed:
    """One batch that has come."""

    __slots__ = ("_head", "_references", "_seen", "_statements")

    def __init__(self, batch: object, ring: Ring) -> None:
        self._head = ring.head + STRIDE  # the head once the next batch has come, and nothing else
        self._statements = _statements()
        self._seen: list[_Seen] = []
        note = _noting(self._seen, ring)
        self._references = [weakref.ref(tensor, note) for tensor in _ends_of(batch)]

    def took_ns(self) -> int | None:
        """Time from the next batch's arrival until this one's last tensor was freed, ns; None if freed otherwise."""
        return max((now - came for now, came in map(self._freed, self._seen) if came), default=None)

    def _freed(self, seen: _Seen) -> tuple[int, int]:
        """When a tensor was freed, and when the next batch came; 0 if the arrival of that batch did not free it."""
        _, now, head, (came, entry), statement = seen
        replaced = head == self._head and entry & 7 == S_DATA_WAIT and statement in self._statements
        return now, came if replaced else 0


def _noting(seen: list[_Seen], ring: Ring) -> Callable[[object], object]:
    """A callback for weak references that appends what it sees on this thread. On another thread it does nothing.

    It consists of C functions. During a Python callback, the interpreter could run a pending signal handler, and an
    exception in a weak reference's callback (Ctrl-C) would be lost. A thread that Python did not start (autograd's) has
    no frame, so the thread is checked first: `zip` stops there.
    """
    slot = ring.head & MASK
    now = zip(
        takewhile(get_ident().__eq__, iter(get_ident, None)),
        iter(now_ns, None),
        iter(partial(getattr, ring, "head"), None),
        iter(partial(itemgetter(slot + 1, slot + 2), ring.words), None),
        map(attrgetter("f_code", "f_lineno"), iter(sys._getframe, None)),
        strict=False,
    )
    return partial(next, map(seen.append, now))  # next(..., reference): the reference is the default, unused


def _statements() -> list[tuple[CodeType, int]]:
    """Where a batch is requested: the current lines of the innermost frames."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _FRAMES:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _ends_of(batch: object) -> list[Any]:
    """The first and the last tensor: containers are freed from one end to the other, in either direction."""
    return [end for index in (0, -1) if (end := _end_of(batch, index)) is not None]


def _end_of(batch: object, index: int) -> object | None:
    """The object at one end of nested containers, if it supports weak references; else None. Runs none of its code."""
    for _ in range(_DEPTH):
        if isinstance(batch, UserDict):
            batch = batch.data
        if isinstance(batch, dict):
            values = dict.values(batch)
            batch = next(iter(values) if index == 0 else reversed(values), None)
        elif isinstance(batch, list):
            batch = list.__getitem__(batch, index) if list.__len__(batch) else None
        elif isinstance(batch, tuple):
            batch = tuple.__getitem__(batch, index) if tuple.__len__(batch) else None
        else:
            return batch if type(batch).__weakrefoffset__ else None
    return None
