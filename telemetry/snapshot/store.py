"""Turns a recording into a trace file.

    snapshots/REASON-stepN/rank-R.HOST_PID.MS.pt.trace.json.gz     one per rank, named as TensorBoard's plugin needs it
    snapshots/.export.….tmp/                                       an unfinished export

A trace gets its name only after all of it is on the disk. Its key ``telemetry`` says why it was recorded.

An unfinished trace is on the same disk, never in memory: /dev/shm is small, and all trainings of the machine pass
their batches through it. torch holds the GIL while it writes, so the disk is tried first: if it takes too long to write
one mebibyte, it would block the training.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import stat
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.safety.files import opened, temporary_name
from telemetry.snapshot.plan import FOLDER
from telemetry.util.clock import NS, now_ns, unix_ns, unix_time

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.config import Config
    from telemetry.seams.profilers import Session
    from telemetry.seams.worker_block import WorkerCounters

MIN_FREE_BYTES: Final = 1 << 30
"""Space that must be free: for checkpoints, for other programs, and for the unfinished traces of all ranks. By default
the budget of a recording keeps each of them to some tens of MiB."""

_STALE_SECONDS: Final = 600.0
"""An older unfinished export was left behind by a process that was killed: an export takes seconds."""

_CHUNK: Final = 1 << 18
_LEVEL: Final = 4

_PROBE_BYTES: Final = 1 << 20
_PROBE_SECONDS: Final = 2.0

_HEAD: Final = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_EVENTS: Final = re.compile(rb'"traceEvents": \[\s*(\{)')
_KERNEL: Final = b'"cat": "kernel"'


class StoreError(Exception):
    """The trace is not published; the text has the reason."""


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """A complete trace file.

    Attributes:
        path: path in the run folder.
        size: bytes of the file; ``raw_bytes``: uncompressed.
        kernels: whether a kernel of a GPU is in it.
        held: seconds for which the GIL was held, by activity: ``save``, ``free``.
    """

    path: str
    size: int
    raw_bytes: int
    kernels: bool
    held: dict[str, float]


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
            name = {"name": f"DataLoader worker {worker.worker}"}
            events.append({"ph": "M", "name": "process_name", "ts": 0, **where, "args": name})
            kept = len(worker.recent_finished_ns)
            for number in range(max(0, worker.ended - kept), worker.ended):
                began, ended = worker.recent_started_ns[number % kept], worker.recent_finished_ns[number % kept]
                if self.first_ns <= ended and began <= min(self.last_ns, ended):
                    times = {"ts": (began - zero_ns) / 1e3, "dur": (ended - began) / 1e3}
                    args = {"worker": worker.worker, "number": number}
                    # A category that no reader takes for the training process's.
                    event = {"ph": "X", "cat": "dataloader_worker", "name": "fetch", "args": args}
                    events.append(event | where | times)
        return b"".join(msgspec.json.encode(event) + b",\n" for event in events)


class TraceStore:
    """Publishes the traces of one process in ``RUN_DIR/snapshots``."""

    def __init__(self, snapshots: Path, config: Config) -> None:
        self._snapshots = snapshots
        self._disk_bytes = config.snapshot_disk_bytes

    def sweep(self) -> None:
        """Remove unfinished exports that were left behind."""
        for path in self._snapshots.glob(".export.*.tmp"):
            if unix_time() - path.lstat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, trace: Session, name: str, fetches: WorkerFetches) -> StoredTrace:
        """Save a trace and make it visible once it is complete. It is freed in any case.

        Args:
            trace: the recording.
            name: name of the snapshot's folder, and of the file in it.
            fetches: what the workers did, which is added to it.

        Raises:
            StoreError: there is no space, or the trace is incomplete.
            OSError: a file cannot be read or written.
        """
        work, held = self._snapshots / temporary_name("export"), {"save": 0.0}
        try:
            try:
                self._snapshots.mkdir(0o700, parents=True, exist_ok=True)
                work.mkdir(0o700)
                self._check_disk(work)
                held["save"] = trace.save(work / "trace.json")
            finally:
                held["free"] = trace.free()
            packed = work / "packed"  # not a name that a reader of traces would look for
            size, kernels = _compress(work / "trace.json", packed, fetches)
            path, packed_bytes = self._snapshots / name, packed.stat().st_size
            self._remove_oldest(path.parent.name, packed_bytes)
            path.parent.mkdir(0o700, exist_ok=True)
            packed.rename(path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return StoredTrace(f"snapshots/{name}", packed_bytes, size, kernels, held)

    def _check_disk(self, work: Path) -> None:
        found = os.statvfs(work)
        free = found.f_bavail * found.f_frsize
        if free < MIN_FREE_BYTES:
            raise StoreError(f"no room: {MIN_FREE_BYTES >> 20} MiB must be free, and {free >> 20} MiB are")
        start, probe = now_ns(), _created(work / "probe")
        try:
            _write(probe, bytes(_PROBE_BYTES))
            os.fsync(probe)
        finally:
            os.close(probe)
        seconds = (now_ns() - start) / NS
        if seconds > _PROBE_SECONDS:
            size = f"{_PROBE_BYTES >> 20} MiB"
            raise StoreError(f"the disk is too slow: {seconds:.1f} s for {size}, and the training would wait for it")

    def _remove_oldest(self, current: str, added: int) -> None:
        """Remove the oldest snapshots until ``added`` bytes fit the limit. The current one stays, on all ranks."""
        total, current_bytes = added, added
        others: list[tuple[float, Path, int]] = []
        for path in self._snapshots.iterdir():
            if FOLDER.fullmatch(path.name) and not path.is_symlink():
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


def _compress(source: Path, target: Path, fetches: WorkerFetches) -> tuple[int, bool]:
    """Compress a raw trace, with the fetches in it. Returns the uncompressed size, and whether it has a kernel.

    zlib releases the GIL while it works.
    """
    size, kernels, end = 0, False, b""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    raw = opened(source, os.O_RDWR)
    try:
        packed = _created(target)
        try:
            for chunk in itertools.chain([_begin(raw, fetches)], iter(lambda: os.read(raw, _CHUNK), b"")):
                size += len(chunk)
                kernels, end = kernels or _KERNEL in end + chunk, (end + chunk)[-64:]
                _write(packed, compressor.compress(chunk))
            _write(packed, compressor.flush())
            os.fsync(packed)
        finally:
            os.close(packed)
        os.ftruncate(raw, 0)  # a worker that was forked meanwhile has the file open, too
    finally:
        os.close(raw)
    if end.rstrip()[-1:] != b"}":
        raise StoreError("torch did not write it to its end")
    return size, kernels


def _begin(raw: int, fetches: WorkerFetches) -> bytes:
    """Read a trace up to its first event, and add the fetches; nothing if it has no event or does not tell the time."""
    head = os.pread(raw, _CHUNK, 0)
    base, events = _HEAD.search(head), _EVENTS.search(head)
    if base is None or events is None:
        return b""
    return os.read(raw, events.start(1)) + fetches.events(int(base[1]))


def _created(path: Path) -> int:
    return opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _write(file: int, chunk: bytes) -> None:
    """Write to a descriptor: a file object's copy in a child that is forked meanwhile would write its buffer, too."""
    if os.write(file, chunk) < len(chunk):
        raise OSError(errno.ENOSPC, "no room for the trace")
