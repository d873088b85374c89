"""Samples the training thread: the agent thread reads its innermost Python frame.

A sample holds the GIL for about 20 µs, which is its only cost to the training thread. A few samples per second show
which ranks of a job wait for another rank.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.util.stacks import line_of, stack_of, users_spot

if TYPE_CHECKING:
    from collections.abc import Callable

_BACKWARD: Final = f"{os.sep}torch{os.sep}autograd{os.sep}graph.py"
_TOGETHER: Final = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}distributed.py",
    _BACKWARD,
)
"""Innermost frames in which ranks wait for one another: a collective, DDP, or the backward pass, which reduces."""


@dataclass(frozen=True, slots=True)
class ThreadSamples:
    """The samples since the last call.

    Attributes:
        samples: number of samples in which the thread computed. ``in_sync``: those of them in which ranks wait for one
            another.
        where: the line of the user's own code in most samples that are not in sync; else None.
    """

    samples: int
    in_sync: int
    where: str | None


class ThreadSampler:
    """Samples of one thread.

    Args:
        thread: its ident.
        computing: whether it is in a step and not waiting for a batch.
        running: whether it runs on a core. A backward pass that runs on a core computes, so it does not wait for
            another rank. Must return False on a GPU: there the thread's state does not show what the GPU does.
    """

    def __init__(self, thread: Callable[[], int], computing: Callable[[], bool], running: Callable[[], bool]) -> None:
        self._thread = thread
        self._computing = computing
        self._running = running
        self._samples = 0
        self._in_sync = 0
        self._places: Counter[str] = Counter()

    def sample(self) -> None:
        """Take one sample of the thread if it computes."""
        if not self._computing():
            return
        stack = stack_of(self._thread())
        if not stack:
            return
        self._samples += 1
        file = stack[0].file
        if any(part in file for part in _TOGETHER) and not (_BACKWARD in file and self._running()):
            self._in_sync += 1
            return
        own = users_spot(stack)
        if own is not None:
            self._places[line_of(own)] += 1

    def take(self) -> ThreadSamples:
        """The samples since the last call."""
        seen = self._places.most_common(1)
        taken = ThreadSamples(self._samples, self._in_sync, seen[0][0] if seen else None)
        self._samples = self._in_sync = 0
        self._places.clear()
        return taken
