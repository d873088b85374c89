"""The figures of the log's samples that a report reads, by event."""

from __future__ import annotations

from typing import Final

GPU_NUMBERS: Final = (
    "utilization_ratio",
    "sm_active_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "sm_clock_hertz",
    "temperature_celsius",
)
HOST_NUMBERS: Final = (
    "cpu_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "process_resident_memory_bytes",
    "workers_bytes",
    "shared_memory_bytes",
)
WORKERS_NUMBERS: Final = (
    "workers",
    "ready_batches",
    "cpu_ratio",
    "runnable_ratio",
    "blocked_ratio",
)
