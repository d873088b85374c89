"""Turns a recording into a trace file. The file gets its name only after it was compressed and read back.

    snapshots/REASON-stepN/rank-R.HOST_PID.MS.pt.trace.json.gz     one per rank, named as TensorBoard's plugin needs it
    snapshots/REASON-stepN/about/snapshot.json, rank-R.json        the manifest: why, which steps, and when
    snapshots/.partial-OWNER/                                      an unfinished export
    snapshots/.claim-BYTES-DEVICE-OWNER                            space reserved by an export; see `export_space`

Holistic Trace Analysis takes every ``.json`` in a folder for a trace (and one without a rank for that of rank 0). So
the manifest has a folder of its own.

An unfinished trace is on the same disk, never in memory: /dev/shm is small, and all trainings of the machine pass
their batches through it. torch holds the GIL while it writes. So the disk is tried first: if it takes too long to
write one mebibyte, it would block the training.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.snapshot import protocol as p
from telemetry.snapshot.export_space import ExportSpace, NoSpaceError, Reservation, age_seconds, destination
from telemetry.snapshot.private_folder import Folder, open_folder
from telemetry.util.clock import NS, now_ns
from telemetry.util.files import raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from telemetry.snapshot.snapshot_outcome import RecordedTrace

PARTIAL: Final = ".partial-"
_CHUNK: Final = 1 << 18
_RAW: Final = "trace.json"
_PROBE: Final = "probe"
_COMPRESSED: Final = "packed"  # not a name that a reader of traces would look for
_LEVEL: Final = 4
_MIN_COMPRESSION: Final = 5
"""A trace gets at least this many times smaller; measured: 15 to 25."""

_PROBE_BYTES: Final = 1 << 20
_PROBE_SECONDS: Final = 2.0
"""If a disk takes longer for `_PROBE_BYTES`, no trace is written: torch would hold the GIL meanwhile."""

_MAX_OVERSHOOT: Final = 10
"""If the upper bound of a trace is above this many times `TraceStore.max_bytes`, its events are counted first."""

_HEAD: Final = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_EVENTS: Final = re.compile(rb'"traceEvents": \[\s*(\{)')


class StoreError(Exception):
    """The trace is not published; the text says why."""


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """A trace file that is complete.

    Attributes:
        name: name of the file.
        size: its bytes; ``raw_bytes``: uncompressed.
        zero_ns: Unix time in nanoseconds from which the trace's microseconds count; None if the trace does not say.
        held: for how many seconds the GIL was held, by what was done: ``count``, ``save``, ``free``.
    """

    name: str
    size: int
    raw_bytes: int
    zero_ns: int | None
    held: dict[str, float]


@dataclass(frozen=True, slots=True)
class TraceStore:
    """Publishes the traces of one process.

    Attributes:
        snapshots: the folder ``RUN_DIR/snapshots``.
        shared: a folder that all runs of this user on this machine share; None without one.
        owner: name of this process, see `export_owner`.
        max_bytes: limit of one trace, uncompressed.
        budget_bytes: limit of all snapshots of the run, on disk.
        is_gone: whether the process of an owner has ended, given the seconds since it wrote its file.
    """

    snapshots: Path
    shared: Path | None
    owner: str
    max_bytes: int
    budget_bytes: int
    is_gone: Callable[[str, float], bool] = lambda _owner, _age: False

    def publish(
        self,
        trace: RecordedTrace,
        folder: str,
        name: str,
        *,
        extra_events: Callable[[int], bytes] = lambda _: b"",
        on_stage: Callable[[str], None] = lambda _: None,
    ) -> StoredTrace:
        """Save a trace and make it visible once it is complete. It is freed in any case.

        Args:
            trace: the recording.
            folder: name of the snapshot's folder.
            name: name of the file.
            extra_events: given `StoredTrace.zero_ns`, events to insert first: JSON objects, a comma after each.
            on_stage: called with the name of each stage when it is reached.

        Raises:
            StoreError: there is no space, or the trace is too large or incomplete.
            OSError: a file cannot be read or written.
        """
        held: dict[str, float] = {}
        with open_folder(self.snapshots, make=True) as snapshots:
            partial = f"{PARTIAL}{self.owner}"
            snapshots.remove(partial)
            try:
                with snapshots.sub(partial, make=True) as work:
                    on_stage("begun")
                    space = ExportSpace(self.snapshots, self.shared, self.owner, self.is_gone)
                    with self._space_reserved(space, trace, held):
                        _probe_disk(work)
                        raw = self._save(trace, work, held)
                        try:
                            on_stage("saved")
                            size, zero_ns = self._compress(raw, work, extra_events, on_stage)
                        finally:
                            work.close(raw, discard=True)
                        stored = StoredTrace(name, os.stat(_COMPRESSED, dir_fd=work.fd).st_size, size, zero_ns, held)
                        self._remove_oldest(snapshots, folder, stored.size)
                        with snapshots.sub(folder, make=True) as final:
                            on_stage("verified")
                            os.rename(_COMPRESSED, name, src_dir_fd=work.fd, dst_dir_fd=final.fd)
                            final.sync()
                snapshots.sync()
                on_stage("published")
            finally:
                if "free" not in held:
                    held["free"] = trace.free()
                snapshots.remove(partial)
        return stored

    @contextmanager
    def _space_reserved(self, space: ExportSpace, trace: RecordedTrace, held: dict[str, float]) -> Iterator[None]:
        """Reserve space for the trace and for the compressed file, or raise before anything is written."""
        upper = trace.max_bytes()
        try:
            if upper <= _MAX_OVERSHOOT * self.max_bytes:
                with space.reserved(upper + upper // _MIN_COMPRESSION):
                    yield
                return
        except NoSpaceError:
            pass  # this bound is high: count the events for a lower one
        lower, upper, held["count"] = trace.estimate()
        if lower > self.max_bytes:
            raise StoreError(f"it has at least {lower} bytes, more than snapshot_max_bytes = {self.max_bytes}")
        try:
            with space.reserved(upper + upper // _MIN_COMPRESSION):
                yield
        except NoSpaceError as error:
            raise StoreError(str(error)) from None

    @staticmethod
    def _save(trace: RecordedTrace, work: Folder, held: dict[str, float]) -> int:
        """Have torch write the trace. Returns the open file. Its name is removed, so a crash leaves nothing behind."""
        try:
            held["save"] = trace.save(work.path / _RAW)
        finally:
            held["free"] = trace.free()
        raw = work.reopen(_RAW)
        work.remove(_RAW)
        return raw

    def _compress(
        self, raw: int, work: Folder, extra_events: Callable[[int], bytes], on_stage: Callable[[str], None]
    ) -> tuple[int, int | None]:
        """Compress the trace and read it back. Returns its uncompressed size and `StoredTrace.zero_ns`."""
        size = os.fstat(raw).st_size
        if size > self.max_bytes:
            raise StoreError(f"it has {size} bytes, more than snapshot_max_bytes = {self.max_bytes}")
        head = os.pread(raw, _CHUNK, 0)
        zero, events = _HEAD.search(head), _EVENTS.search(head)
        if os.pread(raw, 64, max(0, size - 64)).rstrip()[-1:] != b"}":
            raise StoreError("torch did not write it to its end")
        file, complete = work.create(_COMPRESSED), False
        try:
            on_stage("compressing")
            begin, added = b"", b""
            if zero is not None and events is not None:
                begin, added = os.read(raw, events.start(1)), extra_events(int(zero[1]))
                size += len(added)
            checksum = _deflate(begin + added, raw, file)
            os.fsync(file)
            on_stage("compressed")
            os.lseek(file, 0, os.SEEK_SET)
            if _inflate(file) != (size, checksum):
                raise StoreError("what was read back is not what was written")
            complete = True
        finally:
            work.close(file, discard=not complete)
        return size, None if zero is None else int(zero[1])

    def _remove_oldest(self, snapshots: Folder, current: str, added: int) -> None:
        """Remove the oldest snapshots until ``added`` bytes fit the budget. The current one stays, on all ranks."""
        found: list[tuple[float, str, int]] = []
        for name in snapshots.names():
            if p.valid_folder(name):
                try:
                    size, changed = snapshots.size(name)
                except OSError:
                    continue  # removed by another rank, or not our folder
                found.append((float("inf") if name == current else changed, name, size))
        total = added + sum(size for _, _, size in found)
        for _, name, size in sorted(found):
            if total <= self.budget_bytes:
                return
            if name == current:
                break
            snapshots.remove(name)
            total -= size
        if total > self.budget_bytes:
            raise StoreError(f"this snapshot alone is larger than snapshot_disk_bytes = {self.budget_bytes}")


def _deflate(begin: bytes, raw: int, file: int) -> int:
    """Compress ``begin`` and the rest of ``raw`` into ``file``, gzip. Returns the checksum of the uncompressed bytes.

    zlib releases the GIL while it works.
    """
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    checksum = zlib.crc32(begin)
    _write(file, compressor.compress(begin))
    while chunk := os.read(raw, _CHUNK):
        checksum = zlib.crc32(chunk, checksum)
        _write(file, compressor.compress(chunk))
    _write(file, compressor.flush())
    return checksum


def _inflate(file: int) -> tuple[int, int]:
    """Read a gzip file as a stream. Returns its uncompressed size and checksum; -1 and 0 if it is damaged."""
    size = checksum = 0
    try:
        with gzip.open(os.fdopen(raised(os.dup(file)), "rb")) as stream:
            while chunk := stream.read(_CHUNK):
                size += len(chunk)
                checksum = zlib.crc32(chunk, checksum)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return -1, 0
    return size, checksum


def _write(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        written = os.write(file, view)
        if written <= 0:
            raise OSError(errno.ENOSPC, "no room for the trace")
        view = view[written:]


def _probe_disk(work: Folder) -> None:
    """Write and sync `_PROBE_BYTES`.

    Raises:
        StoreError: it takes too long.
        OSError: the bytes cannot be written.
    """
    start = now_ns()
    file = work.create(_PROBE)
    try:
        _write(file, bytes(_PROBE_BYTES))
        os.fsync(file)
    finally:
        work.close(file, discard=True)
        work.remove(_PROBE)
    seconds = (now_ns() - start) / NS
    if seconds > _PROBE_SECONDS:
        raise StoreError(
            f"the disk is too slow: {seconds:.1f} s for {_PROBE_BYTES >> 20} MiB, and the training would wait for it"
        )


def sweep(roots: Iterable[Path | None], is_gone: Callable[[str, float], bool]) -> int:
    """Remove unfinished exports and reservations of processes that have ended. Returns how many.

    A reservation that names another run's folder stays for `leftovers`.

    Args:
        roots: the folders to search: the run's, and the machine's, where earlier versions saved.
        is_gone: whether the process of an owner has certainly ended, given the seconds since it wrote its file.

    Raises:
        OSError: a folder does not belong to this user alone; the others are swept nevertheless.
    """
    removed, failed, roots = 0, None, list(roots)
    for root in roots:
        if root is None or not root.exists():
            continue
        try:
            with open_folder(root) as folder:
                for name in folder.names():
                    reservation = Reservation.parse(name)
                    owner = reservation.owner if reservation else ""
                    if name.startswith(PARTIAL):
                        owner = name.removeprefix(PARTIAL)
                    if owner and is_gone(owner, age_seconds(folder.fd, name)):
                        if reservation and destination(folder, name) not in (None, *roots):
                            continue
                        folder.remove(name)
                        removed += 1
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    return removed


def trace_name(rank: int, host: str, pid: int, stamp_ms: int) -> str:
    """Name of a rank's trace file. TensorBoard's plugin reads the worker and the span from it."""
    return f"rank-{rank}.{host}_{pid}.{stamp_ms}.pt.trace.json.gz"
