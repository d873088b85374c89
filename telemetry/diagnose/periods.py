"""What comes back after longer than a window: checkpoints, and the edges of epochs.

A window holds one of them or none, and what it holds is no fair part: a checkpoint of 45 s every half an hour would be
more than a window, and workers that take 12 s to start for each epoch of a minute would be in every other one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from telemetry.records import Slice

_EARLY_CHECKPOINTS: Final = 2
"""One file is written, and beside it the next: from then on each may reuse what the one it replaces has left."""

_MUCH_LONGER: Final = 1.5
"""An epoch that has lasted so many times as long as those before it is another kind of epoch."""


class Checkpoints:
    """How far apart they are, and what the first of the run took.

    Attributes:
        interval: seconds of training, their own included, between the newest one and the one before it, or the start.
    """

    def __init__(self) -> None:
        self.interval = 0.0
        self._first = 0
        self._first_seconds = 0.0
        self._trained = self._began = 0.0
        self._writing = False

    @property
    def early(self) -> float:
        """Mean seconds of the first checkpoints; 0.0 before there are any."""
        return self._first_seconds / self._first if self._first else 0.0

    def add(self, piece: Slice) -> None:
        """Take in a slice."""
        if self._first < _EARLY_CHECKPOINTS:
            self._first += piece.checkpoint_steps
            self._first_seconds += piece.checkpoint
        if piece.checkpoint > 0 and not self._writing:
            self.interval, self._began = self._trained - self._began, self._trained
        self._writing = piece.checkpoint > 0
        self._trained += piece.wait + piece.compute + piece.checkpoint


class Edges:
    """What the starts of epochs cost: three of them, with two epochs between, tell."""

    def __init__(self) -> None:
        self._loop = self._wait = self._sampler = 0.0  # of the epoch so far
        # Those that are over: seconds of loop, at edges, and of these in the sampler.
        self._epochs: deque[tuple[float, float, float]] = deque(maxlen=2)

    @property
    def share(self) -> float:
        """Of the loop, the less of the newest two epochs; 0.0 where the one that runs is much longer than they were."""
        return self._shares[0]

    @property
    def share_of_sampler(self) -> float:
        """Of `share`, what the training thread has spent in the sampler."""
        return self._shares[1]

    @property
    def _shares(self) -> tuple[float, float]:
        if len(self._epochs) < 2 or self._loop > _MUCH_LONGER * max(loop for loop, _, _ in self._epochs):
            return 0.0, 0.0
        loop, wait, sampler = min(self._epochs, key=lambda epoch: epoch[1] / epoch[0] if epoch[0] > 0 else 0.0)
        return (wait / loop, min(wait, sampler) / loop) if loop > 0 else (0.0, 0.0)

    def add(self, piece: Slice) -> None:
        """Take in a slice."""
        if piece.edges:
            self._epochs.append((self._loop, self._wait, self._sampler))
            self._loop = self._wait = self._sampler = 0.0
        self._loop += piece.wait + piece.compute
        self._wait += max(0.0, piece.edge_wait - piece.edge_garbage)
        self._sampler += piece.edge_sampler
