"""The evidence for the causes of lost time: the figures of one rank over one window."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from telemetry.model.records import (
    CHECKPOINT,
    EVALUATION,
    FETCH_BUCKETS,
    OTHER,
    LoaderSettings,
    LoaderTraits,
    RankPace,
    WindowPace,
)
from telemetry.model.totals import ROUNDING_SECONDS, Totals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.model.totals import Conditions, Tick, WorkerTotals


MIN_ITERATED_STEPS: Final = 5
MAX_STEPS_PER_ITERATOR: Final = 1.5
"""A script that makes a new iterator for so few steps, over at least so many of them, does not iterate over epochs."""


# -- the record --------------------------------------------------------------------------------------------------------


class Evidence(Struct, frozen=True):
    """One rank over one window, as the rules and the log have it. What was not measured is None.

    Attributes:
        batches_per_step: mostly 1. More if a loop takes several batches per step: from loaders side by side, or between
            two calls of ``step()``. If there are loaders with workers, only their batches count.
        source: where batches come from, see `Conditions`. ``settings``: the settings of that loader.
        traits: what the loader's data set and sampler show. ``read_by_thread``: whether another thread of this process
            reads a DataLoader. ``iterated_at``: file, line and function in which the newest iterator was made.
        own_fetch_cpu_ratio: share of the training thread's own fetches in which it was on a core, or wanted one.
        compute_parts: the share of each part of the compute, see `COMPUTE_PARTS`; None if nothing shows it.

        edges: iterations that began. ``iterations_left``: iterations that were left before their end.
        edge_wait_seconds: wait at epoch boundaries: start and end of an iteration, and its first batch.
        around_edges_seconds: additional wait for the first and last batches of epochs: workers start, and end, one by
            one.
        edge_share: share of the loop in waits at boundaries, if one epoch is longer than the window; 0.0 if that has
            not been seen.
        first_fetch_seconds: mean time of a worker's first fetch of an iteration. ``worker_start_seconds``: mean time
            from the begin of the iteration until that fetch begins.
        first_fetch_ratio: share of the wait at boundaries in which first fetches take longer than others. It stays
            known in a window without a boundary.

        checkpoints: number of steps with one.
        checkpoint_interval_seconds: training time between the newest checkpoint and the one before; 0.0 if the window
            has several.
        early_checkpoint_seconds: mean time of the first checkpoints of the run; 0.0 before there are any.
        around_checkpoints_seconds: additional compute of their steps compared with other steps: work for a checkpoint
            other than writing it.

        garbage_seconds: garbage collections on the training thread. ``garbage_wait_seconds``: those during requests in
            mid-epoch. ``edge_garbage_seconds``: at epoch boundaries. ``own_collections_ratio``: share of the
            collections of all objects that the script has started itself.
        recompilations: how often ``torch.compile`` has compiled functions again, because a check of the code that they
            had failed. ``recompile_seconds``: the time of all of them. ``recompiled_function``: the function with the
            longest time, such as ``forward at model.py:12``. ``recompiled_because``: the check that failed in the
            newest one, in torch's words.

        outlier_wait_seconds: wait in single steps that waited much longer than those around them.
        fetch_wait_seconds, transfer_wait_seconds, transfer_wait_long_fetch_seconds, head_of_line_seconds: waits in
            mid-epoch by their reason, see `Deliveries`; 0.0 if no batch could be matched with its fetch.
            ``blocking_worker``: the worker with the longest head-of-line blocking.
        transfer_seconds: mean time of a batch from a worker that is idle. ``transfer_from_busy_seconds``: from a worker
            that is in another fetch.
        freeing_seconds: time of the training thread to free a batch after the next has come, a part of compute, by the
            samples of its stack. ``receiving_cpu_seconds``: time inside ``next()`` in which it was not blocked, without
            the sampler.

        sampler_seconds: time of the sampler of a loader with workers in mid-epoch waits, by the samples of the training
            thread's stack. ``edge_sampler_seconds``: at epoch boundaries. ``edge_share_of_sampler``: its part of
            ``edge_share``. ``sampler_cpu_ratio``: share of its time on a core.

        workers: DataLoader workers. ``configured_workers``: ``num_workers`` of the loader. Workers without items may
            have ended; ``empty_workers``: their number.
        worker_cores: number of cores that they may use, if it is lower than that of this rank.
        worker_busy_ratio: share of their time in fetches. ``worker_cpu_ratio``, ``worker_runnable_ratio``,
            ``worker_blocked_ratio``: shares of the time in fetches. If the kernel does not separate running from
            run-queue delay, the second is None and the other two come from CPU time alone.
        pickling_cores: cores that they use outside of fetches, to pickle finished batches.

        fetches: batches that the workers finished. ``fetch_seconds``, ``fetch_cpu_seconds``: mean of one.
            ``longest_fetch_seconds``: upper bound of all. ``slowest_fetch_seconds``: mean of the slowest worker.
        long_fetches: durations of fetches of more than a second, as last seen. ``fetching_seconds``: duration so far of
            the longest fetch in progress at the end of the window.

        cores: cores that this rank may use and no other process uses. ``cores_of_others``: used by others.
        process_cpu_per_step_seconds: CPU time of the training process without its workers, startup, evaluations and
            checkpoints.
        own_cpu_seconds: CPU time of the training thread. ``own_runnable_seconds``: time in which it was runnable
            without a core.
        throttled_ratio: share of the periods in which the cgroup's CPU quota was used up.
        gpu_idle_seconds: time in the loop without a kernel and without waiting for a batch. ``gpu_slowed_seconds``:
            lost because the GPU's clock was throttled. Of this rank's GPU, or all of them.

        pace: the pace of this rank. ``peers``: other ranks that it may wait for. ``earlier_paces``: paces of this rank
            at the time of those peers' paces that are older.
    """

    window_seconds: float
    steps: int
    wait_seconds: float
    exposed_seconds: float | None
    compute_seconds: float
    pace: RankPace
    batches_per_step: float = 1.0
    evaluation_seconds: float = 0.0
    source: str | None = None
    settings: LoaderSettings = {}
    traits: LoaderTraits = LoaderTraits()
    read_by_thread: bool = False
    iterated_at: tuple[str, int, str] | None = None
    own_fetch_cpu_ratio: float | None = None
    compute_parts: dict[str, float] | None = None
    edges: int = 0
    iterations_left: int = 0
    edge_wait_seconds: float = 0.0
    around_edges_seconds: float = 0.0
    edge_share: float = 0.0
    first_fetch_seconds: float | None = None
    worker_start_seconds: float | None = None
    first_fetch_ratio: float = 0.0
    checkpoint_seconds: float = 0.0
    checkpoints: int = 0
    checkpoint_interval_seconds: float = 0.0
    early_checkpoint_seconds: float = 0.0
    around_checkpoints_seconds: float = 0.0
    garbage_seconds: float = 0.0
    garbage_wait_seconds: float = 0.0
    edge_garbage_seconds: float = 0.0
    own_collections_ratio: float | None = None
    recompilations: int | None = None
    recompile_seconds: float | None = None
    recompiled_function: str | None = None
    recompiled_because: str | None = None
    outlier_wait_seconds: float = 0.0
    fetch_wait_seconds: float = 0.0
    transfer_wait_seconds: float = 0.0
    transfer_wait_long_fetch_seconds: float = 0.0
    head_of_line_seconds: float = 0.0
    blocking_worker: int | None = None
    transfer_seconds: float | None = None
    transfer_from_busy_seconds: float | None = None
    freeing_seconds: float | None = None
    receiving_cpu_seconds: float | None = None
    ready_batches: float | None = None
    slack_seconds: float | None = None
    sampler_seconds: float | None = None
    edge_sampler_seconds: float = 0.0
    edge_share_of_sampler: float = 0.0
    sampler_cpu_ratio: float | None = None
    workers: int = 0
    configured_workers: int = 0
    empty_workers: int = 0
    same_batches: bool | None = None
    worker_cores: int | None = None
    worker_busy_ratio: float | None = None
    worker_cpu_ratio: float | None = None
    worker_runnable_ratio: float | None = None
    worker_blocked_ratio: float | None = None
    pickling_cores: float | None = None
    fetches: int | None = None
    fetch_seconds: float | None = None
    fetch_cpu_seconds: float | None = None
    longest_fetch_seconds: float | None = None
    slowest_fetch_seconds: float | None = None
    long_fetches: tuple[float, ...] = ()
    fetching_seconds: float = 0.0
    read_bytes: float | None = None
    written_bytes: float | None = None
    cores: float = 0.0
    cores_of_others: float | None = None
    host_cpu_ratio: float | None = None
    process_cpu_per_step_seconds: float | None = None
    own_cpu_seconds: float | None = None
    own_runnable_seconds: float | None = None
    throttled_ratio: float | None = None
    gpu_utilization_ratio: float | None = None
    gpu_idle_seconds: float | None = None
    gpu_slowed_seconds: float | None = None
    peers: tuple[RankPace, ...] = ()
    earlier_paces: tuple[RankPace, ...] = ()

    @property
    def loop_seconds(self) -> float:
        """Wait and compute."""
        return self.wait_seconds + self.compute_seconds

    @property
    def loop_and_checkpoint_seconds(self) -> float:
        """Seconds of the loop and of checkpoints, scaled so that the window has as many checkpoints as the run."""
        return max(self.loop_seconds + self.checkpoint_seconds, self.checkpoint_interval_seconds)

    @property
    def mid_epoch_wait_seconds(self) -> float:
        """Seconds of waiting outside of epoch boundaries; below 0.0 if the clocks differ."""
        return self.wait_seconds - self.edge_wait_seconds

    @property
    def on_gpu(self) -> bool:
        """Whether the run is known to use a GPU."""
        return self.gpu_utilization_ratio is not None

    @property
    def step_seconds(self) -> float:
        """Measured seconds of a step, with the waits at epoch boundaries. There must be a step."""
        return self.loop_seconds / self.steps

    @property
    def step_compute_seconds(self) -> float:
        """Seconds of compute of one step. There must be a step."""
        return self.compute_seconds / self.steps

    @property
    def supply_seconds(self) -> float | None:
        """Seconds that all workers together need for the batches of one step, if they are always busy."""
        giving = self.workers
        if self.empty_workers:
            giving = min(giving, self.configured_workers - self.empty_workers)
        if self.fetch_seconds is None or giving <= 0:
            return None
        return self.fetch_seconds * self.batches_per_step / giving

    @property
    def steps_per_iterator(self) -> float | None:
        """Steps for which the script makes a new iterator of its loader; None if it makes few."""
        if not self.edges or self.steps < MIN_ITERATED_STEPS:
            return None
        steps = self.steps / self.edges
        return max(1.0, steps) if steps <= MAX_STEPS_PER_ITERATOR else None


def evidence_field(evidence: Evidence) -> dict[str, Any]:
    """The evidence as a field of the log, without figures that were not measured."""
    fields: dict[str, Any] = {
        name: getattr(evidence, name)
        for name in Evidence.__struct_fields__
        if name not in {"pace", "peers", "earlier_paces", "traits"}
    }
    fields |= to_builtins(evidence.traits)
    fields["where"] = evidence.pace.where
    fields["long_fetches"] = [round(seconds, 3) for seconds in evidence.long_fetches]
    if evidence.peers:
        fields["paces"] = [_of_window(pace) for pace in (evidence.pace, *evidence.peers)]
    if evidence.earlier_paces:
        fields["earlier_paces"] = [_of_window(pace) for pace in evidence.earlier_paces]
    fields = {name: _plain(value) for name, value in fields.items() if value is not None}
    if evidence.worker_cpu_ratio is not None and evidence.worker_runnable_ratio is None:
        fields["worker_runnable_ratio"] = None  # no schedstat: blocked time may be run-queue delay
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)  # as the log has it: the user's callback gets the same
    return round(value, 6) if isinstance(value, float) else value


def _of_window(pace: RankPace) -> Any:
    """The part of a pace that is about its window. The log has the rest, which is about the run, in other lines."""
    return to_builtins(WindowPace(*(getattr(pace, name) for name in WindowPace.__struct_fields__)))


# -- costs that recur less often than once in a window: checkpoints, and epoch boundaries ------------------------------
# A window has one of them or none, so its share differs from that of the run. A checkpoint of 45 s every half hour
# fills a whole window. If workers take 12 s to start for each epoch of a minute, only every other window has a start.

_FIRST_CHECKPOINTS: Final = 2
"""The first checkpoints are written to new files. Later ones may reuse space of the file that they replace."""

_MUCH_LONGER: Final = 1.5
"""An epoch that has lasted this many times as long as those before it is assumed to be of another kind."""


@dataclass(frozen=True, slots=True)
class RecurringCosts:
    """The costs of checkpoints and epoch boundaries over the run so far, see `Evidence`.

    Attributes:
        checkpoint_interval_seconds: with the checkpoint itself; the first interval begins at the start.
        edge_share: the lower value of the newest two epochs. 0.0 before two epochs have ended, and if the current epoch
            is much longer than they were.
        first_fetch_ratio: of the epoch with the newest boundary.
    """

    checkpoint_interval_seconds: float = 0.0
    early_checkpoint_seconds: float = 0.0
    edge_share: float = 0.0
    edge_share_of_sampler: float = 0.0
    first_fetch_ratio: float = 0.0


class _EpochCosts(NamedTuple):
    """Seconds of the loop in one epoch, of the waits at its boundary, and of the sampler in these waits."""

    loop: float
    boundary: float
    sampler: float

    def share_of(self, seconds: float) -> float:
        return seconds / self.loop if self.loop > 0 else 0.0


class RecurringCostsWatch:
    """Tracks the costs from tick to tick. It keeps the totals at the newest checkpoint and epoch boundary."""

    def __init__(self) -> None:
        self._before = Totals()
        self._writing = False
        self._checkpoint_began = 0.0
        self._interval = 0.0
        self._first_checkpoints = 0
        self._first_seconds = 0.0
        self._epoch_began = Totals()
        self._first_fetch_ratio = 0.0
        self._epochs: deque[_EpochCosts] = deque(maxlen=2)  # epochs that have ended

    def add(self, tick: Tick) -> None:
        """Add a tick."""
        before, now = self._before, tick.totals
        saved, saved_before = (each.ledger_seconds.get(CHECKPOINT, 0.0) for each in (now, before))
        if self._first_checkpoints < _FIRST_CHECKPOINTS:
            self._first_checkpoints, self._first_seconds = now.checkpoint_steps, saved
        if saved > saved_before and not self._writing:
            trained = before.loop_seconds + saved_before
            self._interval, self._checkpoint_began = trained - self._checkpoint_began, trained
        self._writing = saved > saved_before
        if now.epochs.boundaries > before.epochs.boundaries:
            began = self._epoch_began
            waited = before.epochs.boundary_wait_seconds - began.epochs.boundary_wait_seconds
            garbage = before.garbage.boundary_wait_seconds - began.garbage.boundary_wait_seconds
            sampler = _boundary_sampler(before - began)
            loop = before.loop_seconds - began.loop_seconds
            self._epochs.append(_EpochCosts(loop, max(0.0, waited - garbage), sampler))
            self._first_fetch_ratio = _first_fetch_ratio(before - began)
            self._epoch_began = before
        self._before = now

    @property
    def costs(self) -> RecurringCosts:
        """The costs as of the newest tick."""
        first = self._first_seconds / self._first_checkpoints if self._first_checkpoints else 0.0
        running = self._before.loop_seconds - self._epoch_began.loop_seconds
        if len(self._epochs) < 2 or running > _MUCH_LONGER * max(epoch.loop for epoch in self._epochs):
            return RecurringCosts(self._interval, first, first_fetch_ratio=self._first_fetch_ratio)
        epoch = min(self._epochs, key=lambda epoch: epoch.share_of(epoch.boundary))
        boundary, sampler = (epoch.share_of(part) for part in (epoch.boundary, min(epoch.boundary, epoch.sampler)))
        return RecurringCosts(self._interval, first, boundary, sampler, self._first_fetch_ratio)


# -- a window of ticks as evidence: the difference of its totals, and the conditions -----------------------------------

_LONG_FETCH_SECONDS: Final = 1.0
"""A fetch that takes longer than this is recorded on its own, to decide whether it was stuck."""

_ENOUGH_SAMPLED: Final = 0.5
"""If fewer of the fetches fall into ticks in which the workers were sampled, the mean of all fetches is used. That
includes those for evaluations."""

_ENOUGH_FETCHES: Final = 3
"""Least fetches of a worker for a mean that shows how slow it is."""

_YOUNGER_COLLECTIONS: Final = 10
"""Python's own threshold: after so many collections of younger objects it may collect all."""

