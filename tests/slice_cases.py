"""Slices of time for the tests of diagnose: healthy, starved, and one for each cause."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from telemetry.diagnosis.causes import CAUSES, advise
from telemetry.model.records import FETCH_BUCKETS, Histogram, RankPace, WorkersSample
from tests.slices import Slice, evidence_over

IDLE = WorkersSample(
    workers=4, training_workers=4, resident_memory_bytes=1, ready_batches=0, fetching_seconds=0.0, fetches_total=0, fetch_duration=None,
    cpu_ratio=0.0, busy_ratio=0.0, runnable_ratio=0.0, blocked_ratio=0.0, read_bytes_per_second=0.0,
)  # fmt: skip


def a_slice(*, wait=0.0, compute=1.0, steps=10, seconds=None, **fields) -> Slice:
    whole = wait + compute + fields.get("checkpoint", 0.0) + fields.get("evaluation", 0.0)
    base = dict(
        seconds=whole if seconds is None else seconds, wait=wait, exposed=wait, boundary_wait=0.0, boundaries=0, compute=compute,
        evaluation=0.0, checkpoint=0.0, garbage=0.0, steps=steps, source="workers", process_cpu=compute, cores=8.0,
    )  # fmt: skip
    return Slice(**base | fields)


def with_workers(
    *, busy, cpu=0.0, runnable=0.0, blocked=0.0, ready=0, fetches=10, stuck=0.0, workers=4, **fields
) -> Slice:
    sample = dataclasses.replace(
        IDLE, workers=workers, training_workers=workers, busy_ratio=busy, cpu_ratio=cpu, runnable_ratio=runnable, blocked_ratio=blocked,
        ready_batches=ready, fetching_seconds=stuck,
    )  # fmt: skip
    seconds = fields.get("wait", 0.0) + fields.get("compute", 1.0)
    return a_slice(workers=sample, fetches=fetches, fetch_busy=busy * workers * seconds, **fields)


def pace(rank: int, *, steps=10, compute=1.0, exposed=0.0, away=0.0, **fields) -> RankPace:
    """Over one second, or as many as the window has: only what comes to a step counts."""
    return RankPace(
        rank=rank, seconds=1.0, steps=steps, compute_seconds=compute, exposed_wait_seconds=exposed, away_seconds=away,
        **fields,
    )  # fmt: skip


STARVED = dict(wait=0.6, compute=0.4)
CASES = {
    "loader_on_training_thread": a_slice(source="training_thread", **STARVED),
    "source_slow": a_slice(source="watched", **STARVED),
    "workers_cpu_bound": with_workers(busy=0.99, cpu=0.90, blocked=0.09, **STARVED),
    "workers_io_bound": with_workers(busy=0.99, cpu=0.10, blocked=0.89, **STARVED),
    "workers_throttled": with_workers(busy=0.99, cpu=0.45, runnable=0.50, blocked=0.04, **STARVED),
    "uneven_batches": with_workers(busy=0.4, cpu=0.3, blocked=0.1, wait=0.3, compute=0.7, workers=4, fetches=10),
    "uneven_batches, others ready": with_workers(busy=0.4, cpu=0.4, ready=3, outlier_wait=0.5, **STARVED),
    "batch_transfer": with_workers(busy=0.2, cpu=0.2, ready=3, **STARVED),
    "worker_stuck": with_workers(busy=0.9, cpu=0.1, blocked=0.8, stuck=40.0, fetches=100, **STARVED),
    "worker_startup": with_workers(busy=0.3, cpu=0.3, boundary_wait=0.55, boundaries=2, **STARVED),
    "batch_transfer, matched": with_workers(
        busy=0.6, cpu=0.5, blocked=0.1, fetch_wait=0.1, transfer_wait=0.4, outlier_wait=0.5, **STARVED
    ),
    "uneven_batches, matched": with_workers(
        busy=0.4, cpu=0.4, ready=3, fetch_wait=0.4, transfer_wait=0.1, head_of_line=0.3, **STARVED
    ),
    "workers_io_bound, matched": with_workers(
        busy=0.99, cpu=0.1, blocked=0.89, fetch_wait=0.5, transfer_wait=0.1, **STARVED
    ),
    "workers_cpu_bound, transferred late": with_workers(  # a busy GIL makes its queue wait
        busy=0.97, cpu=0.9, blocked=0.07, fetch_wait=0.2, transfer_wait=0.4, workers=1, fetches=10, **STARVED
    ),
    "workers_throttled, as the training thread is": with_workers(
        busy=0.2, cpu=0.2, fetch_wait=0.1, transfer_wait=0.5, own_runnable=0.6, **STARVED
    ),
    "workers_throttled, as the training thread is whenever it wakes": with_workers(
        busy=0.2, cpu=0.2, fetch_wait=0.1, transfer_wait=0.5, own_runnable=0.2, own_cpu=0.05, **STARVED
    ),
    "workers_throttled, crowding out the training thread": with_workers(
        busy=0.9, cpu=0.3, runnable=0.6, wait=0.0, compute=1.0, own_runnable=0.5, process_cpu=0.5, cores=2.0
    ),
    "batch_transfer, on a busy machine": with_workers(
        busy=0.2, cpu=0.2, fetch_wait=0.1, transfer_wait=0.5, own_runnable=0.2, **STARVED
    ),
    "workers_throttled, supply and compute alike": with_workers(
        busy=0.8, cpu=0.05, runnable=0.7, blocked=0.05, fetch_wait=0.3, transfer_wait=0.0, fetches=20, **STARVED
    ),
    "workers_cpu_bound, no schedstat": with_workers(busy=0.99, cpu=0.9, runnable=None, blocked=None, **STARVED),
    "workers_io_bound, no schedstat": with_workers(busy=0.99, cpu=0.1, runnable=None, blocked=None, **STARVED),
    "workers_throttled, no schedstat": with_workers(
        busy=0.99, cpu=0.4, runnable=None, blocked=None, host_cpu_ratio=0.99, **STARVED
    ),
    "workers_throttled, by a quota, no schedstat": with_workers(
        busy=0.99, cpu=0.4, runnable=None, blocked=None, throttled_ratio=0.9, host_cpu_ratio=0.1, **STARVED
    ),
    "straggler": a_slice(peers=(pace(1, compute=0.3, exposed=0.7), pace(2))),
    "straggler, in its compute": a_slice(samples=50, in_sync=40, peers=(pace(1, stack_samples=50, in_sync_samples=2),)),
    "straggler, on GPUs": a_slice(
        samples=50,
        in_sync=40,
        gpu_utilization_ratio=0.99,
        peers=(pace(1, stack_samples=50, in_sync_samples=2, on_gpu=True, gpu_busy_ratio=0.5),),
    ),
    "straggler, out of its steps": a_slice(peers=(pace(1, compute=0.5, exposed=0.0, away=0.5),)),
    "host_bound": a_slice(gpu_utilization_ratio=0.6),
    "gpu_throttled": a_slice(gpu_utilization_ratio=1.0, gpu_clock_ratio=0.5, gpu_throttled=("hw_thermal",)),
    "checkpoint": a_slice(compute=0.5, checkpoint=0.5),
    "recompiling": a_slice(compute=1.0, recompilations=5, recompile_seconds={"forward at model.py:12": 0.4}),
    "gc_pause": a_slice(source="training_thread", compute=1.0, garbage=0.4),
    "unknown": a_slice(source="workers", workers=None, **STARVED),
}


# -- properties ---------------------------------------------------------------------------------------------------

amount = st.floats(0, 1e6) | st.sampled_from([0.0, 1e-9])
ratio = st.floats(0, 1) | st.none()
samples = st.builds(
    WorkersSample, workers=st.integers(0, 64), training_workers=st.integers(0, 64), resident_memory_bytes=st.integers(0, 1 << 40),
    ready_batches=st.none() | st.integers(0, 1000), fetching_seconds=amount, fetches_total=st.integers(0, 1 << 40),
    fetch_duration=st.none() | st.lists(st.integers(0, 9), min_size=len(FETCH_BUCKETS) + 1, max_size=len(FETCH_BUCKETS) + 1)
    .map(lambda counts: Histogram(FETCH_BUCKETS, tuple(counts), 1.0)), cpu_ratio=ratio, busy_ratio=ratio, runnable_ratio=ratio, blocked_ratio=ratio,
    read_bytes_per_second=st.none() | amount, allowed_cores=st.none() | st.integers(1, 512), pickling_ratio=st.none() | amount,
    written_bytes_per_second=st.none() | amount | st.floats(0, 1e12),
    fetched=st.dictionaries(st.integers(1, 4), st.tuples(st.integers(0, 10**6), amount), max_size=4),
)  # fmt: skip
paces = st.builds(
    RankPace, rank=st.integers(0, 9), seconds=amount, steps=st.integers(0, 10**6), compute_seconds=amount,
    exposed_wait_seconds=st.none() | amount, away_seconds=amount, stack_samples=st.integers(0, 100),
    in_sync_samples=st.integers(0, 100), cause=st.none() | st.sampled_from(list(CAUSES)),
    where=st.none() | st.just("f (train.py:1)"),
)  # fmt: skip
slices = st.builds(
    Slice, seconds=amount, wait=amount, exposed=st.none() | amount, boundary_wait=amount, boundaries=st.integers(0, 100),
    compute=amount, evaluation=amount, checkpoint=amount, garbage=amount, steps=st.integers(0, 10**6), batches=st.integers(0, 10**6),
    near_boundaries=st.floats(-100.0, 100.0), outlier_wait=amount, checkpoint_steps=st.integers(0, 10**6), checkpoint_steps_compute=amount,
    source=st.sampled_from([None, "workers", "training_thread", "watched", "of a newer version"]),
    process_cpu=st.none() | amount, fetches=st.none() | st.integers(0, 10**6), fetch_busy=st.none() | amount,
    workers=st.none() | samples, cores=st.floats(0.05, 512), throttled_ratio=ratio, gpu_utilization_ratio=ratio,
    fetch_wait=amount, transfer_wait=amount, head_of_line=amount, timed_fetch=amount, timed_fetch_cpu=amount, startup=amount,
    release=amount, releases=st.integers(0, 10**6),
    parts=st.none() | st.dictionaries(st.sampled_from(["forward", "backward", "compile"]), amount),
    own_runnable=st.none() | amount, samples=st.integers(0, 100), in_sync=st.integers(0, 100), host_cpu_ratio=ratio,
    where=st.none() | st.just("f (train.py:1)"), peers=st.lists(paces, max_size=3).map(tuple), gpu_clock_ratio=ratio,
    gpu_throttled=st.lists(st.sampled_from(["hw_thermal", "sw_power_cap", "new"]), max_size=2).map(tuple),
    settings=st.sampled_from([
        {}, {"prefetch_factor": None, "in_order": True}, {"prefetch_factor": 64}, {"persistent_workers": True, "num_workers": 3},
        {"sharing_strategy": "file_descriptor", "in_order": False, "num_workers": 2}, {"loader_used_again": False},
    ]),
    transfer_wait_long=amount, matched=st.integers(0, 10**6), from_busy=st.integers(0, 10**6), transfer_wait_busy=amount, left=st.integers(0, 100),
    host_cores=st.integers(0, 512), quota=st.none() | st.floats(0.01, 512), quota_used=st.none() | amount,
)  # fmt: skip


def first(cause: str, part: Slice):
    """The first advice for a slice."""
    return advise(cause, evidence_over([part]))[0]
