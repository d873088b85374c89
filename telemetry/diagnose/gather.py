"""A window of slices, added up into evidence."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from telemetry.diagnose.evidence import Evidence
from telemetry.records import RankPace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.records import Slice, WorkersSample

_IN_THE_LOOP: Final = 0.95
"""Share of a slice in the training loop from which what the GPU did in it is the loop's doing."""

_MOSTLY: Final = 0.5
"""Share of a slice in the training loop from which what the process used of the cores is the loop's."""

_LONG_FETCH: Final = 1.0
"""Seconds from which on a fetch is noted by itself: whether it was stuck is to be seen beside the others."""

_ENOUGH_FETCHES: Final = 3
"""Of one worker, before their mean says how slow it is."""

HELD_BACK: Final = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
"""Reasons for a low clock that are a fault. At its power cap a GPU runs whenever it is used well."""


def gather(
    slices: Sequence[Slice],
    *,
    rank: int = 0,
    cause: str | None = None,
    checkpoint_interval: float = 0.0,
    early_checkpoint: float = 0.0,
    edge_share: float = 0.0,
    edge_share_of_sampler: float = 0.0,
) -> Evidence:
    """Add up a window.

    Args:
        slices: of the window; not empty.
        rank: whose it is, for its `RankPace`.
        cause: of its open stall, for the same.
        checkpoint_interval: seconds of training between the newest checkpoint and the one before it.
        early_checkpoint: what the first checkpoints of the run took, each.
        edge_share: what the edges of epochs have taken of the newest of them.
        edge_share_of_sampler: of that, what the sampler has taken.
    """
    waited = _waited_for(slices)
    cores, of_others = _cores(slices)
    steps = int(_sum(slices, lambda s: s.steps))
    checkpoints = int(_sum(slices, lambda s: s.checkpoint_steps))
    # In an evaluation the training's workers have nothing to do, and its own fetch.
    in_the_loop = [s for s in slices if s.wait + s.compute >= _MOSTLY * s.seconds] or slices
    # And they tell nothing before they have begun.
    told = [s for s in in_the_loop if s.fetches is not None and s.fetch_busy is not None]
    fetches = sum(s.fetches or 0 for s in told)
    fetch = sum(s.fetch_busy or 0.0 for s in told) / fetches if fetches else None
    workers = [s.workers for s in in_the_loop if s.workers is not None]
    shares = _shares(workers)
    cpu_share = shares.get("cpu")
    process_cpu = _all([_cpu_of_the_loop(s) for s in slices])
    timed = _sum(slices, lambda s: s.timed_fetch)
    return Evidence(
        seconds=_sum(slices, lambda s: s.seconds),
        steps=steps,
        batches_per_step=_batches_per_step(slices, steps),
        wait=_sum(slices, lambda s: s.wait),
        exposed=_all([s.exposed for s in slices]),
        edge_wait=_sum(slices, lambda s: s.edge_wait),
        edges=int(_sum(slices, lambda s: s.edges)),
        edge_share=edge_share,
        around_edges=_around_edges(slices),
        left=int(_sum(slices, lambda s: s.left)),
        late_wait=_sum(slices, lambda s: s.late_wait),
        late=_sum(slices, lambda s: s.late),
        moved=_sum(slices, lambda s: s.moved),
        moved_from_long=_sum(slices, lambda s: s.moved_from_long),
        head_of_line=_sum(slices, lambda s: s.head_of_line),
        moving_seconds=_each(slices, lambda s: s.moved - s.moved_from_busy, lambda s: s.matched - s.from_busy),
        moving_from_busy_seconds=_each(slices, lambda s: s.moved_from_busy, lambda s: s.from_busy),
        freeing_seconds=_each(slices, lambda s: s.freeing, lambda s: s.freed),
        compute=_sum(slices, lambda s: s.compute),
        evaluation=_sum(slices, lambda s: s.evaluation),
        checkpoint=_sum(slices, lambda s: s.checkpoint),
        checkpoints=checkpoints,
        checkpoint_interval=checkpoint_interval if checkpoints < 2 else 0.0,
        early_checkpoint=early_checkpoint,
        around_checkpoints=_around_checkpoints(slices, steps),
        garbage=_sum(slices, lambda s: s.garbage),
        garbage_wait=_sum(slices, lambda s: s.garbage_wait),
        edge_garbage=_sum(slices, lambda s: s.edge_garbage),
        sampler=_sampler(slices),
        edge_sampler=_sum(slices, lambda s: s.edge_sampler),
        edge_share_of_sampler=edge_share_of_sampler,
        sampler_cpu_share=_sampler_cpu_share(slices),
        receiving_cpu_seconds=_each(slices, lambda s: s.timed_receiving_cpu, lambda s: s.timed_waits),
        source=waited.source,
        own_fetch_cpu_share=min(1.0, _sum(slices, lambda s: s.timed_fetch_cpu) / timed) if timed > 0 else None,
        workers=_usual_workers(workers),
        worker_cores=_worker_cores(slices, cores),
        fetches=fetches if told else None,
        fetch_seconds=fetch,
        fetch_cpu_seconds=fetch * cpu_share if fetch is not None and cpu_share is not None else None,
        longest_fetch=_longest_fetch(workers),
        slowest_fetch=_slowest_fetch(workers),
        read_bytes=_over_time(slices, lambda w: w.read_bytes_per_second),
        written_bytes=_over_time(slices, lambda w: w.written_bytes_per_second),
        busy_ratio=_mean([w.busy_ratio for w in workers]),
        packing_cores=_packing_cores(workers),
        cpu_share=cpu_share,
        runnable_share=shares.get("runnable"),
        blocked_share=shares.get("blocked"),
        ready_batches=_mean([w.ready_batches for w in workers]),
        slack_seconds=_mean([w.slack_seconds for w in workers]),
        head_of_line_worker=_most_common([w.head_of_line_worker for w in workers]),
        stuck_seconds=workers[-1].fetching_seconds if workers else 0.0,
        long_fetches=_long_fetches(workers),
        process_cpu_per_step=process_cpu / steps if process_cpu is not None and steps else None,
        own_runnable=_all([s.own_runnable for s in slices]),
        host_cpu_ratio=_mean([s.host_cpu_ratio for s in slices]),
        cores=cores,
        cores_of_others=of_others,
        throttled_ratio=_mean([s.throttled_ratio for s in slices]),
        gpu_utilization_ratio=_mean([s.gpu_utilization_ratio for s in slices]),
        gpu_idle=_gpu_idle(slices),
        gpu_slowed=_gpu_slowed(slices),
        settings=waited.settings,
        pace=_pace(slices, rank, cause),
        peers=next((s.peers for s in reversed(slices) if s.peers), ()),
    )


