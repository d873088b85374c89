"""Memory of PyTorch's CUDA caching allocator. Never imports torch and never initialises CUDA."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from telemetry.core.samples import TorchMemorySample

if TYPE_CHECKING:
    from collections.abc import Callable


def cuda() -> Any | None:
    """``torch.cuda`` if torch is loaded and CUDA initialised, else None."""
    torch = sys.modules.get("torch")
    module = getattr(torch, "cuda", None)
    try:
        return module if module is not None and module.is_initialized() else None
    except Exception:
        return None  # torch is being imported


class TorchMemorySource:
    """The bytes allocated for tensors, and the bytes reserved by the allocator.

    Args:
        device: index of the training thread's device. It is passed because the agent thread has its own current device.
    """

    name = "torch_memory"

    def __init__(self, device: Callable[[], int]) -> None:
        self._device = device

    def read(self) -> TorchMemorySample | None:
        """One reading; None while CUDA is not in use, which is no failure."""
        module = cuda()
        if module is None:
            return None
        device = self._device()
        return TorchMemorySample(module.memory_allocated(device), module.memory_reserved(device))

    def close(self) -> None:
        """Nothing is held."""
