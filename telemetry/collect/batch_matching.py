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

from telemetry.core.worker_records import Deliveries
from telemetry.util.clock import NS

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
        workers, not_in_turn, of_epoch = self._workers, self._not_in_turn, self._of_epoch
        for arrival in arrivals:
            epoch, number, requested, arrived = arrival
            place, worker = divmod(number, workers)
            fetches = of_epoch(worker, epoch)
            finished = None if fetches is None else fetches.finished(place)
            if (finished > arrived) if finished is not None else self._came_before_its_fetch(arrival):
                not_in_turn.add(epoch)
            if fetches is None or finished is None or not number or epoch in not_in_turn:
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
            longest = fetches.longest_after(place, since, arrived)
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

    def _came_before_its_fetch(self, arrival: Arrival) -> bool:
        """Whether a batch has arrived although the fetch matched with it has not ended.

        This happens when the workers of an iterable data set end one by one, and the others get more batches.
        """
        worker = self._counters.get(arrival.number % self._workers)
        began = None if worker is None else _began(worker, arrival.epoch)
        return worker is not None and began is not None and began + arrival.number // self._workers >= worker.ended

    def _is_long(self, arrival: Arrival, fetch_ns: int) -> bool:
        worker = self._counters[arrival.number % self._workers]
        return fetch_ns * worker.fetches >= _LONG * worker.wall_ns > 0

    def _earliest_behind(self, arrival: Arrival) -> int | None:
        """When the first of the next batches, one of each other worker, was finished."""
        after = range(arrival.number + 1, arrival.number + self._workers)
        ends = [end for batch in after if (end := self.finished_ns(arrival.epoch, batch)) is not None]
        return min(ends, default=None)


class _EpochFetches:
    """The fetches of one worker in one epoch.

    Args:
        counters: of the worker.
        began: number of its first fetch.
        after: number of its first fetch of the next epoch; None if that is not known.
    """

    __slots__ = ("_began", "_counters", "_end", "_ends", "_kept", "_oldest", "_starts")

    def __init__(self, counters: WorkerCounters, began: int, after: int | None) -> None:
        self._began = began
        self._counters = counters
        self._starts, self._ends = counters.recent_started_ns, counters.recent_finished_ns
        self._kept = len(self._ends)
        # Stamps are kept from here on. The oldest may be overwritten as it is read.
        self._oldest = counters.ended - self._kept + 1
        self._end = counters.ended if after is None else min(after, counters.ended)

    def finished(self, place: int) -> int | None:
        """When a fetch ended, by its place in the epoch; None if it has not ended, or its stamp is no longer kept."""
        number = self._began + place
        return self._ends[number % self._kept] if self._oldest <= number < self._end else None

    def longest_after(self, place: int, since_ns: int, arrived_ns: int) -> int:
        """The longest later fetch that the worker was in at any time between two stamps.

        Args:
            place: of the batch's own fetch, which is kept. So later ones are, too. They are few: at most
                `prefetch_factor` batches ahead.
            since_ns: the first, monotonic.
            arrived_ns: the second, when the batch arrived.

        Returns:
            Nanoseconds; for a fetch still in progress, up to the arrival. 0 if there was none.
        """
        longest, kept = 0, self._kept
        for fetch in range(self._began + place + 1, self._counters.ended):
            started = self._starts[fetch % kept]
            if started >= arrived_ns:
                return longest
            ended = self._ends[fetch % kept]
            if ended > since_ns and ended - started > longest:
                longest = ended - started
        fetching = self._counters.fetching_since_ns
        return max(longest, arrived_ns - fetching) if 0 < fetching < arrived_ns else longest


def _epoch_fetches(worker: WorkerCounters | None, epoch: int) -> _EpochFetches | None:
    began = None if worker is None else _began(worker, epoch)
    return None if worker is None or began is None else _EpochFetches(worker, began, _began(worker, epoch + 1))


def _began(worker: WorkerCounters, epoch: int) -> int | None:
    """The number of a worker's first fetch of an epoch; None if it has not begun the epoch, or no longer keeps it."""
    if not worker.epoch - len(worker.epoch_began) < epoch <= worker.epoch or epoch <= 0:
        return None
    return worker.epoch_began[epoch % len(worker.epoch_began)]
