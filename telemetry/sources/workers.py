"""The DataLoader workers of this process: what they do, and where their time goes.

The workers record their fetches (`seams.worker`), which shows how busy they are. The kernel's schedstat of the same
threads splits that time into running, runnable (waiting for a core) and the rest, blocked. Between fetches a worker
sleeps. So all its CPU time belongs to its fetches, including that of its other threads and of programs that it starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.model.records import FETCH_BUCKETS, Deliveries, FirstFetches, Histogram, WorkersSample
from telemetry.model.totals import together
from telemetry.safety.processes import read_schedule
from telemetry.seams.worker_block import RECENT, WorkerCounters
from telemetry.sources.proc import is_worker_of_ours, read_io, read_stat
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.seams.loaders import Arrival, LoaderHandle, LoaderRegistry
    from telemetry.seams.worker_block import WorkerBlock
    from telemetry.sources.proc import Stat

# -- the source --------------------------------------------------------------------------------------------------------

_TICK_NS: Final = 10_000_000
_NONE_YET: Final = Histogram(FETCH_BUCKETS, (0,) * (len(FETCH_BUCKETS) + 1), 0.0)
_SHARES: Final = (
    *("cpu_ratio", "busy_ratio", "runnable_ratio", "blocked_ratio", "pickling_ratio"),
    *("read_bytes_per_second", "written_bytes_per_second"),
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One worker at one moment, a monotonic stamp. ``busy_ns`` includes the fetch in progress. None: not known."""

    at_ns: int
    cpu_seconds: float
    busy_ns: int | None
    run_ns: int | None
    runnable_ns: int | None
    read_bytes: int | None
    written_bytes: int | None


