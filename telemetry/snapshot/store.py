"""Turns a recording into a trace file.

    snapshots/REASON-stepN/rank-R.HOST_PID.MS.pt.trace.json.gz     one per rank, named as TensorBoard's plugin needs it
    snapshots/.partial-OWNER/                                      an unfinished export

A trace gets its name only after it was compressed and read back. Its key ``telemetry`` says why it was recorded.

An unfinished trace is on the same disk, never in memory: /dev/shm is small, and all trainings of the machine pass
their batches through it. torch writes a whole trace before its size is known, and holds the GIL meanwhile. So the disk
must have room for the most that all ranks of the snapshot may write, and is tried first: if it takes too long to write
one mebibyte, it would block the training.
"""

from __future__ import annotations

import errno
import gzip
import itertools
import os
import re
import shutil
import stat
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.snapshot.agree import FOLDER
from telemetry.snapshot.budget import free_memory
from telemetry.util.clock import NS, now_ns, unix_ns, unix_time
from telemetry.util.files import file_system_of, opened
from telemetry.util.processes import pid_namespace, start_ticks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from telemetry.config import Config
    from telemetry.hooks.worker_block import WorkerCounters
    from telemetry.snapshot.agree import Plan
    from telemetry.snapshot.capture import RecordedTrace

MIN_FREE_BYTES: Final = 1 << 30
"""Space that an export leaves free: for checkpoints, for other programs, and for an estimate that was too low."""

_PARTIAL: Final = ".partial-"
_STALE_SECONDS: Final = 3600.0
"""An older unfinished export of another machine or container was left behind: an export takes seconds."""

_CHUNK: Final = 1 << 18
_LEVEL: Final = 4
_MIN_COMPRESSION: Final = 5
"""A trace gets at least this many times smaller; measured: 15 to 25."""

_PROBE_BYTES: Final = 1 << 20
_PROBE_SECONDS: Final = 2.0
"""If a disk takes longer for `_PROBE_BYTES`, no trace is written: torch would hold the GIL meanwhile."""

_HEAD: Final = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_EVENTS: Final = re.compile(rb'"traceEvents": \[\s*(\{)')


class StoreError(Exception):
    """The trace is not published; the text has the reason."""


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """A complete trace file.

    Attributes:
        size: bytes of the file; ``raw_bytes``: uncompressed.
        kernels: whether a kernel of a GPU is in it.
        held: seconds for which the GIL was held, by activity: ``save``, ``free``.
    """

    name: str
    size: int
    raw_bytes: int
    kernels: bool
    held: dict[str, float]


def trace_name(rank: int, host: str, pid: int, stamp_ms: int) -> str:
    """Name of a rank's trace file. TensorBoard's plugin reads the worker and the span from it."""
    return f"rank-{rank}.{host}_{pid}.{stamp_ms}.pt.trace.json.gz"


@dataclass(frozen=True, slots=True)
class WorkerFetches:
    """The newest fetches of the DataLoader workers, for those that were in progress during a recording.

    The profiler records the training process only. ``first_ns, last_ns``: start and end of the recording, monotonic.
    """

    workers: list[WorkerCounters]
    first_ns: int
    last_ns: int

    def events(self, base_unix_ns: int) -> bytes:
        """The fetches as events of a Chrome trace, on tracks of their own: JSON objects, a comma after each.

        Args:
            base_unix_ns: Unix time from which the trace's microseconds count.
        """
        zero_ns = base_unix_ns + now_ns() - unix_ns()
        events: list[dict[str, Any]] = []
        for worker in self.workers:
            where = {"pid": worker.pid, "tid": worker.tid}
            kept = len(worker.recent_finished_ns)
            fetches = []
            for number in range(max(0, worker.ended - kept), worker.ended):
                began, ended = worker.recent_started_ns[number % kept], worker.recent_finished_ns[number % kept]
                if self.first_ns <= ended and began <= min(self.last_ns, ended):
                    times = {"ts": (began - zero_ns) / 1e3, "dur": (ended - began) / 1e3}
                    args = {"worker": worker.worker, "number": number}
                    # A category that no reader takes for the training process's.
                    event = {"ph": "X", "cat": "dataloader_worker", "name": "fetch", "args": args}
                    fetches.append(event | where | times)
            if fetches:
                name = {"name": f"DataLoader worker {worker.worker}"}
                events += {"ph": "M", "name": "process_name", "ts": 0, **where, "args": name}, *fetches
        return b"".join(msgspec.json.encode(event) + b",\n" for event in events)


