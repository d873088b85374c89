"""Replay: batches that are drawn and thrown away before the first step, to come to where a checkpoint was written.

They look like steps that compute nothing: the loop asks for the next batch as soon as one has come.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from telemetry.util.clock import NS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.records import Step

_MAX_COMPUTE_RATIO: Final = 0.125
"""A batch is thrown away if less than this share of a usual step's compute comes after it."""

_MIN_BATCHES: Final = 3
"""A loop that reads a batch or two ahead throws none away."""

_MAX_STEPS: Final = 1 << 16
"""Of the tick in which an optimizer steps first, which is cut off from there on."""

_USUAL: Final = 8

_ENOUGH: Final = 4
"""Steps that are sure to be no replay. One of them may be long because the machine is busy."""

_MAX_HELD_UP_RATIO: Final = 0.5
"""A batch before the first step of an optimizer may be held up for up to this share of a usual step's compute."""


class ReplayWatch:
    """Finds the replay among the first steps of a process.

    Attributes:
        settled: whether it is known how much was replay.
        batches: thrown away. ``seconds``, ``wait_seconds``: their part of the loop's time, and of its waits.
    """

    def __init__(self) -> None:
        self.settled = False
        self.batches = 0
        self.seconds = 0.0
        self.wait_seconds = 0.0
        # Steps before any optimizer has stepped: number, wait and compute, by the bits of their compute in ns.
        self._before: dict[int, list[float]] = {}
        self._after: list[tuple[float, float]] = []  # wait and compute of the others, and of the tick in between

    def add(self, steps: Sequence[Step], optimizer_steps: int) -> None:
        """Steps have closed. ``optimizer_steps``: counted so far, maybe later than these steps."""
        for step in () if self.settled else steps:
            wait, compute = step.wait_seconds, max(0.0, step.seconds - step.wait_seconds)
            if not optimizer_steps:
                bits = int(compute * NS).bit_length()
                if bits not in self._before:
                    self._before[bits] = [0, 0.0, 0.0]
                sums = self._before[bits]
                sums[0] += 1
                sums[1] += wait
                sums[2] += compute
            elif len(self._after) < _MAX_STEPS:
                self._after.append((wait, compute))

    def settle(self, optimizer_steps: int, first_wait_seconds: float, *, most: float, ended: bool = False) -> None:
        """Decide, once optimizers have stepped. To be called when all steps so far have been added.

        Args:
            optimizer_steps: so far.
            first_wait_seconds: the wait for the first batch, which is no replay.
            most: how many batches can have been drawn without a step of an optimizer. In a loop that steps after each
                batch it tells all. Where gradients are accumulated or steps are skipped, the durations decide.
            ended: there are no more steps to wait for.
        """
        if self.settled or optimizer_steps < 2 or not self._after:
            return
        if most < _MIN_BATCHES:
            self._end()
            return
        if optimizer_steps <= _ENOUGH and not ended:
            return
        usual = statistics.median(compute for _, compute in self._after[-min(_USUAL, optimizer_steps - 1) :])
        limit = usual * _MAX_COMPUTE_RATIO
        number, wait, compute, short = 0.0, 0.0, 0.0, 0.0
        for bits, sums in self._before.items():
            if (1 << bits) / NS <= usual * _MAX_HELD_UP_RATIO:
                number, wait, compute = number + sums[0], wait + sums[1], compute + sums[2]
            if (1 << bits) / NS <= limit:
                short += sums[0]
        if short < number / 2:  # short steps, such as those of accumulated gradients, and no replay
            number, wait, compute = 0.0, 0.0, 0.0
        else:
            for each_wait, each_compute in self._after[: _short_ones([each for _, each in self._after], limit)]:
                number, wait, compute = number + 1, wait + each_wait, compute + each_compute
        if number >= _MIN_BATCHES:
            self.batches = int(min(number, most))
            self.wait_seconds = max(0.0, wait - first_wait_seconds)
            self.seconds = self.wait_seconds + compute
        self._end()

    def _end(self) -> None:
        self.settled = True
        self._before, self._after = {}, []


def in_replay(resumption: Mapping[str, Any], optimizer_steps: float, steps: float) -> bool:
    """Whether a process that resumed from an optimizer's state draws batches, and its optimizer has not stepped yet.

    Args:
        resumption: how it began, as in its log.
        optimizer_steps: of the process so far.
        steps: of its loop so far.
    """
    loaded_at = resumption.get("resumed_at_optimizer_steps")
    return loaded_at is not None and optimizer_steps <= loaded_at and steps >= _MIN_BATCHES


def _short_ones(compute_seconds: Sequence[float], limit: float) -> int:
    """How many steps at the beginning are short, though a busy machine may make one of them long."""
    ahead, most, best = 0, 0, 0
    for place, seconds in enumerate(compute_seconds, 1):
        ahead += 1 if seconds <= limit else -1
        if ahead > most:
            most, best = ahead, place
    return best
