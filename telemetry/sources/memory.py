"""The memory of the training process and its DataLoader workers, of /dev/shm, and of the CUDA allocator."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from telemetry.log.lines import GpuOutOfMemoryLine
from telemetry.model.records import MemorySample, TorchMemorySample
from telemetry.safety.errors import let_pass
from telemetry.safety.files import read_small
from telemetry.sources.cgroup import MemoryLimits
from telemetry.sources.collector import CollectorError
from telemetry.sources.proc import is_worker_of_ours, read_stat
from telemetry.util.clock import NS, now_ns, thread_time_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.seams.state import StepState
    from telemetry.sources.proc import Stat


# -- the memory of the training process and its DataLoader workers, of /dev/shm, and what is left of the limits --------
# Most of it is cheap: `statm` takes 7 µs and no lock. But it does not show which pages a forked worker still shares
# with the training process, and so hides memory that is copied on write. `smaps_rollup` shows it, but the kernel goes
# through all pages for it (12 ms for each GiB of small pages) and keeps the process from mapping memory meanwhile. So
# it is read of one worker, for which all others count, because they were forked from the same process.

READ_SECONDS: Final = 2.0
_AGE_RATIO: Final = 1 / 64
_MAX_READ_SECONDS: Final = 60.0
"""Seconds between two readings: 2 at first, then this part of the run's age, because its trend is what matters."""

_MAX_PROBE_RATIO: Final = 0.0005
"""Reading `smaps_rollup` may take this share of a core: the last reading decides when the next one comes."""

_KIB: Final = 1024


class MemorySource:
    """The memory of this process, its workers and /dev/shm.

    Args:
        workers: returns the pids of the live workers.
        stat: reads the stat of a worker.
        proc: where /proc is mounted, for limits.
        cgroups: where the cgroup hierarchies are mounted.
        shared_memory: the file system of shared memory.
    """

    name = "memory"

    def __init__(
        self,
        workers: Callable[[], Iterable[int]],
        *,
        stat: Callable[[int], Stat | None] = read_stat,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        shared_memory: str = "/dev/shm",  # noqa: S108 - only its size is read
    ) -> None:
        self._workers = workers
        self._stat = stat
        self._limits = MemoryLimits(proc, cgroups)
        self._shared_memory = shared_memory
        self._began_ns = self._due_ns = now_ns()
        self._probe_due_ns = 0
        self._newest = MemorySample()
        self._probed: int | None = None  # a worker, and the anonymous bytes that it shares
        self._shared: int | None = None

    def read(self) -> MemorySample:
        """Return the newest reading, after making a new one if that is due.

        Raises:
            CollectorError: there is no /proc.
        """
        now = now_ns()
        if now >= self._due_ns:
            age = (now - self._began_ns) / NS
            # A little early, so that a tick that comes a moment too soon does not have to wait for the next one.
            self._due_ns = now + int(0.9 * NS * min(_MAX_READ_SECONDS, max(READ_SECONDS, _AGE_RATIO * age)))
            self._newest = self._read(now)
        return self._newest

    def _read(self, now: int) -> MemorySample:
        own = read_stat("self")
        if own is None:
            raise CollectorError("/proc/self/stat cannot be read")
        workers, shared = self._of_workers(now)
        used, free = self._size_of_shared_memory()
        own_shared, limit = self._limits.shared_memory(), self._limits.tightest()
        return MemorySample(
            training_bytes=own.anonymous_bytes,
            workers_bytes=workers,
            workers_shared_bytes=shared,
            shared_memory_bytes=used if own_shared is None else own_shared,
            shared_memory_free_bytes=free,
            memory_available_bytes=None if limit is None else limit.available,
            memory_limit_bytes=None if limit is None else limit.limit,
        )

    def _of_workers(self, now: int) -> tuple[int | None, int | None]:
        """What the workers have to themselves, and what they share; None until the shared part is known."""
        stats = {pid: stat for pid in filter(None, self._workers()) if (stat := self._stat(pid)) is not None}
        anonymous = {pid: stat.anonymous_bytes for pid, stat in stats.items() if is_worker_of_ours(stat.parent)}
        probed = min(anonymous, default=None)
        if probed != self._probed:
            self._probed, self._shared = probed, None
        if probed is not None and now >= self._probe_due_ns:
            self._shared = self._probe(probed)
        if self._shared is None:
            return None, None
        shared = self._shared * len(anonymous)
        return max(0, sum(anonymous.values()) - shared), shared

    def _probe(self, pid: int) -> int:
        started = thread_time_ns()
        try:
            shared = shared_bytes(read_small(f"/proc/{pid}/smaps_rollup"))
        except OSError:  # it has ended, or the kernel is older than 4.14: then nothing counts as shared
            shared = 0
        self._probe_due_ns = now_ns() + int((thread_time_ns() - started) / _MAX_PROBE_RATIO)
        return shared

    def _size_of_shared_memory(self) -> tuple[int | None, int | None]:
        """Bytes used and free; None if there is no such file system."""
        try:
            found = os.statvfs(self._shared_memory)
        except OSError:
            return None, None
        return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_bavail * found.f_frsize


