"""Joins ticks to blocks of the training loop: how long a step takes, without what interrupts the loop now and then."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from telemetry.core.labels import CHECKPOINT, EVALUATION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from telemetry.core.totals import Totals

BLOCK_SECONDS: Final = 30.0
"""Length of a block, in seconds of the training loop. Single pauses, and long sequences between short ones, are a small
part of it."""

BLOCK_STEPS: Final = 8
"""A block has at least this many steps, however long they take."""

FIRST_SECONDS: Final = 60.0
"""The first steps belong to no block. They fill caches, start workers and choose kernels."""

SETTLE_TICKS: Final = 3
"""After an epoch boundary, an evaluation or a checkpoint this many ticks belong to no block."""

RARE_SECONDS: Final = 120.0
"""What interrupts the loop more often than this is a part of it."""


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """A stretch of the training loop.

    Attributes:
        at_seconds: its start, on the clock of `Totals.wall_seconds`. ``step``: the steps before it.
        steps: how many steps ended in it. ``wait_seconds``, ``compute_seconds``: of all of them.
        signals: means of sampled figures, by name; one that is unknown is missing.
        held_slow, held_fast: the longest and shortest steps that most of several blocks in a row had. Means of joined
            blocks do not show them. Without any, they are 0 and infinite.
    """

    at_seconds: float
    step: int
    steps: int
    wait_seconds: float
    compute_seconds: float
    signals: Mapping[str, float] = field(default_factory=dict)
    held_slow: float = 0.0
    held_fast: float = math.inf

    @property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return (self.wait_seconds + self.compute_seconds) / self.steps

    def __add__(self, later: LoopBlock) -> LoopBlock:
        """Both blocks as one."""
        share = self.steps / (self.steps + later.steps)
        both = self.signals.keys() & later.signals.keys()
        mean = {name: share * self.signals[name] + (1 - share) * later.signals[name] for name in both}
        return LoopBlock(
            self.at_seconds,
            self.step,
            self.steps + later.steps,
            self.wait_seconds + later.wait_seconds,
            self.compute_seconds + later.compute_seconds,
            {**later.signals, **self.signals, **mean},
            max(self.held_slow, later.held_slow),
            min(self.held_fast, later.held_fast),
        )


class BlockBuilder:
    """Takes the totals of each tick, and returns a block when it is full."""

    def __init__(self) -> None:
        self._start: Totals | None = None
        self._signals: dict[str, tuple[float, int]] = {}
        self._interruptions = (0, 0.0)
        self._interrupted_at = 0.0
        self._settling = 0

    def add(self, totals: Totals, signals: Mapping[str, float]) -> LoopBlock | None:
        """Add a tick. Returns a block if one is full now.

        Args:
            totals: at this tick.
            signals: sampled figures at this tick, by name.
        """
        if self._rare_interruption(totals):
            # The block in progress is not used: the interruption may have begun in it.
            self._start, self._settling = None, SETTLE_TICKS
        elif self._settling or totals.loop_seconds < FIRST_SECONDS:
            self._settling = max(0, self._settling - 1)
        elif self._start is None:
            self._start, self._signals = totals, {}
        else:
            for name, value in signals.items():
                total, count = self._signals.get(name, (0.0, 0))
                self._signals[name] = (total + value, count + 1)
            passed = totals.passed_since(self._start)
            if passed.loop_seconds >= BLOCK_SECONDS and passed.steps >= BLOCK_STEPS:
                return self._take(totals, self._start)
        return None

    def _rare_interruption(self, totals: Totals) -> bool:
        epochs, ledger = totals.epochs, totals.ledger_seconds
        now = epochs.boundaries + epochs.left, ledger.get(EVALUATION, 0.0) + ledger.get(CHECKPOINT, 0.0)
        if now == self._interruptions:
            return False
        rare = totals.loop_seconds - self._interrupted_at >= RARE_SECONDS
        self._interruptions, self._interrupted_at = now, totals.loop_seconds
        return rare

    def _take(self, totals: Totals, start: Totals) -> LoopBlock:
        added = totals - start
        means = {name: total / count for name, (total, count) in self._signals.items()}
        self._start, self._signals = totals, {}
        return LoopBlock(
            start.wall_seconds,
            start.steps,
            added.steps,
            max(0.0, added.wait_seconds - added.epochs.boundary_wait_seconds),
            added.compute_seconds,
            means | signals_of(added),
        )


def signals_of(added: Totals) -> dict[str, float]:
    """The figures of a stretch that the counters know themselves. What was not measured is missing."""
    workers, cpu, own = added.sampled.workers, added.sampled.cpu, added.own
    found = {
        "fetch_seconds": workers.fetch_busy_seconds / workers.fetches if workers.fetches else None,
        "read_bytes_per_second": added.sampled.read_bytes.mean,
        "other_cores": cpu.other_cores.mean,
        "cpu_throttled_ratio": cpu.throttled_ratio.mean,
        "garbage_ratio": added.garbage.seconds / added.loop_seconds if added.loop_seconds > 0 else None,
        "waiting_for_ranks_ratio": own.in_sync_samples / own.samples if own.samples else None,
    }
    return {name: value for name, value in found.items() if value is not None}
