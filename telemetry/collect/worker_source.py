"""Samples the DataLoader workers of this process: what they do, and where their time goes.

The workers record their fetches, which shows how busy they are. The kernel's schedstat of the same threads splits that
time into running, runnable (waiting for a core) and the rest, blocked. Between fetches a worker sleeps. So all its CPU
time belongs to its fetches, including that of its other threads and of programs that it starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Any, Final, Protocol

from telemetry.collect.batch_matching import Fetches, HeadOfLine
from telemetry.collect.worker_files import FilesOfWorkers
from telemetry.core.worker_records import FETCH_BUCKETS, Arrival, Deliveries, WorkerCounters, WorkersSample
from telemetry.records import Histogram
from telemetry.sources.proc import read_stat
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable

    from telemetry.collect.worker_files import WorkerFiles
    from telemetry.sources.proc import Io, Schedule, Stat

_TICK_NS: Final = 10_000_000
_NONE_YET: Final = Histogram(FETCH_BUCKETS, (0,) * (len(FETCH_BUCKETS) + 1), 0.0)


class Block(Protocol):
    """A block in which workers record what they do."""

    def read(self) -> tuple[WorkerCounters, ...]:
        """The counters of the workers that have begun."""


class Loader(Protocol):
    """A live iterator with workers, as the training thread has registered it."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of its workers, 0 for one that is a thread of this process."""

    @property
    def threads(self) -> int:
        """How many workers are threads of this process. Nothing else is known about these."""

    @property
    def queue(self) -> Any:
        """The queue of finished batches."""

    @property
    def block(self) -> Block | None:
        """The counters of its workers; None if the workers were started before the agent."""

    @property
    def training(self) -> bool:
        """Whether it has given a training batch."""

    @property
    def in_order(self) -> bool:
        """Whether its workers get the batches in turn."""

    @property
    def epoch(self) -> int:
        """Iterations begun."""

    @property
    def delivered(self) -> int | None:
        """Batches taken in the newest iteration; None if they were not counted."""

    @property
    def arrivals(self) -> deque[Arrival]:
        """Training batches taken since the last reading. A reading removes them."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """One worker at one moment. ``busy_ns`` includes the fetch in progress."""

    cpu_seconds: float
    busy_ns: int | None
    schedule: Schedule | None
    io: Io | None


class WorkersSource:
    """All workers of all live iterators.

    Args:
        live: returns the live iterators.
        retired: returns the iterators that ended since the last call and must still be read; each is returned once.
    """

    name = "workers"

    def __init__(self, live: Callable[[], Iterable[Loader]], retired: Callable[[], Iterable[Loader]]) -> None:
        self._live = live
        self._retired = retired
        self._files = FilesOfWorkers()
        self._stats: dict[int, Stat] = {}  # by pid, at the newest reading
        self._trained = False
        self._not_in_turn: dict[tuple[int, ...], set[int]] = {}
        self._before: dict[tuple[int, int], _Seen] = {}
        self._before_ns = 0
        self._counted: dict[tuple[int, int, int], WorkerCounters] = {}
        self._histogram = _NONE_YET
        self._deliveries = Deliveries()

    def read(self) -> WorkersSample:
        """The live workers of this process. Without workers the counts are zero."""
        before = self._deliveries
        for loader in self._retired():
            self._deliver(loader, self._count(loader.block), now_ns())
        now = now_ns()
        blocked: HeadOfLine | None = None
        seen: dict[tuple[int, int], _Seen] = {}
        self._stats = stats = {}
        fetched: dict[int, tuple[int, float]] = {}
        resident, ready, longest = 0, None, 0.0
        live = list(self._live())
        self._not_in_turn = {loader.pids: epochs for loader in live if (epochs := self._not_in_turn.get(loader.pids))}
        self._trained = trained = self._trained or any(loader.training for loader in live)
        everyone = 0
        for loader in live:
            counted = self._count(loader.block)
            counters = {c.pid: c for c in counted}
            blocked = self._deliver(loader, counted, now) or blocked
            if loader.training or not trained:
                ready = _ready(loader.queue, ready)
            everyone += loader.threads
            for pid in filter(None, loader.pids):
                files = self._files.of(pid)
                stat = files.stat()
                if stat is None:
                    continue  # the worker has ended, or its pid belongs to another process by now
                stats[pid] = stat
                resident += stat.resident_bytes
                everyone += 1
                if trained and not loader.training:
                    continue
                # With its threads, and the programs that it has run: their CPU time is not blocked time of the worker.
                cpu = stat.cpu_seconds + stat.children_cpu_seconds
                seen[pid, stat.start_ticks] = _see(files, cpu, counters.get(pid), now)
                worker = counters.get(pid)
                longest = max(longest, _fetching_seconds(worker, now))
                if worker is not None:
                    fetched[pid] = (worker.fetches, worker.wall_ns / NS)
        sample = WorkersSample(
            workers=everyone,
            training_workers=len(seen),
            resident_memory_bytes=resident,
            ready_batches=ready if seen else None,
            fetching_seconds=longest,
            fetches_total=sum(self._histogram.counts),
            fetch_duration=self.fetches,
            slack_seconds=_mean_slack(before, self._deliveries),
            deliveries=self._deliveries,
            head_of_line_batches=blocked.batches if blocked is not None else 0,
            head_of_line_worker=blocked.worker if blocked is not None else None,
            head_of_line_since_seconds=blocked.seconds if blocked is not None else None,
            fetched=fetched,
            allowed_cores=_allowed_cores(pid for pid, _ in seen),
            **self._shares(seen, now),
        )
        self._before, self._before_ns = seen, now
        self._files.close(but={pid for loader in live for pid in loader.pids})
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

    def close(self) -> None:
        """Close the files. A forked child calls this, too, for its copies."""
        self._files.close()

    def _count(self, block: Block | None) -> tuple[WorkerCounters, ...]:
        """Read a block and add what is new in it to the histogram."""
        if block is None:
            return ()
        counters = block.read()
        for worker in counters:
            key = (id(block), worker.worker, worker.pid)
            before = self._counted.get(key)
            if before is not None and _is_another(before, worker):
                before = None
            seen = before.histogram if before else _NONE_YET.counts
            counts = tuple(map(add, self._histogram.counts, map(sub, worker.histogram, seen)))
            took = (worker.wall_ns - (before.wall_ns if before else 0)) / NS
            self._histogram = Histogram(FETCH_BUCKETS, counts, self._histogram.total + took)
            self._counted[key] = worker
        return counters

    def _deliver(self, loader: Loader, counters: tuple[WorkerCounters, ...], now: int) -> HeadOfLine | None:
        """Match the batches that the training thread has taken with their fetches."""
        arrivals = loader.arrivals
        taken = [arrivals.popleft() for _ in range(len(arrivals))]
        if not counters or not loader.in_order:
            return None
        not_in_turn = self._not_in_turn.setdefault(loader.pids, set())
        fetches = Fetches(counters, len(loader.pids), not_in_turn)
        if taken:
            self._deliveries += fetches.deliveries(taken)
        not_in_turn -= {epoch for epoch in not_in_turn if epoch < loader.epoch - 1}
        if loader.delivered is None or not loader.training:
            return None
        return fetches.blocked(loader.epoch, loader.delivered, now)

    def _shares(self, seen: dict[tuple[int, int], _Seen], now: int) -> dict[str, float | None]:
        """Means over the workers that also existed at the last reading, as shares of the wall clock since then."""
        wall = now - self._before_ns
        both = [(self._before[worker], after) for worker, after in seen.items() if worker in self._before]
        shares: dict[str, float | None] = dict.fromkeys(
            (
                "cpu_ratio", "busy_ratio", "runnable_ratio", "blocked_ratio", "pickling_ratio",
                "read_bytes_per_second", "written_bytes_per_second",
            )
        )  # fmt: skip
        if not both or wall <= 0:
            return shares
        process_cpu = _mean(after.cpu_seconds - before.cpu_seconds for before, after in both) / (wall / NS)
        shares["cpu_ratio"] = process_cpu
        known = [(b, a) for b, a in both if a.busy_ns is not None and b.busy_ns is not None]
        if known and len(known) == len(both):
            busy = _mean(max(0, (a.busy_ns or 0) - (b.busy_ns or 0)) for b, a in known) / wall
            shares["busy_ratio"] = min(1.0, busy)
            run, runnable = _scheduled(known, wall)
            if run is not None and runnable is not None:
                # The kernel counts the whole process in ticks of 10 ms, and the thread exactly.
                elsewhere = process_cpu - run > _TICK_NS / wall
                cpu = max(run, min(busy - runnable, process_cpu)) if elsewhere else run
                shares["cpu_ratio"] = cpu
                shares["runnable_ratio"] = runnable
                shares["blocked_ratio"] = min(1.0, max(0.0, busy - cpu - runnable))
                # At most one thread more, Python's own: what exceeds a core are threads of the data set.
                shares["pickling_ratio"] = max(0.0, min(1.0, process_cpu) - cpu)
        told = [(b.io, a.io) for b, a in both if b.io is not None and a.io is not None]
        if len(told) == len(both):
            shares["read_bytes_per_second"] = sum(a.read_bytes - b.read_bytes for b, a in told) / (wall / NS)
            shares["written_bytes_per_second"] = sum(a.written_bytes - b.written_bytes for b, a in told) / (wall / NS)
        return shares


def _mean_slack(before: Deliveries, after: Deliveries) -> float | None:
    """How long a batch had been ready, mean over the batches that were taken between two readings."""
    batches = after.batches - before.batches
    return (after.slack_seconds - before.slack_seconds) / batches if batches else None


def _is_another(before: WorkerCounters, now: WorkerCounters) -> bool:
    """Whether the counters are of another worker. Memory is reused, and with it the id of a block."""
    return now.wall_ns < before.wall_ns or min(map(sub, now.histogram, before.histogram)) < 0


def _allowed_cores(pids: Iterable[int]) -> int | None:
    """Cores that all workers together may use. A user's ``worker_init_fn`` may restrict each worker to a few."""
    cores: set[int] = set()
    for pid in pids:
        try:
            cores |= os.sched_getaffinity(pid)
        except OSError:  # the worker has ended meanwhile
            continue
    return len(cores) or None