_NEARLY_ALL: Final = 1 - 1e-6
_NO_RECURRING_COSTS: Final = RecurringCosts()


def aggregate(
    ticks: Sequence[Tick],
    *,
    rank: int = 0,
    cause: str | None = None,
    recurring: RecurringCosts = _NO_RECURRING_COSTS,
) -> Evidence:
    """Make the evidence of at least two ticks. ``cause``: cause of the open stall, for the `RankPace` of ``rank``."""
    added = ticks[-1].totals - ticks[0].totals
    conditions = [tick.conditions for tick in ticks][1:]
    source, settings = _waited_for(added, conditions)
    # The workers while the training loop runs, or at any time in a window without the loop.
    in_loop = added.sampled.workers.sampled_seconds > ROUNDING_SECONDS
    sampled = added.sampled.workers if in_loop else added.sampled.idle_workers
    evidence = Evidence(
        window_seconds=added.wall_seconds,
        steps=added.steps,
        batches_per_step=_batches_per_step(added),
        wait_seconds=added.wait_seconds,
        exposed_seconds=added.exposed_after_first_seconds,
        compute_seconds=added.compute_seconds,
        evaluation_seconds=added.ledger_seconds.get(EVALUATION, 0.0),
        source=source,
        settings=settings,
        traits=next((c.traits for c in reversed(conditions) if c.source == source), LoaderTraits()),
        iterated_at=conditions[-1].iterated_at,
        read_by_thread=any(c.read_by_thread for c in conditions),
        own_fetch_cpu_ratio=_share(added.stacks.wait_cpu, added.stacks.wait) if source != "workers" else None,
        compute_parts=_compute_parts(added),
        pace=_pace(added, conditions, rank, cause),
        peers=next((c.peers for c in reversed(conditions) if c.peers), ()),
    )
    evidence = _with_machine(evidence, added, conditions)
    evidence = _with_workers(evidence, sampled, conditions)
    evidence = _with_fetches(evidence, added, sampled, ticks)
    evidence = _with_waits(evidence, added, sampled)
    evidence = _with_edges(evidence, added, recurring)
    return _with_other_costs(evidence, added, recurring, conditions[-1].recompiled_because)


