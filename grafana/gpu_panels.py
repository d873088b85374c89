"""The GPUs of the ranks that are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grafana.panels import Query, fair_bad, graph
from grafana.selection import WORST, of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries

_NONE: Final = "No GPU, or no NVML"
_GPU: Final = "rank {{rank}}, GPU {{gpu}}"


def gpus() -> Iterator[timeseries.Panel]:
    """Activity, memory, power, and what holds the clocks back."""
    yield graph(
        "SM activity",
        "How much of each GPU worked: from hardware counters (the agent's, or else DCGM exporter's), on older GPUs the "
        "share of time in which the process ran a kernel. Low while the rank does not wait for data: kernels are too "
        "small, or the host is too slow; take a snapshot.",
        "percentunit",
        Query(f"{of('run_rank_gpu:training_gpu_sm_active:ratio')} {WORST}", _GPU),
        top=1,
        no_value=_NONE,
    )
    yield graph(
        "Utilisation",
        "Share of time in which any kernel ran. It says busy, not efficient: compare it with SM activity beside it.",
        "percentunit",
        Query(f"{of('run_rank_gpu:training_gpu_utilization:ratio')} {WORST}", _GPU),
        top=1,
        no_value=_NONE,
    )
    yield graph(
        "Occupancy, tensor cores, memory bandwidth",
        "Means over the chosen ranks, from hardware counters: the agent's on Hopper and newer, for tensor cores else "
        "DCGM exporter's. Tensor cores near zero in a model of matrix products: mixed precision is off. Memory "
        "bandwidth near one: the kernels wait for memory.",
        "percentunit",
        Query(f"avg({of('training_gpu_sm_occupancy_ratio')})", "warps resident"),
        Query(
            f"avg({of('training_gpu_tensor_active_ratio')}) or "
            f"avg({of('run_rank_gpu:training_gpu_info:max')} * on (uuid) group_left () uuid:dcgm_tensor_active:ratio)",
            "tensor cores active",
        ),
        Query(f"avg({of('training_gpu_memory_bandwidth_ratio')})", "memory bandwidth used"),
        top=1,
        no_value="Not measured: needs Hopper or newer, or DCGM exporter",
    )
    yield graph(
        "GPU memory in use",
        "Of what each GPU has, by all processes. Close to one, the next larger batch ends in an out-of-memory error; "
        "far below, a larger batch may make better use of it.",
        "percentunit",
        Query(f"{of('training_gpu_memory_used_bytes')} / {of('training_gpu_memory_total_bytes')} {WORST}", _GPU),
        steps=fair_bad(0.9, 0.97),
        top=1,
        no_value=_NONE,
    )
    yield graph(
        "Memory of PyTorch's allocator",
        "The largest over the chosen ranks. Reserved far above allocated is fragmentation; allocated that grows step "
        "by step is a tensor that is kept.",
        "bytes",
        Query(f"max({of('training_cuda_memory_allocated_bytes')})", "allocated by tensors"),
        Query(f"max({of('training_cuda_memory_reserved_bytes')})", "reserved"),
        Query(f"max({of('training_gpu_memory_used_bytes')})", "in use on the GPU"),
        no_value="No CUDA",
    )
    yield graph(
        "Power",
        "Power draw. A GPU that works draws most of its limit; one that waits for data draws far less than its "
        "neighbours.",
        "watt",
        Query(f"{of('training_gpu_power_watts')} {WORST}", _GPU),
        no_value=_NONE,
    )
    yield graph(
        "SM clock, of the highest",
        "The clock of each GPU as a share of the highest it has. Lower than its neighbours': see what holds it back, "
        "and its temperature.",
        "percentunit",
        Query(f"{of('training_gpu_sm_clock_hertz')} / {of('training_gpu_sm_clock_max_hertz')} {WORST}", _GPU),
        top=1,
        no_value=_NONE,
    )
    yield graph(
        "Temperature",
        "Of each GPU. Around 85 to 90 degrees most lower their clocks by themselves: look at the air flow of the node.",
        "celsius",
        Query(f"{of('training_gpu_temperature_celsius')} {WORST}", _GPU),
        steps=fair_bad(80, 88),
        no_value=_NONE,
    )
    yield graph(
        "GPUs held back, by reason",
        "GPUs of the chosen ranks whose clock is lowered right now. Heat and power brakes are faults of the machine "
        "and slow the whole job; the power cap is what a well-used GPU runs into.",
        "short",
        Query(f"sum by (reason) ({of('training_gpu_throttled')}) > 0", "{{reason}}"),
        no_value="No GPU is held back",
    )
