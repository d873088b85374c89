"""Reads from stack samples what no hook tells of a loop that asks no loader for batches.

* **It runs** from the first backward pass on that a sample shows.
* **It evaluates** while a function of the user's stands between its call of ``eval()`` and one of ``train()``, with
  gradients off and without a backward pass. The change is halfway between the two samples that show it.
* **Its steps**, if no optimizer of torch steps, are its backward passes. Short bursts of close samples show how often
  one begins, so their number is an estimate.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

from telemetry.model.records import BACKWARD, OPTIMIZER
from telemetry.seams.collectives import in_backward
from telemetry.sources.code_lines import EvaluationLines, evaluation_lines
from telemetry.sources.parts import part_of_frame
from telemetry.util.clock import NS
from telemetry.util.stacks import code_of, is_library

if TYPE_CHECKING:
    from telemetry.util.stacks import Stack

_DECORATED: Final = ("torch.utils._contextlib", "decorate_context")
"""The frame of torch's that calls a function under ``@torch.no_grad()``."""

_MAX_LINES: Final = 2048


class UnseenLoop:
    """Follows a loop without loaders by samples of the training thread. Used on the agent thread.

    Attributes:
        began_ns: when a sample has shown the first backward pass, monotonic; 0 before.
        evaluating: whether the newest sample was of an evaluation.
        changes: when evaluations have begun (True) and ended (False), for the ledger.
        pace: how often the backward pass begins.
    """

    def __init__(self) -> None:
        self.began_ns = 0
        self.evaluating = False
        self.changes: deque[tuple[int, bool]] = deque()
        self.pace = BackwardPace()
        self._newest_ns = 0
        self._lines: dict[tuple[str, int, str], EvaluationLines | None] = {}
        self._ruled_out: set[tuple[str, str]] = set()  # functions that train between eval() and train()

    def take(self, stack: Stack, stamp: int, thread: int) -> bool:
        """Take a sample of the training thread (its ident) in its startup or its loop. Returns whether it evaluates."""
        if not self.began_ns and in_backward(stack):
            self.began_ns = stamp
        evaluating = self._evaluates(stack, thread)
        self._note(stamp, evaluating=evaluating)
        return evaluating

    def away(self, stamp: int) -> None:
        """Note a sample of something else, such as a checkpoint."""
        self._note(stamp, evaluating=False)

    def _note(self, stamp: int, *, evaluating: bool) -> None:
        if evaluating != self.evaluating:
            self.changes.append(((self._newest_ns + stamp) // 2 if self._newest_ns else stamp, evaluating))
            self.evaluating = evaluating
        self._newest_ns = stamp

    def _evaluates(self, stack: Stack, thread: int) -> bool:
        trains = any(part_of_frame(spot) in {BACKWARD, OPTIMIZER} for spot in stack)
        for depth, spot in enumerate(stack):
            if is_library(spot.file) or (spot.file, spot.function) in self._ruled_out:
                continue
            found = self._lines_at((spot.file, spot.line, spot.function), thread)
            if found is None:
                continue
            by = stack[depth + 1] if depth + 1 < len(stack) else spot
            if trains:
                self._ruled_out.add((spot.file, spot.function))
            elif found.gradients_off or (by.module, by.function) == _DECORATED:
                return True
        return False

    def _lines_at(self, place: tuple[str, int, str], thread: int) -> EvaluationLines | None:
        if place not in self._lines:
            file, line, function = place
            if len(self._lines) >= _MAX_LINES:
                self._lines.clear()
            code = code_of(thread, file, function, line)
            if code is not None:
                ranges = [each for each in evaluation_lines(code) if each.first <= line <= each.last]
                self._lines[place] = ranges[0] if ranges else None
        return self._lines.get(place)


# -- how often the backward pass begins --------------------------------------------------------------------------------

_GAPS: Final = (0.001, 0.004, 0.016, 0.06, 0.25)
_SAMPLES: Final = 200
"""A burst takes so many samples, with one of these gaps in seconds: a longer one if there were too few backward passes,
a shorter one if too few samples were in each. It costs the agent thread some 30 ms, and slows the loop meanwhile."""

_MIN_PASSES: Final = 6
_MIN_OF_EACH: Final = 2.5
"""A pass, and the time between two, must have so many samples on average. Else too many fall between two samples, and
passes that are much shorter than the gap would seem to have two."""

_FIRST_SECONDS: Final = 2.0
_TIMES: Final = 2.0
_MAX_BETWEEN_SECONDS: Final = 300.0
"""The first burst begins so long after the first backward pass, and each later one when this has passed several times
over, or after five minutes."""


class BackwardPace:
    """Learns from bursts of samples how often a backward pass begins.

    Attributes:
        period_seconds: from one backward pass to the next, by the newest burst; None before the first.
    """

    def __init__(self) -> None:
        self.period_seconds: float | None = None
        self._random = random.Random()  # noqa: S311 - our own, so that the training's numbers stay the same
        self._gap = 1
        self._tries = 0
        self._due = _FIRST_SECONDS
        self._begins: list[int] = []  # stamps of samples that are the first of a backward pass
        self._taken = self._inside = 0
        self._before: bool | None = None
        self._steps = 0.0
        self._counted_seconds = 0.0

    def due(self, passed_seconds: float) -> bool:
        """Whether a burst is due or in progress. ``passed_seconds``: since the first backward pass."""
        return passed_seconds >= self._due

    @property
    def gap_seconds(self) -> float:
        """Time to the next sample of the burst: random, so that passes in a fixed rhythm are met at any moment."""
        return _GAPS[self._gap] * self._random.uniform(0.5, 1.5)

    def take(self, stamp: int, passed_seconds: float, *, backward: bool) -> None:
        """Take a sample of a burst. ``backward``: whether the training thread is in the backward pass."""
        if backward and self._before is False:
            self._begins.append(stamp)
        self._before = backward
        self._taken += 1
        self._inside += backward
        if self._taken >= _SAMPLES:
            self._end(passed_seconds)

    def away(self) -> None:
        """Give up the burst in progress: the loop has paused."""
        self._begins, self._taken, self._inside, self._before = [], 0, 0, None

    def _end(self, passed_seconds: float) -> None:
        passes, fewest = len(self._begins), min(self._inside, self._taken - self._inside)
        if passes < _MIN_PASSES:
            gap = self._gap + 1
        elif fewest < _MIN_OF_EACH * passes:
            gap = self._gap - 1
        else:
            gap = self._gap
            # Samples come late on a busy machine, and may miss a pass: then one takes as long as two or more.
            apart = [later - begun for begun, later in pairwise(self._begins)]
            usual = median(apart)
            self.period_seconds = sum(apart) / sum(max(1, round(each / usual)) for each in apart) / NS
        self._tries += 1
        if gap == self._gap or not 0 <= gap < len(_GAPS) or self._tries > len(_GAPS):
            self._due, self._tries = min(_TIMES * passed_seconds, passed_seconds + _MAX_BETWEEN_SECONDS), 0
        else:
            self._gap = gap
        self.away()

    def steps(self, compute_seconds: float) -> int | None:
        """About how many steps the loop has made. ``compute_seconds``: its compute so far. None if not known."""
        if self.period_seconds is None:
            return None
        self._steps += max(0.0, compute_seconds - self._counted_seconds) / self.period_seconds
        self._counted_seconds = compute_seconds
        return round(self._steps)
