"""Torch's switches that make steps longer as long as they are on. They are read, and never changed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from telemetry.model.records import ANOMALY, CUDA_BLOCKING, DETERMINISTIC, PROFILER, SYNC_DEBUG
from telemetry.seams.device import cuda

if TYPE_CHECKING:
    from collections.abc import Iterator


def switches_on() -> tuple[str, ...]:
    """The names of the switches that are on now. Takes some microseconds."""
    torch = sys.modules.get("torch")
    try:
        return tuple(_on(torch)) if torch is not None else ()
    except Exception:  # torch is being imported, or has no such switch
        return ()


def _on(torch: Any) -> Iterator[str]:
    if torch.is_anomaly_enabled():
        yield ANOMALY
    if torch.autograd.profiler._is_profiler_enabled:
        yield PROFILER
    if torch.are_deterministic_algorithms_enabled():
        yield DETERMINISTIC
    gpu = cuda()
    if gpu is not None:
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"}:
            yield CUDA_BLOCKING
        if gpu.get_sync_debug_mode():
            yield SYNC_DEBUG
