"""PyTorch's CUDA caching allocator, where CUDA is in use. Never imports torch and never initialises CUDA."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from telemetry.records import TorchMemorySample

if TYPE_CHECKING:
    from collections.abc import Callable


def cuda() -> Any | None:
    """``torch.cuda`` if torch is loaded and CUDA initialised, else None."""
    torch = sys.modules.get("torch")
    module = getattr(torch, "cuda", None)
    try:
        return module if module is not None and module.is_initialized() else None
    except Exception:
        return None  # torch is half imported


class TorchMemorySource:
    """What tensors hold, and what the allocator holds.

    Args:
        device: index of the training thread's device; an agent thread has a current device of its own.
    """

    name = "torch_memory"

    def __init__(self, device: Callable[[], int]) -> None:
        self._device = device

    def read(self) -> TorchMemorySample | None:
        """None while CUDA is not in use: that is no failure."""
        module = cuda()
        if module is None:
            return None
        device = self._device()
        return TorchMemorySample(module.memory_allocated(device), module.memory_reserved(device))

    def close(self) -> None:
        """Nothing is held."""
