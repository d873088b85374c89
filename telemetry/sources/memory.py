"""The memory of the training process and its DataLoader workers, of /dev/shm, and what is left of the limits."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.model.records import MemorySample
from telemetry.safety.files import read_small
from telemetry.sources.cgroup import MemoryLimits
from telemetry.sources.collector import CollectorError
from telemetry.sources.proc import is_worker_of_ours, read_stat
from telemetry.util.clock import NS, now_ns, thread_time_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.sources.proc import Stat

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
