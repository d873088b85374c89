"""Finds the batches that a resumed run draws and throws away to come to where its checkpoint was written."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from telemetry.util.clock import NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.records import Step

_MAX_COMPUTE_RATIO: Final = 0.125
"""A batch counts as thrown away if the step computes for less than this share of a usual step's compute."""

MIN_BATCHES: Final = 3
"""A loop that reads one or two batches ahead does not throw them away."""

_MAX_STEPS: Final = 1 << 16
"""The watch keeps at most this many steps from the tick in which an optimizer first steps."""

_USUAL: Final = 8

_ENOUGH: Final = 4
"""So many optimizer steps are enough for a usual duration. A busy machine may make one of them long."""

_MAX_HELD_UP_RATIO: Final = 0.5
"""A batch before the first optimizer step may take up to this share of a usual step's compute and still be replay."""


class ReplayWatch:
    """Finds the replay: batches that a resumed run throws away to come to where its checkpoint was written.

    They look like steps without compute: the loop asks for the next batch as soon as one has come.

    Attributes:
        settled: whether the replay has been decided.
        batches: batches thrown away. ``seconds``, ``wait_seconds``: what they took in the loop, and in its waits.
    """

    def __init__(self) -> None:
        self.settled = False
        self.batches = 0
        self.seconds = 0.0
        self.wait_seconds = 0.0
        # Steps before the first optimizer step: number, wait and compute, by the bit length of their compute in ns.
        self._before: dict[int, list[float]] = {}
        self._after: list[tuple[float, float]] = []  # wait and compute of later steps, from that tick on

    def add(self, steps: Sequence[Step], optimizer_steps: int) -> None:
        """Add closed steps. ``optimizer_steps``: the count now, which may already be ahead of these steps."""
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
        """Decide how much was replay, once optimizers have stepped. Call it after `add` has all steps so far.

        Args:
            optimizer_steps: optimizer steps so far.
            first_wait_seconds: the wait for the first batch, which is no replay.
            most: how many batches can have been drawn without an optimizer step. If the loop steps after each batch,
                this decides alone. If it accumulates gradients or skips steps, the durations decide.
            ended: no more steps will come.
        """
        if self.settled or optimizer_steps < 2 or not self._after:
            return
        if most < MIN_BATCHES:
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
        if short < number / 2:  # short steps without replay, such as those of accumulated gradients
            number, wait, compute = 0.0, 0.0, 0.0
        else:
            for each_wait, each_compute in self._after[: _short_ones([each for _, each in self._after], limit)]:
                number, wait, compute = number + 1, wait + each_wait, compute + each_compute
        if number >= MIN_BATCHES:
            self.batches = int(min(number, most))
            self.wait_seconds = max(0.0, wait - first_wait_seconds)
            self.seconds = self.wait_seconds + compute
        self._end()

    def _end(self) -> None:
        self.settled = True
        self._before, self._after = {}, []


def _short_ones(compute_seconds: Sequence[float], limit: float) -> int:
    """How many steps at the beginning are short. A busy machine may make one among them long."""
    ahead, most, best = 0, 0, 0
    for place, seconds in enumerate(compute_seconds, 1):
        ahead += 1 if seconds <= limit else -1
        if ahead > most:
            most, best = ahead, place
    return best
