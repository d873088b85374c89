"""Matches each batch that was taken with the fetch that made it: how long it was ready, or what it was waited for.

In an epoch the DataLoader gives batch number ``n`` to worker ``n % workers``. It is that worker's fetch number
``n // workers``. The stamps of both processes come from one clock. A wait for a batch is split at the end of its fetch:
before it is fetch wait, after it is transfer wait (pickling, sending, pinning, unpickling). If a later batch is already
finished during the fetch wait, that is head-of-line blocking. A transfer needs the worker too, which may be busy with
another fetch.
"""

from __future__ import annotations

from bisect import bisect_left
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

    def finished_ns(self, epoch: int, batch: int) -> int | None:
        """When the fetch of a batch ended; None if it has not ended, or is no longer kept."""
        worker = self._counters.get(batch % self._workers)
        if worker is None:
            return None
        began = _began(worker, epoch)
        if began is None:
            return None
        number = began + batch // self._workers
        after = _began(worker, epoch + 1)
        newest, kept = worker.ended - 1, len(worker.recent_finished_ns)
        if number > newest or (after is not None and number >= after):
            return None
        if number <= newest - (kept - 1):  # the oldest may be overwritten during the read
            return None
        return worker.recent_finished_ns[number % kept]

    def deliveries(self, arrivals: Iterable[Arrival]) -> Deliveries:
        """The sums over these batches: slack, fetch wait and transfer wait. The first batch of an epoch is left out."""
        batches, slack, fetch_wait, transfer_wait = 0, 0, 0, 0
        from_busy, transfer_wait_busy, transfer_wait_long = 0, 0, 0
        head_of_line: dict[int, int] = {}  # by the worker that is waited for
        for arrival in arrivals:
            finished = self.finished_ns(arrival.epoch, arrival.number)
            if self._impossible(arrival, finished):
                self._not_in_turn.add(arrival.epoch)
            if finished is None or not arrival.number or arrival.epoch in self._not_in_turn:
                continue
            batches += 1
            slack += max(0, arrival.requested_ns - finished)
            since = max(arrival.requested_ns, finished)
            transfer_wait += arrival.arrived_ns - since
            longest = self._busy_again(arrival, since)
            if longest:
                from_busy += 1
                transfer_wait_busy += arrival.arrived_ns - since
                transfer_wait_long += arrival.arrived_ns - since if self._is_long(arrival, longest) else 0
            if finished > arrival.requested_ns:
                fetch_wait += finished - arrival.requested_ns
                behind = self._earliest_behind(arrival)
                if behind is not None and behind < finished:
                    worker, blocked = arrival.number % self._workers, finished - max(behind, arrival.requested_ns)
                    head_of_line[worker] = head_of_line.get(worker, 0) + blocked
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

    def _busy_again(self, arrival: Arrival, since_ns: int) -> int:
        """The longest later fetch that a batch's worker was in at any time from ``since_ns`` until the batch arrived.

        Nanoseconds; for a fetch still in progress, up to the arrival. 0 if there was none.
        """
        worker = self._counters[arrival.number % self._workers]
        number = (_began(worker, arrival.epoch) or 0) + arrival.number // self._workers
        starts, ends = worker.recent_started_ns, worker.recent_finished_ns
        kept = len(starts)
        later = range(number + 1, worker.ended)  # these are kept, because this batch's own fetch is
        begun = bisect_left(later, arrival.arrived_ns, key=lambda fetch: starts[fetch % kept])
        longest = 0
        if begun == len(later) and 0 < worker.fetching_since_ns < arrival.arrived_ns:
            longest = arrival.arrived_ns - worker.fetching_since_ns
        for fetch in reversed(later[:begun]):
            if ends[fetch % kept] <= since_ns:
                break
            longest = max(longest, ends[fetch % kept] - starts[fetch % kept])
        return longest

    def _is_long(self, arrival: Arrival, fetch_ns: int) -> bool:
        worker = self._counters[arrival.number % self._workers]
        return fetch_ns * worker.fetches >= _LONG * worker.wall_ns > 0

    def _earliest_behind(self, arrival: Arrival) -> int | None:
        """When the first of the next batches, one of each other worker, was finished."""
        after = range(arrival.number + 1, arrival.number + self._workers)
        ends = [end for batch in after if (end := self.finished_ns(arrival.epoch, batch)) is not None]
        return min(ends, default=None)


def _began(worker: WorkerCounters, epoch: int) -> int | None:
    """The number of a worker's first fetch of an epoch; None if it has not begun the epoch, or no longer keeps it."""
    if not worker.epoch - len(worker.epoch_began) < epoch <= worker.epoch or epoch <= 0:
        return None
    return worker.epoch_began[epoch % len(worker.epoch_began)]