def _waited_for(slices: Sequence[Slice]) -> Slice:
    """The newest slice of the source that was waited for most: loops may read two loaders side by side."""
    waits: dict[str | None, float] = {}
    for piece in slices:
        waits[piece.source] = waits.get(piece.source, 0.0) + piece.wait
    source = max(waits, key=lambda name: (name is not None, waits[name]))
    return next(piece for piece in reversed(slices) if piece.source == source)


def _pace(slices: Sequence[Slice], rank: int, cause: str | None) -> RankPace:
    seconds, compute = _sum(slices, lambda s: s.seconds - s.startup), _sum(slices, lambda s: s.compute)
    return RankPace(
        rank=rank,
        seconds=seconds,
        steps=int(_sum(slices, lambda s: s.steps)),
        compute=compute,
        exposed=_all([s.exposed for s in slices]),
        away=max(0.0, seconds - compute - _sum(slices, lambda s: s.wait)),
        samples=int(_sum(slices, lambda s: s.samples)),
        in_sync=int(_sum(slices, lambda s: s.in_sync)),
        on_gpu=slices[-1].gpu_utilization_ratio is not None,
        gpu_busy=_mean([s.gpu_utilization_ratio for s in slices]),
        cause=cause,
        where=_most_common([s.where for s in slices]),
    )


def _shares(samples: Sequence[WorkersSample]) -> dict[str, float]:
    """Of the workers' time in fetches: running, runnable, blocked; empty where nothing tells."""
    scheduled = [w for w in samples if w.blocked_ratio is not None]
    if not scheduled:
        timed = [w for w in samples if w.busy_ratio is not None and w.cpu_ratio is not None]
        busy = sum(w.busy_ratio or 0.0 for w in timed)
        cpu = min(1.0, sum(w.cpu_ratio or 0.0 for w in timed) / busy) if busy > 0 else None
        return {} if cpu is None else {"cpu": cpu, "blocked": 1.0 - cpu}
    parts = {
        "cpu": sum(w.cpu_ratio or 0.0 for w in scheduled),
        "runnable": sum(w.runnable_ratio or 0.0 for w in scheduled),
        "blocked": sum(w.blocked_ratio or 0.0 for w in scheduled),
    }
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()} if total > 0 else {}


