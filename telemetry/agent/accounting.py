"""The books of one rank: from the spans in the ring to the ledger, the steps and the exposed wait."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Final

from telemetry.attach import accelerator
from telemetry.attach.batch_numbering import BatchNumbering
from telemetry.attach.ring import BATCH, CLOSES, JOINS, LEAVES, OPENS
from telemetry.core.clock import NS, now_ns
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
"""Spans folded in one go: 0.2 ms at most, after which the training thread gets its turn. Of steps of 40 us thousands
lie in the ring at a tick."""

_LONG_AGO_NS: Final = NS // 2
_UNSEEN_STEPS: Final = 16
"""Steps of optimizers since the last batch, from which on the batches are taken to come another way: many algorithms
step more than once for a batch, but for those no other thread requests batches meanwhile."""


class Accounting:
    """Kept by the agent thread alone.

    Attributes:
        ledger: seconds by category. ``stats``: step durations. ``exposed``: exposed wait.
        on_steps: told of the steps that have closed.
        updated_ns: up to when everything is counted.
        exposed_source: where the exposed wait is from: ``host``, ``cuda_events`` (or that of another device), or None
            when nothing can tell; ``exposed_absent`` says why then.
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
        self._batches_seen = 0
        self._at_batch = (0, 0)  # steps of optimizers, and requests elsewhere, when the newest batch had come

    def update(self) -> None:
        """Bring everything up to now."""
        tracker, ring = self._tracker, self._tracker.ring
        with self._errors.contained("ledger"):
            # In this order, and before the ring is emptied. A request seen in progress here was so at ``now``, or its
            # span is to be found; and what is in the ring up to ``head`` tells whether ``lost`` comes after it.
            now, waiting_since, lost, head = now_ns(), tracker.waiting_since, ring.lost, ring.head
            self.updated_ns = now
            while taken := ring.drain(_CHUNK, head):
                self.ledger.fold(spans(taken))
                steps = self.ledger.take_steps()
                self.stats.add(steps)
                self.on_steps(steps)
                self._numbering.fold(taken)
                if len(taken) == _CHUNK:
                    time.sleep(0)
            if lost is not None:
                self.ledger.fold((lost,))
            self.ledger.advance(now, waiting_since)
            self._look_for_batches(waiting_since)
            self._update_exposed()
        if tracker.errors != self._hook_errors_seen:
            new, self._hook_errors_seen = tracker.errors - self._hook_errors_seen, tracker.errors
            self._errors.note("hook", tracker.last_error or "unknown", count=new)

    def keep_up(self) -> None:
        """`update`, if the last one is long ago: something took its time, and meanwhile the ring fills."""
        if now_ns() - self.updated_ns > _LONG_AGO_NS:
            self.update()

    def close(self) -> None:
        """The run has ended."""
        # A step left with ``break`` was a step; when it ended nobody knows, so it is in no distribution.
        self.stats.steps += self.ledger.step_is_open

    def take_named_phases(self) -> Iterator[PhaseSpan]:
        """The phases the user has named and that ended since the last call."""
        while self._tracker.phases:
            yield self._tracker.phases.popleft()

    def take_source(self) -> BatchSource | None:
        """Where the batches came from that were waited for most since the last call."""
        return self._numbering.take_source() or self._tracker.sources.newest()

    def own_fetches(self) -> Histogram | None:
        """What the training thread took for batches that it fetched itself."""
        return self._numbering.own_fetches()

    @property
    def steps_total(self) -> int:
        """Steps that have ended, those that could not be kept included."""
        return self.stats.steps + self.ledger.dropped_steps

    def count_steps(self) -> int:
        """The same, for those that ask at each line."""
        return self.steps_total

    @property
    def dropped_steps(self) -> int:
        """Steps that could not be kept."""
        return self.ledger.dropped_steps

    @property
    def optimizer_steps(self) -> int:
        """Calls of an optimizer's step."""
        return self._tracker.optimizer_steps

    @property
    def no_batch_seen(self) -> bool:
        """Whether no step's batch was requested where the hooks see it: then nothing is known of waiting."""
        return 0 < self.unseen_steps >= self.steps_total

    @property
    def unseen_steps(self) -> int:
        """Steps before which no batch was requested on the training thread."""
        return self._tracker.unseen_steps

    @property
    def exposed_seconds(self) -> float | None:
        """The exposed wait so far; None where nothing can tell."""
        return None if self.no_batch_seen else self.exposed.seconds

    def _look_for_batches(self, waiting_since: int) -> None:
        """Notice that the loop has gone over to batches that another thread requests."""
        tracker, ledger = self._tracker, self.ledger
        now = (tracker.optimizer_steps, tracker.requests_elsewhere)
        if waiting_since or self._batches_seen != ledger.batches or not tracker.stepping:
            self._batches_seen, self._at_batch = ledger.batches, now
            return
        steps, elsewhere = (new - old for new, old in zip(now, self._at_batch, strict=True))
        if steps >= _UNSEEN_STEPS and 2 * elsewhere >= steps:
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
        elif self.exposed_absent is None:  # once a part is missing, the run has no figure
            self.exposed_source = f"{device}_events"
            (sampled, sampled_wait), (edge, edge_wait) = clock.sampled_ns, clock.boundary_ns
            self.exposed.gpu(waited, (sampled / NS, sampled_wait / NS), (edge / NS, edge_wait / NS))


def spans(entries: Iterable[Entry]) -> Iterator[Span | DroppedSpans]:
    """Ring entries in the words of the ledger."""
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