def _with_machine(evidence: Evidence, added: Totals, conditions: Sequence[Conditions]) -> Evidence:
    cores, of_others = _cores(added, conditions)
    cpu, gpu = added.sampled.cpu, added.sampled.gpu
    known, unused = cpu.process_seconds.seconds >= _NEARLY_ALL * added.wall_seconds > 0, gpu.unused_ratio.known
    return replace(
        evidence,
        cores=cores,
        cores_of_others=of_others,
        host_cpu_ratio=cpu.host_ratio.mean,
        process_cpu_per_step_seconds=_each(cpu.process_seconds.integral, added.steps) if known else None,
        own_cpu_seconds=added.thread_cpu_seconds,
        own_runnable_seconds=added.run_queue_delay_seconds,
        throttled_ratio=cpu.throttled_ratio.mean,
        gpu_utilization_ratio=gpu.utilization_ratio.mean,
        gpu_idle_seconds=None if unused is None else max(0.0, unused - gpu.exposed_wait_seconds - gpu.garbage_seconds),
        gpu_slowed_seconds=gpu.slowed_ratio.known,
    )


def _with_workers(evidence: Evidence, sampled: WorkerTotals, conditions: Sequence[Conditions]) -> Evidence:
    cpu, runnable, blocked = _shares(sampled)
    by_count = _positive(sampled.seconds_by_count)
    allowed = next((c.worker_cores for c in reversed(conditions) if c.fetching_seconds is not None), None)
    return replace(
        evidence,
        # Not the maximum: workers of an ended epoch may still exist when those of the next have begun.
        workers=max(by_count, key=lambda count: (by_count[count], count), default=0),
        configured_workers=int(evidence.settings.get("num_workers") or 0),
        empty_workers=conditions[-1].empty_workers,
        same_batches=next((c.same_batches for c in reversed(conditions) if c.same_batches is not None), None),
        worker_cores=allowed if allowed is not None and allowed < evidence.cores else None,
        worker_busy_ratio=sampled.busy_ratio.mean,
        worker_cpu_ratio=cpu,
        worker_runnable_ratio=runnable,
        worker_blocked_ratio=blocked,
        pickling_cores=sampled.pickling_cores.mean,
    )


