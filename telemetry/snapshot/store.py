"""From a recording to a file that can be trusted: saved, compressed, read back, and only then given its name.

    snapshots/REASON-stepN/rank-R.HOST_PID.MS.pt.trace.json.gz     one per rank, as TensorBoard's plugin wants them
    snapshots/REASON-stepN/about/snapshot.json, rank-R.json        why, which steps, and whose clock; see `about`
    snapshots/.partial-HOST-PID-TICKS-N/                           what is not whole yet

Holistic Trace Analysis takes every ``.json`` in a folder for a trace (and one without a rank for that of rank 0),
which is why the description lies in a folder of its own.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.files import opened, raised
from telemetry.snapshot import plan as p
from telemetry.snapshot.folder import Folder, open_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.snapshot.outcome import Trace

PARTIAL: Final = ".partial-"
_CHUNK: Final = 1 << 18
_RAW: Final = "trace.json"
_PACKED: Final = "packed"  # no name by which a reader of traces would know it
_LEVEL: Final = 4
_COMPRESSES: Final = 5
"""How many times smaller a trace gets at least; measured 15 to 25."""

_SPARE_BYTES: Final = 64 << 20
"""Disk that is left to the training."""

_HEAD: Final = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_EVENTS: Final = re.compile(rb'"traceEvents": \[\s*(\{)')


class StoreError(Exception):
    """The trace is not kept; the text says why."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A trace that is in its place.

    Attributes:
        name: of the file; ``size`` in bytes, ``raw_bytes`` uncompressed.
        zero_ns: Unix time in nanoseconds from which the trace's microseconds count; None where it does not say.
        held: seconds for which the interpreter was held, by ``save`` and ``free``.
    """

    name: str
    size: int
    raw_bytes: int
    zero_ns: int | None
    held: dict[str, float]


@dataclass(frozen=True, slots=True)
class Keeper:
    """Keeps the traces of one process.

    Attributes:
        snapshots: the folder ``RUN_DIR/snapshots``.
        scratch: a folder in memory, for what is not compressed yet; None where there is none.
        owner: ``HOST-PID-TICKS``, which names this process for good.
        most_bytes: of one trace, uncompressed.
        budget_bytes: of all snapshots of the run, on disk.
    """

    snapshots: Path
    scratch: Path | None
    owner: str
    most_bytes: int
    budget_bytes: int

    def keep(
        self,
        trace: Trace,
        folder: str,
        name: str,
        *,
        more: Callable[[int], bytes] = lambda _: b"",
        reached: Callable[[str], None] = lambda _: None,
    ) -> Stored:
        """Save a trace, and publish it whole. It is freed in any case.

        Args:
            trace: to save.
            folder: of the snapshot.
            name: of the file.
            more: given the trace's zero (`Stored.zero_ns`), events to put first into it, a comma after each.
            reached: told of each stage as it is reached, for whoever watches.

        Raises:
            StoreError: there is no room, or it is too large, or not whole.
            OSError: something else on the way.
        """
        held: dict[str, float] = {}
        with open_folder(self.snapshots, make=True) as snapshots:
            partial = f"{PARTIAL}{self.owner}"
            snapshots.remove(partial)
            try:
                with snapshots.sub(partial, make=True) as work:
                    reached("begun")
                    raw = self._save(trace, work, held)
                    try:
                        reached("saved")
                        size, zero_ns = self._compress(raw, work, more, reached)
                    finally:
                        os.close(raw)
                    stored = Stored(name, os.stat(_PACKED, dir_fd=work.fd).st_size, size, zero_ns, held)
                    self._make_room(snapshots, folder, stored.size)
                    with snapshots.sub(folder, make=True) as final:
                        reached("verified")
                        os.rename(_PACKED, name, src_dir_fd=work.fd, dst_dir_fd=final.fd)
                        final.sync()
                snapshots.sync()
                reached("published")
            finally:
                if "free" not in held:
                    held["free"] = trace.free()
                snapshots.remove(partial)
        return stored

    def _save(self, trace: Trace, work: Folder, held: dict[str, float]) -> int:
        """Have torch write it, in memory if there is room. Returns the open file, which has no name any more."""
        if self.scratch is None or _free_bytes(self.scratch) < self.most_bytes:
            return self._save_in(work, trace, held)
        with open_folder(self.scratch, make=True) as memory:
            memory.remove(work.path.name)
            try:
                with memory.sub(work.path.name, make=True) as inner:
                    return self._save_in(inner, trace, held)
            finally:
                memory.remove(work.path.name)

    def _save_in(self, place: Folder, trace: Trace, held: dict[str, float]) -> int:
        try:
            held["save"] = trace.save(place.path / _RAW)
        finally:
            held["free"] = trace.free()
        raw = opened(_RAW, os.O_RDONLY, dir_fd=place.fd)
        place.remove(_RAW)
        return raw

    def _compress(
        self, raw: int, work: Folder, more: Callable[[int], bytes], reached: Callable[[str], None]
    ) -> tuple[int, int | None]:
        size = os.fstat(raw).st_size
        if size > self.most_bytes:
            raise StoreError(f"it has {size} bytes, more than snapshot_max_bytes = {self.most_bytes}")
        if _free_bytes_of(work.fd) < size // _COMPRESSES + _SPARE_BYTES:
            raise StoreError(f"no room: less than {(size // _COMPRESSES + _SPARE_BYTES) >> 20} MiB are free")
        head = os.pread(raw, _CHUNK, 0)
        zero, events = _HEAD.search(head), _EVENTS.search(head)
        if os.pread(raw, 64, max(0, size - 64)).rstrip()[-1:] != b"}":
            raise StoreError("torch did not write it to its end")
        file = work.create(_PACKED)
        try:
            reached("compressing")
            begin, added = b"", b""
            if zero is not None and events is not None:
                begin, added = os.read(raw, events.start(1)), more(int(zero[1]))
                size += len(added)
            checksum = _deflate(begin + added, raw, file)
            os.fsync(file)
            reached("compressed")
            os.lseek(file, 0, os.SEEK_SET)
            if _inflate(file) != (size, checksum):
                raise StoreError("what was read back is not what was written")
        finally:
            os.close(file)
        return size, None if zero is None else int(zero[1])

    def _make_room(self, snapshots: Folder, current: str, wanted: int) -> None:
        """Remove the oldest snapshots until one more trace fits in. The current one, others' parts included, stays."""
        found: list[tuple[float, str, int]] = []
        for name in snapshots.names():
            if p.valid_folder(name):
                try:
                    size, changed = snapshots.size(name)
                except OSError:
                    continue  # removed by another rank, or no folder of ours
                found.append((float("inf") if name == current else changed, name, size))
        total = wanted + sum(size for _, _, size in found)
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
    """Compress ``begin`` and what is left of ``raw`` into ``file``, gzip. Returns the checksum of all of it.

    zlib works without the interpreter.
    """
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    checksum = zlib.crc32(begin)
    _write(file, packer.compress(begin))
    while chunk := os.read(raw, _CHUNK):
        checksum = zlib.crc32(chunk, checksum)
        _write(file, packer.compress(chunk))
    _write(file, packer.flush())
    return checksum


def _inflate(file: int) -> tuple[int, int]:
    """Read a gzip file as a stream. Returns its size and checksum, uncompressed."""
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


def _free_bytes(path: Path) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _free_bytes_of(fd: int) -> int:
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize


def sweep(snapshots: Path, scratch: Path | None, is_gone: Callable[[str], bool]) -> int:
    """Remove what processes that are gone have left half done. Returns how many.

    Args:
        snapshots: the folder ``RUN_DIR/snapshots``.
        scratch: as `Keeper`'s.
        is_gone: whether the process of an owner (``HOST-PID-TICKS``) certainly runs no more.

    Raises:
        OSError: the folder is not this user's alone.
    """
    removed = 0
    for root in filter(None, (snapshots, scratch)):
        if not root.exists():
            continue
        with open_folder(root) as folder:
            for name in folder.names():
                if name.startswith(PARTIAL) and is_gone(name.removeprefix(PARTIAL)):
                    folder.remove(name)
                    removed += 1
    return removed


def trace_name(rank: int, host: str, pid: int, stamp_ms: int) -> str:
    """The name of a rank's trace: worker and span, in the words of TensorBoard's plugin."""
    return f"rank-{rank}.{host}_{pid}.{stamp_ms}.pt.trace.json.gz"
