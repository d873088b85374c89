"""The GPUs of the chosen ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import shared_panels
from grafana.panels import Query, graph
from grafana.selection import RUN_SCOPE, of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries


def gpus() -> Iterator[timeseries.Panel]:
    """Activity, memory, power, and reasons for low clocks."""
    yield shared_panels.sm_activity(
        RUN_SCOPE,
        "Low while the rank does not wait for data: kernels are too small, or the host is too slow; take a snapshot.",
    )
    yield shared_panels.utilisation(
        RUN_SCOPE, "This means busy, not efficient: compare it with the SM activity beside it."
    )
    yield graph(
        "Occupancy, tensor cores, memory bandwidth",
        "Means over the chosen ranks, from hardware counters: the agent's on Hopper and newer, for tensor cores else "
        "DCGM exporter's. Tensor cores near zero in a model of matrix products mean that mixed precision is off. "
        "Memory bandwidth near one means that kernels wait for memory.",
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
    yield shared_panels.gpu_memory(
        RUN_SCOPE,
        "Close to one, a larger batch would run out of memory. Far below, a larger batch may use the GPU better.",
    )
    yield graph(
        "Memory of PyTorch's allocator",
        "The largest over the chosen ranks. Reserved far above allocated means fragmentation. If allocated grows "
        "with every step, a tensor is kept.",
        "bytes",
        Query(f"max({of('training_cuda_memory_allocated_bytes')})", "allocated by tensors"),
        Query(f"max({of('training_cuda_memory_reserved_bytes')})", "reserved"),
        Query(f"max({of('training_gpu_memory_used_bytes')})", "in use on the GPU"),
        no_value="No CUDA",
    )
    yield shared_panels.power(
        RUN_SCOPE,
        "A GPU that works draws most of its limit; one that waits for data draws far less than its neighbours.",
    )
    yield shared_panels.sm_clock(
        RUN_SCOPE, "If it is lower than its neighbours', look at the throttle reasons and its temperature."
    )
    yield shared_panels.temperature(RUN_SCOPE)
    yield shared_panels.held_back(RUN_SCOPE, "they slow the whole job")
