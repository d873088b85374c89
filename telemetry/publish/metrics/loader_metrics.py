"""Metrics of the DataLoader's workers and of the batches they deliver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.publish.metrics.metric import COUNTER, GAUGE, HISTOGRAM, Metric, MetricGroup
from telemetry.records import Histogram

if TYPE_CHECKING:
    from telemetry.core.views import RunView
    from telemetry.records import WorkersSample

_NO_PROC: Final = "without `/proc`"
_NO_WORKERS: Final = "without workers, and at their first reading"
_NO_FETCH_TIMES: Final = f"{_NO_WORKERS}; for workers started before the agent, and for workers that are threads"
_NO_SCHEDSTAT: Final = f"{_NO_FETCH_TIMES}; where the kernel has no `schedstat`"


def _fetches(view: RunView) -> Histogram | None:
    """All fetches of the rank: those of workers, and those of the training thread without workers."""
    own, workers = view.own_fetches, view.worker_fetches
    if own is None or workers is None:
        return own or workers
    counts = tuple(a + b for a, b in zip(own.counts, workers.counts, strict=True))
    return Histogram(own.bounds, counts, own.total + workers.total)


FETCHES: Final[MetricGroup[Histogram]] = MetricGroup(
    record=_fetches,
    absent="before the first fetch that the agent saw end",
    metrics=(
        Metric(
            name="training_loader_fetch_duration_seconds",
            type=HISTOGRAM,
            unit="seconds",
            help="Time that a worker took to fetch a batch; without workers, that the training thread took.",
            details="Covers all workers of the run so far.",
            read=lambda fetches: fetches,
        ),
    ),
)

WORKERS: Final[MetricGroup[WorkersSample]] = MetricGroup(
    record=lambda view: view.workers,
    absent=f"{_NO_PROC}, and before the first sample",
    metrics=(
        Metric(
            name="training_loader_workers",
            type=GAUGE,
            unit="processes",
            help="Live DataLoader workers of this rank.",
            details=(
                "Includes workers that are threads of the training process. 0 with `num_workers=0` and between epochs."
            ),
            read=lambda workers: workers.workers,
        ),
        Metric(
            name="training_loader_workers_memory_bytes",
            type=GAUGE,
            unit="bytes",
            help="Resident memory of the workers, summed.",
            details="Pages that workers share are counted once per worker. Workers that are threads count 0.",
            read=lambda workers: workers.resident_memory_bytes,
        ),
        Metric(
            name="training_loader_worker_busy_ratio",
            type=GAUGE,
            unit="ratio",
            help="Share of time in which the workers were in a fetch.",
            details="Mean over the workers. It is the sum of the next three.",
            absent=_NO_FETCH_TIMES,
            read=lambda workers: workers.busy_ratio,
        ),
        Metric(
            name="training_loader_worker_cpu_ratio",
            type=GAUGE,
            unit="ratio",
            help="Share of time in which the workers ran on a core.",
            details="Near 1, the workers are CPU-bound.",
            absent=_NO_WORKERS,
            read=lambda workers: workers.cpu_ratio,
        ),
        Metric(
            name="training_loader_worker_runnable_ratio",
            type=GAUGE,
            unit="ratio",
            help="Share of time in which the workers were ready to run but had no core (run-queue delay).",
            details="There are too few cores, or a CPU limit applies.",
            absent=_NO_SCHEDSTAT,
            read=lambda workers: workers.runnable_ratio,
        ),
        Metric(
            name="training_loader_worker_blocked_ratio",
            type=GAUGE,
            unit="ratio",
            help="Share of time in which the workers were blocked in a fetch: storage, network, locks.",
            absent=_NO_SCHEDSTAT,
            read=lambda workers: workers.blocked_ratio,
        ),
        Metric(
            name="training_loader_ready_batches",
            type=GAUGE,
            unit="batches",
            help="Batches that are ready for the training thread.",
            absent=f"{_NO_PROC}; without workers; where the queue cannot report its size",
            read=lambda workers: workers.ready_batches,
        ),
        Metric(
            name="training_loader_slack_seconds",
            type=GAUGE,
            unit="seconds",
            help="How long a batch had been ready when it was requested, mean since the last sample.",
            details="It falls before the GPU becomes idle. 0: the training thread waits for every batch.",
            absent=(
                "where no batch could be matched with its fetch: no workers, workers started before the agent, "
                "`in_order=False`"
            ),
            read=lambda workers: workers.slack_seconds,
        ),
        Metric(
            name="training_loader_fetch_wait_seconds_total",
            type=COUNTER,
            unit="seconds",
            help="Fetch wait: time waiting for batches whose fetch had not ended when they were requested.",
            details="Up to the end of the fetch. Counts the matched batches, without the first of each epoch.",
            read=lambda workers: workers.deliveries.fetch_wait_seconds,
        ),
        Metric(
            name="training_loader_transfer_wait_seconds_total",
            type=COUNTER,
            unit="seconds",
            help="Transfer wait: time waiting for batches whose fetch had ended.",
            details=(
                "Pickling, sending, pinning and unpickling, and what the training thread itself does before `next()` "
                "returns: the sampler, garbage collections. Counts the same batches as the fetch wait."
            ),
            read=lambda workers: workers.deliveries.transfer_wait_seconds,
        ),
        Metric(
            name="training_loader_head_of_line_seconds_total",
            type=COUNTER,
            unit="seconds",
            help="Part of the fetch wait during which a later batch of another worker was ready.",
            read=lambda workers: workers.deliveries.head_of_line_wait_seconds,
        ),
        Metric(
            name="training_loader_head_of_line_batches",
            type=GAUGE,
            unit="batches",
            help="Finished batches that wait right now for an earlier batch.",
            details="The log (`workers`) has the worker they wait for, and since when.",
            read=lambda workers: workers.head_of_line_batches,
        ),
    ),
)
