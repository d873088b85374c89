"""Metrics of the training loop: steps, the ledger and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.publish.metrics.metric import COUNTER, GAUGE, HISTOGRAM, Metric, MetricGroup, MetricLabel
from telemetry.records import CATEGORIES

if TYPE_CHECKING:
    from telemetry.core.views import RunView
    from telemetry.publish.metrics.metric import Reading
    from telemetry.records import OwnTotals

CATEGORY: Final = MetricLabel("category", CATEGORIES)

SAMPLE_STATE: Final = MetricLabel("state", ("own", "in_sync"))

RUN_INFO: Final[MetricGroup[RunView]] = MetricGroup(
    record=lambda view: view,
    labels=(
        "node",
        "local_rank",
        "world_size",
        "launcher",
        "telemetry_version",
        "python_version",
        "torch_version",
        "job",
        "user",
        "account",
        "partition",
    ),
    label_values=lambda view: view.info,
    metrics=(
        Metric(
            name="training_run_info",
            type=GAUGE,
            help="Always 1. Where this rank runs and with which versions; join on run and rank.",
            details=(
                "`launcher` is `torchrun` (everything that sets `RANK` and `WORLD_SIZE`), `mpi`, `slurm`, `lightning`, "
                "`spawn` (`torch.multiprocessing.spawn`), `kubernetes` or `plain`. "
                "`job`, `user`, `account` and `partition` are what Slurm, LSF, PBS or Kubernetes (`JOB_NAME`, "
                "`POD_NAMESPACE`, `QUEUE_NAME`) say; empty where nothing tells. Prometheus calls the label `job` "
                "`exported_job`, because each target has a `job` already."
            ),
            read=lambda _: 1.0,
        ),
    ),
)

LOOP: Final[MetricGroup[RunView]] = MetricGroup(
    record=lambda view: view,
    metrics=(
        Metric(
            name="training_run_ended",
            type=GAUGE,
            help="1 once this rank has ended by itself, 0 before.",
            read=lambda view: view.ended,
        ),
        Metric(
            name="training_steps_total",
            type=COUNTER,
            unit="steps",
            help="Training steps that have ended.",
            read=lambda view: view.totals.steps,
        ),
        Metric(
            name="training_samples_total",
            type=COUNTER,
            unit="samples",
            help="Samples of the batches that the training took.",
            details=(
                "As many as there were indices. Batches that were only prefetched, those of an evaluation, and those "
                "that are drawn and thrown away after a restart do not count. Known from the second optimizer step on. "
                "Goes on over the attempts of a run, by rank. An attempt that did not know its own adds nothing."
            ),
            absent="if the size of a batch was not known ([Throughput](throughput.md))",
            read=lambda view: view.samples,
        ),
        Metric(
            name="training_tokens_total",
            type=COUNTER,
            unit="tokens",
            help="Tokens that the training took.",
            details=(
                "As `telemetry.tokens()` told them, else the positions of `input_ids` in the batches that the training "
                "took, padding included. Goes on over attempts as `training_samples_total` does."
            ),
            absent="if the script tells none, and no batch has `input_ids` or one is not known",
            read=lambda view: view.tokens,
        ),
        Metric(
            name="training_optimizer_steps_total",
            type=COUNTER,
            unit="steps",
            help="Steps of optimizers.",
            details="With gradient accumulation there are fewer than training steps, with several optimizers more.",
            read=lambda view: view.totals.optimizer_steps,
        ),
        Metric(
            name="training_step_duration_seconds",
            type=HISTOGRAM,
            unit="seconds",
            help="Duration of a training step: wait and compute.",
            details="Without evaluations and checkpoints within the step. The setting `step_buckets` gives the bounds.",
            read=lambda view: view.step_duration,
        ),
        Metric(
            name="training_wait_duration_seconds",
            type=HISTOGRAM,
            unit="seconds",
            help="Time that a training step waited for its batch.",
            details="The bounds are 1 ms and those of the setting `step_buckets`.",
            read=lambda view: view.wait_duration,
        ),
        Metric(
            name="training_time_seconds_total",
            type=COUNTER,
            unit="seconds",
            label=CATEGORY,
            help="Time of this rank by category; the categories add up to its wall clock.",
            details="Every second since the agent's start is in exactly one category.",
            read=lambda view: view.totals.ledger_seconds,
        ),
        Metric(
            name="training_exposed_wait_seconds_total",
            type=COUNTER,
            unit="seconds",
            help="Exposed wait: time waiting for data while the device had nothing to run.",
            details="Without a GPU the whole wait is exposed.",
            absent=(
                "on a GPU where the wait cannot be timed (`gpu_events` is off, or there are no CUDA events); where no "
                "step requested its batch in a way that the agent sees"
            ),
            read=lambda view: view.totals.exposed_wait_seconds,
        ),
        Metric(
            name="training_compute_samples_total",
            type=COUNTER,
            unit="samples",
            label=SAMPLE_STATE,
            help="Samples of the training thread in a step, by whether it waited for other ranks.",
            details=(
                "`in_sync`: in a call in which ranks wait for one another (a collective, the backward pass of DDP). "
                "`own`: anywhere else. On a GPU they show what the host does, not the device."
            ),
            absent="in a job of one rank",
            read=lambda view: _samples(view.totals.own),
        ),
        Metric(
            name="training_last_step_timestamp_seconds",
            type=GAUGE,
            unit="seconds",
            help="Unix time at which the newest step ended.",
            absent="before the first step has ended",
            read=lambda view: view.last_step_unix_seconds,
        ),
    ),
)


def _samples(own: OwnTotals) -> Reading:
    if not own.samples:
        return None
    return {"own": own.samples - own.in_sync_samples, "in_sync": own.in_sync_samples}
