"""Where the training thread is: a look at its innermost Python frame, from the agent thread.

A look costs the training thread nothing but the interpreter for some 20 µs; some looks a second tell in which of a
job's ranks the others wait.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.stacks import line_of, stack_of, users_spot

if TYPE_CHECKING:
    from collections.abc import Callable

_BACKWARD: Final = f"{os.sep}torch{os.sep}autograd{os.sep}graph.py"
_TOGETHER: Final = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}distributed.py",
    _BACKWARD,
)
"""Innermost frames in which ranks wait for one another: a collective; DDP's own; the backward pass, which reduces."""


@dataclass(frozen=True, slots=True)
class Looks:
    """What the looks since the last call have seen.

    Attributes:
        samples: looks at a thread that computed. ``in_sync``: of them, where ranks wait for one another.
        where: the line of the user's own code that was seen most often while not in sync; None for none.
    """

    samples: int
    in_sync: int
    where: str | None


class Whereabouts:
    """Looks at one thread.

    Args:
        thread: its ident.
        computing: whether it is in a step and not waiting for a batch.
        running: whether it is on a core. A backward pass that is computes, and waits for no other rank; but False on a
            GPU, where the thread that waits for it to be over tells nothing.
    """

    def __init__(self, thread: Callable[[], int], computing: Callable[[], bool], running: Callable[[], bool]) -> None:
        self._thread = thread
        self._computing = computing
        self._running = running
        self._samples = 0
        self._in_sync = 0
        self._places: Counter[str] = Counter()

    def look(self) -> None:
        """See where the thread is right now."""
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

    def take(self) -> Looks:
        """What has been seen since the last call."""
        seen = self._places.most_common(1)
        looks = Looks(self._samples, self._in_sync, seen[0][0] if seen else None)
        self._samples = self._in_sync = 0
        self._places.clear()
        return looks
