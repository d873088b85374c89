"""Metrics of the rank's GPU, from NVML and from PyTorch's CUDA allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.publish.metrics.metric import COUNTER, GAUGE, Metric, MetricGroup, MetricLabel
from telemetry.records import CATEGORIES, THROTTLE_REASONS

if TYPE_CHECKING:
    from telemetry.core.views import RunView
    from telemetry.records import GpuSample, TorchMemorySample

_NO_DEVICE: Final = "without NVML, and before the rank's device is known"
_NO_READING: Final = f"{_NO_DEVICE}; where the GPU or MIG slice does not support the reading"
_NO_GPM: Final = "without NVML; on GPUs older than Hopper, which have no hardware counters (GPM)"


def _place(gpu: GpuSample | None) -> dict[str, str]:
    return {} if gpu is None else {"gpu": str(gpu.index), "uuid": gpu.uuid}


GPU_INFO: Final[MetricGroup[GpuSample]] = MetricGroup(
    record=lambda view: view.gpu,
    labels=("gpu", "uuid", "name", "sm_active_source"),
    label_values=lambda gpu: {
        "gpu": str(gpu.index),
        "uuid": gpu.uuid,
        "name": gpu.name,
        "sm_active_source": gpu.sm_active_source or "none",
    },
    absent=_NO_DEVICE,
    metrics=(
        Metric(
            name="training_gpu_info",
            type=GAUGE,
            help="Always 1. The GPU of this rank and the source of its SM activity.",
            details=(
                "`sm_active_source` is the source of `training_gpu_sm_active_ratio`: `gpm` (hardware counters), "
                "`process` (share of time in which this process ran a kernel) or `none`."
            ),
            read=lambda _: 1.0,
        ),
    ),
)

GPU: Final[MetricGroup[GpuSample]] = MetricGroup(
    record=lambda view: view.gpu,
    labels=("gpu", "uuid"),
    label_values=_place,
    absent=_NO_READING,
    metrics=(
        Metric(
            name="training_gpu_utilization_ratio",
            type=GAUGE,
            unit="ratio",
            help="Share of time in which any kernel ran: busy, not efficient.",
            details="One small kernel after another reads 1.",
            read=lambda gpu: gpu.utilization_ratio,
        ),
        Metric(
            name="training_gpu_sm_active_ratio",
            type=GAUGE,
            unit="ratio",
            help="Share of the SMs that were active.",
            read=lambda gpu: gpu.sm_active_ratio,
        ),
        Metric(
            name="training_gpu_sm_occupancy_ratio",
            type=GAUGE,
            unit="ratio",
            help="Warps resident on the SMs, as a share of the maximum.",
            absent=_NO_GPM,
            read=lambda gpu: gpu.sm_occupancy_ratio,
        ),
        Metric(
            name="training_gpu_tensor_active_ratio",
            type=GAUGE,
            unit="ratio",
            help="Share of time in which the tensor cores were active.",
            absent=_NO_GPM,
            read=lambda gpu: gpu.tensor_active_ratio,
        ),
        Metric(
            name="training_gpu_memory_bandwidth_ratio",
            type=GAUGE,
            unit="ratio",
            help="Memory bandwidth in use, as a share of the maximum.",
            absent=_NO_GPM,
            read=lambda gpu: gpu.memory_bandwidth_ratio,
        ),
        Metric(
            name="training_gpu_memory_used_bytes",
            type=GAUGE,
            unit="bytes",
            help="GPU memory in use, by all processes.",
            read=lambda gpu: gpu.memory_used_bytes,
        ),
        Metric(
            name="training_gpu_memory_total_bytes",
            type=GAUGE,
            unit="bytes",
            help="Total memory of the GPU.",
            read=lambda gpu: gpu.memory_total_bytes,
        ),
        Metric(
            name="training_gpu_power_watts",
            type=GAUGE,
            unit="watts",
            help="Power draw of the GPU.",
            read=lambda gpu: gpu.power_watts,
        ),
        Metric(
            name="training_gpu_temperature_celsius",
            type=GAUGE,
            unit="celsius",
            help="Temperature of the GPU.",
            read=lambda gpu: gpu.temperature_celsius,
        ),
        Metric(
            name="training_gpu_sm_clock_hertz",
            type=GAUGE,
            unit="hertz",
            help="Clock frequency of the SMs.",
            read=lambda gpu: gpu.sm_clock_hertz,
        ),
        Metric(
            name="training_gpu_sm_clock_max_hertz",
            type=GAUGE,
            unit="hertz",
            help="Maximum clock frequency of the SMs.",
            read=lambda gpu: gpu.sm_clock_max_hertz,
        ),
        Metric(
            name="training_gpu_throttled",
            type=GAUGE,
            label=MetricLabel("reason", THROTTLE_REASONS),
            help="1 for each reason that limits the clocks right now, 0 for the others.",
            details="A low clock on an idle GPU is not throttling.",
            read=lambda gpu: gpu.throttled,
        ),
    ),
)

GPU_ENERGY: Final[MetricGroup[RunView]] = MetricGroup(
    # A counter must not disappear and come back: it keeps its value and its labels while NVML is down.
    record=lambda view: None if view.energy_gpu is None or view.totals.gpu_energy_joules is None else view,
    labels=("gpu", "uuid"),
    label_values=lambda view: _place(view.energy_gpu),
    absent=f"{_NO_DEVICE}; on GPUs older than Volta and MIG devices, which have no counter",
    metrics=(
        Metric(
            name="training_gpu_energy_joules_total",
            type=COUNTER,
            unit="joules",
            label=MetricLabel("category", CATEGORIES),
            help="Energy that the whole GPU has used since the agent's first reading, by category of the ledger.",
            details=(
                "The sum is the GPU's own counter, of all processes on it: ranks that share a GPU each show all of it. "
                "The split is an estimate: between two readings each category gets its share of the time. While NVML "
                "is down the value stays; the next reading adds what was used meanwhile."
            ),
            read=lambda view: view.totals.gpu_energy_joules,
        ),
    ),
)

GPU_PRICE: Final[MetricGroup[RunView]] = MetricGroup(
    record=lambda view: view,
    absent="without the setting `gpu_hour_price`",
    metrics=(
        Metric(
            name="training_gpu_hour_price",
            type=GAUGE,
            help="Price of an hour of one GPU, from the run's settings.",
            details=(
                "In the currency of the setting `gpu_hour_price`: use the same one for all runs. One rank counts as "
                "one GPU."
            ),
            read=lambda view: view.gpu_hour_price,
        ),
    ),
)

TORCH_MEMORY: Final[MetricGroup[TorchMemorySample]] = MetricGroup(
    record=lambda view: view.torch_memory,
    absent="until the process has initialised CUDA",
    metrics=(
        Metric(
            name="training_cuda_memory_allocated_bytes",
            type=GAUGE,
            unit="bytes",
            help="Memory that tensors occupy on the training thread's device.",
            read=lambda memory: memory.allocated_bytes,
        ),
        Metric(
            name="training_cuda_memory_reserved_bytes",
            type=GAUGE,
            unit="bytes",
            help="Memory that PyTorch's caching allocator has reserved on that device.",
            read=lambda memory: memory.reserved_bytes,
        ),
    ),
)
