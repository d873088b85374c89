"""Matches each batch that was taken with the fetch that made it: how long it was ready, or what it was waited for.

In an epoch the DataLoader gives batch number ``n`` to worker ``n % workers``. It is that worker's fetch number
``n // workers``. The stamps of both processes come from one clock. A wait for a batch is split at the end of its fetch:
before it is fetch wait, after it is transfer wait (pickling, sending, pinning, unpickling). If a later batch is already
finished during the fetch wait, that is head-of-line blocking. A transfer needs the worker too, which may be busy with
another fetch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.core.clock import NS
from telemetry.core.worker_records import Deliveries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from telemetry.core.worker_records import Arrival, WorkerCounters


_LONG: Final = 3.0
"""A fetch is long if it takes this many times the mean of its worker's fetches."""


@dataclass(frozen=True, slots=True)
class HeadOfLine:
    """Finished batches that wait behind one that is not finished.

    Attributes:
        batches: how many. ``worker``: the number of the worker that they wait for.
        seconds: how long its fetch has taken; 0.0 if it has not begun.
    """

    batches: int
    worker: int
    seconds: float


class Fetches:
    """The ends of the newest fetches of a loader's workers.

    Args:
        counters: the counters of its workers.
        workers: number of its workers.
        not_in_turn: epochs in which batches did not come in order. Newly found ones are added.
    """

    def __init__(self, counters: Iterable[WorkerCounters], workers: int, not_in_turn: set[int] | None = None) -> None:
        self._not_in_turn = not_in_turn if not_in_turn is not None else set()
        self._counters: Mapping[int, WorkerCounters] = {c.worker: c for c in counters}
        self._workers = workers
        self._epochs: dict[tuple[int, int], _EpochFetches | None] = {}

    def finished_ns(self, epoch: int, batch: int) -> int | None:
        """When the fetch of a batch ended; None if it has not ended, or is no longer kept."""
        number, worker = divmod(batch, self._workers)
        fetches = self._of_epoch(worker, epoch)
        return None if fetches is None else fetches.finished(number)

    def _of_epoch(self, worker: int, epoch: int) -> _EpochFetches | None:
        """A worker's fetches of one epoch; None if they are not kept. The many batches of a tick ask for the same."""
        key = worker, epoch
        if key not in self._epochs:
            self._epochs[key] = _epoch_fetches(self._counters.get(worker), epoch)
        return self._epochs[key]

    def deliveries(self, arrivals: Iterable[Arrival]) -> Deliveries:
        """The sums over these batches: slack, fetch wait and transfer wait. The first batch of an epoch is left out."""
        batches, slack, fetch_wait, transfer_wait = 0, 0, 0, 0
        from_busy, transfer_wait_busy, transfer_wait_long = 0, 0, 0
        head_of_line: dict[int, int] = {}  # by the worker that is waited for
        for arrival in arrivals:
            epoch, number, requested, arrived = arrival
            place, worker = divmod(number, self._workers)
            fetches = self._of_epoch(worker, epoch)
            finished = None if fetches is None else fetches.finished(place)
            if self._impossible(arrival, finished):
                self._not_in_turn.add(epoch)
            if fetches is None or finished is None or not number or epoch in self._not_in_turn:
                continue
            batches += 1
            if finished > requested:
                since = finished
                fetch_wait += finished - requested
                behind = self._earliest_behind(arrival)
                if behind is not None and behind < finished:
                    blocked = finished - max(behind, requested)
                    head_of_line[worker] = head_of_line.get(worker, 0) + blocked
            else:
                since = requested
                slack += requested - finished
            transfer_wait += arrived - since
            longest = self._busy_again(arrival, since, self._counters[worker], fetches)
            if longest:
                from_busy += 1
                transfer_wait_busy += arrived - since
                transfer_wait_long += arrived - since if self._is_long(arrival, longest) else 0
        return Deliveries(
            batches=batches,
            slack_seconds=slack / NS,
            fetch_wait_seconds=fetch_wait / NS,
            transfer_wait_seconds=transfer_wait / NS,
            from_busy=from_busy,
            transfer_wait_busy_worker_seconds=transfer_wait_busy / NS,
            transfer_wait_long_fetch_seconds=transfer_wait_long / NS,
            head_of_line_wait_seconds=sum(head_of_line.values()) / NS,
            head_of_line_worker_seconds={worker: blocked / NS for worker, blocked in head_of_line.items()},
        )

    def blocked(self, epoch: int, next_batch: int, now_ns: int) -> HeadOfLine | None:
        """Finished batches behind ``next_batch``, which is not finished; else None."""
        worker = self._counters.get(next_batch % self._workers)
        if worker is None or epoch in self._not_in_turn or self.finished_ns(epoch, next_batch) is not None:
            return None
        began = [_began(c, epoch) for c in self._counters.values()]
        if None in began:
            return None
        finished = sum(c.ended - (b or 0) for c, b in zip(self._counters.values(), began, strict=True))
        if finished <= next_batch:
            return None
        since = worker.fetching_since_ns
        return HeadOfLine(finished - next_batch, worker.worker, max(0, now_ns - since) / NS if since else 0.0)

    def _impossible(self, arrival: Arrival, finished: int | None) -> bool:
        """Whether a batch has arrived although the fetch matched with it has not ended.

        This happens when the workers of an iterable data set end one by one, and the others get more batches.
        """
        if finished is not None:
            return finished > arrival.arrived_ns
        worker = self._counters.get(arrival.number % self._workers)
        began = None if worker is None else _began(worker, arrival.epoch)
        return worker is not None and began is not None and began + arrival.number // self._workers >= worker.ended

    def _busy_again(self, arrival: Arrival, since_ns: int, worker: WorkerCounters, fetches: _EpochFetches) -> int:
        """The longest later fetch that a batch's worker was in at any time from ``since_ns`` until the batch arrived.

        Nanoseconds; for a fetch still in progress, up to the arrival. 0 if there was none.
        """
        first, longest = fetches.began + arrival.number // self._workers + 1, 0
        starts, ends, kept = worker.recent_started_ns, fetches.finished_ns, fetches.kept
        # These are kept, because this batch's own fetch is. They are few: at most `prefetch_factor` batches ahead.
        for fetch in range(first, worker.ended):
            started, ended = starts[fetch % kept], ends[fetch % kept]
            if started >= arrival.arrived_ns:
                return longest
            if ended > since_ns:
                longest = max(longest, ended - started)
        if 0 < worker.fetching_since_ns < arrival.arrived_ns:
            longest = max(longest, arrival.arrived_ns - worker.fetching_since_ns)
        return longest

    def _is_long(self, arrival: Arrival, fetch_ns: int) -> bool:
        worker = self._counters[arrival.number % self._workers]
        return fetch_ns * worker.fetches >= _LONG * worker.wall_ns > 0

    def _earliest_behind(self, arrival: Arrival) -> int | None:
        """When the first of the next batches, one of each other worker, was finished."""
        after = range(arrival.number + 1, arrival.number + self._workers)
        ends = [end for batch in after if (end := self.finished_ns(arrival.epoch, batch)) is not None]
        return min(ends, default=None)


