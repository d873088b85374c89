"""Turns the spans of one rank's ring into the ledger, the steps and the exposed wait."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Final

from telemetry.loop.evaluation_waits import EvaluationWaits
from telemetry.model.records import (
    CATEGORIES,
    CHECKPOINT,
    COMPUTE,
    DATA_WAIT,
    EVALUATION,
    OTHER,
    STARTUP,
    Epochs,
    Histogram,
    PhaseSpan,
    Step,
)
from telemetry.safety.gil import GilTurns
from telemetry.seams.batches import TrainedBatches
from telemetry.seams.device import device_in_use, wait_class
from telemetry.seams.ring import BATCH, CLOSES, ENDS, GAP, JOINS, LEAVES, OPENS, S_DATA_WAIT, STEP
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.config import Config
    from telemetry.safety.errors import ErrorLog
    from telemetry.seams.attachment import Attachment
    from telemetry.seams.loaders import BatchSource
    from telemetry.seams.ring import Entry
    from telemetry.seams.tracker import StepTracker
    from telemetry.sources.unseen_loop import UnseenLoop


# -- the ledger: turns spans of the training thread into seconds by category, steps and phases -------------------------
# It has one current category and only moves forward. It books each instant once, and never takes anything back. So the
# categories always add up to the time since the start, whatever the spans are.

_PHASES: Final = frozenset({EVALUATION, CHECKPOINT})
_SAMPLED: Final = frozenset({STARTUP, COMPUTE})
"""Samples can show that time of these categories is an evaluation's."""

_NEAR_BOUNDARY: Final = 8
"""The workers of an epoch start and end one by one. So this many batches after its first, and before its end, may be
late because of the epoch boundary."""

_MAX_HELD_NS: Final = 30 * NS
"""After so long, time of which nobody knows yet whether it is an evaluation counts as one: most are."""

Span = tuple[int, int, str, str, bool, bool, bool, bool]
"""start, end (monotonic ns), category during, category after, closes a step, opens a step, delivered a batch, stopped
the workers of an iteration that was left"""


