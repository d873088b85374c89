"""The DataLoader workers of this process: what they do, where their time goes, and their stacks.

The workers record their fetches (`hooks.worker`), which shows how busy they are. The kernel's schedstat of the same
threads splits that time into running, runnable (waiting for a core) and the rest, blocked. Between fetches a worker
sleeps. So all its CPU time belongs to its fetches, including that of its other threads and of programs that it starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from operator import add, sub
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.worker import STACK_REQUEST
from telemetry.hooks.worker_block import FETCH_BUCKETS, StackPort, WorkerBlock, WorkerCounters
from telemetry.records import Deliveries, Histogram, WorkersSample
from telemetry.sources.proc import is_worker_of_ours, read_io, read_schedule, read_stat, thread_state
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.files import raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from telemetry.hooks.loaders import Arrival, LoaderHandle
    from telemetry.sources.proc import Io, Schedule, Stat

# -- the source ----------------------------------------------------------------------------------------------------

_TICK_NS: Final = 10_000_000
_NONE_YET: Final = Histogram(FETCH_BUCKETS, (0,) * (len(FETCH_BUCKETS) + 1), 0.0)


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

    def __init__(
        self, live: Callable[[], Iterable[LoaderHandle]], retired: Callable[[], Iterable[LoaderHandle]]
    ) -> None:
        self._live = live
        self._retired = retired
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
                stat = read_stat(pid)
                if stat is None or not is_worker_of_ours(stat.parent):
                    continue  # the worker has ended, or its pid belongs to another process by now
                stats[pid] = stat
                resident += stat.resident_bytes
                everyone += 1
                if trained and not loader.training:
                    continue
                worker = counters.get(pid)
                seen[pid, stat.start_ticks] = _see(pid, stat, worker, now)
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
        """There is nothing to close."""

    def _count(self, block: WorkerBlock | None) -> tuple[WorkerCounters, ...]:
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

    def _deliver(self, loader: LoaderHandle, counters: tuple[WorkerCounters, ...], now: int) -> HeadOfLine | None:
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
        names = ("cpu_ratio", "busy_ratio", "runnable_ratio", "blocked_ratio", "pickling_ratio")
        rates = ("read_bytes_per_second", "written_bytes_per_second")
        shares: dict[str, float | None] = dict.fromkeys(names + rates)
        if not both or wall <= 0:
            return shares
        process_cpu = _mean(after.cpu_seconds - before.cpu_seconds for before, after in both) / (wall / NS)
        shares["cpu_ratio"] = process_cpu
        if all(b.busy_ns is not None and a.busy_ns is not None for b, a in both):
            busy = _mean(max(0, (a.busy_ns or 0) - (b.busy_ns or 0)) for b, a in both) / wall
            shares["busy_ratio"] = min(1.0, busy)
            run, runnable = _scheduled(both, wall)
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


def _see(pid: int, stat: Stat, counters: WorkerCounters | None, now: int) -> _Seen:
    # With its threads, and the programs that it has run: their CPU time is not blocked time of the worker.
    cpu = stat.cpu_seconds + stat.children_cpu_seconds
    if counters is None:
        return _Seen(cpu, None, None, read_io(pid))
    busy = counters.wall_ns + int(_fetching_seconds(counters, now) * NS)
    return _Seen(cpu, busy, read_schedule(pid, counters.tid), read_io(pid))


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


# -- batches and their fetches -------------------------------------------------------------------------------------

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
    """The newest fetches of a loader's workers, to be matched with the batches that were taken.

    In an epoch the DataLoader gives batch number ``n`` to worker ``n % workers``. It is that worker's fetch number
    ``n // workers``. The stamps of both processes come from one clock. A wait for a batch is split at the end of its
    fetch: before it is fetch wait, after it is transfer wait (pickling, sending, pinning, unpickling). If a later batch
    is already finished during the fetch wait, that is head-of-line blocking. A transfer needs the worker too, which may
    be busy with another fetch.

    Args:
        counters: the counters of its workers.
        workers: number of its workers.
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
        """A worker's fetches of one epoch; None if they are not kept. The many batches of a tick ask for the same."""
        key = worker, epoch
        if key not in self._epochs:
            counters = self._counters.get(worker)
            began = None if counters is None else _began(counters, epoch)
            known = counters is not None and began is not None
            self._epochs[key] = _EpochFetches(counters, epoch, began) if known else None  # type: ignore[arg-type]
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
                transfer_wait_long += arrived - since if self._is_long(worker, longest) else 0
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

    def _is_long(self, worker: int, fetch_ns: int) -> bool:
        counters = self._counters[worker]
        return fetch_ns * counters.fetches >= _LONG * counters.wall_ns > 0

    def _earliest_behind(self, arrival: Arrival) -> int | None:
        """When the first of the next batches, one of each other worker, was finished."""
        after = range(arrival.number + 1, arrival.number + self._workers)
        ends = [end for batch in after if (end := self.finished_ns(arrival.epoch, batch)) is not None]
        return min(ends, default=None)


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


def _began(worker: WorkerCounters, epoch: int) -> int | None:
    """The number of a worker's first fetch of an epoch; None if it has not begun the epoch, or no longer keeps it."""
    if not worker.epoch - len(worker.epoch_began) < epoch <= worker.epoch or epoch <= 0:
        return None
    return worker.epoch_began[epoch % len(worker.epoch_began)]