class WorkersSource:
    """All workers of all live iterators. Iterators that have ended are read once more."""

    name = "workers"

    def __init__(self, loaders: LoaderRegistry) -> None:
        self._loaders = loaders
        self._stats: dict[int, Stat] = {}  # by pid, at the newest reading
        self._trained = False
        self._not_in_turn: dict[tuple[int, ...], set[int]] = {}
        self._before: dict[tuple[int, int], _Seen] = {}  # by pid and start
        self._counted: dict[tuple[int, int, int], WorkerCounters] = {}
        self._histogram = _NONE_YET
        self._deliveries = Deliveries()
        self._first_fetches = FirstFetches()
        self._empty_workers = 0
        self._same_batches: bool | None = None

    def read(self) -> WorkersSample:
        """The live workers of this process. Without workers the counts are zero."""
        before = self._deliveries
        for loader in self._loaders.take_retired():
            self._deliver(loader, self._count(loader.block), now_ns())
        now, live = now_ns(), self._loaders.live()
        blocked = HeadOfLine()
        seen: dict[tuple[int, int], _Seen] = {}
        self._stats = {}
        fetched: dict[int, tuple[int, float]] = {}
        ready, longest, everyone = None, 0, 0
        self._not_in_turn = {loader.pids: epochs for loader in live if (epochs := self._not_in_turn.get(loader.pids))}
        self._trained = trained = self._trained or any(loader.training for loader in live)
        for loader in live:
            counters = self._count(loader.block)
            blocked = self._deliver(loader, counters, now) or blocked
            by_pid = {worker.pid: worker for worker in counters}
            if loader.training or not trained:
                ready = _ready(loader, counters, ready)
            everyone += loader.threads
            for pid in filter(None, loader.pids):
                stat = read_stat(pid)
                if stat is None or not is_worker_of_ours(stat.parent):
                    continue  # the worker has ended, or its pid belongs to another process by now
                self._stats[pid] = stat
                everyone += 1
                if trained and not loader.training:
                    continue
                worker = by_pid.get(pid)
                fetching = 0
                if worker is not None:
                    fetching = max(0, now - worker.fetching_since_ns) if worker.fetching_since_ns else 0
                    fetched[pid] = (worker.fetches, worker.wall_ns / NS)
                longest = max(longest, fetching)
                key = pid, stat.start_ticks
                seen[key] = _look(now, pid, stat, worker, fetching)
                known = self._before.get(key)
                if worker is not None and (known is None or known.busy_ns is None):
                    # Workers of short epochs end before they are read twice.
                    born = _born(worker) if loader.block is not None and not loader.block.shared_by_file else None
                    self._before |= {} if born is None else {key: born}
        taken = self._deliveries.matched - before.matched
        slack = self._deliveries.slack_seconds - before.slack_seconds
        sample = WorkersSample(
            workers=everyone,
            training_workers=len(seen),
            resident_memory_bytes=sum(stat.resident_bytes for stat in self._stats.values()),
            ready_batches=ready if seen else None,
            fetching_seconds=longest / NS,
            fetches_total=sum(self._histogram.counts),
            fetch_duration=self.fetches,
            slack_seconds=slack / taken if taken else None,
            deliveries=self._deliveries,
            head_of_line_batches=blocked.batches,
            head_of_line_worker=blocked.worker,
            head_of_line_since_seconds=blocked.seconds,
            fetched=fetched,
            allowed_cores=_allowed_cores(pid for pid, _ in seen),
            first_fetches=self._first_fetches,
            empty_workers=self._empty_workers,
            same_batches=self._same_batches,
            **self._shares(seen),
        )
        self._before = seen
        blocks = {id(loader.block) for loader in live}
        self._counted = {key: counters for key, counters in self._counted.items() if key[0] in blocks}
        return sample

    @property
    def fetches(self) -> Histogram | None:
        """The fetches of all workers so far, even if the last reading failed; None before the first."""
        return self._histogram if any(self._histogram.counts) else None

    def stat(self, pid: int) -> Stat | None:
        """CPU time and memory of a worker, from the newest reading if it was read there; None if it has ended."""
        return self._stats.get(pid) or read_stat(pid)

    def _count(self, block: WorkerBlock | None) -> tuple[WorkerCounters, ...]:
        if block is None:
            return ()
        counters = block.read()
        for worker in counters:
            key = (id(block), worker.worker, worker.pid)
            before = self._counted.get(key) or WorkerCounters()
            # Memory is reused, and a block's id with it: smaller counters belong to another worker.
            if worker.wall_ns < before.wall_ns or min(map(sub, worker.histogram, before.histogram)) < 0:
                before = WorkerCounters()
            self._counted[key] = worker
            counts = tuple(map(add, self._histogram.counts, map(sub, worker.histogram, before.histogram)))
            seconds = self._histogram.total + (worker.wall_ns - before.wall_ns) / NS
            self._histogram = Histogram(FETCH_BUCKETS, counts, seconds)
            first = self._first_fetches
            self._first_fetches = FirstFetches(
                first.fetches + worker.firsts - before.firsts,
                first.seconds + (worker.first_wall_ns - before.first_wall_ns) / NS,
                first.start_seconds + (worker.first_wait_ns - before.first_wait_ns) / NS,
            )
        self._look_at_streams(block, counters)
        return counters

    def _look_at_streams(self, block: WorkerBlock, counters: tuple[WorkerCounters, ...]) -> None:
        """Find workers without items, and workers that give the same batches, in the newest epoch."""
        epoch = block.head.iteration
        began = [worker for worker in counters if worker.epoch == epoch]
        made = [worker.made for worker in began]
        ended = [worker.exhausted_epoch == epoch for worker in began]
        if len(began) == block.workers and any(made) and all(map(max, made, ended)):
            self._empty_workers = made.count(0)
        first = [(worker.first_batch, worker.second_batch) for worker in began if worker.second_batch]
        if len(first) > 1:
            self._same_batches = any(first.count(both) > 1 and both[0] != both[1] for both in first)

    def _deliver(self, loader: LoaderHandle, counters: tuple[WorkerCounters, ...], now: int) -> HeadOfLine | None:
        """Match the batches that the training thread has taken with their fetches."""
        arrivals = loader.arrivals
        taken = [arrivals.popleft() for _ in range(len(arrivals))]
        if not counters or not loader.in_order:
            return None
        not_in_turn = self._not_in_turn.setdefault(loader.pids, set())
        fetches = Fetches(counters, len(loader.pids), not_in_turn)
        if taken:
            self._deliveries = together(self._deliveries, fetches.deliveries(taken))
        not_in_turn -= {epoch for epoch in not_in_turn if epoch < loader.epoch - 1}
        if loader.delivered is None or not loader.training:
            return None
        return fetches.blocked(loader.epoch, loader.delivered, now)

    def _shares(self, seen: dict[tuple[int, int], _Seen]) -> dict[str, float | None]:
        """Means over the workers, as shares of the wall clock since the last reading, or since their first fetch."""
        both = [(self._before[worker], after) for worker, after in seen.items() if worker in self._before]
        every = sum(after.at_ns - before.at_ns for before, after in both)
        shares: dict[str, float | None] = dict.fromkeys(_SHARES)
        if every <= 0:
            return shares

        def added(name: str) -> int | None:
            """The sum over the workers; None if it is unknown of one."""
            pairs = [(getattr(before, name), getattr(after, name)) for before, after in both]
            return None if any(None in pair for pair in pairs) else sum(max(0, now - then) for then, now in pairs)

        process_cpu = NS * sum(after.cpu_seconds - before.cpu_seconds for before, after in both) / every
        shares["cpu_ratio"] = process_cpu
        busy_ns, run_ns, runnable_ns = added("busy_ns"), added("run_ns"), added("runnable_ns")
        if busy_ns is not None:
            shares["busy_ratio"] = min(1.0, busy_ns / every)
        if busy_ns is not None and run_ns is not None and runnable_ns is not None:
            busy, run, runnable = busy_ns / every, min(1.0, run_ns / every), min(1.0, runnable_ns / every)
            # The kernel counts the whole process in ticks of 10 ms, and the thread exactly.
            elsewhere = process_cpu - run > len(both) * _TICK_NS / every
            cpu = max(run, min(busy - runnable, process_cpu)) if elsewhere else run
            shares["cpu_ratio"] = cpu
            shares["runnable_ratio"] = runnable
            shares["blocked_ratio"] = min(1.0, max(0.0, busy - cpu - runnable))
            # At most one thread more, Python's own: everything beyond one core is threads of the data set.
            shares["pickling_ratio"] = max(0.0, min(1.0, process_cpu) - cpu)
        for name in ("read_bytes", "written_bytes"):
            transferred = added(name)
            if transferred is not None:
                shares[f"{name}_per_second"] = NS * len(both) / every * transferred
        return shares