class Ledger:
    """Turns spans into seconds by category, closed steps and closed phases.

    Args:
        start_ns: monotonic stamp of the start.

    Attributes:
        batches: training batches that have come. ``dropped_steps``: steps that ended in a stretch of dropped spans.
        step_is_open: whether a step has begun and not ended. At the end of a run, ``break`` has left such a step.
        at_epoch_boundary: whether an iteration has ended or begun, and the next batch has not come yet.
        phases: evaluations and checkpoints that have closed since they were taken.
    """

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.at_ns = start_ns  # all before is booked
        self.category = STARTUP
        self.ns: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.batches = 0
        self.dropped_steps = 0
        self.last_step_ns: int | None = None
        # Waits for the first batch of the run, and waits at later epoch boundaries: an iteration ends, is left or
        # begins, or its first batch comes. Both include a wait in progress.
        self.first_wait_ns = 0
        self.boundary_wait_ns = 0
        self.epoch_boundaries = 0
        self._first_boundary_ns = self._newest_boundary_ns = 0
        self.iterations_left = 0
        self.evaluations = 0  # that have ended
        # What only samples of the stack tell, of a loop without loaders. See `loop_runs` and `sampled`.
        self._runs = False
        self._changes: deque[tuple[int, bool]] = deque()
        self._evaluating = False
        self._evaluating_since_ns = 0
        self._owed_ns = 0  # time of evaluations that was booked before it was known; below 0: booked too much
        self._evaluated_ns = 0  # in the open step
        # How much longer the batches next to boundaries took to come than batches in mid-epoch.
        self.near_boundary_wait_ns = 0
        self._epoch = _Epoch()
        self.at_epoch_boundary = False
        self._batches_of_epoch = self._batches_at_boundary = 0  # of the newest that has ended; so far when it ended
        self._span_at_ns = start_ns
        self._span_category = STARTUP
        self._waiting_at_ns: int | None = None  # `advance` has booked a wait from here on; its span comes later
        self.step_is_open = False
        self._cut = False  # whether the begin of the open step was dropped
        self._wait_ns = 0
        self._compute_ns = 0
        self._checkpoint = False  # whether the open step has written a checkpoint
        self._dropped = 0  # steps that the ring has dropped
        self._phase_start_ns: int | None = None
        self.phases: list[PhaseSpan] = []
        self._steps: list[Step] = []

    def fold(self, spans: Iterable[Span]) -> None:
        """Book spans in the order in which they happened."""
        for span in spans:
            start, end, during, after, closes, opens, batch, left = span
            self._follow_samples(start)
            usual = closes and opens and batch and not left
            if usual and during == DATA_WAIT and after == COMPUTE and self.fold_steps(((start, end, 0, None),)):
                continue
            self._pass(start)
            if closes and self.step_is_open:
                self._close(start)
            elif closes and self._cut:
                self.dropped_steps, self.last_step_ns = self.dropped_steps + 1, start
            self._cut = self._cut and not closes
            if opens:
                self.step_is_open, self._wait_ns, self._compute_ns, self._checkpoint = True, 0, 0, False
                self._evaluated_ns = 0
            self._enter(during, start)
            self._pass(end)
            if left:
                self._count_left(max(0, end - start))
            elif during == DATA_WAIT:
                self._count_boundary(max(0, end - start), batch=batch)
            self._enter(after, end)
            self.batches += batch

    def fold_steps(self, spans: Sequence[tuple[int, int, int, object]]) -> int:
        """Book ordinary spans: each ends a step and is the wait of the next one, in mid-epoch.

        `fold` can book them, too, but takes six times as long, and nearly all spans are of this kind.

        Args:
            spans: the start and end of each; the rest is not used.

        Returns:
            How many were booked: none unless the ledger computes in mid-epoch, none after one that begins too early.
        """
        if not spans or not self._computes_until(spans[0][0]):
            return 0
        wait, checkpoint, open_ns = self._wait_ns, self._checkpoint, self._wait_ns + self._compute_ns
        at, booked, steps, waits = self._span_at_ns, self.at_ns, [], []
        for start, end, _, _ in spans:
            if start < at:
                break
            steps.append(Step((open_ns + start - at) / NS, wait / NS, checkpoint))
            open_ns = wait = end - start if end > start else 0
            waits.append(wait)
            at, checkpoint = start + wait, False
        waited = sum(waits)
        self.ns[DATA_WAIT] += waited
        self.ns[COMPUTE] += at - booked - waited
        self._steps += steps
        self._wait_ns, self._compute_ns, self._checkpoint = wait, 0, False
        self.at_ns = self._span_at_ns = at
        self._waiting_at_ns = None
        self.last_step_ns = at - wait
        self._epoch.add(waits)
        self.batches += len(waits)
        return len(waits)

    def _computes_until(self, stamp: int) -> bool:
        """Whether a step is open in mid-epoch, and everything booked since its newest span is compute."""
        return (
            self.step_is_open
            and self._span_category == COMPUTE
            and self.category == COMPUTE
            and self._phase_start_ns is None
            and not self.at_epoch_boundary
            and self.batches > 0
            and self._span_at_ns <= self.at_ns <= stamp
        )

    def advance(
        self, now_ns: int, waiting_since_ns: int = 0, *, dropped_since_ns: int = 0, held_since_ns: int = 0
    ) -> None:
        """Book the time up to now. If a request is in progress since ``waiting_since_ns``, book it as data wait.

        If spans are dropped since ``dropped_since_ns``, it is other: nobody knows what this time was. If they are held
        back since ``held_since_ns``, it is booked once it is known, or after a while as evaluation.

        A request whose span has already been folded is not booked again. The request may begin before the newest booked
        time, if it began just after the last call had looked for one.
        """
        self._follow_samples(now_ns)
        if held_since_ns >= max(1, self._span_at_ns):
            self._book(held_since_ns)
            if now_ns - held_since_ns < _MAX_HELD_NS:
                return
            self.category = EVALUATION
        elif dropped_since_ns:
            self._book(dropped_since_ns)
            self.category = OTHER
        elif waiting_since_ns > 0 and waiting_since_ns >= self._span_at_ns:
            self._book(waiting_since_ns)
            if self._waiting_at_ns is None:
                self._waiting_at_ns = self.at_ns
            self.category = DATA_WAIT
        self._book(now_ns)

    def loop_runs(self) -> None:
        """Note that samples have shown the first backward pass: the startup is over, without any step or batch."""
        self._runs = True
        self.category = COMPUTE if self.category == STARTUP else self.category
        self._span_category = COMPUTE if self._span_category == STARTUP else self._span_category

    def sampled(self, stamp: int, *, evaluates: bool) -> None:
        """Note that an evaluation begins or ends at a stamp, as samples show. The time until then may be booked."""
        self._changes.append((stamp, evaluates))

    def _follow_samples(self, stamp: int) -> None:
        """Follow what samples have shown up to a stamp."""
        while self._changes and self._changes[0][0] <= stamp:
            at, evaluates = self._changes.popleft()
            self._book(at)
            late = max(0, self.at_ns - at)
            self._owed_ns += late if evaluates else -late
            self._evaluating = evaluates
            if evaluates:
                self._evaluating_since_ns = at
            else:
                self.evaluations += 1
                seconds = (at - self._evaluating_since_ns) / NS
                loop = self.ns[DATA_WAIT] / NS, self.ns[COMPUTE] / NS
                self.phases.append(PhaseSpan(EVALUATION, EVALUATION, self._evaluating_since_ns, seconds, loop))

    def take_steps(self) -> list[Step]:
        """The steps closed since the last call."""
        steps, self._steps = self._steps, []
        return steps

    @property
    def open_step_seconds(self) -> float:
        """Seconds of the open step in the training loop so far; 0.0 without one."""
        if not self.step_is_open:
            return 0.0
        booked = self._wait_ns + self._compute_ns - self._evaluated_ns
        running = self.at_ns - self._span_at_ns if self._span_category in {DATA_WAIT, COMPUTE} else 0
        return (booked + max(0, running)) / NS

    def end_epoch(self) -> None:
        """Note that an epoch has ended without a request of its own that has found the end."""
        self._count_boundary(0, batch=False)

    def end(self, *, exhausted: bool) -> None:
        """Count the last epoch, if it was a whole one. Lightning asks no loader for more than it knows to be in it.

        ``exhausted``: the loader has given all its samples. If not, it may have given as many batches as before.
        """
        running = self.batches - self._batches_at_boundary
        if running > 0 and not self.at_epoch_boundary and (exhausted or running == self._batches_of_epoch):
            self.epoch_boundaries += 1
            self._newest_boundary_ns = self._span_at_ns
            self._first_boundary_ns = self._first_boundary_ns or self._span_at_ns

    @property
    def epoch_seconds(self) -> float | None:
        """Mean duration of an epoch, with the evaluations between two; None before the end of the first."""
        if self.epoch_boundaries > 1:
            return (self._newest_boundary_ns - self._first_boundary_ns) / (self.epoch_boundaries - 1) / NS
        begin = self.start_ns + self.ns[STARTUP]
        return (self._first_boundary_ns - begin) / NS if self.epoch_boundaries else None

    def take_phases(self) -> list[PhaseSpan]:
        """The evaluations and checkpoints that closed since the last call."""
        phases, self.phases = self.phases, []
        return phases

    def seconds(self) -> dict[str, float]:
        """Seconds by category. Their sum is `wall_seconds`."""
        return {category: amount / NS for category, amount in self.ns.items()}

    @property
    def wall_seconds(self) -> float:
        """Seconds booked since the start."""
        return (self.at_ns - self.start_ns) / NS

    def _book(self, stamp: int) -> None:
        """Book the time up to a stamp as the current category. An earlier stamp books nothing."""
        passed = stamp - self.at_ns
        if passed > 0:
            self.at_ns = stamp
            known_by_samples = (self._evaluating or self._owed_ns) and self.category in _SAMPLED
            evaluated = self._evaluated(passed) if known_by_samples else 0
            self.ns[EVALUATION] += evaluated
            self.ns[self.category] += passed - evaluated
            if self.category == DATA_WAIT and not self.batches:
                self.first_wait_ns += passed
            elif self.category == DATA_WAIT and self.at_epoch_boundary:
                self.boundary_wait_ns += passed

    def _evaluated(self, passed: int) -> int:
        """The part of this time that is booked as evaluation, because samples show one or have shown one too late."""
        due = self._owed_ns + (passed if self._evaluating else 0)
        evaluated = min(max(0, due), passed)
        self._owed_ns = due - evaluated
        self._evaluated_ns += evaluated
        return evaluated

    def _pass(self, stamp: int) -> None:
        """Advance the ledger and the open step to a span's stamp.

        The step has its own cursor, because `advance` may have booked the start of a wait before it was known that a
        new step begins with it.
        """
        self._book(stamp)
        passed = stamp - self._span_at_ns
        if passed <= 0:
            return
        self._span_at_ns, self._waiting_at_ns = stamp, None
        if self._span_category == DATA_WAIT:
            self._wait_ns += passed
        elif self._span_category == COMPUTE:
            self._compute_ns += passed

    def fold_gap(self, start: int, end: int, dropped: int, *, opened: bool) -> None:
        """Book the time of spans that did not fit into the ring as other. ``dropped``: steps that were dropped so far.

        The step that was open at its start is one of them. If one is ``opened`` at its end, it is counted when it ends.
        """
        self._pass(start)
        self._enter(OTHER, start)
        self._pass(end)
        self.count_dropped(dropped)
        self.step_is_open, self._cut = False, opened
        self.at_epoch_boundary, self._epoch = False, _Epoch()

    def count_dropped(self, dropped: int) -> None:
        """Count the steps that the ring has dropped. ``dropped``: all of them so far."""
        self.dropped_steps, self._dropped = self.dropped_steps + dropped - self._dropped, dropped

    def _count_boundary(self, waited: int, *, batch: bool) -> None:
        """Count a request that has ended. If it brought no batch, an iteration has ended or begun."""
        if self.batches and not batch and not self.at_epoch_boundary:
            self.boundary_wait_ns += waited  # this was not known before
            self.epoch_boundaries += 1
            self._newest_boundary_ns = self.at_ns
            self._first_boundary_ns = self._first_boundary_ns or self.at_ns
            self.near_boundary_wait_ns += self._epoch.extra_wait_ns()
            self._epoch = _Epoch()
            self._batches_of_epoch = self.batches - self._batches_at_boundary
            self._batches_at_boundary = self.batches
        elif self.batches and batch and not self.at_epoch_boundary:
            self._epoch.add((waited,))
        self.at_epoch_boundary = not batch

    def _count_left(self, waited: int) -> None:
        """Count an iteration that was left as a boundary. The next batch may come from another loader, in mid-epoch."""
        self.iterations_left += 1
        self._epoch = _Epoch()  # an epoch that was left has no last batches
        if not self.at_epoch_boundary:
            self.boundary_wait_ns += waited

    def _enter(self, category: str, stamp: int) -> None:
        category = COMPUTE if category == STARTUP and self._runs else category
        self.category = category
        if category == self._span_category:
            return
        if self._phase_start_ns is not None:
            seconds = max(0, stamp - self._phase_start_ns) / NS
            name = self._span_category
            self.evaluations += name == EVALUATION
            loop = self.ns[DATA_WAIT] / NS, self.ns[COMPUTE] / NS
            self.phases.append(PhaseSpan(name, name, self._phase_start_ns, seconds, loop))
        self._phase_start_ns = stamp if category in _PHASES else None
        self._checkpoint |= category == CHECKPOINT
        self._span_category = category

    def _close(self, stamp: int) -> None:
        self.step_is_open = False
        self.last_step_ns = stamp
        seconds = max(0, self._wait_ns + self._compute_ns - self._evaluated_ns) / NS
        self._steps.append(Step(seconds, self._wait_ns / NS, self._checkpoint))


