"""The ledger: turns spans of the training thread into seconds by category, steps and phases.

The ledger has one current category and only moves forward. Each instant is booked once. So the categories always add up
to the time since the start, with any spans. What is booked stays booked: no category ever decreases.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from telemetry.core.clock import NS
from telemetry.core.labels import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, STARTUP
from telemetry.core.spans import DroppedSpans, PhaseSpan, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PHASES: Final = frozenset({EVALUATION, CHECKPOINT})

_NEAR_BOUNDARY: Final = 8
"""The workers of an epoch start one by one and end one by one. So this many batches after the first, and before the
end, may be late because of the epoch boundary."""

Span = tuple[int, int, str, str, bool, bool, bool, bool]
"""start, end (monotonic ns), category during, category after, closes a step, opens a step, delivered a batch, stopped
the workers of an iteration that was left."""


class Ledger:
    """Turns spans into seconds by category, closed steps and closed phases.

    Args:
        start_ns: monotonic stamp at which the time starts.

    Attributes:
        batches: training batches that have come. ``dropped_steps``: steps that ended in a stretch of dropped spans.
    """

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.at_ns = start_ns
        self.category = STARTUP
        self.ns: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.batches = 0
        self.dropped_steps = 0
        self.last_step_ns: int | None = None
        # The wait for the first batch of the run, and the waits at later epoch boundaries: an iteration that ends or is
        # left, one that begins, and its first batch. As in the data wait, waits in progress are included.
        self.first_wait_ns = 0
        self.boundary_wait_ns = 0
        self.epoch_boundaries = 0
        self.iterations_left = 0
        # How much longer the batches next to the boundaries were waited for than those in mid-epoch.
        self.near_boundary_wait_ns = 0
        self._epoch = _Epoch()
        self._at_boundary = False
        self._span_at_ns = start_ns
        self._span_category = STARTUP
        self._waiting_at_ns: int | None = None  # from here on, `advance` has booked a wait whose span comes later
        self._dropped: DroppedSpans | None = None
        self._open = False
        self._wait_ns = 0
        self._compute_ns = 0
        self._checkpoint = False  # whether a checkpoint was written in the open step
        self._before_dropped = (0, 0, False)  # the open step's wait, compute and checkpoint, before spans were dropped
        self._phase_start_ns: int | None = None
        self._phases: list[PhaseSpan] = []
        self._steps: list[Step] = []

    def fold(self, spans: Iterable[Span | DroppedSpans]) -> None:
        """Book spans, in the order in which they happened."""
        for span in spans:
            if isinstance(span, DroppedSpans):
                self._fold_dropped(span)
                continue
            start, end, during, after, closes, opens, batch, left = span
            usual = closes and opens and batch and not left
            if usual and during == DATA_WAIT and after == COMPUTE and self.fold_steps(((start, end, 0, None),)):
                continue
            self._pass(start)
            if closes and self._open:
                self._close(start)
            if opens:
                self._open, self._wait_ns, self._compute_ns, self._checkpoint = True, 0, 0, False
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

        Nearly all spans are of this kind. `fold` books the same, but takes six times as long.

        Args:
            spans: start and end of each; the rest is not used.

        Returns:
            How many were booked: none if the ledger does not compute in mid-epoch, and none after one that begins too
            early. `fold` books any.
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
        self._epoch.add_all(waits)
        self.batches += len(waits)
        return len(waits)

    def _computes_until(self, stamp: int) -> bool:
        """Whether a step is open in mid-epoch, and all that was booked since its newest span is compute."""
        return (
            self._open
            and self._span_category == COMPUTE
            and self.category == COMPUTE
            and self._phase_start_ns is None
            and not self._at_boundary
            and self.batches > 0
            and self._span_at_ns <= self.at_ns <= stamp
        )

    def advance(self, now_ns: int, waiting_since_ns: int = 0) -> None:
        """Book the time up to now. If a request is in progress since ``waiting_since_ns``, book it as data wait.

        If the span of the request has been folded meanwhile, it is not booked again. The request may have begun before
        the newest booked time: right after the last call had checked for one.
        """
        if waiting_since_ns > 0 and waiting_since_ns >= self._span_at_ns:
            self._book(waiting_since_ns)
            if self._waiting_at_ns is None:
                self._waiting_at_ns = self.at_ns
            self.category = DATA_WAIT
        self._book(now_ns)

    def take_steps(self) -> list[Step]:
        """The steps closed since the last call."""
        steps, self._steps = self._steps, []
        return steps

    @property
    def step_is_open(self) -> bool:
        """Whether a step has begun and not ended. At the end of a run this is a step that was left with ``break``."""
        return self._open

    @property
    def open_step_seconds(self) -> float:
        """Training-loop seconds of the open step so far; 0.0 without one."""
        if not self._open:
            return 0.0
        booked = self._wait_ns + self._compute_ns
        running = self.at_ns - self._span_at_ns if self._span_category in {DATA_WAIT, COMPUTE} else 0
        return (booked + max(0, running)) / NS

    @property
    def at_epoch_boundary(self) -> bool:
        """Whether an iteration has ended or begun, and no batch of the next iteration has come yet."""
        return self._at_boundary

    @property
    def phase_has_ended(self) -> bool:
        """Whether `take_phases` has something to return."""
        return bool(self._phases)

    def take_phases(self) -> list[PhaseSpan]:
        """The evaluations and checkpoints closed since the last call."""
        phases, self._phases = self._phases, []
        return phases

    def seconds(self) -> dict[str, float]:
        """Seconds by category. Their sum is `wall_seconds`."""
        return {category: amount / NS for category, amount in self.ns.items()}

    @property
    def wall_seconds(self) -> float:
        """Seconds booked since the start."""
        return (self.at_ns - self.start_ns) / NS

    def _book(self, stamp: int) -> None:
        """Book the time up to a stamp as the current category. Time before an earlier stamp is booked already."""
        passed = stamp - self.at_ns
        if passed > 0:
            self.at_ns = stamp
            self.ns[self.category] += passed
            if self.category == DATA_WAIT and not self.batches:
                self.first_wait_ns += passed
            elif self.category == DATA_WAIT and self._at_boundary:
                self.boundary_wait_ns += passed

    def _pass(self, stamp: int) -> None:
        """Advance to a stamp of a span: in the ledger, and in the open step.

        The step has its own cursor. `advance` may have booked the first part of a wait already, before it was known
        that a new step begins with it.
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

    def _fold_dropped(self, dropped: DroppedSpans) -> None:
        """Book the sums of a stretch of dropped spans. If it has grown since the last time, book the new part."""
        before = self._dropped
        if before is not None and (dropped.stretch, dropped.end_ns) <= (before.stretch, before.end_ns):
            return
        if before is not None and before.stretch < dropped.stretch:
            before = None
        waiting_at, running = self._waiting_at_ns, self._span_category
        if before is None:
            self._pass(dropped.start_ns)
            self._enter(CATEGORIES[dropped.first], dropped.start_ns)
            self._before_dropped = self._wait_ns, self._compute_ns, self._checkpoint
            self._at_boundary, self._epoch = False, _Epoch()
        known = dropped.start_ns if before is None else before.end_ns
        early = max(0, self.at_ns - known)  # the part of the stretch that `advance` has booked
        waited = 0 if waiting_at is None else min(early, max(0, self.at_ns - waiting_at))
        booked = dict.fromkeys(CATEGORIES, 0)
        booked[DATA_WAIT] = waited
        booked[running] += early - waited
        earlier = before.ns if before is not None else (0,) * len(CATEGORIES)
        owed = {c: new - old - booked[c] for c, new, old in zip(CATEGORIES, dropped.ns, earlier, strict=True)}
        self._book_owed(owed, dropped.end_ns, first_batch=not self.batches and not dropped.batches)
        self.batches += dropped.batches - (before.batches if before is not None else 0)
        self.dropped_steps += dropped.steps - (before.steps if before is not None else 0)
        self.last_step_ns = dropped.last_step_ns or self.last_step_ns
        self._open, (wait, compute, checkpoint) = dropped.open, self._before_dropped
        inherits = not dropped.opened
        self._wait_ns = dropped.wait_ns + wait * inherits
        self._compute_ns = dropped.compute_ns + compute * inherits
        self._checkpoint = dropped.checkpoint or (checkpoint and inherits)
        self.category = self._span_category = CATEGORIES[dropped.category]
        if dropped.entered_ns != (before.entered_ns if before is not None else 0):
            # The previous phase ended at an unknown moment.
            self._phase_start_ns = dropped.entered_ns if self.category in _PHASES else None
        self._span_at_ns, self._waiting_at_ns, self._dropped = dropped.end_ns, None, dropped

    def _book_owed(self, owed: dict[str, int], stamp: int, *, first_batch: bool) -> None:
        """Book the time up to a stamp, to each category the time that it is owed.

        A category may be owed a negative time, if time was booked to it that belongs to another one. It keeps that
        time, and the other categories get less.
        """
        left = max(0, stamp - self.at_ns)
        given = {category: max(0, amount) for category, amount in owed.items()}
        excess = sum(given.values()) - left
        for category in sorted(given, key=lambda category: given[category], reverse=True):
            cut = min(max(0, excess), given[category])
            given[category] -= cut
            excess -= cut
        for category, amount in given.items():
            self.ns[category] += amount
        self.at_ns += left
        if first_batch:
            self.first_wait_ns += given[DATA_WAIT]

    def _count_boundary(self, waited: int, *, batch: bool) -> None:
        """A request has ended. If it brought no batch, it has ended an iteration or begun one."""
        if self.batches and not batch and not self._at_boundary:
            self.boundary_wait_ns += waited  # this was not known before
            self.epoch_boundaries += 1
            self.near_boundary_wait_ns += self._epoch.extra_wait_ns()
            self._epoch = _Epoch()
        elif self.batches and batch and not self._at_boundary:
            self._epoch.add(waited)
        self._at_boundary = not batch

    def _count_left(self, waited: int) -> None:
        """An iteration was left, which is a boundary. The next batch may come from another loader, in mid-epoch."""
        self.iterations_left += 1
        self._epoch = _Epoch()  # an epoch that was left has no last batches
        if not self._at_boundary:
            self.boundary_wait_ns += waited

    def _enter(self, category: str, stamp: int) -> None:
        self.category = category
        if category == self._span_category:
            return
        if self._phase_start_ns is not None:
            seconds = max(0, stamp - self._phase_start_ns) / NS
            name = self._span_category
            loop = self.ns[DATA_WAIT] / NS, self.ns[COMPUTE] / NS
            self._phases.append(PhaseSpan(name, name, self._phase_start_ns, seconds, loop))
        self._phase_start_ns = stamp if category in _PHASES else None
        self._checkpoint |= category == CHECKPOINT
        self._span_category = category

    def _close(self, stamp: int) -> None:
        self._open = False
        self.last_step_ns = stamp
        self._steps.append(Step((self._wait_ns + self._compute_ns) / NS, self._wait_ns / NS, self._checkpoint))