def _usual_workers(samples: Sequence[WorkersSample]) -> int:
    """Not the most: those of an epoch that has ended may still be there when those of the next have begun."""
    seen = Counter(w.training_workers for w in samples if w.training_workers)
    return max(seen, key=lambda workers: (seen[workers], workers), default=0)


def _packing_cores(samples: Sequence[WorkersSample]) -> float | None:
    return _mean([w.packing_ratio * w.training_workers for w in samples if w.packing_ratio is not None])


def _cpu_of_the_loop(piece: Slice) -> float | None:
    """The first slice has all that the process used before there was an agent."""
    if piece.process_cpu is None:
        return None
    return piece.process_cpu * min(1.0, (piece.wait + piece.compute) / piece.seconds) if piece.seconds > 0 else 0.0


def _around_checkpoints(slices: Sequence[Slice], steps: int) -> float:
    with_one = int(_sum(slices, lambda s: s.checkpoint_steps))
    if not 0 < with_one < steps:
        return 0.0  # nothing to compare with
    in_them = _sum(slices, lambda s: s.checkpoint_steps_compute)
    usual = (_sum(slices, lambda s: s.compute) - in_them) / (steps - with_one)
    if usual <= 0:
        return 0.0  # a long one, most of which was before the window
    return max(0.0, in_them - with_one * usual)


def _around_edges(slices: Sequence[Slice]) -> float:
    """Of the whole window, since those of one epoch may be as much shorter; no more than was waited in mid-epoch."""
    mid_epoch = _sum(slices, lambda s: s.wait - s.edge_wait)
    return max(0.0, min(mid_epoch, _sum(slices, lambda s: s.around_edges)))


def _longest_fetch(samples: Sequence[WorkersSample]) -> float | None:
    """The upper bound of the highest bucket to which the window has added; None where no fetch ended in it."""
    histograms = [w.fetch_duration for w in samples if w.fetch_duration is not None]
    if len(histograms) < 2:
        return None
    first, last = histograms[0], histograms[-1]
    counts = zip(last.bounds, first.counts, last.counts, strict=False)
    return max((bound for bound, before, after in counts if after > before), default=None)


def _long_fetches(samples: Sequence[WorkersSample]) -> tuple[float, ...]:
    """How long each of them had taken when it was last seen in progress."""
    seen = [w.fetching_seconds for w in samples]
    return tuple(now for now, then in pairwise([*seen, 0.0]) if now > then and now >= _LONG_FETCH)


def _slowest_fetch(samples: Sequence[WorkersSample]) -> float | None:
    """Of the workers that are there, each by the better half of the window: one long fetch makes none slow."""
    middle = len(samples) // 2
    first, second = _mean_fetches(samples[: middle + 1]), _mean_fetches(samples[middle:])
    return max((min(mean, second[pid]) for pid, mean in first.items() if pid in second), default=None)


def _mean_fetches(samples: Sequence[WorkersSample]) -> dict[int, float]:
    """By the pids of the workers that have fetched enough for a mean."""
    if not samples:
        return {}
    before, means = samples[0].fetched, {}
    for pid, (fetches, seconds) in samples[-1].fetched.items():
        fetches_before, seconds_before = before.get(pid, (0, 0.0))
        if fetches - fetches_before >= _ENOUGH_FETCHES:
            means[pid] = (seconds - seconds_before) / (fetches - fetches_before)
    return means


def _sampler(slices: Sequence[Slice]) -> float | None:
    """Of all workers' batches in mid-epoch, from those that were timed; no more than was waited."""
    each = _each(slices, lambda s: s.timed_sampler, lambda s: s.timed_waits)
    if each is None:
        return None
    batches = _sum(slices, lambda s: s.matched) or _sum(slices, lambda s: s.batches - s.edges)
    waited = _sum(slices, lambda s: s.wait - s.edge_wait - s.garbage_wait)
    return max(0.0, min(each * batches, waited))


