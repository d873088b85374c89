"""Turns a recording into a trace file, and writes the manifest of the snapshot.

    snapshots/REASON-stepN/rank-R.HOST_PID.MS.pt.trace.json.gz     one per rank, named as TensorBoard's plugin needs it
    snapshots/REASON-stepN/about/snapshot.json, rank-R.json        the manifest: why, which steps, and when
    snapshots/.partial-OWNER/                                      an unfinished export

A trace gets its name only after it was compressed and read back. Holistic Trace Analysis takes every ``.json`` in a
folder for a trace (and one without a rank for that of rank 0). So the manifest has a folder of its own.

An unfinished trace is on the same disk, never in memory: /dev/shm is small, and all trainings of the machine pass
their batches through it. torch writes a whole trace before its size is known, and holds the GIL meanwhile. So the disk
must have room for the most that all ranks of the snapshot may write, and is tried first: if it takes too long to write
one mebibyte, it would block the training.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import shutil
import stat
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.records import StallRecord
from telemetry.snapshot.agree import FOLDER
from telemetry.snapshot.budget import free_memory
from telemetry.util.clock import NS, now_ns, unix_time
from telemetry.util.files import file_system_of, opened, read_small, replace_file
from telemetry.util.processes import pid_namespace, start_ticks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
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

_MAX_MANIFESTS: Final = 8
_MAX_PART_BYTES: Final = 1 << 16

WORKER_CATEGORY: Final = "dataloader_worker"
"""Category of our events. The profiler has no such category, so no reader takes them for the training process's."""


class StoreError(Exception):
    """The trace is not published; the text has the reason."""


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """A complete trace file.

    Attributes:
        size: bytes of the file; ``raw_bytes``: uncompressed.
        zero_ns: Unix time in nanoseconds from which the trace's microseconds count; None if the trace lacks it.
        held: seconds for which the GIL was held, by activity: ``save``, ``free``.
    """

    name: str
    size: int
    raw_bytes: int
    zero_ns: int | None
    held: dict[str, float]


def trace_name(rank: int, host: str, pid: int, stamp_ms: int) -> str:
    """Name of a rank's trace file. TensorBoard's plugin reads the worker and the span from it."""
    return f"rank-{rank}.{host}_{pid}.{stamp_ms}.pt.trace.json.gz"


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
        self,
        trace: RecordedTrace,
        plan: Plan,
        name: str,
        *,
        most_bytes: int,
        extra_events: Callable[[int], bytes] = lambda _: b"",
    ) -> StoredTrace:
        """Save a trace and make it visible once it is complete. It is freed in any case.

        Args:
            trace: the recording.
            plan: it has the folder, and all ranks that export at the same time.
            name: name of the file.
            most_bytes: the most bytes that it may take, uncompressed.
            extra_events: given `StoredTrace.zero_ns`, events to insert first: JSON objects, a comma after each.

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
                packed, size, zero_ns = self._compress(raw, extra_events)
            finally:
                os.ftruncate(raw, 0)  # a worker that was forked meanwhile has the file open, too
                os.close(raw)
            stored = StoredTrace(name, packed.stat().st_size, size, zero_ns, held)
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
        path = self._work / "probe"
        file = opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _write(file, bytes(_PROBE_BYTES))
            os.fsync(file)
        finally:
            os.close(file)
            path.unlink()
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

    def _compress(self, raw: int, extra_events: Callable[[int], bytes]) -> tuple[Path, int, int | None]:
        """Compress the trace and read it back. Returns the file, its uncompressed size and `StoredTrace.zero_ns`.

        zlib releases the GIL while it works.
        """
        size = os.fstat(raw).st_size
        if size > self._max_bytes:
            raise StoreError(f"it has {size} bytes, more than snapshot_max_bytes = {self._max_bytes}")
        if os.pread(raw, 64, max(0, size - 64)).rstrip()[-1:] != b"}":
            raise StoreError("torch did not write it to its end")
        head, begin = os.pread(raw, _CHUNK, 0), b""
        zero, events = _HEAD.search(head), _EVENTS.search(head)
        if zero is not None and events is not None:
            begin = os.read(raw, events.start(1)) + extra_events(int(zero[1]))
            size += len(begin) - events.start(1)
        packed = self._work / "packed"  # not a name that a reader of traces would look for
        file = opened(packed, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
            _write(file, compressor.compress(begin))
            while chunk := os.read(raw, _CHUNK):
                _write(file, compressor.compress(chunk))
            _write(file, compressor.flush())
            os.fsync(file)
        finally:
            os.close(file)
        if _unpacked_size(packed) != size:
            raise StoreError("what was read back is not what was written")
        return packed, size, None if zero is None else int(zero[1])

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


def _unpacked_size(packed: Path) -> int:
    """Read a gzip file, which compares its checksum. Returns its uncompressed size; -1 if it is damaged."""
    size = 0
    try:
        with os.fdopen(opened(packed, os.O_RDONLY), "rb") as file, gzip.GzipFile(fileobj=file) as stream:
            while chunk := stream.read(_CHUNK):
                size += len(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return -1
    return size


def _write(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        written = os.write(file, view)
        if written <= 0:
            raise OSError(errno.ENOSPC, "no room for the trace")
        view = view[written:]


# -- the fetches of the DataLoader workers -------------------------------------------------------------------------


def worker_tracks(counters: Iterable[WorkerCounters], first_ns: int, last_ns: int, zero_ns: int) -> bytes:
    """The fetches that were in progress during a recording, as events of a Chrome trace: tracks of their own.

    The profiler records the training process only, and each worker remembers only its newest fetches. All times are
    monotonic: start and end of the recording, and the zero of the trace's microseconds. Returns JSON objects, a comma
    after each.
    """
    events: list[dict[str, Any]] = []
    for worker in counters:
        where = {"pid": worker.pid, "tid": worker.tid}
        kept = len(worker.recent_finished_ns)
        fetches = []
        for number in range(max(0, worker.ended - kept), worker.ended):
            began, ended = worker.recent_started_ns[number % kept], worker.recent_finished_ns[number % kept]
            if first_ns <= ended and began <= min(last_ns, ended):
                times = {"ts": (began - zero_ns) / 1e3, "dur": (ended - began) / 1e3}
                about = {"worker": worker.worker, "number": number}
                fetches.append({"ph": "X", "cat": WORKER_CATEGORY, "name": "fetch", **where, **times, "args": about})
        if fetches:
            name = {"name": f"DataLoader worker {worker.worker}"}
            events += {"ph": "M", "name": "process_name", "ts": 0, **where, "args": name}, *fetches
    return b"".join(msgspec.json.encode(event) + b",\n" for event in events)


# -- the manifest --------------------------------------------------------------------------------------------------


class RankPart(msgspec.Struct):
    """A rank's part of the manifest, with its trace and its log lines. Times are ISO-8601, in UTC."""

    rank: int
    local_rank: int
    node: str
    pid: int
    tid: int
    file: str
    size_bytes: int
    trace_bytes: int
    trace_zero_unix_seconds: float | None
    first_step: int | None
    last_step: int | None
    why: str | None
    started: str
    ended: str
    log: str
    pause_seconds: dict[str, float]
    held_seconds: dict[str, float]