def _look(now: int, pid: int, stat: Stat, worker: WorkerCounters | None, fetching_ns: int) -> _Seen:
    io, schedule = read_io(pid), None if worker is None else read_schedule(pid, worker.tid)
    return _Seen(
        now,
        # With its threads, and the programs that it has run: their CPU time is not blocked time of the worker.
        cpu_seconds=stat.cpu_seconds + stat.children_cpu_seconds,
        busy_ns=None if worker is None else worker.wall_ns + fetching_ns,
        run_ns=None if schedule is None else schedule.run_ns,
        runnable_ns=None if schedule is None else schedule.runnable_ns,
        read_bytes=None if io is None else io.read_bytes,
        written_bytes=None if io is None else io.written_bytes,
    )


def _born(worker: WorkerCounters) -> _Seen | None:
    """A forked worker at its first fetch; None if its stamp is not there. Before, it has hardly used a core."""
    began = 0 < worker.ended <= RECENT
    return _Seen(worker.recent_started_ns[0], 0.0, 0, 0, 0, 0, 0) if began else None


def _allowed_cores(pids: Iterable[int]) -> int | None:
    """Cores that all workers together may use. A user's ``worker_init_fn`` may restrict each worker to a few."""
    cores: set[int] = set()
    for pid in pids:
        try:
            cores |= os.sched_getaffinity(pid)
        except OSError:  # the worker has ended meanwhile
            continue
    return len(cores) or None


