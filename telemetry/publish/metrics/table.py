"""All metrics, in the order of docs/METRICS.md."""

from __future__ import annotations

from typing import Final

from telemetry.publish.metrics.agent_metrics import AGENT
from telemetry.publish.metrics.attempt_metrics import ATTEMPTS
from telemetry.publish.metrics.change_metrics import CHANGES
from telemetry.publish.metrics.gpu_metrics import GPU, GPU_ENERGY, GPU_INFO, GPU_PRICE, TORCH_MEMORY
from telemetry.publish.metrics.loader_metrics import FETCHES, WORKERS
from telemetry.publish.metrics.loop_metrics import LOOP, RUN_INFO
from telemetry.publish.metrics.machine_metrics import HOST, PRESSURE, PROCESS
from telemetry.publish.metrics.memory_metrics import MEMORY_GROWTH
from telemetry.publish.metrics.metric import MetricSection
from telemetry.publish.metrics.stall_metrics import HANG, SNAPSHOTS, STALLS

SECTIONS: Final = (
    MetricSection("The training loop", (RUN_INFO, LOOP)),
    MetricSection("Stalls, changes and snapshots", (STALLS, HANG, CHANGES, SNAPSHOTS)),
    MetricSection("Attempts of the run", (ATTEMPTS,)),
    MetricSection("The GPU of this rank", (GPU_INFO, GPU, GPU_ENERGY, GPU_PRICE, TORCH_MEMORY)),
    MetricSection("The DataLoader and its workers", (WORKERS, FETCHES)),
    MetricSection("The process and the machine", (PROCESS, HOST, PRESSURE, MEMORY_GROWTH)),
    MetricSection("The agent itself", (AGENT,)),
)