@dataclass(frozen=True, slots=True)
class _EpochFetches:
    """The fetches of one worker in one epoch.

    Attributes:
        began: number of its first fetch. The fetches from ``oldest`` to before ``end`` have ended, and their stamps
            are kept.
        finished_ns: when they ended. Fetch ``n`` is at ``n % kept``.
    """

    began: int
    oldest: int
    end: int
    kept: int
    finished_ns: tuple[int, ...]

    def finished(self, place: int) -> int | None:
        """When a fetch ended, by its place in the epoch; None if it has not ended, or its stamp is no longer kept."""
        number = self.began + place
        return self.finished_ns[number % self.kept] if self.oldest <= number < self.end else None


def _epoch_fetches(worker: WorkerCounters | None, epoch: int) -> _EpochFetches | None:
    began = None if worker is None else _began(worker, epoch)
    if worker is None or began is None:
        return None
    after, kept = _began(worker, epoch + 1), len(worker.recent_finished_ns)
    # The oldest stamp may be overwritten as it is read.
    oldest, end = worker.ended - kept + 1, worker.ended if after is None else min(after, worker.ended)
    return _EpochFetches(began, oldest, end, kept, worker.recent_finished_ns)


def _began(worker: WorkerCounters, epoch: int) -> int | None:
    """The number of a worker's first fetch of an epoch; None if it has not begun the epoch, or no longer keeps it."""
    if not worker.epoch - len(worker.epoch_began) < epoch <= worker.epoch or epoch <= 0:
        return None
    return worker.epoch_began[epoch % len(worker.epoch_began)]
