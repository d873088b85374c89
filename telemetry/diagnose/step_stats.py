"""Turns steps into distributions: the histogram of the run, and the sketches of a window."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from telemetry.core.distribution import Histogram
from telemetry.core.quantile_sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.core.spans import Step


_LATE: Final = 3.0
"""A wait is late from this many times the median of the steps that were read together with it."""


_SHORT_WAIT: Final = 0.001
"""Seconds. A shorter wait means that the batch was ready."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The steps of one window."""

    steps: int
    step: Sketch
    wait: Sketch


class StepStats:
    """Adds steps to the run's histogram and to the window in progress.

    Args:
        bounds: upper bounds of the histogram's buckets, seconds.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._wait_bounds = tuple(sorted({_SHORT_WAIT, *bounds}))
        self._counts = [0] * (len(bounds) + 1)
        self._wait_counts = [0] * (len(self._wait_bounds) + 1)
        self._sum = self._wait_sum = 0.0
        self.steps = 0
        # Waits that are much longer than those around them: single batches are late.
        self.outlier_wait_seconds = 0.0
        # Steps in which a checkpoint was written, and their compute.
        self.checkpoint_steps = 0
        self.checkpoint_steps_compute_seconds = 0.0
        self.run_step = Sketch()
        self.run_wait = Sketch()
        self._step = Sketch()
        self._wait = Sketch()

    def add(self, steps: Iterable[Step]) -> None:
        """Count closed steps."""
        closed = list(steps)
        if not closed:
            return
        durations, waits, checkpoints = zip(*closed, strict=True)
        for bounds, counts, seconds in (
            (self._bounds, self._counts, durations),
            (self._wait_bounds, self._wait_counts, waits),
        ):
            for value in seconds:
                counts[bisect_left(bounds, value)] += 1
        self._sum += sum(durations)
        self._wait_sum += sum(waits)
        self.steps += len(closed)
        self._step.add(durations)
        self._wait.add(waits)
        if any(checkpoints):
            written = [step for step in closed if step.checkpoint]
            self.checkpoint_steps += len(written)
            self.checkpoint_steps_compute_seconds += sum(step.seconds - step.wait_seconds for step in written)
        late = _LATE * median(waits)
        if max(waits) > late:
            self.outlier_wait_seconds += sum(wait for wait in waits if wait > late)

    def histogram(self) -> Histogram:
        """The run's step durations so far."""
        return Histogram(self._bounds, tuple(self._counts), self._sum)

    def wait_histogram(self) -> Histogram:
        """The waits of the run's steps so far. Waits may be short, so there is one more bucket for short ones."""
        return Histogram(self._wait_bounds, tuple(self._wait_counts), self._wait_sum)

    def durations(self) -> Sketch:
        """The durations of the run's steps so far, including the window in progress."""
        sketch = Sketch()
        for part in (self.run_step, self._step):
            sketch.merge(part.counts.items(), part.largest)
        return sketch

    def take_window(self) -> StepWindow:
        """Close the window in progress and begin the next."""
        window = StepWindow(self._step.total, self._step, self._wait)
        self._step, self._wait = Sketch(), Sketch()
        return window

    def commit(self, window: StepWindow) -> None:
        """Add a window to the sketches of the run, after it was written to the log."""
        self.run_step.merge(window.step.counts.items(), window.step.largest)
        self.run_wait.merge(window.wait.counts.items(), window.wait.largest)


class ExposedWait:
    """The run's exposed wait, measured with the host's clock or the GPU's.

    On the GPU only some waits are timed. For the waits between two readings, the exposed share is taken from those that
    were timed. Every wait at an epoch boundary is timed and counted exactly.
    """

    def __init__(self) -> None:
        self.seconds: float | None = 0.0
        self._wait = 0.0
        self._pending = 0.0
        self._seen = (0.0, 0.0, 0.0, 0.0)

    def host(self, data_wait_seconds: float) -> None:
        """On a CPU: every second of waiting is exposed. ``data_wait_seconds``: the ledger's value so far."""
        self.seconds = (self.seconds or 0.0) + max(0.0, data_wait_seconds - self._wait)
        self._wait = data_wait_seconds

    def absent(self, data_wait_seconds: float) -> None:
        """Nothing can be measured. From now on the run has no value, because a part of it would be missing."""
        self.seconds = None
        self._wait = data_wait_seconds

    def gpu(self, data_wait_seconds: float, sampled: tuple[float, float], exact: tuple[float, float]) -> None:
        """On a GPU. ``sampled``, ``exact``: (exposed, host wait) seconds so far, of timed steps and of boundaries."""
        exposed, waited, exact_exposed, exact_waited = (*sampled, *exact)
        seen_exposed, seen_waited, seen_exact_exposed, seen_exact_waited = self._seen
        self._pending += max(0.0, data_wait_seconds - self._wait)
        self._wait = data_wait_seconds
        if self.seconds is None or (waited <= seen_waited and exact_waited <= seen_exact_waited):
            return
        rest = max(0.0, self._pending - (exact_waited - seen_exact_waited))
        added = exact_exposed - seen_exact_exposed
        if waited > seen_waited:
            added += rest * (exposed - seen_exposed) / (waited - seen_waited)
            rest = 0.0
        self.seconds += max(0.0, added)
        self._pending = rest
        self._seen = (exposed, waited, exact_exposed, exact_waited)
