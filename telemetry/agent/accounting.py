"""Accounting of one rank: from the spans in the ring to the ledger, the steps and the exposed wait."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from telemetry.agent.sample_counter import SampleCounter
from telemetry.attach import accelerator
from telemetry.attach.batch_numbering import BatchNumbering
from telemetry.attach.ring import BATCH, CLOSES, JOINS, LEAVES, OPENS, STEP
from telemetry.core.clock import NS, now_ns, sleep
from telemetry.core.labels import CATEGORIES, DATA_WAIT
from telemetry.core.spans import DroppedSpans
from telemetry.diagnose.ledger import Ledger
from telemetry.diagnose.step_stats import ExposedWait, StepStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from telemetry.attach.attachment import Attachment
    from telemetry.attach.loader_handle import BatchSource
    from telemetry.attach.ring import Entry
    from telemetry.attach.step_tracker import StepTracker
    from telemetry.config import Config
    from telemetry.core.distribution import Histogram
    from telemetry.core.errors import ErrorLog
    from telemetry.core.spans import PhaseSpan, Step
    from telemetry.diagnose.ledger import Span

_CHUNK: Final = 32
"""Spans that are folded at a time. That takes at most 0.2 ms, and then the training thread gets its turn. With steps of
40 µs there are thousands of spans in the ring at a tick."""

_LONG_AGO_NS: Final = NS // 2
_UNSEEN_STEPS: Final = 16
"""After this many optimizer steps without a batch, the batches are assumed to come in another way, if another thread
requests batches meanwhile, or no step is open: the iteration has ended. Many algorithms step more than once for a
batch, but not for one of an iteration that is over."""

_LEFT_STEPS: Final = 256
"""The same number if the iteration was left before its end, as by ``next(iter(loader))``: its last batch may be in use
for longer."""


class Accounting:
    """Used only by the agent thread.

    Attributes:
        samples: how many samples and tokens the training took.
        ledger: seconds by category. ``stats``: step durations. ``exposed``: exposed wait.
        on_steps: functions that get the steps that have closed.
        updated_ns: everything before this stamp is counted.
        exposed_source: source of the exposed wait: ``host``, ``cuda_events`` (or events of another device), or None if
            it cannot be measured. Then ``exposed_absent`` gives the reason.
    """

    def __init__(
        self, tracker: StepTracker, attachment: Attachment, config: Config, errors: ErrorLog, start_ns: int
    ) -> None:
        self._tracker = tracker
        self._attachment = attachment
        self._errors = errors
        self.ledger = Ledger(start_ns)
        self.stats = StepStats(config.step_buckets)
        self.exposed = ExposedWait()
        self.exposed_source: str | None = "host"
        self.exposed_absent: str | None = None
        self.on_steps: Callable[[list[Step]], None] = lambda _: None
        self._hook_errors_seen = 0
        self.updated_ns = start_ns
        self._numbering = BatchNumbering()
        self.samples = SampleCounter(tracker.marks)
        self.steps_without_optimizer = 0
        self._batches_seen = 0
        self._at_batch = (0, 0)  # optimizer steps, and requests on other threads, when the newest batch came

    def update(self) -> None:
        """Count everything up to now."""
        tracker, ring = self._tracker, self._tracker.ring
        with self._errors.contained("ledger"):
            # In this order, and before the ring is emptied. If a request is in progress here, it was in progress at
            # ``now``, or its span is in the ring. The entries before ``head`` show whether ``lost`` comes after them.
            ended = self.samples.ended
            stepped, optimizers = tracker.optimizer_steps, tracker.resume.optimizers
            now, waiting_since, lost, head = now_ns(), tracker.waiting_since, ring.lost, ring.head
            self.updated_ns = now
            position = ring.tail
            while taken := ring.drain(_CHUNK, head):
                self.samples.fold(taken, position)
                position = ring.tail
                self._fold(taken)
                steps = self.ledger.take_steps()
                self.stats.add(steps)
                self.on_steps(steps)
                self._numbering.fold(taken)
                if len(taken) == _CHUNK:
                    sleep(0)
            self.samples.forget(ended)
            if lost is not None:
                self.ledger.fold((lost,))
            self.ledger.advance(now, waiting_since)
            self.steps_without_optimizer = self.steps_total + self.ledger.step_is_open - stepped // max(1, optimizers)
            self._look_for_batches(waiting_since)
            self._update_exposed()
        if tracker.errors != self._hook_errors_seen:
            new, self._hook_errors_seen = tracker.errors - self._hook_errors_seen, tracker.errors
            self._errors.note("hook", tracker.last_error or "unknown", count=new)

    def _fold(self, taken: list[Entry]) -> None:
        """Book entries. Nearly always all of them are ordinary batches."""
        ledger = self.ledger
        ordinary = next((place for place, entry in enumerate(taken) if entry[2] != STEP), len(taken))
        booked = ledger.fold_steps(taken[:ordinary])
        if not booked:  # a wait was in progress at the end of the last reading
            ledger.fold(spans(taken[:1]))
            booked = 1 + ledger.fold_steps(taken[1:ordinary])
        ledger.fold(spans(taken[booked:]))

    def keep_up(self) -> None:
        """Call `update` if the last call was long ago: something took long, and the ring fills meanwhile."""
        if now_ns() - self.updated_ns > _LONG_AGO_NS:
            self.update()

    def close(self) -> None:
        """The run has ended."""
        # A step that was left with ``break`` counts as a step. It is not known when it ended, so it has no duration.
        self.stats.steps += self.ledger.step_is_open

    @property
    def phase_has_ended(self) -> bool:
        """Whether a phase has ended that nobody has taken yet."""
        return self.ledger.phase_has_ended or bool(self._tracker.phases)

    def take_named_phases(self) -> Iterator[PhaseSpan]:
        """The named phases that ended since the last call."""
        while self._tracker.phases:
            yield self._tracker.phases.popleft()

    def take_source(self) -> BatchSource | None:
        """The batch source with the longest wait since the last call."""
        return self._numbering.take_source() or self._tracker.sources.newest()

    def own_fetches(self) -> Histogram | None:
        """Durations of the training thread's own fetches."""
        return self._numbering.own_fetches()

    @property
    def steps_total(self) -> int:
        """Steps that have ended, including dropped ones."""
        return self.stats.steps + self.ledger.dropped_steps

    def count_steps(self) -> int:
        """The same as a method: the log calls it for each line."""
        return self.steps_total

    @property
    def dropped_steps(self) -> int:
        """Steps that were dropped because the ring was full."""
        return self.ledger.dropped_steps

    @property
    def optimizer_steps(self) -> int:
        """Steps of optimizers."""
        return self._tracker.optimizer_steps

    @property
    def no_batch_seen(self) -> bool:
        """Whether the hooks have seen no batch request at all. Then nothing is known about waiting."""
        return 0 < self.unseen_steps >= self.steps_total

    @property
    def unseen_steps(self) -> int:
        """Steps before which no batch was requested on the training thread."""
        return self._tracker.unseen_steps

    def trained_samples(self) -> int | None:
        """Samples that the training took; None if that is not known."""
        return None if self.unseen_steps else self.samples.samples

    def tokens(self) -> int | None:
        """Tokens that the training took; None if that is not known. The script knows better than its batches."""
        told = self._tracker.tokens_told
        return None if told is None and self.unseen_steps else self.samples.tokens(told)

    @property
    def exposed_seconds(self) -> float | None:
        """The exposed wait so far; None if it cannot be measured."""
        return None if self.no_batch_seen else self.exposed.seconds

    def _look_for_batches(self, waiting_since: int) -> None:
        """Detect that the batches now come in another way: from another thread, or an object that is not hooked."""
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
        device = accelerator.in_use(self._tracker.trained_on)
        if device is None:
            self.exposed.host(waited)
            return
        absent = self._attachment.watch_gpu(device)
        clock = self._attachment.clock
        if clock is None or absent is not None:
            self.exposed_source, self.exposed_absent = None, absent
            self.exposed.absent(waited)
        elif self.exposed_absent is None:  # if a part is missing, the run has no value any more
            self.exposed_source = f"{device}_events"
            (sampled, sampled_wait), (boundary, boundary_wait) = clock.sampled_ns, clock.boundary_ns
            self.exposed.gpu(waited, (sampled / NS, sampled_wait / NS), (boundary / NS, boundary_wait / NS))


def spans(entries: Iterable[Entry]) -> Iterator[Span | DroppedSpans]:
    """Ring entries as spans for the ledger."""
    for start, end, code, origin in entries:
        if isinstance(origin, DroppedSpans):
            yield origin
        else:
            yield (start, end, *_decoded(code))


@cache
def _decoded(code: int) -> tuple[str, str, bool, bool, bool, bool]:
    """The category during a span and after it, and its flags, as `Span` has them."""
    flags = bool(code & CLOSES), bool(code & OPENS), bool(code & (BATCH | JOINS)), bool(code & LEAVES)
    return (CATEGORIES[code & 7], CATEGORIES[code >> 3 & 7], *flags)