def _see(files: WorkerFiles, cpu_seconds: float, counters: WorkerCounters | None, now: int) -> _Seen:
    if counters is None:
        return _Seen(cpu_seconds, None, None, files.io())
    busy = counters.wall_ns + int(_fetching_seconds(counters, now) * NS)
    return _Seen(cpu_seconds, busy, files.schedule(counters.tid), files.io())


def _fetching_seconds(counters: WorkerCounters | None, now: int) -> float:
    """How long the fetch in progress has taken; 0.0 without one."""
    if counters is None or not counters.fetching_since_ns:
        return 0.0
    return max(0, now - counters.fetching_since_ns) / NS


def _scheduled(pairs: list[tuple[_Seen, _Seen]], wall: int) -> tuple[float | None, float | None]:
    """Shares of the wall clock that the workers ran, and were runnable; None if the kernel does not report it."""
    known = [(b.schedule, a.schedule) for b, a in pairs if b.schedule is not None and a.schedule is not None]
    if len(known) < len(pairs):
        return None, None
    run = _mean(a.run_ns - b.run_ns for b, a in known) / wall
    runnable = _mean(a.runnable_ns - b.runnable_ns for b, a in known) / wall
    return min(1.0, run), min(1.0, runnable)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _ready(queue: Any, before: int | None) -> int | None:
    try:
        return (before or 0) + int(queue.qsize())
    except Exception:  # a queue that cannot report its size, or is closed
        return before