class Manifest(msgspec.Struct):
    """The manifest of a snapshot: its reason, its steps, and their places in the logs.

    ``together``: whether the recordings of all ranks overlap: not if they count their steps differently.
    """

    id: str
    reason: str
    kind: str
    asked_by: str
    stall: StallRecord | None
    first_step: int
    last_step: int
    ranks_expected: tuple[int, ...]
    log_from: str
    log_until: str
    together: bool
    ranks: list[RankPart]


def add_to_manifest(snapshots: Path, plan: Plan, part: RankPart) -> None:
    """Add a rank's part to the manifest of a snapshot.

    Each rank writes its part to a file of its own. Then it combines all parts that are there into the manifest, and
    checks afterwards for parts that were added meanwhile. So the manifest is complete whichever rank writes it last.
    """
    folder = snapshots / plan.folder / "about"
    folder.mkdir(0o700, exist_ok=True)
    _write_json(folder / f"rank-{part.rank}.json", part)
    written: list[Path] = []
    for _ in range(_MAX_MANIFESTS):
        paths = sorted(folder.glob("rank-*.json"))
        if paths == written:
            return
        parts = {part.rank: part}
        for path in paths:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                other = msgspec.json.decode(read_small(path, _MAX_PART_BYTES), type=RankPart)
                parts[other.rank] = other
        started, ended = [each.started for each in parts.values()], [each.ended for each in parts.values()]
        manifest = Manifest(
            id=plan.request.id,
            reason=plan.request.reason,
            kind=plan.request.kind,
            asked_by=plan.request.asked_by,
            stall=plan.request.stall,
            first_step=plan.first_step,
            last_step=plan.last_step,
            ranks_expected=plan.ranks,
            log_from=min(started),
            log_until=max(ended),
            together=max(started) <= min(ended),  # ISO-8601 in one form sorts as text
            ranks=[parts[rank] for rank in sorted(parts)],
        )
        _write_json(folder / "snapshot.json", manifest)
        written = paths


def _write_json(path: Path, record: msgspec.Struct) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
