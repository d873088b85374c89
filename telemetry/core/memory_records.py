"""Readings of the memory of a run, and what is concluded from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

TRAINING: Final = "training"
WORKERS: Final = "workers"
SHARED_MEMORY: Final = "shared_memory"
CUDA: Final = "cuda"

MEMORY_PARTS: Final = (TRAINING, WORKERS, SHARED_MEMORY, CUDA)
"""What can grow, the values of the ``where`` label: the training process, its DataLoader workers, /dev/shm, and the
tensors on the GPU."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One reading, in bytes. None: not measured.

    Attributes:
        training_bytes: anonymous memory of the training process. Pages of files and of shared memory do not count.
        workers_bytes: anonymous memory of all DataLoader workers, without pages that they still share with the
            process that forked them. None without workers.
        workers_shared_bytes: the anonymous memory that they still share. If they write to it, it is copied.
        shared_memory_bytes: shared memory of this process's cgroup; without a cgroup all of /dev/shm that is in use.
            ``shared_memory_free_bytes``: what all processes have left of the size of /dev/shm.
        memory_available_bytes: what this process and all others can still allocate before the kernel has to kill one:
            the smallest of what is left on the machine and of what is left in each memory cgroup above this process.
            Page cache counts as available.
        memory_limit_bytes: the limit that leaves least: of a cgroup, or the memory of the machine.
    """

    training_bytes: int | None = None
    workers_bytes: int | None = None
    workers_shared_bytes: int | None = None
    shared_memory_bytes: int | None = None
    shared_memory_free_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """How the memory of a run grows.

    Attributes:
        bytes_per_second: lasting growth by part, from `MEMORY_PARTS`; 0 for a part that does not grow for good. A part
            is missing if it was not measured for long enough.
        where: the part that grows most; None if none does, or if the growth is of none of them.
        where_bytes_per_second: growth of that part, or of whatever it is that uses up the memory.
        exhausted_in_seconds: when there is no memory left, at this rate; None if that is not in sight.
        exhausted: what is used up then: ``memory``, ``shared_memory`` or ``cuda``.
        copied_on_write: whether the growth of the workers is memory of the training process that they copy.
    """

    bytes_per_second: dict[str, float] = field(default_factory=dict)
    where: str | None = None
    where_bytes_per_second: float | None = None
    exhausted_in_seconds: float | None = None
    exhausted: str | None = None
    copied_on_write: bool = False