# -- stacks --------------------------------------------------------------------------------------------------------

_ALL_SECONDS: Final = 1.5
_POLL_SECONDS: Final = 0.01
_MAX_WORKERS: Final = 64


@dataclass(frozen=True, slots=True)
class WorkerStack:
    """The stack of one worker.

    Attributes:
        stack: its lines, the main thread's first. If it is empty, ``missing`` gives the reason.
        state: state of its main thread, in words; empty if it is unknown.
    """

    pid: int
    state: str
    stack: str
    missing: str


def ask_workers(workers: Sequence[tuple[int, StackPort | None]]) -> list[WorkerStack]:
    """Ask all workers for their stacks at the same time. Takes at most 1.5 s.

    A thread of the worker is woken through a pipe, and answers in memory. No signal is sent: it would interrupt the
    worker's system calls, and C libraries take that for an error. The pipe is opened through /proc, as files that a
    process of the same user has open can be. ptrace is not needed.

    Args:
        workers: pid and port (None if the worker has none) of each. Workers beyond the first 64 are not asked.

    Returns:
        One result per worker, in the same order.
    """
    requests = [_StackRequest(pid, port) for pid, port in workers]
    for request in requests[_MAX_WORKERS:]:
        request.missing = f"only {_MAX_WORKERS} workers are asked"
    began = now_ns()
    asked = [(request, port) for request in requests if (port := request.port) is not None]
    for request, port in asked:
        request.ask(port)
    while not all(request.done for request in requests) and now_ns() - began < _ALL_SECONDS * NS:
        sleep(_POLL_SECONDS)
        for request, port in asked:
            request.read_answer(port)
    for request, port in asked:
        request.time_out(port)
    return [WorkerStack(i.pid, thread_state(i.pid, i.pid), i.stack, i.missing) for i in requests]


class _StackRequest:
    """The request for the stack of one worker."""

    def __init__(self, pid: int, port: StackPort | None) -> None:
        self.pid = pid
        self.port = port
        self.stack = ""
        self.missing = (
            "" if port is not None else "it was started before the agent, or could not be made ready to be asked"
        )
        self._number = now_ns()
        self._before: tuple[Schedule, Schedule] | None = None

    @property
    def done(self) -> bool:
        return bool(self.stack or self.missing)

    def ask(self, port: StackPort) -> None:
        """Wake the worker's thread, if the process is still a worker of ours that can answer."""
        if self.done:
            return
        self._before = self._schedules(port)
        try:
            self.missing = self._silent() or self._wake(port)
        except FileNotFoundError:
            self.missing = "it has closed our pipe"
        except OSError as error:
            self.missing = f"it cannot be asked ({error.strerror})"

    def read_answer(self, port: StackPort) -> None:
        """Take the answer if it is there."""
        answer = port.area.read() if not self.done else None
        if answer is not None and (answer.session, answer.pid) == (self._number, self.pid):
            self.stack = answer.content.decode("utf-8", "replace")

    def time_out(self, port: StackPort) -> None:
        """Record why the worker did not answer."""
        if not self.done:
            self.missing = self._silent() or self._late(port)

    def _silent(self) -> str:
        """Why no thread of this process can answer; empty if one can."""
        stat = read_stat(self.pid)
        if stat is None:
            return "it has ended"
        if not is_worker_of_ours(stat.parent):
            return "it has ended, and its pid is another process's"
        stopped = thread_state(self.pid, self.pid) in {"stopped", "traced"}
        return "it is stopped, by a signal or a debugger" if stopped else ""

    def _wake(self, port: StackPort) -> str:
        """Write the request into the pipe. Returns why it was not written.

        Raises:
            OSError: the pipe cannot be opened, or is full.
        """
        path = f"/proc/{self.pid}/fd/{port.pipe}"
        # Looked at first: to open another file may change something for its owner.
        if str(Path(path).readlink()) != f"pipe:[{port.inode}]":
            return "it has closed our pipe"
        # For reading, too: without a reader, a write would send SIGPIPE.
        pipe = raised(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            if os.fstat(pipe).st_ino != port.inode:
                return "it has closed our pipe"
            os.write(pipe, STACK_REQUEST.pack(self._number))
        finally:
            os.close(pipe)
        return ""

    def _late(self, port: StackPort) -> str:
        """Why it did not answer in time, by what the kernel tells of the thread that answers and of the main thread."""
        after = self._schedules(port)
        if self._before is None or after is None:
            return "it did not answer in time"
        seconds = (now_ns() - self._number) / NS
        answering, main = (
            ((now.run_ns - then.run_ns) / NS, (now.runnable_ns - then.runnable_ns) / NS)
            for now, then in zip(after, self._before, strict=True)
        )
        if not answering[0] or answering[1] > seconds / 2:
            return f"it did not answer in {seconds:.1f} s: it got no core"
        return (
            f"it did not answer in {seconds:.1f} s: a call that holds the GIL runs. "
            f"Of this time its main thread was on a core for {main[0]:.1f} s"
        )

    def _schedules(self, port: StackPort) -> tuple[Schedule, Schedule] | None:
        """Of the thread that answers and of the main thread; None if the kernel does not report them."""
        answering, main = read_schedule(self.pid, port.thread), read_schedule(self.pid, self.pid)
        return (answering, main) if answering is not None and main is not None else None
