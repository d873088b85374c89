"""Label values: the closed sets of categories, causes, events and reasons."""

from __future__ import annotations

from typing import Final

STARTUP: Final = "startup"

DATA_WAIT: Final = "data_wait"
COMPUTE: Final = "compute"
EVALUATION: Final = "evaluation"
CHECKPOINT: Final = "checkpoint"
OTHER: Final = "other"

CATEGORIES: Final = (STARTUP, DATA_WAIT, COMPUTE, EVALUATION, CHECKPOINT, OTHER)
"""The categories of the ledger. Every second of a rank is in exactly one of them."""

_STUCK_IN: Final = {
    DATA_WAIT: "waiting for a batch",
    COMPUTE: "in the compute of a step",
    EVALUATION: "in an evaluation",
    CHECKPOINT: "in a checkpoint",
}


def stuck_in_words(category: str) -> str:
    """What a training thread is doing that is stuck in a category of the ledger, such as "waiting for a batch"."""
    return _STUCK_IN.get(category, f"in {category}")


CAUSES: Final = (
    "loader_on_training_thread",
    "workers_cpu_bound",
    "workers_io_bound",
    "workers_throttled",
    "worker_startup",
    "uneven_batches",
    "batch_transfer",
    "worker_stuck",
    "source_slow",
    "straggler",
    "checkpoint",
    "gc_pause",
    "host_bound",
    "gpu_throttled",
    "unknown",
)
"""Why a run loses time: the values of the ``cause`` label."""

RECORDED: Final = "recorded"
REFUSED: Final = "refused"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"

SNAPSHOT_RESULTS: Final = (RECORDED, REFUSED, FAILED, SKIPPED)
"""How a snapshot ends on a rank, the values of the ``result`` label: the trace was written; it was not recorded because
of another profiler or a limit; it failed; or this rank did not reach its steps."""

THROTTLE_REASONS: Final = (
    "sw_power_cap",
    "hw_slowdown",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "sync_boost",
    "applications_clocks",
    "display_clocks",
)
"""Why a GPU's clocks are reduced: the values of the ``reason`` label. The low clock of an idle GPU does not count."""
SLOWER: Final = "slower"

SNAPSHOT_OFF_REASONS: Final = (SLOWER,)
"""Why a run takes no more snapshots: the values of the ``reason`` label. ``slower``: steps stayed slower after one."""
