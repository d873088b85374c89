"""What to do about memory that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.core.memory_records import CUDA, SHARED_MEMORY, TRAINING, WORKERS

if TYPE_CHECKING:
    from telemetry.core.memory_records import MemoryGrowth

_COPIED: Final = (
    "a list or dict of Python objects is copied on write, because reading an object changes its reference count; keep "
    "the data in numpy or Arrow arrays"
)

_BY_PART: Final = {
    TRAINING: (
        "the script keeps something of every step; look for lists of losses or outputs (append loss.item() or "
        "tensor.detach().clone() of what is needed) and for caches without a limit"
    ),
    WORKERS: (
        "the data set keeps something of every sample, or a library it uses leaks; look for caches without a limit "
        "(functools.lru_cache with maxsize=None, a dict), and for files and readers that stay open"
    ),
    SHARED_MEMORY: (
        "batches from the workers, or views of them, are kept; keep tensor.clone() of what is needed and drop the rest"
    ),
    CUDA: ("tensors on the GPU are kept; append loss.item() instead of the loss, and outputs as tensor.detach().cpu()"),
}


def memory_advice(growth: MemoryGrowth) -> str:
    """What to look for; empty if it is not known what grows."""
    if growth.where is None:
        return ""
    return _COPIED if growth.copied_on_write else _BY_PART[growth.where]