def _with_fetches(evidence: Evidence, added: Totals, sampled: WorkerTotals, ticks: Sequence[Tick]) -> Evidence:
    counted = sampled.counted_seconds > ROUNDING_SECONDS  # there are no figures before they have begun
    seconds = _each(sampled.fetch_busy_seconds, sampled.fetches) if counted else None
    if sampled.fetches < _ENOUGH_SAMPLED * added.worker_fetches:  # few workers lived from one tick to the next
        seconds = _each(added.worker_fetch_seconds, added.worker_fetches)
    conditions = [tick.conditions for tick in ticks][1:]
    in_loop = [c for c in conditions if c.in_loop] or conditions
    fetching = [c.fetching_seconds for c in in_loop if c.fetching_seconds is not None]
    on_core = evidence.worker_cpu_ratio
    return replace(
        evidence,
        fetches=sampled.fetches if counted else None,
        fetch_seconds=seconds,
        fetch_cpu_seconds=seconds * on_core if seconds is not None and on_core is not None else None,
        # The bound of the highest bucket with a fetch; None if no fetch ended, or one is above the last bound.
        longest_fetch_seconds=max(
            (bound for bound, count in zip(FETCH_BUCKETS, added.fetch_counts, strict=False) if count), default=None
        ),
        slowest_fetch_seconds=_slowest_fetch(ticks),
        long_fetches=tuple(
            now for now, then in pairwise([*fetching, 0.0]) if now > then and now >= _LONG_FETCH_SECONDS
        ),
        fetching_seconds=fetching[-1] if fetching else 0.0,
        read_bytes=added.sampled.read_bytes.known,
        written_bytes=added.sampled.written_bytes.known,
    )


