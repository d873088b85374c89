"""When a snapshot is taken: pure policy, without a clock, files or torch."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from telemetry.snapshot import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterable

STRAGGLER: Final = "straggler"

_WINDOW_STEPS: Final = 50
_WINDOW_SECONDS: Final = 2.0
"""Steps are compared in windows of at least this many steps and seconds: shorter windows are noise."""

_KEPT_STEPS: Final = 4096
_MIN_STEPS: Final = 10
"""With fewer steps before a snapshot no comparison is made."""

_PACE_STEPS: Final = 3
_PACES: Final = 5
"""The pace is the shortest of the last `_PACES` mean step times, each of at least `_PACE_STEPS` steps."""

_SETTLING_STEPS: Final = 3
_SLOW_WINDOWS: Final = 3
_SLOW_RATIO: Final = 1.10
"""A slowdown lasts if steps are slower by a tenth in this many windows in a row. On GPUs, steps were seen to stay 10 to
20 % slower after a profile (pytorch#144455)."""


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """The settings that limit snapshots: settle time and cooldown in seconds, and how many one run may take."""

    settle_seconds: float
    cooldown_seconds: float
    max_snapshots: int


class Trigger:
    """One rank's policy.

    Attributes:
        taken: snapshots so far, with those that failed on this rank.
        off: why this run takes no more snapshots; None if it may.
    """

    def __init__(self, limits: SnapshotLimits) -> None:
        self._limits = limits
        self._stall_since: float | None = None
        self._fired = False
        self._last: float | None = None
        self.taken = 0
        self.off: str | None = None

    def stalled(self, now: float, cause: str | None) -> bool:
        """Whether the open stall triggers a snapshot now. Called at each tick.

        A stall triggers one snapshot, after the settle time and if the cooldown is over. A stall caused by checkpoints
        triggers none, because a trace of steps does not show them.

        Args:
            now: monotonic seconds.
            cause: the cause of the open stall; None without one.
        """
        if cause is None or cause == "checkpoint":
            self._stall_since, self._fired = None, False
            return False
        if self._stall_since is None:
            self._stall_since = now
        held = now - self._stall_since
        # A rank that waits for a straggler waits longer: the straggler's own snapshot shows the reason.
        settle = self._limits.settle_seconds * (2 if cause == STRAGGLER else 1)
        if self._fired or held < settle or self.refuses(now, p.STALL) is not None:
            return False
        self._fired = True
        return True

    def refuses(self, now: float, kind: str) -> str | None:
        """Why a request is refused; None if it is not. The cooldown holds for stalls, not for a person's request."""
        if self.off is not None:
            return self.off
        if self.taken >= self._limits.max_snapshots:
            return f"this run has taken its max_snapshots = {self._limits.max_snapshots}"
        if kind == p.STALL and self._last is not None and now - self._last < self._limits.cooldown_seconds:
            left = self._limits.cooldown_seconds - (now - self._last)
            return f"the cooldown since the last snapshot has {left:.0f} s to go"
        return None

    def took(self, now: float) -> None:
        """A snapshot was agreed on. It also shows the open stall, even if a person requested it."""
        self.taken += 1
        self._fired = self._stall_since is not None
        self._last = now


@dataclass(frozen=True, slots=True)
class Comparison:
    """Median step seconds before and after a snapshot; ``slower`` if that is a lasting slowdown."""

    before: float
    after: float
    slower: bool


class StepWatch:
    """Compares step times before and after a snapshot."""

    def __init__(self) -> None:
        self._recent = array("d")  # seconds of the newest steps; a list of numbers takes a MiB
        self._count = 0
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._from: int | None = None  # steps from here on are after the snapshot
        self._before = 0.0
        self._window: list[float] = []
        self._window_seconds = 0.0
        self._slow = 0

    def add(self, seconds: Iterable[float]) -> Comparison | None:
        """Add the seconds of steps that have ended. Returns a comparison once one is complete."""
        found, added, number = None, [*seconds], self._count
        self._count += len(added)
        self._recent.extend(added)
        if self._from is not None:
            for step in added:
                number += 1
                if self._from is not None and number >= self._from:
                    found = self._after(step) or found
        if len(self._recent) > 2 * _KEPT_STEPS:
            del self._recent[:-_KEPT_STEPS]
        if len(added) >= _PACE_STEPS:
            self._paces.append(sum(added) / len(added))
        return found

    def compare(self, first: int, last: int) -> None:
        """Start a comparison: the profiler was on from step ``first`` to step ``last``, counted from 1."""
        before, total = [], 0.0
        for ago, seconds in enumerate(reversed(self._recent)):
            if self._count - ago < first:
                before.append(seconds)
                total += seconds
                if len(before) >= _WINDOW_STEPS and total >= _WINDOW_SECONDS:
                    break
        if len(before) < _MIN_STEPS:
            return
        self._before, self._window, self._window_seconds, self._slow = median(before), [], 0.0, 0
        self._from = last + 1 + _SETTLING_STEPS

    def _after(self, step: float) -> Comparison | None:
        self._window.append(step)
        self._window_seconds += step
        if len(self._window) < _WINDOW_STEPS or self._window_seconds < _WINDOW_SECONDS:
            return None
        after, self._window, self._window_seconds = median(self._window), [], 0.0
        self._slow = self._slow + 1 if after > _SLOW_RATIO * self._before else 0
        if 0 < self._slow < _SLOW_WINDOWS:
            return None
        self._from = None
        return Comparison(self._before, after, slower=self._slow > 0)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step at the fastest recent pace; None as long as there are too few steps."""
        newest = self._recent[-_PACE_STEPS:]
        return min([*self._paces, sum(newest) / len(newest)]) if len(newest) == _PACE_STEPS else None