def _sampler_cpu_share(slices: Sequence[Slice]) -> float | None:
    took = _sum(slices, lambda s: s.timed_sampler + s.edge_sampler)
    cpu = _sum(slices, lambda s: s.timed_sampler_cpu + s.edge_sampler_cpu)
    return min(1.0, cpu / took) if took > 0 else None


def _worker_cores(slices: Sequence[Slice], cores: float) -> int | None:
    newest = next((s.workers.allowed_cores for s in reversed(slices) if s.workers is not None), None)
    return newest if newest is not None and newest < cores else None


def _batches_per_step(slices: Sequence[Slice], steps: int) -> float:
    batches = int(_sum(slices, lambda s: s.batches))
    if not steps or batches <= steps + 1:  # the newest is of a step that has not ended
        return 1.0
    fetches = [s.fetches for s in slices if s.fetches is not None]
    return max(1.0, min(batches, sum(fetches)) / steps) if fetches else batches / steps  # some without workers


def _over_time(slices: Sequence[Slice], rate: Callable[[WorkersSample], float | None]) -> float | None:
    told = [(s.seconds, rate(s.workers)) for s in slices if s.workers is not None]
    known = [seconds * value for seconds, value in told if value is not None]
    return sum(known) if known else None


def _cores(slices: Sequence[Slice]) -> tuple[float, float | None]:
    """Cores this rank may use, less what other processes (other ranks among them) take; and what those take."""
    allowed, used, others, in_quota = slices[-1].cores, [], [], []
    for piece in slices:
        in_the_loop = piece.seconds > 0 and piece.wait + piece.compute >= _MOSTLY * piece.seconds
        if piece.process_cpu is None or not in_the_loop:
            continue
        workers = piece.workers
        by_workers = 0.0 if workers is None else (workers.cpu_ratio or 0.0) * workers.training_workers
        used.append(piece.process_cpu / piece.seconds + by_workers)
        if piece.host_cpu_ratio is not None:
            others.append(max(0.0, piece.host_cpu_ratio * piece.host_cores - used[-1]))
        if piece.quota is not None and piece.quota_used is not None:
            in_quota.append((piece.quota, max(0.0, piece.quota_used - used[-1])))
    own = max(sum(used) / len(used), 1.0) if used else 1.0
    cores, theirs = allowed, None
    if others:
        theirs = sum(others) / len(others)
        cores = min(cores, max(own, max(piece.host_cores for piece in slices) - theirs))
    if in_quota:  # of a pod, say: its ranks share it, however many cores of the machine are idle
        in_it = sum(used for _, used in in_quota) / len(in_quota)
        left = max(own, in_quota[-1][0] - in_it)
        if left < cores:
            cores, theirs = left, in_it
    return cores, theirs


def _gpu_idle(slices: Sequence[Slice]) -> float | None:
    # What NVML and the events tell of a slice is not of the very same moments: only the sum may be cut off at zero.
    idle = [
        (1.0 - s.gpu_utilization_ratio) * s.seconds - s.exposed - s.garbage
        for s in slices
        if s.gpu_utilization_ratio is not None
        and s.exposed is not None
        and s.wait + s.compute >= _IN_THE_LOOP * s.seconds
    ]
    return max(0.0, sum(idle)) if idle else None


def _gpu_slowed(slices: Sequence[Slice]) -> float | None:
    known = [s for s in slices if s.gpu_clock_ratio is not None]
    if not known:
        return None
    return sum(s.compute * max(0.0, 1.0 - (s.gpu_clock_ratio or 0.0)) for s in known if HELD_BACK & {*s.gpu_throttled})


def _sum(slices: Sequence[Slice], of: Callable[[Slice], float]) -> float:
    return sum(of(piece) for piece in slices)


def _each(slices: Sequence[Slice], of: Callable[[Slice], float], count: Callable[[Slice], int]) -> float | None:
    many = _sum(slices, count)
    return _sum(slices, of) / many if many else None


def _all(values: Sequence[float | None]) -> float | None:
    """The sum, None if any part of it is not known."""
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _most_common(values: Sequence[Any]) -> Any:
    seen = Counter(v for v in values if v is not None).most_common(1)
    return seen[0][0] if seen else None