def _with_waits(evidence: Evidence, added: Totals, sampled: WorkerTotals) -> Evidence:
    took, stacks, batches = added.deliveries, added.stacks, added.batches
    blocking, from_busy = _positive(sampled.head_of_line_seconds), took.transfer_wait_busy_worker_seconds
    freeing, receiving = _share(stacks.freeing, stacks.step), _share(stacks.wait_cpu - stacks.sampler_cpu, stacks.wait)
    return replace(
        evidence,
        outlier_wait_seconds=added.outlier_wait_seconds,
        fetch_wait_seconds=took.fetch_wait_seconds,
        transfer_wait_seconds=took.transfer_wait_seconds,
        transfer_wait_long_fetch_seconds=took.transfer_wait_long_fetch_seconds,
        head_of_line_seconds=took.head_of_line_seconds,
        blocking_worker=max(blocking, key=lambda worker: blocking[worker], default=None),
        transfer_seconds=_each(took.transfer_wait_seconds - from_busy, took.matched - took.from_busy),
        transfer_from_busy_seconds=_each(from_busy, took.from_busy),
        freeing_seconds=None if freeing is None else _each(freeing * added.compute_seconds, batches),
        receiving_cpu_seconds=None if receiving is None else _each(receiving * _mid_epoch_wait(added), batches),
        ready_batches=sampled.ready_batches.mean,
        slack_seconds=sampled.slack_seconds.mean,
    )