def _ready(loader: LoaderHandle, counters: Iterable[WorkerCounters], before: int | None) -> int | None:
    """Add the batches of a loader whose fetches have ended, and that were not taken yet."""
    if loader.delivered is None or not loader.epoch:
        return before
    made = sum(worker.made for worker in counters if worker.epoch == loader.epoch)
    return (before or 0) + max(0, made - loader.delivered)


# -- batches and their fetches -----------------------------------------------------------------------------------------

_LONG: Final = 3.0
"""A fetch is long if it takes this many times the mean of its worker's fetches."""


class HeadOfLine(NamedTuple):
    """Finished batches that wait behind one that is not finished.

    Attributes:
        batches: how many wait.
        worker: the number of the worker that they wait for.
        seconds: how long its fetch has taken; 0.0 if it has not begun.
    """

    batches: int = 0
    worker: int | None = None
    seconds: float | None = None


class Fetches:
    """Matches the newest fetches of a loader's workers with the batches that were taken.

    In an epoch the DataLoader gives batch number ``n`` to worker ``n % workers`` as its fetch number ``n // workers``.
    The stamps of both processes come from one clock. A wait for a batch is split at the end of its fetch: before it is
    fetch wait, after it is transfer wait (pickling, sending, pinning, unpickling). If a later batch is already finished
    during the fetch wait, that is head-of-line blocking. A transfer needs the worker too, which may be busy with
    another fetch.

    Args:
        counters: the workers' counters.
        workers: number of workers.
        not_in_turn: epochs in which batches did not come in order. Newly found ones are added.
    """

    def __init__(self, counters: Iterable[WorkerCounters], workers: int, not_in_turn: set[int] | None = None) -> None:
        self._not_in_turn = not_in_turn if not_in_turn is not None else set()
        self._counters = {c.worker: c for c in counters}
        self._workers = workers
        self._epochs: dict[tuple[int, int], _EpochFetches | None] = {}

    def finished_ns(self, epoch: int, batch: int) -> int | None:
        """When the fetch of a batch ended; None if it has not ended, or is no longer kept."""
        number, worker = divmod(batch, self._workers)
        fetches = self._of_epoch(worker, epoch)
        return None if fetches is None else fetches.finished(number)

    def _of_epoch(self, worker: int, epoch: int) -> _EpochFetches | None:
        """A worker's fetches of one epoch, if kept. They are cached, because a tick asks for them many times."""
        key = worker, epoch
        if key not in self._epochs:
            counters = self._counters.get(worker)
            began = None if counters is None else _began(counters, epoch)
            known = counters is not None and began is not None
            self._epochs[key] = _EpochFetches(counters, epoch, began) if known else None  # type: ignore[arg-type]
        return self._epochs[key]

    def deliveries(self, arrivals: Iterable[Arrival]) -> Deliveries:
        """The sums over these batches: slack, fetch wait and transfer wait. The first batch of an epoch is left out."""
        matched, slack, fetch_wait, transfer_wait, head_of_line = 0, 0, 0, 0, 0
        from_busy, transfer_wait_busy, transfer_wait_long = 0, 0, 0
        workers, not_in_turn, of_epoch = self._workers, self._not_in_turn, self._of_epoch
        for epoch, number, requested, arrived in arrivals:
            place, worker = divmod(number, workers)
            fetches = of_epoch(worker, epoch)
            if fetches is None:
                continue
            finished = fetches.finished(place)
            # It came before its fetch ended: workers of an iterable data set have ended one by one, and the others get
            # more batches.
            if finished > arrived if finished is not None else fetches.is_to_come(place):
                not_in_turn.add(epoch)
            if finished is None or not number or epoch in not_in_turn:
                continue
            matched += 1
            if finished > requested:
                since = finished
                fetch_wait += finished - requested
                # When the first of the next batches, one of each other worker, was finished.
                after = range(number + 1, number + workers)
                behind = min((e for n in after if (e := self.finished_ns(epoch, n)) is not None), default=finished)
                if behind < finished:
                    head_of_line += finished - max(behind, requested)
            else:
                since = requested
                slack += requested - finished
            transfer_wait += arrived - since
            longest = fetches.longest_after(place, since, arrived)
            if longest:
                from_busy += 1
                transfer_wait_busy += arrived - since
                transfer_wait_long += arrived - since if fetches.is_long(longest) else 0
        return Deliveries(
            matched=matched,
            slack_seconds=slack / NS,
            fetch_wait_seconds=fetch_wait / NS,
            transfer_wait_seconds=transfer_wait / NS,
            from_busy=from_busy,
            transfer_wait_busy_worker_seconds=transfer_wait_busy / NS,
            transfer_wait_long_fetch_seconds=transfer_wait_long / NS,
            head_of_line_seconds=head_of_line / NS,
        )

    def blocked(self, epoch: int, next_batch: int, now_ns: int) -> HeadOfLine | None:
        """Finished batches behind ``next_batch``, which is not finished; else None."""
        worker = self._counters.get(next_batch % self._workers)
        if worker is None or epoch in self._not_in_turn or self.finished_ns(epoch, next_batch) is not None:
            return None
        finished = 0
        for counters in self._counters.values():
            began = _began(counters, epoch)
            if began is None:
                return None
            finished += counters.ended - began
        if finished <= next_batch:
            return None
        since = worker.fetching_since_ns
        return HeadOfLine(finished - next_batch, worker.worker, max(0, now_ns - since) / NS if since else 0.0)