class _Epoch:
    """The waits for the batches of one epoch, without the first batch, whose wait is at the boundary."""

    __slots__ = ("_batches", "_first", "_last", "_total_ns")

    def __init__(self) -> None:
        self._batches = self._total_ns = 0
        self._first: list[int] = []
        self._last: deque[int] = deque(maxlen=_NEAR_BOUNDARY)

    def add(self, waited_ns: int) -> None:
        """The next batch has come."""
        self._batches += 1
        self._total_ns += waited_ns
        self._last.append(waited_ns)
        if len(self._first) < _NEAR_BOUNDARY:
            self._first.append(waited_ns)

    def add_all(self, waited_ns: Sequence[int]) -> None:
        """Some batches have come."""
        self._batches += len(waited_ns)
        self._total_ns += sum(waited_ns)
        self._last.extend(waited_ns[-_NEAR_BOUNDARY:])
        if len(self._first) < _NEAR_BOUNDARY:
            self._first += waited_ns[: _NEAR_BOUNDARY - len(self._first)]

    def extra_wait_ns(self) -> int:
        """How much longer batches next to the boundaries were waited for than as many in mid-epoch; may be negative."""
        near = min(_NEAR_BOUNDARY, self._batches // 4)
        if not near:
            return 0
        at_boundaries = sum(self._first[:near]) + sum([*self._last][-near:])
        usual = (self._total_ns - at_boundaries) / (self._batches - 2 * near)
        return int(at_boundaries - 2 * near * usual)