def _with_edges(evidence: Evidence, added: Totals, recurring: RecurringCosts) -> Evidence:
    epochs, first, stacks = added.epochs, added.first_fetches, added.stacks
    sampler, mid_epoch_wait = _share(stacks.sampler, stacks.wait), added.wait_seconds - epochs.boundary_wait_seconds
    on_core = stacks.sampler_cpu + stacks.boundary_sampler_cpu
    return replace(
        evidence,
        edges=epochs.boundaries,
        iterations_left=epochs.left,
        edge_wait_seconds=epochs.boundary_wait_seconds,
        # Over the whole window, since one epoch varies; at most the wait in mid-epoch.
        around_edges_seconds=max(0.0, min(mid_epoch_wait, epochs.near_boundary_wait_seconds)),
        edge_share=recurring.edge_share,
        first_fetch_seconds=_each(first.seconds, first.fetches),
        worker_start_seconds=_each(first.start_seconds, first.fetches),
        first_fetch_ratio=_first_fetch_ratio(added) or recurring.first_fetch_ratio,
        sampler_seconds=None if sampler is None else sampler * _mid_epoch_wait(added),
        edge_sampler_seconds=_boundary_sampler(added),
        edge_share_of_sampler=recurring.edge_share_of_sampler,
        sampler_cpu_ratio=_share(on_core, stacks.sampler + stacks.boundary_sampler),
    )


