"""What comes back after longer than a window: checkpoints, and epoch boundaries.

A window holds one of them or none, and what it holds is no fair part: a checkpoint of 45 s every half an hour would be
more than a window, and workers that take 12 s to start for each epoch of a minute would be in every other one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.core.labels import CHECKPOINT
from telemetry.core.totals import Totals

if TYPE_CHECKING:
    from telemetry.core.tick import Tick

_FIRST_CHECKPOINTS: Final = 2
"""One file is written, and beside it the next: from then on each may reuse what the one it replaces has left."""

_MUCH_LONGER: Final = 1.5
"""An epoch that has lasted so many times as long as those before it is another kind of epoch."""


@dataclass(frozen=True, slots=True)
class RecurringCosts:
    """What checkpoints and epoch boundaries cost over the run so far.

    Attributes:
        checkpoint_interval_seconds: of training, its checkpoints included, between the newest checkpoint and the one
            before it, or the start.
        first_checkpoint_seconds: mean time of the first checkpoints; 0.0 before there are any.
        boundary_ratio: share of the loop that waits at epoch boundaries take: the less of the newest two epochs. 0.0
            before these, and where the one that runs is much longer than they were.
        sampler_boundary_ratio: of that, what the training thread has spent in the sampler.
    """

    checkpoint_interval_seconds: float = 0.0
    first_checkpoint_seconds: float = 0.0
    boundary_ratio: float = 0.0
    sampler_boundary_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class _EpochCosts:
    """Seconds of the loop, of waits at its boundary, and of these in the sampler."""

    loop: float
    boundary: float
    sampler: float

    @property
    def ratio(self) -> float:
        return self.boundary / self.loop if self.loop > 0 else 0.0


class RecurringCostsWatch:
    """Follows them from tick to tick. It remembers the totals at the newest checkpoint and epoch boundary."""

    def __init__(self) -> None:
        self._before = Totals()
        self._writing = False
        self._checkpoint_began = 0.0
        self._interval = 0.0
        self._first_checkpoints = 0
        self._first_seconds = 0.0
        self._epoch_began = Totals()
        self._epochs: deque[_EpochCosts] = deque(maxlen=2)  # that are over

    def add(self, tick: Tick) -> None:
        """Take in a tick."""
        before, now = self._before, tick.totals
        written = _checkpoint(now) - _checkpoint(before)
        if self._first_checkpoints < _FIRST_CHECKPOINTS:
            self._first_checkpoints, self._first_seconds = now.checkpoint_steps, _checkpoint(now)
        if written > 0 and not self._writing:
            trained = before.loop_seconds + _checkpoint(before)
            self._interval, self._checkpoint_began = trained - self._checkpoint_began, trained
        self._writing = written > 0
        if now.epochs.boundaries > before.epochs.boundaries:
            self._epochs.append(self._epoch(before))
            self._epoch_began = before
        self._before = now

    @property
    def costs(self) -> RecurringCosts:
        """As of the newest tick."""
        first = self._first_seconds / self._first_checkpoints if self._first_checkpoints else 0.0
        epochs = self._epochs
        much_longer = len(epochs) < 2 or self._running_loop > _MUCH_LONGER * max(epoch.loop for epoch in epochs)
        if much_longer:
            return RecurringCosts(self._interval, first)
        epoch = min(epochs, key=lambda epoch: epoch.ratio)
        sampler = min(epoch.boundary, epoch.sampler) / epoch.loop if epoch.loop > 0 else 0.0
        return RecurringCosts(self._interval, first, epoch.ratio, sampler)

    @property
    def _running_loop(self) -> float:
        return self._before.loop_seconds - self._epoch_began.loop_seconds

    def _epoch(self, end: Totals) -> _EpochCosts:
        began = self._epoch_began
        waited = end.epochs.boundary_wait_seconds - began.epochs.boundary_wait_seconds
        garbage = end.garbage.boundary_wait_seconds - began.garbage.boundary_wait_seconds
        sampler = end.sampler.boundary_seconds - began.sampler.boundary_seconds
        return _EpochCosts(end.loop_seconds - began.loop_seconds, max(0.0, waited - garbage), sampler)


def _checkpoint(totals: Totals) -> float:
    return totals.ledger_seconds.get(CHECKPOINT, 0.0)
