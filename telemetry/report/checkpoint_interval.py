"""How often to write a checkpoint: the interval that loses least time.

A checkpoint that takes C seconds every T seconds costs C / T of the time. A failure, one in M seconds of training,
costs half an interval of steps that are done again. Their sum is least at T = sqrt(2 C M) (Young; Daly's terms of
higher order matter where C is not much less than M).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

MIN_FAILURES: Final = 2
"""Fewer tell nothing about how often a run fails."""

_WORTH: Final = 0.01
"""A gain of less than this in effective training time is no advice."""


@dataclass(frozen=True, slots=True)
class Experience:
    """What a run tells about its checkpoints and failures.

    Attributes:
        failures: how many attempts were killed or failed.
        loop_seconds: of training, checkpoints included, over all attempts.
        checkpoints: how many a rank has written. ``checkpoint_seconds``: for how long one stops the training.
        restart_seconds: from a failure to the first new step.
    """

    failures: int
    loop_seconds: float
    checkpoints: int
    checkpoint_seconds: float | None
    restart_seconds: float

    @property
    def failure_seconds(self) -> float | None:
        """Seconds of training for one failure; None if too few were seen, or no time of training."""
        return self.loop_seconds / self.failures if self.failures >= MIN_FAILURES and self.loop_seconds > 0 else None

    @property
    def interval_seconds(self) -> float | None:
        """Seconds of training between two checkpoints so far."""
        if not self.checkpoints:
            return None
        return max(0.0, self.loop_seconds / self.checkpoints - (self.checkpoint_seconds or 0.0))

    @property
    def best_interval_seconds(self) -> float | None:
        """The interval that costs least; None if it is not known what that depends on."""
        if self.failure_seconds is None or not self.checkpoint_seconds:
            return None
        return best_interval(self.checkpoint_seconds, self.failure_seconds)

    def predicted(self, interval_seconds: float | None) -> float | None:
        """Effective training time, as a share of the wall clock, with checkpoints so far apart."""
        if interval_seconds is None or self.failure_seconds is None or self.checkpoint_seconds is None:
            return None
        return ettr(interval_seconds, self.checkpoint_seconds, self.failure_seconds, self.restart_seconds)

    def _productive(self, interval_seconds: float | None) -> float | None:
        ratio = self.predicted(interval_seconds)
        if ratio is None or interval_seconds is None or self.checkpoint_seconds is None:
            return None
        segment = interval_seconds + self.checkpoint_seconds
        return ratio * interval_seconds / segment if segment > 0 else None

    @property
    def gain(self) -> float | None:
        """What the best interval adds to the share of productive time; None if that is too little for an advice."""
        best, now = self._productive(self.best_interval_seconds), self._productive(self.interval_seconds)
        return best - now if best is not None and now is not None and best - now >= _WORTH else None

    def as_json(self) -> dict[str, Any] | None:
        """For ``report --json``; None if nothing can be said."""
        if self.best_interval_seconds is None or self.checkpoint_seconds is None:
            return None
        return {
            "checkpoint_seconds": round(self.checkpoint_seconds, 3),
            "interval_seconds": _rounded(self.interval_seconds, 1),
            "failure_seconds": _rounded(self.failure_seconds, 1),
            "best_interval_seconds": round(self.best_interval_seconds, 1),
            "predicted_ettr_ratio": _rounded(self.predicted(self.best_interval_seconds), 4),
        }


def best_interval(checkpoint_seconds: float, failure_seconds: float) -> float:
    """Seconds of training between two checkpoints that lose least time, by Daly.

    Args:
        checkpoint_seconds: for which one checkpoint stops the training.
        failure_seconds: of training for one failure.
    """
    cost, mean = checkpoint_seconds, failure_seconds
    if cost >= 2 * mean:
        return mean
    root = math.sqrt(cost / (2 * mean))
    return max(cost, math.sqrt(2 * cost * mean) * (1 + root / 3 + root * root / 9) - cost)


def ettr(interval_seconds: float, checkpoint_seconds: float, failure_seconds: float, restart_seconds: float) -> float:
    """Effective training time as a share of the wall clock, with failures at random moments.

    Writing checkpoints counts as effective, as everywhere in the report: restarts and redone steps do not.

    Args:
        interval_seconds: of training between two checkpoints.
        checkpoint_seconds: for which one stops the training.
        failure_seconds: of training, checkpoints included, for one failure.
        restart_seconds: from a failure to the first new step.
    """
    segment = interval_seconds + checkpoint_seconds
    # Of the time between two failures, the part that is after the newest complete checkpoint; failures are exponential.
    kept = segment / math.expm1(segment / failure_seconds) if segment / failure_seconds < 700 else 0.0
    return kept / (failure_seconds + restart_seconds)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
