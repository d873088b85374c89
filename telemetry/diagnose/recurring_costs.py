"""Costs that recur less often than once in a window: checkpoints, and epoch boundaries.

A window contains one of them or none, so its share of the window is not that of the run. A checkpoint of 45 s every
half hour fills a whole window. If workers take 12 s to start for each epoch of a minute, only every other window has a
start.
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
"""The first checkpoints are written to new files. Later ones may reuse space of the file that they replace."""

_MUCH_LONGER: Final = 1.5
"""An epoch that has lasted this many times as long as those before it is assumed to be of another kind."""


@dataclass(frozen=True, slots=True)
class RecurringCosts:
    """The costs of checkpoints and epoch boundaries over the run so far.

    Attributes:
        checkpoint_interval_seconds: training time, with checkpoints, between the newest checkpoint and the one before
            it, or the start.
        first_checkpoint_seconds: mean time of the first checkpoints; 0.0 before there are any.
        boundary_ratio: share of the loop spent in waits at epoch boundaries: the lower value of the newest two epochs.
            0.0 before two epochs have ended, and if the current epoch is much longer than they were.
        sampler_boundary_ratio: the part of it that the training thread has spent in the sampler.
    """

    checkpoint_interval_seconds: float = 0.0
    first_checkpoint_seconds: float = 0.0
    boundary_ratio: float = 0.0
    sampler_boundary_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class _EpochCosts:
    """Seconds of the loop, of the waits at its boundary, and of these in the sampler."""

    loop: float
    boundary: float
    sampler: float

    @property
    def ratio(self) -> float:
        return self.boundary / self.loop if self.loop > 0 else 0.0


class RecurringCostsWatch:
    """Tracks the costs from tick to tick. It keeps the totals at the newest checkpoint and epoch boundary."""

    def __init__(self) -> None:
        self._before = Totals()
        self._writing = False
        self._checkpoint_began = 0.0
        self._interval = 0.0
        self._first_checkpoints = 0
        self._first_seconds = 0.0
        self._epoch_began = Totals()
        self._epochs: deque[_EpochCosts] = deque(maxlen=2)  # epochs that have ended

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
        """The costs as of the newest tick."""
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
