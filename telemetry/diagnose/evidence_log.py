"""Evidence as a field of the log. Users' queries and stored logs rely on these names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.records import RankPace


def evidence_field(evidence: Evidence) -> dict[str, Any]:
    """The figures that were measured. The others are left out."""
    field = _loop(evidence) | _delivery(evidence) | _workers(evidence) | _machine(evidence)
    if evidence.peers:
        field["paces"] = [_pace(pace) for pace in (evidence.pace, *evidence.peers)]
    if evidence.earlier_paces:
        field["earlier_paces"] = [_pace(pace) for pace in evidence.earlier_paces]
    told = {name: round(value, 6) if isinstance(value, float) else value for name, value in field.items()}
    told = {name: value for name, value in told.items() if value is not None}
    if evidence.workers.cpu_ratio is not None and evidence.workers.runnable_ratio is None:
        told["worker_runnable_ratio"] = None  # no schedstat: blocked time may be run-queue delay
    return told


def _loop(evidence: Evidence) -> dict[str, Any]:
    epochs, checkpoints, garbage = evidence.epochs, evidence.checkpoints, evidence.garbage
    return {
        "window_seconds": evidence.seconds,
        "steps": evidence.steps,
        "batches_per_step": evidence.batches_per_step,
        "wait_seconds": evidence.wait_seconds,
        "exposed_seconds": evidence.exposed_wait_seconds,
        "compute_seconds": evidence.compute_seconds,
        "evaluation_seconds": evidence.evaluation_seconds,
        "edges": epochs.boundaries,
        "left": epochs.left,
        "edge_wait_seconds": epochs.boundary_wait_seconds,
        "around_edges_seconds": epochs.near_boundary_wait_seconds,
        "edge_share": epochs.boundary_ratio,
        "checkpoint_seconds": checkpoints.seconds,
        "checkpoints": checkpoints.steps,
        "checkpoint_interval_seconds": checkpoints.interval_seconds,
        "early_checkpoint_seconds": checkpoints.first_seconds,
        "around_checkpoints_seconds": checkpoints.extra_compute_seconds,
        "garbage_seconds": garbage.seconds,
        "garbage_wait_seconds": garbage.wait_seconds,
        "edge_garbage_seconds": garbage.boundary_wait_seconds,
        "source": evidence.source,
        "settings": evidence.settings,
        "own_fetch_cpu_ratio": evidence.own_fetch_cpu_ratio,
        "where": evidence.pace.where,
    }


def _delivery(evidence: Evidence) -> dict[str, Any]:
    delivery, sampler = evidence.delivery, evidence.sampler
    return {
        "outlier_wait_seconds": delivery.outlier_wait_seconds,
        "fetch_wait_seconds": delivery.fetch_wait_seconds,
        "transfer_wait_seconds": delivery.transfer_wait_seconds,
        "transfer_wait_long_fetch_seconds": delivery.transfer_wait_long_fetch_seconds,
        "head_of_line_seconds": delivery.head_of_line_wait_seconds,
        "blocking_worker": delivery.blocking_worker,
        "moving_seconds": delivery.transfer_seconds,
        "moving_from_busy_seconds": delivery.transfer_from_busy_seconds,
        "freeing_seconds": delivery.release_seconds,
        "receiving_cpu_seconds": delivery.receive_cpu_seconds,
        "ready_batches": delivery.ready_batches,
        "slack_seconds": delivery.slack_seconds,
        "sampler_seconds": sampler.wait_seconds,
        "edge_sampler_seconds": sampler.boundary_wait_seconds,
        "edge_share_of_sampler": sampler.boundary_ratio,
        "sampler_cpu_ratio": sampler.cpu_ratio,
    }


def _workers(evidence: Evidence) -> dict[str, Any]:
    workers = evidence.workers
    return {
        "workers": workers.count,
        "worker_cores": workers.allowed_cores,
        "fetches": workers.fetches,
        "fetch_seconds": workers.fetch_seconds,
        "fetch_cpu_seconds": workers.fetch_cpu_seconds,
        "longest_fetch_seconds": workers.longest_fetch_seconds,
        "slowest_fetch_seconds": workers.slowest_fetch_seconds,
        "long_fetches": [round(seconds, 3) for seconds in workers.long_fetch_seconds],
        "fetching_seconds": workers.fetching_seconds,
        "read_bytes": workers.read_bytes,
        "written_bytes": workers.written_bytes,
        "busy_ratio": workers.busy_ratio,
        "worker_cpu_ratio": workers.cpu_ratio,
        "worker_runnable_ratio": workers.runnable_ratio,
        "worker_blocked_ratio": workers.blocked_ratio,
        "packing_cores": workers.pickling_cores,
    }


def _machine(evidence: Evidence) -> dict[str, Any]:
    cpu, gpu = evidence.cpu, evidence.gpu
    return {
        "cores": cpu.cores,
        "cores_of_others": cpu.cores_of_others,
        "host_cpu_ratio": cpu.host_ratio,
        "process_cpu_per_step_seconds": cpu.process_seconds_per_step,
        "own_runnable_seconds": cpu.run_queue_delay_seconds,
        "throttled_ratio": cpu.throttled_ratio,
        "gpu_utilization_ratio": gpu.utilization_ratio,
        "gpu_idle_seconds": gpu.idle_seconds,
        "gpu_slowed_seconds": gpu.slowed_seconds,
    }


def _pace(pace: RankPace) -> dict[str, Any]:
    told = {
        "last_step": pace.last_step or None,
        "away_in": pace.away_in,
        "core_wait": pace.core_wait_seconds,
        "cores_busy": pace.cores_busy_ratio,
        "node": pace.node,
        "node_ranks": pace.node_ranks or None,
        "node_fastest": pace.node_fastest or None,
    }
    return {
        "rank": pace.rank,
        "seconds": pace.seconds,
        "steps": pace.steps,
        "compute": pace.compute_seconds,
        "exposed": pace.exposed_wait_seconds,
        "away": pace.away_seconds,
        "samples": pace.samples,
        "in_sync": pace.in_sync_samples,
        "on_gpu": pace.on_gpu,
        "cause": pace.cause,
        "where": pace.where,
        "phase": pace.phase,
        "still": pace.seconds_without_step,
        "still_in_sync": pace.waits_for_ranks,
        "gpu_busy": pace.gpu_busy_ratio,
    } | {name: value for name, value in told.items() if value is not None}