def shared_bytes(content: bytes) -> int:
    """The anonymous memory that a process shares with another one, from its smaps_rollup (proc(5)).

    The kernel reports how much of all memory is private (`Private_Dirty`), and how much is anonymous. Shared memory and
    files that are written through a mapping are private, too, as long as no other process maps them. `Pss_Anon` leaves
    these out, so the smaller of the two is what the process has to itself.
    """
    found = {name: int(kib) * _KIB for name, kib in re.findall(rb"(\w+): +(\d+) kB", content)}
    private = min(found.get(b"Private_Dirty", 0), found.get(b"Pss_Anon", sys.maxsize))
    return max(0, found.get(b"Anonymous", 0) - private)


# -- the memory of PyTorch's CUDA caching allocator, without importing torch or initialising CUDA ----------------------


def cuda() -> Any | None:
    """``torch.cuda`` if torch is loaded and CUDA initialised, else None."""
    torch = sys.modules.get("torch")
    module = getattr(torch, "cuda", None)
    try:
        return module if module is not None and module.is_initialized() else None
    except Exception:
        return None  # torch is being imported


class TorchMemorySource:
    """The bytes allocated for tensors, and the bytes that the allocator reserves.

    Torch takes the allocator's lock for this and keeps the GIL. While the training thread is stuck, it may hold that
    lock, and then the whole process would stand still. So there is a new reading only after the training has gone on.

    Args:
        tracker: shows whether the training goes on.
        device: returns the index of the training thread's device; the agent thread has another current device.
        failures: watches for allocations that fail, once CUDA is in use.
    """

    name = "torch_memory"

    def __init__(self, tracker: StepState, device: Callable[[], int], failures: OutOfMemoryWatch) -> None:
        self._tracker = tracker
        self._device = device
        self._failures = failures
        self._progress: tuple[int, int, int] | None = None
        self._newest: TorchMemorySample | None = None

    def read(self) -> TorchMemorySample | None:
        """Take a reading, or repeat the last one. None while CUDA is not in use, which is no failure."""
        module = cuda()
        if module is None:
            return None
        self._failures.attach()
        device, progress = self._device(), self._tracker.progress
        if progress != self._progress:
            self._newest = TorchMemorySample(module.memory_allocated(device), module.memory_reserved(device))
            self._failures.allocated[device] = self._newest.allocated_bytes
            self._progress = progress
        return self._newest


_MAX_NOTED: Final = 16
_NOTED_EVERY_NS: Final = NS
"""Of allocations that fail at once after another, as in a search for the batch size, the first of a second is noted."""


class OutOfMemoryWatch:
    """Notes allocations on the GPU that fail, also those whose exception the script catches.

    Torch calls it on the allocating thread, before it raises, and has released the allocator's lock. Torch has no way
    to take the function back: after `stop` it does nothing.

    Args:
        file: where PyTorch's memory snapshot is written when an allocation fails, the newest over the others; None: not
            at all.

    Attributes:
        allocated: bytes in use at the newest reading, by device.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._attached = self._stopped = False
        self._noted: deque[GpuOutOfMemoryLine] = deque(maxlen=_MAX_NOTED)
        self._failed_total = 0
        self._due_ns = 0
        self.allocated: dict[int, int] = {}

    def attach(self) -> None:
        """Begin to watch, if this has not been done. CUDA must be in use: torch would initialise it."""
        if not self._attached:
            self._attached = True
            attach = getattr(sys.modules["torch"]._C, "_cuda_attachOutOfMemoryObserver", None)
            if attach is not None:
                with suppress(RuntimeError):  # torch's other allocator (backend:cudaMallocAsync) calls no function
                    attach(self._failed)

    def take(self) -> list[GpuOutOfMemoryLine]:
        """What was noted since the last call."""
        return [self._noted.popleft() for _ in range(len(self._noted))]

    def stop(self) -> None:
        """Note nothing more."""
        self._stopped = True

    def _failed(self, device: int, tried: int, total: int, free: int) -> None:
        if self._stopped:
            return
        try:
            self._failed_total += 1
            if now_ns() >= self._due_ns:
                # In a compiled frame Dynamo would compile the functions of torch that are called here.
                note = self._note
                if "torch._dynamo" in sys.modules:
                    note = sys.modules["torch"].compiler.disable(note)
                note(device, tried, total, free)
                self._due_ns = now_ns() + _NOTED_EVERY_NS
        except Exception as error:
            let_pass(error)

    def _note(self, device: int, tried: int, total: int, free: int) -> None:
        cuda: Any = sys.modules["torch"].cuda
        segments = [segment for segment in cuda.memory_snapshot() if segment["device"] == device]
        blocks = [block["size"] for each in segments for block in each["blocks"] if block["state"] == "inactive"]
        noted = GpuOutOfMemoryLine(
            gpu=device,
            tried_bytes=tried,
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=cuda.memory_allocated(device),
            reserved_bytes=cuda.memory_reserved(device),
            largest_free_bytes=max(blocks, default=0),
            allocated_before_bytes=self.allocated.get(device),
            failed_total=self._failed_total,
        )
        self._noted.append(noted)
        if self._file is not None:
            cuda.memory._dump_snapshot(str(self._file))
            self._noted[-1] = structs.replace(noted, file=self._file.name)
