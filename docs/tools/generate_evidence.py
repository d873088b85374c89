"""Writes the generated part of output.md: ``python docs/tools/generate_evidence.py``.

The names come from the code that writes the log: `telemetry.diagnosis.evidence` and
`telemetry.records`. What each is stands here. A name without a meaning is an error, and so is a meaning
without a name.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

from telemetry.diagnosis import evidence as records
from telemetry.diagnosis.evidence import evidence_field
from telemetry.records import RankPace, WorkersSample, mean_of

PAGE: Final = Path(__file__).resolve().parents[1] / "output.md"
BEGIN: Final = "<!-- begin generated: `make docs-reference` writes this part from docs/tools/generate_evidence.py -->\n"
END: Final = "<!-- end generated -->\n"

_HEAD: Final = "| Field | Unit | Meaning |\n| --- | --- | --- |\n"

S, N, RATIO, BYTES, CORES, TEXT = "seconds", "", "0 to 1", "bytes", "cores", "text"

EVIDENCE: Final = {
    "window_seconds": (S, "length of the window"),
    "steps": (N, "steps that ended in the window"),
    "batches_per_step": (N, "batches that a step takes, mostly 1"),
    "wait_seconds": (S, "wait in the window"),
    "exposed_seconds": (S, "exposed wait in the window"),
    "compute_seconds": (S, "compute in the window"),
    "evaluation_seconds": (S, "time in evaluations"),
    "edges": (N, "epoch boundaries: iterations that began"),
    "left": (N, "iterations that were left before their end"),
    "edge_wait_seconds": (S, "wait at epoch boundaries: end and start of an iteration, and its first batch"),
    "around_edges_seconds": (S, "how much longer than others the batches next to epoch boundaries were waited for"),
    "edge_share": (
        RATIO,
        "share of the training loop in waits at epoch boundaries, if epochs are longer than a window",
    ),
    "checkpoint_seconds": (S, "time to write checkpoints"),
    "checkpoints": (N, "steps with a checkpoint"),
    "checkpoint_interval_seconds": (S, "training time between the newest two checkpoints; 0 if the window has several"),
    "early_checkpoint_seconds": (S, "mean time of the first checkpoints of the run"),
    "around_checkpoints_seconds": (
        S,
        "how much longer the compute of steps with a checkpoint took than of others",
    ),
    "garbage_seconds": (S, "garbage collection on the training thread"),
    "garbage_wait_seconds": (S, "the part of it in waits inside an epoch"),
    "edge_garbage_seconds": (S, "the part of it in waits at epoch boundaries"),
    "source": (TEXT, "where batches come from: `training_thread`, `workers`, `watched` or `read_ahead`"),
    "settings": (N, "settings of the loader, by the names of DataLoader's arguments"),
    "own_fetch_cpu_ratio": (RATIO, "share of the training thread's own fetches that ran on a core"),
    "where": (TEXT, "the line of your code in most samples of the training thread"),
    "outlier_wait_seconds": (S, "wait in single steps that waited much longer than the steps around them"),
    "fetch_wait_seconds": (S, "fetch wait"),
    "transfer_wait_seconds": (S, "transfer wait"),
    "transfer_wait_long_fetch_seconds": (
        S,
        "transfer wait while the worker was in a fetch much longer than its usual ones",
    ),
    "head_of_line_seconds": (S, "fetch wait with head-of-line blocking"),
    "blocking_worker": (N, "number of the worker that was waited for longest with head-of-line blocking"),
    "moving_seconds": (S, "mean time to transfer a batch of a worker that is not busy"),
    "moving_from_busy_seconds": (S, "mean time to transfer a batch of a busy worker"),
    "freeing_seconds": (S, "mean time of the training thread to free a batch; part of the compute"),
    "receiving_cpu_seconds": (S, "mean CPU time of the training thread to receive and unpickle a batch"),
    "ready_batches": (N, "mean number of ready batches in the result queues"),
    "slack_seconds": (S, "mean slack of a batch"),
    "sampler_seconds": (S, "time of DataLoader's sampler in waits inside an epoch"),
    "edge_sampler_seconds": (S, "time of DataLoader's sampler in waits at epoch boundaries"),
    "edge_share_of_sampler": (RATIO, "the part of `edge_share` that is the sampler's"),
    "sampler_cpu_ratio": (RATIO, "share of the sampler's time on a core"),
    "workers": (N, "number of workers"),
    "worker_cores": (CORES, "cores that the workers may use, if they may use fewer than the rank"),
    "fetches": (N, "fetches that ended in the window"),
    "fetch_seconds": (S, "mean time of a fetch"),
    "fetch_cpu_seconds": (S, "mean CPU time of a fetch"),
    "longest_fetch_seconds": (S, "upper bound of all fetches"),
    "slowest_fetch_seconds": (S, "mean time of a fetch of the slowest worker"),
    "long_fetches": (S, "fetches of more than a second: how long each was in progress when last seen"),
    "fetching_seconds": (S, "duration so far of the longest fetch in progress"),
    "read_bytes": (BYTES, "read from storage by all workers"),
    "written_bytes": (BYTES, "written by all workers, with the pickled part of batches"),
    "busy_ratio": (RATIO, "share of the time in which a worker is busy"),
    "worker_cpu_ratio": (RATIO, "share of the time in fetches in which a worker is running"),
    "worker_runnable_ratio": (
        RATIO,
        "share of the time in fetches in which a worker is runnable; null if unknown",
    ),
    "worker_blocked_ratio": (RATIO, "share of the time in fetches in which a worker is blocked"),
    "packing_cores": (CORES, "cores that the workers use outside of fetches, for pickling"),
    "cores": (CORES, "cores that this rank may use and no other process uses"),
    "cores_of_others": (CORES, "cores that other processes use"),
    "host_cpu_ratio": (RATIO, "use of all cores of the machine"),
    "process_cpu_per_step_seconds": (S, "CPU time of the training process for a step, without its workers"),
    "own_runnable_seconds": (S, "run-queue delay of the training thread"),
    "throttled_ratio": (RATIO, "share of the periods in which the cgroup's CPU quota was used up"),
    "gpu_utilization_ratio": (RATIO, "share of the time in which the GPU ran a kernel"),
    "gpu_idle_seconds": (S, "time of the training loop without a kernel and without a wait"),
    "gpu_slowed_seconds": (S, "time lost because the GPU's clock was throttled"),
    "paces": (N, "the pace of this rank, and then those of the ranks that it may wait for"),
    "earlier_paces": (N, "paces of this rank at the time of older paces of the others"),
}
"""Unit and meaning of each field that `evidence_field` writes."""

PACE: Final = {
    "rank": (N, "the rank"),
    "seconds": (S, "length of its window"),
    "steps": (N, "steps that ended in it"),
    "compute": (S, "compute in it"),
    "exposed": (S, "exposed wait in it"),
    "away": (S, "time in it that is neither wait nor compute"),
    "samples": (N, "samples of the training thread while it computed"),
    "in_sync": (N, "samples of these in calls in which ranks wait for one another"),
    "on_gpu": (N, "whether it trains on a GPU"),
    "cause": (TEXT, "the cause of its open stall"),
    "where": (TEXT, "the line of your code in most samples, outside of calls in which ranks wait"),
    "phase": (TEXT, "the phase that it is in: an evaluation, a checkpoint, or a debugger that has paused it"),
    "still": (S, "time since its newest step"),
    "still_in_sync": (N, "whether it has spent this time in calls in which ranks wait for one another"),
    "gpu_busy": (RATIO, "share of the time in which its GPU ran something"),
    "last_step": (N, "steps of the run that had ended at the end of the window"),
    "away_in": (TEXT, "the category of the ledger with most of `away`"),
    "core_wait": (S, "run-queue delay of its training thread"),
    "cores_busy": (RATIO, "use of all cores of its machine"),
    "node": (TEXT, "its node, if it is another one"),
    "node_ranks": (N, "number of ranks on that node"),
    "node_fastest": (N, "whether it is one of the fastest of them"),
}
"""Unit and meaning of each field of an entry of `paces`."""

STALL: Final = {
    "lost_seconds": (S, "what each cause has cost in the stall so far"),
    "share_ratio": (RATIO, "the share of the first cause, if others cost about as much"),
    "also": (N, "these other causes: `cause`, `share_ratio`, `advice`"),
    "straggler_rank": (N, "the straggler"),
    "straggler_node": (TEXT, "its node"),
    "straggler_reason": (TEXT, "why it is slow"),
    "stuck_for_seconds": (S, "in a hang: time without progress"),
    "stuck_in": (TEXT, "in a hang: the category of the ledger that the training thread is in"),
    "stuck_at": (TEXT, "in a hang: the innermost frames of the training thread"),
    "lines": (N, "[the lines](lines.md) in which the time was spent"),
    "lines_of": (TEXT, "of what these are shares"),
    "line_samples": (N, "number of samples"),
    "line_verdict": (TEXT, "a sentence on the first line"),
}
"""Fields that only some stalls have. `stall_fields` adds them."""

WORKERS: Final = {
    "workers": (N, "number of workers"),
    "training_workers": (N, "workers of loaders that give training batches"),
    "resident_memory_bytes": (BYTES, "resident memory of all workers"),
    "ready_batches": (N, "mean number of ready batches in the result queues"),
    "fetching_seconds": (S, "duration so far of the longest fetch in progress"),
    "fetches_total": (N, "fetches of the run so far"),
    "cpu_ratio": (RATIO, "share of the time in which a worker is running, in a fetch"),
    "busy_ratio": (RATIO, "share of the time in which a worker is busy"),
    "runnable_ratio": (RATIO, "share of the time in which a worker is runnable"),
    "blocked_ratio": (RATIO, "share of the time in which a worker is blocked; the three add up to `busy_ratio`"),
    "read_bytes_per_second": ("bytes/s", "read from storage by all workers"),
    "slack_seconds": (S, "mean slack of a batch"),
    "fetch_wait_seconds_total": (S, "fetch wait of the run so far"),
    "transfer_wait_seconds_total": (S, "transfer wait of the run so far"),
    "head_of_line_seconds_total": (S, "fetch wait of the run so far with head-of-line blocking"),
    "matched_total": (N, "batches of the run so far that were matched with their fetch"),
    "from_busy_total": (N, "batches of these whose worker was busy during their transfer"),
    "transfer_wait_busy_worker_seconds_total": (S, "transfer wait of the run so far for these"),
    "transfer_wait_long_fetch_seconds_total": (
        S,
        "the part of it with the worker in a fetch much longer than its usual ones",
    ),
    "head_of_line_batches": (N, "finished batches that wait behind one that is not finished"),
    "head_of_line_worker": (N, "number of the worker that fetches that one"),
    "head_of_line_since_seconds": (S, "how long that fetch has taken"),
    "written_bytes_per_second": ("bytes/s", "written by all workers, with the pickled part of batches"),
    "allowed_cores": (CORES, "cores that all training workers together may use"),
    "packing_ratio": (RATIO, "share of the time in which a worker is running outside of fetches, for pickling"),
}
"""Unit and meaning of each field of the event ``workers``."""


def page() -> str:
    """The whole document, with its generated part made anew."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the marks of the generated part: {BEGIN}{END}")
    return f"{before}{BEGIN}\n{generated()}\n{END}{after}"