class _EpochFetches:
    """The fetches of one worker in one epoch, which began with fetch number ``began``."""

    __slots__ = ("_began", "_counters", "_end", "_ends", "_kept", "_oldest", "_starts")

    def __init__(self, counters: WorkerCounters, epoch: int, began: int) -> None:
        self._began = began
        self._counters = counters
        self._starts, self._ends = counters.recent_started_ns, counters.recent_finished_ns
        self._kept = len(self._ends)
        # Stamps are kept from here on. The oldest may be overwritten as it is read.
        self._oldest = counters.ended - self._kept + 1
        after = _began(counters, epoch + 1)
        self._end = counters.ended if after is None else min(after, counters.ended)

    def finished(self, place: int) -> int | None:
        """When a fetch ended, by its place in the epoch; None if it has not ended, or its stamp is no longer kept."""
        number = self._began + place
        return self._ends[number % self._kept] if self._oldest <= number < self._end else None

    def is_to_come(self, place: int) -> bool:
        return self._began + place >= self._counters.ended

    def is_long(self, fetch_ns: int) -> bool:
        return fetch_ns * self._counters.fetches >= _LONG * self._counters.wall_ns > 0

    def longest_after(self, place: int, since_ns: int, arrived_ns: int) -> int:
        """The longest later fetch that the worker was in at any time between two stamps.

        Args:
            place: the place of the batch's own fetch. It is kept, so later ones are, too. There are few: at most
                `prefetch_factor` batches ahead.
            since_ns: the first stamp, monotonic.
            arrived_ns: the second stamp, when the batch arrived.

        Returns:
            Nanoseconds, up to the arrival for a fetch still in progress. 0 without a later fetch.
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


def _began(worker: WorkerCounters, epoch: int) -> int | None:
    """The number of a worker's first fetch of an epoch; None if it has not begun the epoch, or no longer keeps it."""
    if not worker.epoch - len(worker.epoch_began) < epoch <= worker.epoch or epoch <= 0:
        return None
    return worker.epoch_began[epoch % len(worker.epoch_began)]
