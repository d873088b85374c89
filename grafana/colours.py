"""Each thing has the same colour everywhere. The names are from Grafana's own palette, so they fit both its themes."""

from __future__ import annotations

from typing import Final

GOOD: Final = "green"
FAIR: Final = "yellow"
BAD: Final = "red"
NEUTRAL: Final = "blue"

CATEGORIES: Final = {
    "compute": "green",
    "data_wait": "red",
    "evaluation": "blue",
    "checkpoint": "purple",
    "startup": "super-light-blue",
    "other": "#808080",
}
"""Colours of the ledger's categories, from the bottom of the stack upwards."""

LOST: Final = {
    "redone": "red",
    "down": "dark-red",
    "stuck": "orange",
    "restore": "purple",
    "replay": "yellow",
    "startup": "super-light-blue",
}
"""Colours of what restarts and hangs cost."""

CAUSES: Final = {
    "loader_on_training_thread": "dark-red",
    "workers_cpu_bound": "red",
    "workers_io_bound": "orange",
    "workers_throttled": "light-orange",
    "worker_startup": "yellow",
    "uneven_batches": "light-yellow",
    "batch_transfer": "dark-yellow",
    "worker_stuck": "dark-purple",
    "source_slow": "dark-orange",
    "straggler": "blue",
    "checkpoint": "purple",
    "gc_pause": "light-purple",
    "host_bound": "light-blue",
    "gpu_throttled": "dark-blue",
    "unknown": "#808080",
}
"""Reds and yellows: waiting for data. Blues and purples: other causes."""