class _Epoch:
    """The waits for the batches of one epoch. The first batch is left out, because it waits at the boundary."""

    __slots__ = ("_batches", "_first", "_last", "_total_ns")

    def __init__(self) -> None:
        self._batches = self._total_ns = 0
        self._first: list[int] = []
        self._last: deque[int] = deque(maxlen=_NEAR_BOUNDARY)

    def add(self, waited_ns: Sequence[int]) -> None:
        self._batches += len(waited_ns)
        self._total_ns += sum(waited_ns)
        self._last.extend(waited_ns[-_NEAR_BOUNDARY:])
        if len(self._first) < _NEAR_BOUNDARY:
            self._first += waited_ns[: _NEAR_BOUNDARY - len(self._first)]

    def extra_wait_ns(self) -> int:
        """How much longer batches next to boundaries took than as many in mid-epoch; may be negative."""
        near = min(_NEAR_BOUNDARY, self._batches // 4)
        if not near:
            return 0
        at_boundaries = sum(self._first[:near]) + sum([*self._last][-near:])
        usual = (self._total_ns - at_boundaries) / (self._batches - 2 * near)
        return int(at_boundaries - 2 * near * usual)


# -- turns steps into distributions: the histogram of the run, and the sketches of a window ----------------------------

_LATE: Final = 3.0
"""A wait is late from this many times the median of the steps read with it."""


_SHORT_WAIT: Final = 0.001
"""Seconds. After a shorter wait, the batch was ready."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of the run's steps so far, in seconds; None before the first step."""

    p99: float | None
    longest: float | None


class StepStats:
    """Adds steps to the run's histogram and to the window in progress.

    Args:
        bounds: upper bounds of the histogram's buckets, in seconds.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._wait_bounds = tuple(sorted({_SHORT_WAIT, *bounds}))
        self._counts = [0] * (len(bounds) + 1)
        self._wait_counts = [0] * (len(self._wait_bounds) + 1)
        self._sum = self._wait_sum = 0.0
        self.steps = 0
        # Waits of single late batches: they are much longer than the waits around them.
        self.outlier_wait_seconds = 0.0
        # Steps that wrote a checkpoint, and their compute.
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
        """The waits of the run's steps so far, with one more bucket for short ones."""
        return Histogram(self._wait_bounds, tuple(self._wait_counts), self._wait_sum)

    def all_steps(self) -> Sketch:
        """The durations of the run's steps so far, with the window in progress. Takes up to 0.15 ms."""
        sketch = Sketch()
        for part in (self.run_step, self._step):
            sketch.merge(part.counts.items(), part.largest)
        return sketch

    def step_times(self) -> StepTimes:
        """The figures of `all_steps`."""
        sketch = self.all_steps()
        return StepTimes(p99=sketch.quantile(0.99), longest=sketch.largest if sketch.total else None)

    def take_window(self) -> tuple[Sketch, Sketch]:
        """The steps of the window in progress, and their waits. Begins the next window."""
        window = self._step, self._wait
        self._step, self._wait = Sketch(), Sketch()
        return window

    def commit(self, step: Sketch, wait: Sketch) -> None:
        """Add a window to the sketches of the run, after the log has it."""
        self.run_step.merge(step.counts.items(), step.largest)
        self.run_wait.merge(wait.counts.items(), wait.largest)


Sums = dict[int, tuple[int, int]]
"""Exposed wait and host wait, in ns, by `wait_class`: what a `GpuClock` has timed so far."""


class ExposedWait:
    """The run's exposed wait, measured with the host's or the GPU's clock.

    On the GPU only some waits are timed, but the host knows all of them. So the waits between two readings take the
    exposed share of the timed waits of about the same length: a long wait is mostly exposed, and a short one hidden.
    Every wait at an epoch boundary is timed and counted exactly.
    """

    def __init__(self) -> None:
        self.seconds: float | None = 0.0
        self._wait = 0.0
        self._pending = 0.0
        self._lengths: Counter[int] = Counter()  # ns of the waits that the pending time is made of, by class
        self._share: dict[int, float] = {}  # the newest exposed share by class
        self._seen: tuple[Sums, Sums] = ({}, {})

    def host(self, data_wait_seconds: float) -> None:
        """Count all waiting as exposed, as on a CPU. ``data_wait_seconds``: the ledger's value so far."""
        self.seconds = (self.seconds or 0.0) + max(0.0, data_wait_seconds - self._wait)
        self._wait = data_wait_seconds

    def absent(self, data_wait_seconds: float) -> None:
        """Give up the value for the rest of the run, because a part of it cannot be measured."""
        self.seconds = None
        self._wait = data_wait_seconds

    def count(self, entries: Iterable[Entry]) -> None:
        """Count the lengths of waits, from entries of the ring. Only `gpu` uses them."""
        for start, end, code, _ in entries:
            if code & 7 == S_DATA_WAIT:
                self._lengths[wait_class(end - start)] += end - start

    def gpu(self, data_wait_seconds: float, sampled: Sums, at_boundary: Sums) -> None:
        """Add what the GPU's clock has timed so far, of ordinary steps and at epoch boundaries."""
        self._pending += max(0.0, data_wait_seconds - self._wait)
        self._wait = data_wait_seconds
        steps, boundaries = _newer(sampled, self._seen[0]), _newer(at_boundary, self._seen[1])
        if self.seconds is None or not (steps or boundaries):
            return
        self._seen = sampled, at_boundary
        added, rest = 0.0, self._pending
        for length, (exposed, waited) in boundaries.items():
            added, rest = added + exposed / NS, rest - waited / NS
            self._lengths[length] -= waited
        if steps:
            added, rest = added + max(0.0, rest) * self._exposed_share(steps), 0.0
            self._lengths.clear()
        self.seconds += added
        self._pending = max(0.0, rest)

    def _exposed_share(self, timed: Sums) -> float:
        """The exposed share of all counted waits. A class without any timed wait takes that of the nearest one."""
        self._share |= {length: exposed / waited for length, (exposed, waited) in timed.items() if waited}
        lengths = {length: ns for length, ns in self._lengths.items() if ns > 0}
        total = sum(lengths.values())
        if not self._share or not total:
            waited = sum(waited for _, waited in timed.values())
            return sum(exposed for exposed, _ in timed.values()) / waited if waited else 0.0
        nearest = {length: min(self._share, key=lambda known: abs(known - length)) for length in lengths}
        return sum(ns * self._share[nearest[length]] for length, ns in lengths.items()) / total


def _newer(now: Sums, before: Sums) -> Sums:
    """What was added since ``before``."""
    return {
        length: (exposed - before.get(length, (0, 0))[0], waited - before.get(length, (0, 0))[1])
        for length, (exposed, waited) in now.items()
        if (exposed, waited) != before.get(length)
    }


# -- the accounting ----------------------------------------------------------------------------------------------------

_CHUNK: Final = 32
"""So many spans are folded at a time. That takes at most 0.2 ms, and then the training thread gets its turn. With steps
of 40 µs, the ring has thousands of spans at a tick."""

_LONG_AGO_NS: Final = NS // 2
_UNSEEN_STEPS: Final = 16
"""After this many optimizer steps without a batch, batches are assumed to come in another way if another thread
requests batches, or if the iteration has ended and no step is open. Many algorithms step more than once for a batch,
but not for a batch of a finished iteration."""

_LEFT_STEPS: Final = 256
"""The same limit for an iteration that was left early, as by ``next(iter(loader))``. Its last batch may stay in use for
longer."""


class Accounting:
    """Turns the ring of one rank into figures. Only the agent thread uses it.

    Attributes:
        batches: follows the batches that the training took.
        evaluations: adds up the waits of evaluations.
        updated_ns: everything before this stamp is counted.
        exposed_source: what measures the exposed wait: ``host``, ``cuda_events`` or another device's events. None: it
            cannot be measured, and ``exposed_absent`` is the reason.
        turns: sees to it that the agent thread gets the GIL.
    """

    def __init__(
        self, tracker: StepTracker, attachment: Attachment, config: Config, errors: ErrorLog, start_ns: int
    ) -> None:
        self._tracker = tracker
        self._attachment = attachment
        self._errors = errors
        self.turns = GilTurns()
        self.ledger = Ledger(start_ns)
        self.stats = StepStats(config.step_buckets)
        self.exposed = ExposedWait()
        self.exposed_source: str | None = "host"
        self.exposed_absent: str | None = None
        self._closed: list[Step] = []
        self._hook_errors_seen = 0
        self.updated_ns = start_ns
        self.batches = TrainedBatches()
        self.evaluations = EvaluationWaits()
        self._runs = False  # whether samples have shown a backward pass
        self._batches_seen = 0
        self._at_batch = (0, 0)  # optimizer steps, and other threads' requests, when the newest batch came

    def update(self) -> None:
        """Count everything up to now."""
        tracker, ring = self._tracker, self._tracker.ring
        with self._errors.contained("ledger"):
            # This order matters, and all of it comes before the ring is emptied. A request in progress here was already
            # in progress at ``now``, or its span is in the ring.
            ended = self.batches.ended
            now, waiting_since = now_ns(), tracker.waiting_since
            dropped_since, held_since, head = ring.gap_since, ring.held_since, ring.head
            self.updated_ns = now
            while taken := ring.drain(_CHUNK, head):
                self._fold(taken)
                if self._attachment.clock is not None:
                    self.exposed.count(taken)
                steps = self.ledger.take_steps()
                self.stats.add(steps)
                self._closed += steps
                self.batches.fold(taken)
                if len(taken) == _CHUNK:
                    sleep(0)
                    self.turns.check()  # beside C calls of 2 ms, one update took over 20 s
            self.batches.forget(ended)
            self.ledger.advance(now, waiting_since, dropped_since_ns=dropped_since, held_since_ns=held_since)
            self._look_for_batches(waiting_since)
            self._update_exposed()
        if tracker.errors != self._hook_errors_seen:
            new, self._hook_errors_seen = tracker.errors - self._hook_errors_seen, tracker.errors
            self._errors.note("hook", tracker.last_error or "unknown", count=new)

    def _fold(self, taken: list[Entry]) -> None:
        """Book entries of the ring. Nearly always all of them are ordinary batches."""
        ledger = self.ledger
        ordinary = next((place for place, entry in enumerate(taken) if entry[2] != STEP), len(taken))
        booked = ledger.fold_steps(taken[:ordinary])
        if not booked:  # the last reading ended during a wait
            ledger.fold((start, end, *_decoded(code)) for start, end, code, _ in taken[: min(1, ordinary)])
            booked = min(1, ordinary) + ledger.fold_steps(taken[1:ordinary])
        for start, end, code, source in taken[booked:]:
            if code & GAP:
                ledger.fold_gap(start, end, source, opened=bool(code & OPENS))
            else:
                ledger.fold(((start, end, *_decoded(code)),))
                if code & ENDS:
                    ledger.end_epoch()
        self.evaluations.fold(taken[ordinary:])

    def follow_samples(self, loop: UnseenLoop) -> None:
        """Tell the ledger what samples have shown of a loop without loaders."""
        if loop.began_ns and not self._runs:
            self._runs = True
            self.ledger.loop_runs()
        while loop.changes:
            stamp, evaluates = loop.changes.popleft()
            self.ledger.sampled(stamp, evaluates=evaluates)

    def take_steps(self) -> list[Step]:
        """The steps closed since the last call."""
        steps, self._closed = self._closed, []
        return steps

    def keep_up(self) -> None:
        """Call `update` if the last call was long ago, because the ring fills during long work."""
        if now_ns() - self.updated_ns > _LONG_AGO_NS:
            self.update()

    def close(self) -> None:
        """Count steps that no later span shows: the last ones that were dropped, and one that ``break`` has left."""
        self.ledger.count_dropped(self._tracker.ring.dropped)
        self.stats.steps += self._tracker.ring.open
        self.ledger.end(exhausted=self.batches.exhausted)

    def take_phases(self) -> list[PhaseSpan]:
        """The phases that have ended since the last call: of the ledger, and those that the script has named."""
        phases = self.ledger.take_phases()
        while self._tracker.phases:
            phases.append(self._tracker.phases.popleft())
        return phases

    def take_source(self) -> BatchSource | None:
        """The batch source with the longest wait since the last call."""
        return self.batches.take_source() or self._tracker.loaders.newest()

    @property
    def steps_total(self) -> int:
        """Steps that have ended, including dropped ones."""
        return self.stats.steps + self.ledger.dropped_steps

    @property
    def no_batch_seen(self) -> bool:
        """Whether the loop runs, and the hooks have seen no batch request at all. Then waiting is unknown."""
        runs = self.unseen_steps > 0 or (self._runs and not self.ledger.batches)
        return runs and self.unseen_steps >= self.steps_total

    @property
    def unseen_steps(self) -> int:
        """Steps before which the training thread requested no batch."""
        return self._tracker.unseen_steps

    def trained_samples(self) -> int | None:
        """Samples that the training took; None if unknown."""
        return None if self.unseen_steps else self.batches.samples

    def tokens(self) -> int | None:
        """Tokens of the training that the script has reported; None before the first."""
        return self._tracker.tokens_told

    def epochs(self) -> Epochs | None:
        """The whole epochs so far; None before the end of the first."""
        seconds = self.ledger.epoch_seconds
        return None if seconds is None else Epochs(self.ledger.epoch_boundaries, round(seconds, 6))

    @property
    def exposed_seconds(self) -> float | None:
        """The exposed wait so far; None if it cannot be measured."""
        return None if self.no_batch_seen else self.exposed.seconds

    def _look_for_batches(self, waiting_since: int) -> None:
        """Find out whether batches now come in another way: from another thread, or from an object without hooks."""
        tracker, ledger = self._tracker, self.ledger
        now = (tracker.optimizer_steps, tracker.requests_elsewhere)
        in_loop = tracker.stepping or tracker.between_loops
        if waiting_since or self._batches_seen != ledger.batches or not in_loop:
            self._batches_seen, self._at_batch = ledger.batches, now
            return
        steps, elsewhere = (new - old for new, old in zip(now, self._at_batch, strict=True))
        if steps < _UNSEEN_STEPS:
            return
        if tracker.between_loops or 2 * elsewhere >= steps or (tracker.loop_left and steps >= _LEFT_STEPS):
            tracker.follow_optimizer()

    def _update_exposed(self) -> None:
        waited = self.ledger.ns[DATA_WAIT] / NS
        device = device_in_use(self._tracker.trained_on)
        if device is None:
            self.exposed.host(waited)
            return
        absent = self._attachment.watch_gpu(device)
        clock = self._attachment.clock
        if clock is None or absent is not None:
            self.exposed_source, self.exposed_absent = None, absent
            self.exposed.absent(waited)
        elif self.exposed_absent is None:  # a run that misses a part never has a value again
            self.exposed_source = f"{device}_events"
            # Copies: the training thread goes on adding.
            self.exposed.gpu(waited, clock.sampled.copy(), clock.at_boundary.copy())


@cache
def _decoded(code: int) -> tuple[str, str, bool, bool, bool, bool]:
    """The category during a span, the category after it, and its flags, as in `Span`."""
    flags = bool(code & CLOSES), bool(code & OPENS), bool(code & (BATCH | JOINS)), bool(code & LEAVES)
    return (CATEGORIES[code & 7], CATEGORIES[code >> 3 & 7], *flags)