def _with_other_costs(
    evidence: Evidence, added: Totals, recurring: RecurringCosts, recompiled_because: str | None
) -> Evidence:
    garbage = added.garbage
    # Python itself collects all objects at most once in ten collections of younger ones.
    own = max(0.0, garbage.collections - 1 - garbage.younger_collections / _YOUNGER_COLLECTIONS)
    evidence = replace(
        evidence,
        checkpoint_seconds=added.ledger_seconds.get(CHECKPOINT, 0.0),
        checkpoints=added.checkpoint_steps,
        checkpoint_interval_seconds=recurring.checkpoint_interval_seconds if added.checkpoint_steps < 2 else 0.0,
        early_checkpoint_seconds=recurring.early_checkpoint_seconds,
        around_checkpoints_seconds=_around_checkpoints(added),
        garbage_seconds=garbage.seconds,
        garbage_wait_seconds=garbage.wait_seconds,
        edge_garbage_seconds=garbage.boundary_wait_seconds,
        own_collections_ratio=own / garbage.collections if garbage.collections else None,
    )
    took = _positive(added.compiles.again_seconds)
    if not took:
        return evidence
    return replace(
        evidence,
        recompilations=added.compiles.again,
        # A compilation counts when it has ended, and may have begun before the window.
        recompile_seconds=min(added.compute_seconds, sum(took.values())),
        recompiled_function=max(took, key=lambda name: took[name]),
        recompiled_because=recompiled_because,
    )


def _mid_epoch_wait(added: Totals) -> float:
    """Seconds of waiting in mid-epoch, without garbage collections."""
    return max(0.0, added.wait_seconds - added.epochs.boundary_wait_seconds - added.garbage.wait_seconds)


def _boundary_sampler(added: Totals) -> float:
    """Seconds of the sampler at epoch boundaries."""
    return (_share(added.stacks.boundary_sampler, added.stacks.boundary) or 0.0) * added.epochs.boundary_wait_seconds


def _first_fetch_ratio(added: Totals) -> float:
    """The share of the waits at epoch boundaries in which first fetches take longer than other fetches."""
    epochs, waited = added.epochs, added.epochs.boundary_wait_seconds
    first, usual = _each(added.first_fetches.seconds, added.first_fetches.fetches), _usual_fetch(added)
    if first is None or usual is None or waited <= ROUNDING_SECONDS:
        return 0.0
    return min(1.0, max(0.0, first - usual) * epochs.boundaries / waited)


def _usual_fetch(added: Totals) -> float | None:
    """The mean of the fetches that are not the first of their worker in an iteration."""
    seconds = added.worker_fetch_seconds - added.first_fetches.seconds
    return _each(max(0.0, seconds), max(0, added.worker_fetches - added.first_fetches.fetches))


def _waited_for(added: Totals, conditions: Sequence[Conditions]) -> tuple[str | None, LoaderSettings]:
    """The source with the longest wait, and its settings. A loop may read two loaders side by side."""
    waits = {source: seconds for source, seconds in added.wait_seconds_by_source.items() if seconds > ROUNDING_SECONDS}
    source = max(waits, key=lambda name: (name is not None, waits[name])) if waits else conditions[-1].source
    return source, next((c.settings for c in reversed(conditions) if c.source == source), {})


def _batches_per_step(added: Totals) -> float:
    batches, steps, sampled = added.batches, added.steps, added.sampled
    if not steps or batches <= steps + 1:  # the newest batch belongs to a step that has not ended
        return 1.0
    if sampled.workers.counted_seconds + sampled.idle_workers.counted_seconds <= ROUNDING_SECONDS:
        return batches / steps
    fetches = sampled.workers.fetches + sampled.idle_workers.fetches
    return max(1.0, min(batches, fetches) / steps)  # some batches come from loaders without workers


def _around_checkpoints(added: Totals) -> float:
    steps, in_them = added.checkpoint_steps, added.checkpoint_steps_compute_seconds
    if not 0 < steps < added.steps:
        return 0.0  # there are no steps without a checkpoint to compare with
    usual = (added.compute_seconds - in_them) / (added.steps - steps)
    # At most 0 if most of a long checkpoint was before the window.
    return max(0.0, in_them - steps * usual) if usual > 0 else 0.0