class TraceStore:
    """Publishes the traces of one process. ``host``: name of the node, in a form that a file name may have."""

    def __init__(self, snapshots: Path, host: str, config: Config) -> None:
        self._snapshots = snapshots
        self._max_bytes = config.snapshot_max_bytes
        self._disk_bytes = config.snapshot_disk_bytes
        # Two containers on a node may both have a process 7, and a later process may have the same pid.
        namespace, pid = pid_namespace(), os.getpid()
        self._work = snapshots / f"{_PARTIAL}{host}-{namespace}-{pid}-{start_ticks(pid)}"
        self._local = re.compile(rf"{re.escape(_PARTIAL + host)}-{namespace}-(\d+)-(\d+|None)")

    def sweep(self) -> None:
        """Remove unfinished exports of processes of this run that have ended."""
        for path in self._snapshots.glob(f"{_PARTIAL}*"):
            found = self._local.fullmatch(path.name)
            if found is None:
                gone = unix_time() - path.lstat().st_mtime > _STALE_SECONDS
            else:
                gone = str(start_ticks(int(found[1]))) != found[2]
            if gone:
                shutil.rmtree(path, ignore_errors=True)

    def publish(
        self, trace: RecordedTrace, plan: Plan, name: str, *, most_bytes: int, fetches: WorkerFetches
    ) -> StoredTrace:
        """Save a trace and make it visible once it is complete. It is freed in any case.

        Args:
            trace: the recording.
            plan: it has the folder, and all ranks that export at the same time.
            name: name of the file.
            most_bytes: the most bytes that it may take, uncompressed.
            fetches: what the workers did, which is added to it.

        Raises:
            StoreError: there is no space, or the trace is too large or incomplete.
            OSError: a file cannot be read or written.
        """
        held: dict[str, float] = {}
        try:
            self._snapshots.mkdir(0o700, parents=True, exist_ok=True)
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir(0o700)
            self._check_room(most_bytes, len(plan.ranks))
            self._probe_disk()
            raw = self._save(trace, held)
            try:
                packed, size, kernels = self._compress(raw, fetches)
            finally:
                os.ftruncate(raw, 0)  # a worker that was forked meanwhile has the file open, too
                os.close(raw)
            stored = StoredTrace(name, packed.stat().st_size, size, kernels, held)
            self._remove_oldest(plan.folder, stored.size)
            folder = self._snapshots / plan.folder
            folder.mkdir(0o700, exist_ok=True)
            packed.rename(folder / name)
        finally:
            if "free" not in held:
                held["free"] = trace.free()
            shutil.rmtree(self._work, ignore_errors=True)
        return stored

    def _check_room(self, most_bytes: int, ranks: int) -> None:
        free = _free_bytes(self._snapshots)
        if ranks * (most_bytes + most_bytes // _MIN_COMPRESSION) + MIN_FREE_BYTES > free:
            many = f", and so may those of {ranks - 1} other ranks" if ranks > 1 else ""
            raise StoreError(
                f"no room: it may take {most_bytes >> 20} MiB{many}, {MIN_FREE_BYTES >> 20} MiB must stay free, "
                f"and {free >> 20} MiB are free"
            )

    def _probe_disk(self) -> None:
        start = now_ns()
        _write(self._work / "probe", [bytes(_PROBE_BYTES)])
        (self._work / "probe").unlink()
        seconds = (now_ns() - start) / NS
        if seconds > _PROBE_SECONDS:
            size = f"{_PROBE_BYTES >> 20} MiB"
            raise StoreError(f"the disk is too slow: {seconds:.1f} s for {size}, and the training would wait for it")

    def _save(self, trace: RecordedTrace, held: dict[str, float]) -> int:
        """Let torch write the trace. Returns the open file. Its name is removed, so a kill leaves no raw trace."""
        path = self._work / "trace.json"
        try:
            held["save"] = trace.save(path)
        finally:
            held["free"] = trace.free()
        raw = opened(path, os.O_RDWR)
        path.unlink()
        return raw

    def _compress(self, raw: int, fetches: WorkerFetches) -> tuple[Path, int, bool]:
        """Compress the trace and read it back. Returns the file, its uncompressed size, and whether it has a kernel.

        zlib releases the GIL while it works.
        """
        size = os.fstat(raw).st_size
        if size > self._max_bytes:
            raise StoreError(f"it has {size} bytes, more than snapshot_max_bytes = {self._max_bytes}")
        if os.pread(raw, 64, max(0, size - 64)).rstrip()[-1:] != b"}":
            raise StoreError("torch did not write it to its end")
        head, begin = os.pread(raw, _CHUNK, 0), b""
        base, events = _HEAD.search(head), _EVENTS.search(head)
        if base is not None and events is not None:
            begin = os.read(raw, events.start(1)) + fetches.events(int(base[1]))
            size += len(begin) - events.start(1)
        packed = self._work / "packed"  # not a name that a reader of traces would look for
        _write(packed, _compressed(itertools.chain([begin], iter(lambda: os.read(raw, _CHUNK), b""))))
        unpacked, kernels = _read_back(packed)
        if unpacked != size:
            raise StoreError("what was read back is not what was written")
        return packed, size, kernels

    def _remove_oldest(self, current: str, added: int) -> None:
        """Remove the oldest snapshots until ``added`` bytes fit the limit. The current one stays, on all ranks."""
        total, current_bytes = added, added
        others: list[tuple[float, Path, int]] = []
        for path in self._snapshots.iterdir():
            if re.fullmatch(FOLDER, path.name) and not path.is_symlink():
                try:
                    inside = [each.lstat() for each in path.rglob("*")]
                    changed = path.stat().st_mtime
                except OSError:
                    continue  # another rank has removed it
                size = sum(each.st_size for each in inside if stat.S_ISREG(each.st_mode))
                total += size
                if path.name == current:
                    current_bytes += size
                else:
                    others.append((changed, path, size))
        if current_bytes > self._disk_bytes:
            raise StoreError(f"this snapshot alone is larger than snapshot_disk_bytes = {self._disk_bytes}")
        for _, path, size in sorted(others):
            if total <= self._disk_bytes:
                return
            shutil.rmtree(path, ignore_errors=True)
            total -= size


def _free_bytes(path: Path) -> int:
    """Bytes that can still be written to a folder's file system. If that is in memory, free memory limits it too."""
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    memory = free_memory() if file_system_of(path) in {"tmpfs", "ramfs"} else None
    return free if memory is None else min(free, memory)


_KERNEL: Final = b'"cat": "kernel"'


def _read_back(packed: Path) -> tuple[int, bool]:
    """Read a gzip file, which compares its checksum.

    Returns:
        Its uncompressed size, -1 if it is damaged; and whether the trace in it has a kernel of a GPU.
    """
    size, kernels, end = 0, False, b""
    try:
        with os.fdopen(opened(packed, os.O_RDONLY), "rb") as file, gzip.GzipFile(fileobj=file) as stream:
            while chunk := stream.read(_CHUNK):
                size += len(chunk)
                kernels = kernels or _KERNEL in end + chunk
                end = chunk[-len(_KERNEL) :]
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return -1, False
    return size, kernels


def _compressed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    yield from map(compressor.compress, chunks)
    yield compressor.flush()


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a new file to the disk.

    Without a file object, because its copy in a child that is forked meanwhile would write what it has buffered.
    """
    file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for chunk in chunks:
            left = memoryview(chunk)
            while left:
                written = os.write(file, left)
                if not written:
                    raise OSError(errno.ENOSPC, "no room for the trace")
                left = left[written:]
        os.fsync(file)
    finally:
        os.close(file)