def generated() -> str:
    """The tables of fields."""
    evidence = written_evidence()
    parts = (
        ("### Of a window", list(evidence), EVIDENCE),
        ("### Of a pace", list(evidence["paces"][0]), PACE),
        ("### Of some stalls", list(STALL), STALL),
        ("### Of the event `workers`", written_workers(), WORKERS),
    )
    return "\n".join(f"{title}\n\n{_HEAD}{_rows(title, names, told)}" for title, names, told in parts)


def written_evidence() -> dict[str, Any]:
    """The field ``evidence`` of a stall in which everything was measured."""
    groups = {
        spec.name: getattr(records, spec.type)
        for spec in dataclasses.fields(records.Evidence)
        if hasattr(records, str(spec.type))
    }
    pace = RankPace(**dict.fromkeys(RankPace.__struct_fields__, 1))
    told: dict[str, Any] = {name: _filled(kind) for name, kind in groups.items() if name != "pace"}
    told |= {"pace": pace, "peers": (pace,), "earlier_paces": (pace,)}
    told["workers"] = dataclasses.replace(told["workers"], long_fetch_seconds=(1.0,))
    return evidence_field(_filled(records.Evidence, **told))


def written_workers() -> list[str]:
    """The fields of the event ``workers``."""
    return list(mean_of([_filled(WorkersSample, deliveries=WorkersSample.__dataclass_fields__["deliveries"].default)]))


def _filled(kind: Any, **values: Any) -> Any:
    return kind(**{spec.name: 1 for spec in dataclasses.fields(kind)} | values)


def _rows(title: str, names: list[str], told: dict[str, tuple[str, str]]) -> str:
    if set(names) != set(told):
        raise ValueError(f"{title}: these fields need a meaning, or are no longer written: {set(names) ^ set(told)}")
    return "".join(f"| `{name}` | {told[name][0]}{' ' if told[name][0] else ''}| {told[name][1]} |\n" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