def _shares(workers: WorkerTotals) -> tuple[float | None, float | None, float | None]:
    """Shares of the workers' time in fetches: on a core, runnable, blocked. None if the kernel does not report it."""
    total = workers.cpu_seconds + workers.runnable_seconds + workers.blocked_seconds
    if total > ROUNDING_SECONDS:
        return workers.cpu_seconds / total, workers.runnable_seconds / total, workers.blocked_seconds / total
    cpu = _share(workers.unscheduled_cpu_seconds, workers.unscheduled_busy_seconds)
    return cpu, None, None if cpu is None else 1.0 - cpu


def _slowest_fetch(ticks: Sequence[Tick]) -> float | None:
    """Mean fetch of the slowest live worker. The better half of the window counts, without a single long fetch."""
    oldest, middle, newest = (ticks[at].conditions.fetched for at in (0, len(ticks) // 2, -1))
    first, second = _mean_fetches(oldest, middle), _mean_fetches(middle, newest)
    return max((min(mean, second[pid]) for pid, mean in first.items() if pid in second), default=None)


def _mean_fetches(before: dict[int, tuple[int, float]], after: dict[int, tuple[int, float]]) -> dict[int, float]:
    means = {}
    for pid, (fetches, seconds) in after.items():
        fetches_before, seconds_before = before.get(pid, (0, 0.0))
        if fetches - fetches_before >= _ENOUGH_FETCHES:
            means[pid] = (seconds - seconds_before) / (fetches - fetches_before)
    return means


def _cores(added: Totals, conditions: Sequence[Conditions]) -> tuple[float, float | None]:
    """Cores that this rank may use and no other process uses, and the cores that others (including ranks) use."""
    cpu, theirs = added.sampled.cpu, None
    cores = conditions[-1].cores
    own = max(cpu.used_cores.mean or 0.0, 1.0)
    others, in_quota = cpu.other_cores.mean, cpu.other_quota_cores.mean
    if others is not None:
        theirs = others
        cores = min(cores, max(own, max(c.host_cores for c in conditions) - theirs))
    quota = next((c.quota_cores for c in reversed(conditions) if c.quota_cores is not None), None)
    if in_quota is not None and quota is not None:
        # The quota of a pod, for example: its ranks share it, however many cores of the machine are idle.
        left = max(own, quota - in_quota)
        if left < cores:
            cores, theirs = left, in_quota
    return cores, theirs


def _pace(added: Totals, conditions: Sequence[Conditions], rank: int, cause: str | None) -> RankPace:
    seconds, compute = added.wall_seconds - added.startup_seconds, added.compute_seconds
    away = _positive({name: added.ledger_seconds.get(name, 0.0) for name in (EVALUATION, CHECKPOINT, OTHER)})
    places = Counter(c.where for c in conditions if c.where is not None).most_common(1)
    return RankPace(
        rank=rank,
        seconds=seconds,
        steps=added.steps,
        compute_seconds=compute,
        exposed_wait_seconds=added.exposed_after_first_seconds,
        away_seconds=max(0.0, seconds - compute - added.wait_seconds),
        stack_samples=added.stacks.samples,
        in_sync_samples=added.stacks.in_sync,
        on_gpu=conditions[-1].on_gpu,
        gpu_busy_ratio=added.sampled.gpu.utilization_ratio.mean,
        away_in=max(away, key=lambda name: away[name], default=None),
        core_wait_seconds=added.run_queue_delay_seconds,
        cores_busy_ratio=added.sampled.cpu.host_ratio.mean,
        cause=cause,
        where=places[0][0] if places else None,
    )


def _compute_parts(added: Totals) -> dict[str, float] | None:
    parts = _positive(added.compute_parts or {})
    whole = sum(parts.values())
    return {part: round(seconds / whole, 4) for part, seconds in parts.items()} or None


def _positive(seconds: Mapping[Any, float]) -> dict[Any, float]:
    """Leave out values that are zero in the window. A difference of totals keeps every key of the run."""
    return {key: value for key, value in seconds.items() if value > ROUNDING_SECONDS}


def _each(total: float, count: int) -> float | None:
    return total / count if count else None


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > ROUNDING_SECONDS else None
